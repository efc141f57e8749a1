"""A real Prometheus has data for every query of the boards and every alert."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from bench.harness.server import free_port
from tests.dashboards.live import (
    Prometheus,
    demo_places,
    needs_prometheus,
    prometheus,
)
from tests.dashboards.promql import filled, metrics_in
from tests.faults.load import Load
from tests.faults.scene import serving
from tests.faults.trainer import AGAIN, order
from vllm_tide.dashboards import ALERTS, BOARDS, contents

pytestmark = [pytest.mark.nightly, needs_prometheus]

# Counters by reason that are made with the first fault of that reason.
NEED_A_FAULT = {"vllm_tide:faults_total", "vllm_tide:refused_drafts_total"}
SELECTOR = re.compile(r"(?:vllm|vllm_tide):\w+(?:\{[^}]*\})?")
# Of a server with everything enabled, so that every panel has data.
KNOBS = {
    "control": {"policy": "adaspec", "slo_tpot_ms": 50.0},
    "test_time": {
        "memory": "ngram",
        "adapt": "shared",
        "min_tokens": 8,
        "stride": 16,
    },
}


def boards() -> list[dict[str, Any]]:
    return [json.loads(contents()[name]) for name in BOARDS]


def panel_queries() -> Iterator[tuple[str, str, bool]]:
    """Return title and letter, expression, whether only its newest value is shown."""
    for board in boards():
        for panel in board["panels"]:
            for query in panel.get("targets", ()):
                name = f"{panel['title']} {query['refId']}"
                yield name, query["expr"], query["instant"]


def check_all(server: Prometheus, minutes: float) -> None:
    """Assert that all queries but a fault's have data, and that no alert fires."""
    assert not server.down()
    # Windows as Grafana chooses them.
    window = max(1, round(minutes))
    ranges = {"__rate_interval": "4s", "__range": f"{window}m"}
    for name, expr, newest in panel_queries():
        samples = server.series(filled(expr, **ranges), newest)
        assert samples or metrics_in(expr) & NEED_A_FAULT, (name, expr)
    for board in boards():
        for item in board["annotations"]["list"]:  # empty without an event
            server.series(filled(item["expr"]))
    for group in yaml.safe_load(contents()[ALERTS])["groups"]:
        for rule in group["rules"]:
            server.series(rule["expr"], newest=True)  # empty until it fires
            for part in set(SELECTOR.findall(rule["expr"])):
                excused = metrics_in(part) & NEED_A_FAULT
                assert excused or server.series(part), (rule["alert"], part)
    assert not server.firing()


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_server_under_load_has_data_for_every_query(tmp_path):
    async def run(places, known):
        port, minutes = free_port(), 3.0
        knobs = KNOBS | {"train": {"metrics_port": port}}
        async with serving(places, lambda s: Load(s, known, 0), knobs=knobs) as scene:
            urls = [scene.server.url, f"http://127.0.0.1:{port}"]
            with prometheus(urls, tmp_path) as server:
                # One panel compares with the checkpoint's draft, which serves first.
                await asyncio.sleep(0.4 * 60 * minutes)
                order(places.run_dir, AGAIN, 0)
                await asyncio.sleep(0.6 * 60 * minutes)
                await asyncio.to_thread(check_all, server, minutes)

    with demo_places(tmp_path) as given:
        asyncio.run(run(*given))
