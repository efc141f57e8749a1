"""Every metric of the serving side, declared once.

Prefix `vllm_tide:`: vLLM unregisters every collector named `vllm:` when a logger is
made. Counters are totals; a ratio is the reader's business. Runs in the API server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

LABELS = ("model_name", "engine")

# name -> (help, key of the report)
COUNTERS = {
    "vllm_tide:captured_rows": ("Rows of live traffic written to the ring.", "rows"),
    "vllm_tide:captured_requests": (
        "Requests with at least one captured row.",
        "requests",
    ),
    "vllm_tide:swaps": ("Drafts installed.", "swaps"),
}
COUNTERS_BY_REASON = {
    "vllm_tide:dropped_rows": (
        "Rows (requests for opted_out, not_sampled, malformed_opt_out and "
        "unsupported_input) that were not captured, by reason.",
        "dropped",
    ),
    "vllm_tide:refused_drafts": ("Published drafts refused, by reason.", "refused"),
    "vllm_tide:faults": ("Faults contained at the serving boundary.", "faults"),
}
GAUGES = {
    "vllm_tide:draft_version": (
        "Version of the live draft; 0 is the checkpoint's.",
        "draft_version",
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
        self._by_reason = {
            key: Counter(name, text, (*LABELS, "reason"))
            for name, (text, key) in COUNTERS_BY_REASON.items()
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
            for metric in (*self._counters.values(), *self._gauges.values()):
                metric.labels(*labels)
            self._swap_seconds.labels(*labels)

    def observe(self, stats: dict[str, Any], engine: int = 0) -> None:
        """Take one report of totals."""
        labels = self._labels[engine]
        for key, counter in self._counters.items():
            self._advance(counter.labels(*labels), engine, key, "", stats.get(key, 0))
        for key, counter in self._by_reason.items():
            for reason, total in stats.get(key, {}).items():
                child = counter.labels(*labels, reason)
                self._advance(child, engine, key, reason, total)
        for key, gauge in self._gauges.items():
            if key in stats:
                gauge.labels(*labels).set(float(stats[key]))
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
    for kind, table, extra in (
        ("counter", COUNTERS, ""),
        ("counter", COUNTERS_BY_REASON, "`reason`"),
        ("gauge", GAUGES, ""),
    ):
        suffix = "_total" if kind == "counter" else ""
        for name, (text, _) in table.items():
            lines.append(f"| `{name}{suffix}` | {kind} | {extra} | {text} |")
    for name, kind, text in SWAP_METRICS:
        lines.append(f"| `{name}` | {kind} |  | {text} |")
    return lines
