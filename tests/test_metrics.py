"""The exposition of servers and trainers: names, types, texts, labels, values."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from tests.dashboards.known import samples_of
from vllm_tide import metrics
from vllm_tide.metrics import TideProm, increments
from vllm_tide.sidecar.report import StatusCollector, TrainerStatus

PAGES = Path(__file__).parent / "metrics_pages"


def full_report(time: int) -> dict[str, object]:
    """Return a worker's report with every key; numbers grow with time."""
    totals = (
        "rows", "requests", "swaps", "steps", "draft_passes", "drafted_tokens",
        "verified_tokens", "accepted_tokens", "trimmed_tokens", "exploration_steps",
        "missing_draft_kv_tokens", "slo_unreachable_steps", "plain_step_seconds",
        "step_seconds",
        "malformed_limits", "client_limits_dropped", "memory_proposals",
        "memory_accepted_tokens",
    )  # fmt: skip
    labelled = (
        "dropped", "refused", "faults", "steps_without_drafts", "steps_by_depth",
        "slo_requests", "prefix_verified", "prefix_accepted",
    )  # fmt: skip
    gauges = (
        "draft_version", "draft_installed_unix", "ring_used_bytes",
        "ring_capacity_bytes", "consumer_alive", "capture_on", "control_suspended_s",
        "capture_suspended_s", "draft_depth", "time_error", "calibration_error",
    )  # fmt: skip
    return {
        **{key: time * (number + 1.5) for number, key in enumerate(totals)},
        **{
            key: {"one": time * (number + 1), 2: time, "none": 0}
            for number, key in enumerate(labelled)
        },
        **{key: time + number / 8 for number, key in enumerate(gauges)},
        "swap_seconds": [0.02 / time, 0.004],
        "step_accepted": {"0-1k": {0: time, 3: 2}, "4k-16k": {20: 1}},
    }


def full_status() -> TrainerStatus:
    """Return a trainer's status with a number in every field that takes one."""
    values = {
        field.name: number + (0.5 if "float" in str(field.type) else 0)
        for number, field in enumerate(fields(TrainerStatus))
        if str(field.type) in ("int", "float", "float | None")
    }
    return TrainerStatus(
        **values,
        model_name="m",
        schedule={
            "collecting": True, "short": 0.625, "long": 0.75, "shifts": 3, "pauses": 2,
        },
        canary={"rollbacks": 4},
        engines={"a": {"installed": 5}, "b": {"installed": 4}},
        adaptation={"state": "serving", "gain": 0.375, "steps": 7, "requests": 2},
    )  # fmt: skip


def page_of(registry) -> str:
    """Return our part of a scrape, without the times at which counters began."""
    text = generate_latest(registry).decode()
    blocks = re.split(r"^(?=# HELP)", text, flags=re.MULTILINE)
    ours = [b for b in blocks if "vllm_tide:" in b and "_created " not in b]
    return "".join(sorted(ours))


def engine_page() -> str:
    tide = TideProm({0: ["m", "0"], 1: ["m", "1"]})
    seen: dict[object, float] = {}
    for time in (1, 3):
        tide.observe(increments(full_report(time), seen), 0)
    return page_of(REGISTRY)


def trainer_page(status: TrainerStatus) -> str:
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: status))
    return page_of(registry)


def test_an_engines_page_is_unchanged():
    assert engine_page() == (PAGES / "engine.txt").read_text("utf-8")


def test_a_trainers_page_is_unchanged():
    assert trainer_page(full_status()) == (PAGES / "trainer.txt").read_text("utf-8")
    assert trainer_page(TrainerStatus()) == (PAGES / "waiting.txt").read_text("utf-8")


def test_the_reference_has_every_metric_once():
    table = "\n".join(metrics.reference())
    for metric in (metrics.INFO, *metrics.ENGINE, *metrics.TRAINER):
        assert table.count(f"| {metric.text} |") == 1, metric
        (first, *_) = samples_of(metric)
        assert (
            table.count(f"| `{first.removesuffix('_bucket')}` | {metric.kind} |") == 1
        )
    assert len(table.splitlines()) == 3 + len(metrics.ENGINE) + len(metrics.TRAINER)


def test_a_name_ends_with_its_unit():
    for metric in (*metrics.ENGINE, *metrics.TRAINER):
        for unit in ("seconds", "bytes", "ratio"):
            parts = metric.name.split("_")
            assert unit not in parts[:-1] or parts[-1] in ("ratio",), metric.name


def test_enabled_features_are_one_metric():
    tide = {"preset": "control", "control": {"policy": "threshold"}}
    speculative = SimpleNamespace(tide=tide, num_speculative_tokens=5)
    metrics.make_prometheus(speculative, {0: ["m", "0"]})
    labels = {"model_name": "m", "engine": "0", "preset": "control", "k": "5"}
    labels |= {
        "policy": "threshold",
        "vllm": metrics.installed_version(*metrics.DISTRIBUTIONS),
    }
    labels |= {"version": metrics.installed_version("vllm-tide")}
    assert REGISTRY.get_sample_value("vllm_tide:info", labels) == 1
