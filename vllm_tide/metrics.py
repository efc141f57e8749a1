"""Declarations of all metrics of servers and trainers.

The prefix is `vllm_tide:`, because vLLM unregisters every collector with `vllm:` when
it creates a logger. Counters are totals; ratios are left to queries. `TideProm` runs in
the API servers; the trainer's page is in `sidecar/report.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from vllm_tide.config import parse_tide
from vllm_tide.patching import DISTRIBUTIONS, installed_version

PREFIX = "vllm_tide:"
LABELS = ("model_name", "engine")
TRAINER_LABELS = ("model_name",)
ACCEPTED_BUCKETS = (*range(9), 12, 16)
SWAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metric(NamedTuple):
    """A metric.

    Attributes:
        kind: A counter's samples end in `_total`.
        source: Key of the engine's report, or field of `TrainerStatus`, optionally with
            a dot and a key of that field.
        label: Label in addition to `LABELS` or `TRAINER_LABELS`; the source is then a
            dictionary by label; for a histogram, of counts by observed value.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    text: str
    source: str
    label: str = ""


def _counter(name: str, text: str, source: str = "", label: str = "") -> Metric:
    return Metric("counter", name, text, source or name, label)


def _gauge(name: str, text: str, source: str = "", label: str = "") -> Metric:
    return Metric("gauge", name, text, source or name, label)


