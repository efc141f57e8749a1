"""A server's and a trainer's /metrics without either: ours from the real collectors.

Prints the two ports, then lets the figures grow until it is killed.
"""

from __future__ import annotations

import itertools
import socket
import time
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from vllm_tide.metrics import LABELS, TideProm, increments
from vllm_tide.sidecar.report import TrainerStatus, open_metrics, plain_text

WHO = ("demo", "0")
PER_TICK = {
    "vllm:generation_tokens": 30,
    "vllm:spec_decode_num_drafts": 10,
    "vllm:spec_decode_num_draft_tokens": 30,
    "vllm:spec_decode_num_accepted_tokens": 20,
}


SWAP_TICKS = 1000
"""Ticks between swaps: long enough for the checkpoint's draft to be seen serving."""


def report(tick: int) -> dict[str, Any]:
    """What a worker would say."""
    per_tick = {
        "rows": 100,
        "requests": 1,
        "rounds": 10,
        "draft_steps": 30,
        "drafted_tokens": 30,
        "verified_tokens": 28,
        "accepted_tokens": 20,
        "trimmed_tokens": 2,
        "memory_proposals": 2,
        "memory_accepted_tokens": 4,
    }
    return {
        **{name: tick * number for name, number in per_tick.items()},
        "swaps": tick // SWAP_TICKS,
        "swap_seconds": [0.01] if tick % 100 == 1 else [],
        "draft_version": tick // SWAP_TICKS,
        "dropped": {"ring_full": 0},
        "off_rounds": {"no_gain": tick},
        "rounds_by_length": {0: tick, 3: 9 * tick},
        "slo_requests": {"met": tick, "missed": 0},
        "prefix_verified": {"none": 3 * tick, "most_old": tick},
        "prefix_accepted": {"none": 2 * tick, "most_old": 0},
        "step_accepted": {"0-1k": {0: 3, 2: 2, 3: 4}, "4k-16k": {1: 1}},
        "ring_used_bytes": 10_000,
        "ring_capacity_bytes": 1_000_000,
        "consumer_alive": True,
        "capture_on": True,
        "draft_length": 2.7,
        "predicted_step_s": 0.02,
        "measured_step_s": 0.021,
        "time_error": 0.05,
        "calibration_error": 0.03,
        "throughput_ratio": 0.98,
        "plain_seconds": 0.3 * tick,
        "round_seconds": 0.2 * tick,
        "draft_installed_unix": time.time() - tick % 100 / 5,
    }


def learn(status: TrainerStatus, tick: int) -> None:
    """Let a trainer's status grow."""
    status.loss = 1.5
    status.cycles = status.publications = tick // 100
    status.steps = tick
    status.last_publish_unix = time.time() - tick % 100 / 5
    status.rows_read = status.train_tokens = 100 * tick
    status.training_seconds = tick / 10
    status.holdout_acceptance_new = status.holdout_acceptance_live = 3.1
    status.engines = {"engine": {"installed": tick // 100}}
    status.adaptation = {"state": "serving", "gain": 0.4, "steps": tick, "requests": 2}
    status.schedule = {"collecting": True, "short": 0.6, "long": 0.6}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    tide = TideProm({0: list(WHO)})
    counters = {name: Counter(name, name, LABELS).labels(*WHO) for name in PER_TICK}
    position = Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "", (*LABELS, "position")
    )
    ended = Counter("vllm:request_success", "", (*LABELS, "finished_reason"))
    latency = Histogram("vllm:request_time_per_output_token_seconds", "", LABELS)
    Gauge("vllm:num_requests_running", "", LABELS).labels(*WHO).set(4)
    seen: dict[Any, float] = {}
    status, port = TrainerStatus(model_name="demo"), free_port()
    open_metrics(port, lambda: status)
    server, _ = start_http_server(0, "127.0.0.1")
    server.set_app(plain_text(server.get_app()))
    print(server.server_port, port, flush=True)
    for tick in itertools.count(1):
        tide.observe(increments(report(tick), seen))
        learn(status, tick)
        for name, number in PER_TICK.items():
            counters[name].inc(number)
        for place, accepted in enumerate((9, 7, 4)):
            position.labels(*WHO, str(place)).inc(accepted)
        ended.labels(*WHO, "stop").inc()
        latency.labels(*WHO).observe(0.02)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
