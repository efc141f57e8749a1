"""The figures of one arm, from its requests and the scrapes at segment edges.

Definitions are vLLM's: acceptance length = 1 + accepted draft tokens / drafts
(the bonus token counts); TPOT = (end to end - TTFT) / (tokens - 1).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_tide.capture.policy import REFUSALS

from .client import RequestResult
from .scrape import (
    ACCEPTED,
    DRAFTS,
    SWAP_SECONDS,
    SWAPS,
    Scrape,
    bucket_quantile,
)
from .stream import AFTER_SHIFT, BEFORE_SHIFT

FINAL = "final"
# Reasons of vllm_tide:dropped_rows that count requests nobody wanted captured.
REQUEST_REASONS = frozenset(REFUSALS)
# Which drained segments make up each reported phase.
PHASES = {
    BEFORE_SHIFT: (BEFORE_SHIFT,),
    AFTER_SHIFT: (AFTER_SHIFT, FINAL),
    FINAL: (FINAL,),
}


@dataclass(slots=True)
class SegmentRun:
    """One drained segment: its requests, and the counters at both edges."""

    name: str
    start: Scrape
    end: Scrape
    results: list[RequestResult]

    @property
    def duration_s(self) -> float:
        """Seconds from the first request's start to the last one's end."""
        ends = [r.end_s for r in self.results if r.end_s is not None]
        return max(ends) - min(r.start_s for r in self.results)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of the segment's requests."""
        return sum(len(r.token_ids) for r in self.results)


@dataclass(slots=True)
class ArmRun:
    """Everything one arm produced."""

    name: str
    segments: list[SegmentRun]
    samples: list[Scrape]
    startup_s: float
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # Last status file of each trainer.
    trainers: list[dict[str, object]] = field(default_factory=list)
    # Of the trainers' event logs.
    rollbacks: list[dict[str, object]] = field(default_factory=list)

    @property
    def results(self) -> list[RequestResult]:
        """All results in the order of the stream."""
        return [r for segment in self.segments for r in segment.results]


def acceptance_length(edges: Sequence[tuple[Scrape, Scrape]]) -> float | None:
    """Return 1 + accepted / drafts over stretches; None without speculation."""
    drafts = sum(end.value(DRAFTS) - start.value(DRAFTS) for start, end in edges)
    accepted = sum(end.value(ACCEPTED) - start.value(ACCEPTED) for start, end in edges)
    return 1.0 + accepted / drafts if drafts > 0 else None


def phase_segments(run: ArmRun, phase: str) -> list[SegmentRun]:
    """Return the segments of a reported phase."""
    return [s for s in run.segments if s.name in PHASES[phase]]


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None or math.isnan(value) else round(value, digits)


def _throughput(parts: Sequence[SegmentRun]) -> float | None:
    """Output tokens per second of the time requests were running."""
    duration_s = sum(part.duration_s for part in parts)
    tokens = sum(part.num_output_tokens for part in parts)
    return tokens / duration_s if duration_s > 0 else None


def arm_figures(run: ArmRun) -> dict[str, object]:
    """Return the JSON object of one arm."""
    ok = [result for result in run.results if result.ok]
    tpots = [result.tpot_s for result in ok if result.tpot_s is not None]
    ttfts = [result.ttft_s for result in ok if result.ttft_s is not None]
    phases = {name: phase_segments(run, name) for name in PHASES}
    return {
        "output_tokens_per_s": _rounded(_throughput(run.segments), 3),
        "mean_e2e_s": _rounded(statistics.fmean(r.e2e_s for r in ok) if ok else None),
        "tpot_ms": _rounded(1e3 * statistics.fmean(tpots) if tpots else None, 3),
        "acceptance_length": {
            name: _rounded(acceptance_length([(p.start, p.end) for p in parts]))
            for name, parts in phases.items()
        },
        "output_tokens_per_s_by_phase": {
            name: _rounded(_throughput(parts), 3) for name, parts in phases.items()
        },
        "mean_e2e_s_by_phase": {
            name: _rounded(
                statistics.fmean([r.e2e_s for p in parts for r in p.results if r.ok])
                if any(r.ok for p in parts for r in p.results)
                else None
            )
            for name, parts in phases.items()
        },
        "mean_ttft_s": _rounded(statistics.fmean(ttfts) if ttfts else None),
        "startup_s": round(run.startup_s, 1),
        "num_requests": len(run.results),
        "failed_requests": sum(not r.ok for r in run.results),
        "memory": run.memory,
        "trainers": run.trainers,
    }


def swap_pauses_s(samples: Sequence[Scrape]) -> list[float] | None:
    """Return each swap's pause in seconds, or None if some were not seen singly.

    The gauge ``swap_seconds_last`` names the latest pause, so a pause is known
    exactly when the counter grew by one between two samples.
    """
    pauses: list[float] = []
    for before, after in itertools.pairwise(samples):
        grown = after.value(SWAPS) - before.value(SWAPS)
        if grown > 1:
            return None
        if grown == 1:
            pauses.append(after.value(SWAP_SECONDS + "_last"))
    return pauses


def swap_figures(samples: Sequence[Scrape]) -> dict[str, object]:
    """Return count and pauses of the swaps of an arm."""
    if not samples:
        return {"count": 0, "pause_ms_p50": None, "pause_ms_max": None}
    last = samples[-1]
    count = int(last.value(SWAPS) - samples[0].value(SWAPS))
    pauses = swap_pauses_s(samples)
    exact = pauses is not None and len(pauses) == count
    if count == 0:
        p50, longest = None, None
    elif exact and pauses:
        p50, longest = statistics.median(pauses), max(pauses)
    else:
        p50 = bucket_quantile(last.buckets(SWAP_SECONDS), 0.5)
        longest = last.value(SWAP_SECONDS + "_max")
    # The server's own maximum covers what fell between two samples.
    if longest is not None:
        longest = max(longest, last.value(SWAP_SECONDS + "_max"))
    return {
        "count": count,
        "pause_ms_p50": _rounded(None if p50 is None else 1e3 * p50, 3),
        "pause_ms_max": _rounded(None if longest is None else 1e3 * longest, 3),
        "pause_ms_p50_is": "exact" if exact else "upper edge of histogram bucket",
        "refused": last.by_label("vllm_tide:refused_drafts", "reason"),
    }


def first_swap_after_shift_s(run: ArmRun) -> float | None:
    """Return seconds from the first shifted request to the next swap seen; or None."""
    shifted = [s for s in run.segments if s.name == AFTER_SHIFT and s.results]
    if not shifted:
        return None
    began = min(result.start_s for result in shifted[0].results)
    before = shifted[0].start.value(SWAPS)
    seen = (s.t_s for s in run.samples if s.t_s >= began and s.value(SWAPS) > before)
    return _rounded(next((t_s - began for t_s in seen), None), 2)


def capture_figures(samples: Sequence[Scrape]) -> dict[str, object]:
    """Return captured and dropped rows of an arm."""
    if not samples:
        return {"rows": 0, "dropped": 0}
    last = samples[-1]
    dropped = last.by_label("vllm_tide:dropped_rows", "reason")
    rows = [n for reason, n in dropped.items() if reason not in REQUEST_REASONS]
    return {
        "rows": int(last.value("vllm_tide:captured_rows")),
        "dropped": int(sum(rows)),
        "dropped_by_reason": dropped,
        "requests": int(last.value("vllm_tide:captured_requests")),
        "faults": int(last.value("vllm_tide:faults")),
    }