ENGINE = (
    _counter("captured_rows", "Rows of live traffic written to the ring.", "rows"),
    _counter(
        "captured_requests", "Requests with at least one captured row.", "requests"
    ),
    _counter("swaps", "Drafts installed."),
    _counter("control_steps", "Decode steps that control planned.", "steps"),
    _counter(
        "draft_passes",
        "Draft passes run: one per step and drafted position (DFlash runs one).",
    ),
    _counter("drafted_tokens", "Tokens drafted."),
    _counter("verified_tokens", "Drafted tokens sent to verification."),
    _counter("accepted_tokens", "Verified tokens accepted."),
    _counter("trimmed_tokens", "Drafted tokens not sent to verification."),
    _counter(
        "memory_proposals",
        "Verified proposals of the memory (tide.test_time.memory): one per request "
        "and verify step. vLLM's counters of drafts include them; other vllm_tide "
        "counters do not.",
    ),
    _counter(
        "memory_accepted_tokens", "Accepted tokens of verified proposals of the memory."
    ),
    _counter(
        "exploration_steps",
        "Steps that drafted, or verified whole drafts, to measure their gain.",
    ),
    _counter(
        "missing_draft_kv_tokens",
        "Tokens missing from the draft's KV cache, because drafting was off for longer "
        "than their hidden states are stored.",
    ),
    _counter(
        "slo_unreachable_steps",
        "Steps in which every draft depth, 0 included, is predicted to exceed a TPOT "
        "limit.",
    ),
    _counter(
        "plain_step_seconds",
        "Predicted time without drafts for the tokens of measured steps (seconds; "
        "adaspec only).",
    ),
    _counter(
        "step_seconds", "Measured time of the same steps (seconds; adaspec only)."
    ),
    _counter(
        "malformed_limits",
        "Requests with a tide_slo_tpot_ms that is not a positive number, or a "
        "tide_k_max that is not a non-negative integer.",
    ),
    _counter(
        "ignored_limits",
        "Requests with a tide_slo_tpot_ms although tide.control.client_slo_tpot_ms is "
        "null.",
    ),
    _counter(
        "client_limits_dropped",
        "Steps in which control ignored the TPOT limits of clients, which would have "
        "reduced the batch's tokens per second by more than a tenth.",
    ),
    _counter(
        "dropped_rows",
        "Rows (requests for consent_off, unknown_key, opted_out, malformed_opt_out, "
        "not_opted_in, salted, unsupported_input, malformed_tenant and not_sampled) "
        "that were not captured, by reason; ids_only: captured without hidden states; "
        "paused: capture is paused or off; over_budget, cut_short: more than the "
        "trainer reads; prefix_cached: not computed again by vLLM, so nothing is lost.",
        "dropped",
        "reason",
    ),
    _counter(
        "refused_drafts", "Published drafts refused, by reason.", "refused", "reason"
    ),
    _counter("faults", "Exceptions of TIDE contained in serving.", label="reason"),
    _counter(
        "steps_without_drafts",
        "Steps without drafts: no_gain (not faster), slo (a TPOT limit), no_room (no "
        "request may draft: tide_k_max, or its last token), memory (the n-gram memory "
        "drafts instead), check (to measure such a step).",
        label="reason",
    ),
    _counter("steps_by_depth", "Steps by draft depth (draft passes).", label="depth"),
    _counter(
        "slo_requests",
        "Ended requests that met or missed a TPOT limit, measured in the engine.",
        label="outcome",
    ),
    _counter(
        "prefix_verified_tokens",
        "Verified draft tokens by cached share of the request's prompt: none, part "
        "(below half), most; part_old and most_old: cached with an earlier draft.",
        "prefix_verified",
        "prefix",
    ),
    _counter(
        "prefix_accepted_tokens", "Accepted ones of them.", "prefix_accepted", "prefix"
    ),
    Metric(
        "histogram",
        "step_accepted_tokens",
        "Draft tokens accepted of one request in one verify step, by length of the "
        "request so far, prompt included (tokens).",
        "step_accepted",
        "context",
    ),
    _gauge(
        "draft_version",
        "Version of the live draft; 0 is the checkpoint's. A rollback restores a draft "
        "under a new version.",
    ),
    _gauge(
        "draft_installed_timestamp_seconds",
        "Unix time of the live draft's installation (seconds); 0 if unknown.",
        "draft_installed_unix",
    ),
    _gauge("ring_used_bytes", "Unread bytes in the ring."),
    _gauge("ring_capacity_bytes", "Size of the ring."),
    _gauge(
        "ring_consumer_alive", "1 while a trainer reads the ring.", "consumer_alive"
    ),
    _gauge(
        "capture_on",
        "1 if capture was on in the last step, 0 if it was paused or off; absent "
        "without capture.",
    ),
    _gauge(
        "control_suspended_seconds",
        "Time until control restarts after a fault, without drafts in between "
        "(seconds); 0 while it runs.",
        "control_suspended_s",
    ),
    _gauge(
        "capture_suspended_seconds",
        "Time until capture restarts after repeated faults (seconds); 0 while it runs.",
        "capture_suspended_s",
    ),
    _gauge("draft_depth", "Mean draft depth of the steps since the last report."),
    _gauge(
        "time_model_error_ratio",
        "Relative error of predicted step times (decayed mean).",
        "time_error",
    ),
    _gauge(
        "calibration_error_ratio",
        "Expected calibration error of acceptance probabilities (decayed mean).",
        "calibration_error",
    ),
    Metric(
        "histogram",
        "swap_seconds",
        "Time for which a swap blocked the engine (seconds).",
        "swap_seconds",
    ),
    _gauge("last_swap_seconds", "Duration of the newest swap (seconds)."),
    _gauge("longest_swap_seconds", "Longest swap so far (seconds)."),
)
TRAINER = (
    _counter("trainer_cycles", "Training cycles finished.", "cycles"),
    _counter("trainer_steps", "Optimizer steps.", "steps"),
    _counter("trainer_tokens", "Tokens trained on.", "train_tokens"),
    _counter("trainer_rows_read", "Rows read from the engines.", "rows_read"),
    _counter("trainer_requests", "Requests in the rows read.", "requests"),
    _counter(
        "trainer_seconds",
        "Time in training cycles, evaluations included (seconds).",
        "training_seconds",
    ),
    _counter("trainer_publications", "Trained drafts published.", "publications"),
    _counter("trainer_rollbacks", "Rollbacks by the canary.", "canary.rollbacks"),
    _counter(
        "trainer_refused_drafts", "Drafts refused by engines.", "refused_versions"
    ),
    _counter(
        "trainer_out_of_memory",
        "Training cycles that ran out of device memory.",
        "out_of_memory",
    ),
    _counter(
        "trainer_failed_writes",
        "Status files and events that could not be written.",
        "failed_writes",
    ),
    _gauge("trainer_loss", "Loss of the last optimizer step.", "loss"),
    _gauge(
        "trainer_holdout_acceptance_new",
        "Held-out acceptance length of the candidate (tokens).",
        "holdout_acceptance_new",
    ),
    _gauge(
        "trainer_holdout_acceptance_live",
        "Held-out acceptance length of the live draft at that time (tokens).",
        "holdout_acceptance_live",
    ),
    _gauge("trainer_published_version", "Newest draft published.", "published_version"),
    _gauge(
        "trainer_installed_version",
        "Newest draft that an engine serves.",
        "installed_version",
    ),
    _gauge(
        "trainer_last_publication_timestamp_seconds",
        "Unix time of the newest publication (seconds).",
        "last_publish_unix",
    ),
    _gauge(
        "trainer_adaptation_gain",
        "Gain in acceptance length of the fast draft over its base on rows before "
        "training on them (tokens; tide.test_time.adapt).",
        "adaptation.gain",
    ),
    _gauge(
        "trainer_packing_waste_ratio",
        "Share of padding in batch rows (0 to 1).",
        "packing_waste",
    ),
    _gauge(
        "trainer_collecting", "1 while full rows are captured.", "schedule.collecting"
    ),
    _gauge(
        "trainer_acceptance_short_average",
        "Short-term average of the accepted share of drafted tokens.",
        "schedule.short",
    ),
    _gauge(
        "trainer_acceptance_long_average",
        "Long-term average of the accepted share of drafted tokens.",
        "schedule.long",
    ),
    _counter("trainer_shifts", "Detected shifts of traffic.", "schedule.shifts"),
    _counter(
        "trainer_pauses",
        "Pauses of training by tide.schedule.mode tide.",
        "schedule.pauses",
    ),
    _gauge(
        "trainer_engine_version",
        "Draft version that each engine serves.",
        "engines.installed",
        "engine_id",
    ),
)

