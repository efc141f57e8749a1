"""Every metric of the serving side, declared once.

Prefix `vllm_tide:`: vLLM unregisters every collector named `vllm:` when a logger is
made. Counters are totals; a ratio is the reader's business. Runs in the API server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

LABELS = ("model_name", "engine")
CAPTURE_ON = "capture_on"

# name -> (help, key of the report)
COUNTERS = {
    "vllm_tide:captured_rows": ("Rows of live traffic written to the ring.", "rows"),
    "vllm_tide:captured_requests": (
        "Requests with at least one captured row.",
        "requests",
    ),
    "vllm_tide:swaps": ("Drafts installed.", "swaps"),
    "vllm_tide:control_rounds": ("Steps in which control chose.", "rounds"),
    "vllm_tide:draft_steps": ("Draft passes run.", "draft_steps"),
    "vllm_tide:drafted_tokens": ("Tokens drafted.", "drafted_tokens"),
    "vllm_tide:verified_tokens": (
        "Drafted tokens sent to verification.",
        "verified_tokens",
    ),
    "vllm_tide:accepted_tokens": ("Verified tokens accepted.", "accepted_tokens"),
    "vllm_tide:trimmed_tokens": (
        "Drafted tokens left out of verification.",
        "trimmed_tokens",
    ),
    "vllm_tide:probes": ("Shadow probes while drafting was off.", "probes"),
    "vllm_tide:hole_tokens": (
        "Tokens the draft never saw because drafting was off for longer than "
        "tide.control.catchup_mib holds.",
        "hole_tokens",
    ),
    "vllm_tide:slo_rounds_missed": (
        "Steps in which no speculative length could keep the TPOT limit.",
        "slo_misses",
    ),
    "vllm_tide:plain_seconds": (
        "Predicted time of plain decoding for the tokens of measured steps (seconds; "
        "adaspec only).",
        "plain_seconds",
    ),
    "vllm_tide:round_seconds": (
        "Measured time of the same steps (seconds; adaspec only).",
        "round_seconds",
    ),
    "vllm_tide:malformed_slo": (
        "Requests whose tide_slo_tpot_ms was no positive number, or tide_k_max no "
        "length.",
        "malformed_slo",
    ),
    "vllm_tide:client_limits_left_out": (
        "Steps that left out the TPOT limits of clients, which would have cost the "
        "batch more than a tenth of its tokens per second.",
        "limits_left_out",
    ),
}
# name -> (help, key of the report, label)
COUNTERS_BY_LABEL = {
    "vllm_tide:dropped_rows": (
        "Rows (requests for consent_off, unknown_key, opted_out, malformed_opt_out, "
        "not_opted_in, salted, unsupported_input, malformed_tenant and not_sampled) "
        "that were not captured, by reason; ids_only: only their token ids were; "
        "paused: nothing was, capture is paused or off; over_budget, cut_short: the "
        "trainer takes less.",
        "dropped",
        "reason",
    ),
    "vllm_tide:refused_drafts": (
        "Published drafts refused, by reason.",
        "refused",
        "reason",
    ),
    "vllm_tide:faults": (
        "Faults contained at the serving boundary.",
        "faults",
        "reason",
    ),
    "vllm_tide:off_rounds": (
        "Steps without drafting, by reason.",
        "off_rounds",
        "reason",
    ),
    "vllm_tide:rounds_by_length": (
        "Steps by number of draft passes.",
        "rounds_by_length",
        "length",
    ),
    "vllm_tide:slo_requests": (
        "Ended requests with a TPOT limit: met or missed, as the engine saw it.",
        "slo_requests",
        "outcome",
    ),
    "vllm_tide:prefix_verified_tokens": (
        "Drafted tokens verified, by how much of the request's prompt was cached: "
        "none, part (below half), most; part_old and most_old by an earlier draft.",
        "prefix_verified",
        "prefix",
    ),
    "vllm_tide:prefix_accepted_tokens": (
        "Accepted ones of these.",
        "prefix_accepted",
        "prefix",
    ),
}
GAUGES = {
    "vllm_tide:draft_version": (
        "Version of the live draft; 0 is the checkpoint's.",
        "draft_version",
    ),
    "vllm_tide:draft_installed_timestamp_seconds": (
        "Unix time since when the live draft serves (seconds); 0 until it is known.",
        "draft_installed_unix",
    ),
    "vllm_tide:ring_used_bytes": (
        "Bytes in the ring not read yet.",
        "ring_used_bytes",
    ),
    "vllm_tide:ring_capacity_bytes": ("Size of the ring.", "ring_capacity_bytes"),
    "vllm_tide:ring_consumer_alive": (
        "1 while a trainer reads the ring.",
        "consumer_alive",
    ),
    "vllm_tide:capture_on": (
        "1 while capture is on, 0 while it is paused or off; absent without capture.",
        CAPTURE_ON,
    ),
    "vllm_tide:control_suspended_seconds": (
        "Time until control, left out after a fault, drafts again (seconds); 0 while "
        "it runs.",
        "control_suspended_s",
    ),
    "vllm_tide:capture_suspended_seconds": (
        "Time until capture, left out after repeated faults, goes on (seconds); 0 "
        "while it runs.",
        "capture_suspended_s",
    ),
    "vllm_tide:draft_length": (
        "Mean draft passes per step since the last report.",
        "draft_length",
    ),
    "vllm_tide:predicted_step_seconds": (
        "Predicted time of a step (decayed mean, seconds).",
        "predicted_step_s",
    ),
    "vllm_tide:measured_step_seconds": (
        "Measured time of a step (decayed mean, seconds).",
        "measured_step_s",
    ),
    "vllm_tide:time_model_error_ratio": (
        "Relative error of predicted step times (decayed).",
        "time_error",
    ),
    "vllm_tide:calibration_error": (
        "Expected calibration error of acceptance probabilities (decayed).",
        "calibration_error",
    ),
    "vllm_tide:throughput_ratio": (
        "Realised over predicted tokens per second (decayed).",
        "throughput_ratio",
    ),
}
SWAP_SECONDS = "vllm_tide:swap_seconds"
SWAP_SECONDS_LAST = "vllm_tide:swap_seconds_last"
SWAP_SECONDS_MAX = "vllm_tide:swap_seconds_max"
SWAP_METRICS = (
    (SWAP_SECONDS, "histogram", "Time a swap held up the engine (seconds)."),
    (SWAP_SECONDS_LAST, "gauge", "Duration of the newest swap (seconds)."),
    (SWAP_SECONDS_MAX, "gauge", "Longest swap so far (seconds)."),
)
SWAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


def make_prometheus(
    speculative_config: Any, per_engine_labelvalues: dict[int, list[object]]
) -> TideProm | None:
    """Metrics of all engines of this server, or None when `tide` is not configured."""
    if speculative_config is None or speculative_config.tide is None:
        return None
    return TideProm(per_engine_labelvalues)


class TideProm:
    """Turns the engines' reports into Prometheus metrics.

    Args:
        per_engine_labelvalues: Engine index to [model_name, engine].
    """

    def __init__(self, per_engine_labelvalues: dict[int, list[object]]) -> None:
        _unregister()
        self._labels = {
            index: [str(value) for value in values]
            for index, values in per_engine_labelvalues.items()
        }
        self._counters = {
            key: Counter(name, text, LABELS) for name, (text, key) in COUNTERS.items()
        }
        self._by_label = {
            key: Counter(name, text, (*LABELS, label))
            for name, (text, key, label) in COUNTERS_BY_LABEL.items()
        }
        mode = {"multiprocess_mode": "mostrecent"}
        self._gauges = {
            key: Gauge(name, text, LABELS, **mode)  # type: ignore[arg-type]
            for name, (text, key) in GAUGES.items()
        }
        self._swap_seconds = Histogram(
            SWAP_SECONDS,
            SWAP_METRICS[0][2],
            LABELS,
            buckets=SWAP_BUCKETS,
        )
        self._swap_last = Gauge(
            SWAP_SECONDS_LAST,
            SWAP_METRICS[1][2],
            LABELS,
            **mode,  # type: ignore[arg-type]
        )
        self._swap_max = Gauge(
            SWAP_SECONDS_MAX,
            SWAP_METRICS[2][2],
            LABELS,
            **mode,  # type: ignore[arg-type]
        )
        self._longest: dict[int, float] = {}
        self._totals: dict[tuple[int, str, str], float] = {}
        for labels in self._labels.values():
            for key, metric in (self._counters | self._gauges).items():
                if key != CAPTURE_ON:
                    metric.labels(*labels)
            self._swap_seconds.labels(*labels)

    def observe(self, stats: dict[str, Any], engine: int = 0) -> None:
        """Take one report of totals."""
        labels = self._labels[engine]
        for key, counter in self._counters.items():
            self._advance(counter.labels(*labels), engine, key, "", stats.get(key, 0))
        for key, counter in self._by_label.items():
            for value, total in stats.get(key, {}).items():
                child = counter.labels(*labels, str(value))
                self._advance(child, engine, key, str(value), total)
        for key, gauge in self._gauges.items():
            value = stats.get(key)
            if value is not None and not math.isnan(value):
                gauge.labels(*labels).set(float(value))
        self._observe_swaps(labels, engine, stats.get("swap_seconds", ()))

    def _observe_swaps(
        self, labels: list[str], engine: int, seconds: Sequence[float]
    ) -> None:
        for duration in seconds:
            self._swap_seconds.labels(*labels).observe(duration)
            self._swap_last.labels(*labels).set(duration)
            longest = max(duration, self._longest.get(engine, 0.0))
            self._longest[engine] = longest
            self._swap_max.labels(*labels).set(longest)

    def _advance(
        self, child: Counter, engine: int, key: str, reason: str, total: float
    ) -> None:
        seen = self._totals.get((engine, key, reason), 0.0)
        # A smaller total means that the engine restarted and counts from zero.
        child.inc(total - seen if total >= seen else total)
        self._totals[engine, key, reason] = total


def _unregister() -> None:
    """Drop collectors of an earlier logger in this process, as vLLM does with its."""
    from prometheus_client import REGISTRY

    for collector in list(REGISTRY._collector_to_names):
        names = REGISTRY._collector_to_names[collector]
        if any(name.startswith("vllm_tide:") for name in names):
            REGISTRY.unregister(collector)


def reference() -> list[str]:
    """Lines of a Markdown table of every metric, from the declarations above."""
    lines = [
        "| metric | type | further labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for name, (text, _) in COUNTERS.items():
        lines.append(f"| `{name}_total` | counter |  | {text} |")
    for name, (text, _, label) in COUNTERS_BY_LABEL.items():
        lines.append(f"| `{name}_total` | counter | `{label}` | {text} |")
    for name, (text, _) in GAUGES.items():
        lines.append(f"| `{name}` | gauge |  | {text} |")
    for name, kind, text in SWAP_METRICS:
        lines.append(f"| `{name}` | {kind} |  | {text} |")
    return lines
