"""A real `vllm serve` with `"tide": {}`, which is everything: outputs, metrics."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.harness.server import ServerOptions, VllmServer
from tests import toys
from tests.e2e.test_serve import (
    NUM_TOKENS,
    PROMPTS,
    VENV,
    complete,
    greedy,
    metrics,
    trainers,
)
from vllm_tide.config import parse_tide
from vllm_tide.transport.rendezvous import read_manifests

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone]

# What a request may say beside, else nothing is set.
TIDE = {"control": {"client_slo_tpot_ms": 0.0001}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("control")
    target = toys.make_target(folder / "target")
    config = {
        "method": "eagle3",
        "model": str(toys.make_draft(folder / "draft", target)),
        "num_speculative_tokens": 5,
        "tide": TIDE,
    }
    options = ServerOptions(
        venv=VENV,
        model=target,
        log_path=folder / "server.log",
        speculative_config=json.dumps(config),
        max_model_len=256,
        # A cache of its own: it must measure, and leave nothing in the user's.
        extra_env={
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TIDE_RUN_DIR": str(folder / "run"),
        },
    )
    with VllmServer(options) as started:
        started.wait_ready(lambda _: None)
        assert list((folder / "cache" / "vllm_tide" / "profiles").glob("*.json"))
        yield started


def test_nothing_set_runs_every_part(server):
    run_dir = server.options.model.parent / "run"
    (manifest,) = read_manifests(run_dir)
    assert parse_tide(manifest.tide) == parse_tide(TIDE)
    assert manifest.tide["control"]["policy"] == "adaspec"
    deadline = time.monotonic() + 120  # it imports Torch first
    while time.monotonic() < deadline and not list(run_dir.glob("trainer-*.json")):
        time.sleep(0.5)
    (trainer,) = trainers(server)
    assert os.sched_getaffinity(trainer.pid) <= set(server.options.other_cpus)
    assert trainer.nice() == min(19, os.nice(0) + 10)
    complete(server.url, PROMPTS[0])
    time.sleep(0.6)
    complete(server.url, PROMPTS[0])
    assert metrics(server.url)["vllm_tide:ring_consumer_alive"] == 1
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as reply:
        assert 'enable_prefix_caching="True"' in reply.read().decode()


def test_outputs_are_the_targets_and_every_decision_is_counted(server):
    prompts = PROMPTS[:12]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda p: complete(server.url, p), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy(server.options.model, prompt)
    time.sleep(0.6)  # reports go out twice a second
    complete(server.url, prompts[0])
    seen = metrics(server.url)
    assert seen["vllm_tide:control_rounds_total"] >= NUM_TOKENS
    # A random draft is hardly ever right: control finds out and stops it.
    off = [v for k, v in seen.items() if k.startswith("vllm_tide:off_rounds_total/")]
    assert sum(off) > 0.3 * seen["vllm_tide:control_rounds_total"]
    assert (
        seen["vllm_tide:verified_tokens_total"]
        <= seen["vllm_tide:drafted_tokens_total"]
    )
    assert seen["vllm_tide:captured_rows_total"] > 0
    assert seen["vllm_tide:round_seconds_total"] > 0
    assert seen["vllm_tide:plain_seconds_total"] > 0
    assert seen.get("vllm_tide:faults_total", 0) == 0


def test_a_request_brings_its_own_limit(server):
    def limited(limit: object) -> None:
        complete(server.url, PROMPTS[0], vllm_xargs={"tide_slo_tpot_ms": limit})

    limited(0.0001)
    limited(100000)
    limited("soon")
    time.sleep(0.6)
    complete(server.url, PROMPTS[1])
    seen = metrics(server.url)
    assert seen["vllm_tide:slo_requests_total"] == 2
    assert seen["vllm_tide:malformed_slo_total"] == 1