INFO_LABELS = ("version", "vllm", "policy", "preset", "k")
INFO = Metric(
    "gauge",
    "info",
    "Always 1: version of vllm_tide and of vLLM, tide.control.policy, tide.preset, "
    "num_speculative_tokens.",
    "info",
)

# Metrics without a sample before the first value.
ABSENT_AT_FIRST = ("capture_on", "last_swap_seconds", "longest_swap_seconds")


def increments(stats: dict[str, Any], seen: dict[Any, float]) -> dict[str, Any]:
    """Return a report with increments of counters, for the API server that gets it.

    Counters are summed over API servers, so reporting totals would count twice.

    Args:
        seen: Totals of the last report; updated.
    """
    grown = dict(stats)

    def growth(key: Any, total: float) -> float:
        before, seen[key] = seen.get(key, 0.0), total
        # A smaller total means that the worker restarted and counts from zero.
        return total - before if total >= before else total

    for metric in ENGINE:
        key = metric.source
        if metric.kind != "counter" or key not in stats:
            continue
        if metric.label:
            grown[key] = {k: growth((key, k), n) for k, n in stats[key].items()}
        else:
            grown[key] = growth(key, stats[key])
    return grown


def make_prometheus(
    speculative_config: Any, per_engine_labelvalues: dict[int, list[object]]
) -> TideProm | None:
    """Create the metrics of all engines; return None if `tide` is not configured."""
    if speculative_config is None or speculative_config.tide is None:
        return None
    tide = parse_tide(speculative_config.tide)
    facts = {
        "version": installed_version("vllm-tide"),
        "vllm": installed_version(*DISTRIBUTIONS),
        "policy": tide.control.policy,
        "preset": tide.preset,
        "k": str(speculative_config.num_speculative_tokens),
    }
    return TideProm(per_engine_labelvalues, facts)


