"""A reader that prefers OpenMetrics, as Prometheus does, gets unchanged names."""

from __future__ import annotations

import urllib.request

from bench.harness.server import free_port
from vllm_tide.sidecar.report import TrainerStatus, open_metrics

PREFERRED = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def test_the_trainer_keeps_the_colon_of_its_names():
    port = free_port()
    open_metrics(port, lambda: TrainerStatus(model_name="m", last_publish_unix=7.5))
    url = f"http://127.0.0.1:{port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": PREFERRED})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    assert '\nvllm_tide:trainer_cycles_total{model_name="m"} 0.0\n' in text
    name = "vllm_tide:trainer_last_publication_timestamp_seconds"
    assert f'\n{name}{{model_name="m"}} 7.5\n' in text
    assert "\nvllm_tide_" not in text
    assert "\nprocess_resident_memory_bytes " in text
    assert "\nprocess_cpu_seconds_total " in text