class TideProm:
    """Prometheus metrics from the engines' reports.

    Args:
        per_engine_labelvalues: [model_name, engine] by engine index.
        facts: Values of `INFO_LABELS`; empty omits that metric.
    """

    def __init__(
        self,
        per_engine_labelvalues: dict[int, list[object]],
        facts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        _unregister()
        self._labels = {
            index: [str(value) for value in values]
            for index, values in per_engine_labelvalues.items()
        }
        self._made = [(metric, _collector(metric)) for metric in ENGINE]
        self._longest: dict[int, float] = {}
        for metric, collector in self._made:
            if not metric.label and metric.name not in ABSENT_AT_FIRST:
                for labels in self._labels.values():
                    collector.labels(*labels)
        if facts:
            text, names = INFO.text, (*LABELS, *INFO_LABELS)
            info = Gauge(PREFIX + INFO.name, text, names, multiprocess_mode="max")
            values = [facts[name] for name in INFO_LABELS]
            for labels in self._labels.values():
                info.labels(*labels, *values).set(1)

    def observe(self, stats: dict[str, Any], engine: int = 0) -> None:
        """Update the metrics with a report of :func:`increments`."""
        labels = self._labels[engine]
        if seconds := stats.get("swap_seconds"):
            longest = max(*seconds, self._longest.get(engine, 0.0))
            self._longest[engine] = longest
            last = seconds[-1]
            stats = stats | {"last_swap_seconds": last, "longest_swap_seconds": longest}
        for metric, collector in self._made:
            value = stats.get(metric.source)
            if value is None:
                continue
            if metric.label and metric.kind == "histogram":
                for label, counts in value.items():
                    _observe_counts(collector.labels(*labels, label), counts)
            elif metric.label:
                for label, grown in value.items():
                    collector.labels(*labels, str(label)).inc(max(0, grown))
            elif metric.kind == "counter":
                collector.labels(*labels).inc(max(0, value))  # not negative
            elif metric.kind == "histogram":
                for duration in value:
                    collector.labels(*labels).observe(duration)
            elif not math.isnan(value):
                collector.labels(*labels).set(float(value))


def _observe_counts(histogram: Any, counts: dict[int, int]) -> None:
    """Add counts of observations by value; the client's method adds single ones."""
    for value, number in counts.items():
        histogram._sum.inc(value * number)
        histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(number)


def _collector(metric: Metric) -> Any:
    name = PREFIX + metric.name
    labels = (*LABELS, metric.label) if metric.label else LABELS
    if metric.kind == "counter":
        return Counter(name, metric.text, labels)
    if metric.kind == "histogram":
        buckets = ACCEPTED_BUCKETS if metric.label else SWAP_BUCKETS
        return Histogram(name, metric.text, labels, buckets=buckets)
    mode: Any = "max" if metric.name.startswith("longest") else "mostrecent"
    return Gauge(name, metric.text, LABELS, multiprocess_mode=mode)


def _unregister() -> None:
    """Unregister collectors of an earlier logger in this process, as vLLM does."""
    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith(PREFIX) for name in names):
            REGISTRY.unregister(collector)


def finite(value: Any) -> Any:
    """Replace non-finite floats by None, recursively, because JSON has none."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def reference(metrics: Iterable[Metric] = (INFO, *ENGINE, *TRAINER)) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| metric | type | further labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for kind, name, text, _, label in metrics:
        further = [label] if label else list(INFO_LABELS) if name == "info" else []
        labels = ", ".join(f"`{each}`" for each in further)
        full = f"{PREFIX}{name}{'_total' if kind == 'counter' else ''}"
        lines.append(f"| `{full}` | {kind} | {labels} | {text} |")
    return lines
