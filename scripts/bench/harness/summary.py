"""Figures of an arm, from its requests and the server's counters.

Definitions are vLLM's: TPOT = (end to end - TTFT) / (output tokens - 1) by request;
acceptance length = 1 + accepted draft tokens / drafts (the bonus token counts).

`tokens_per_step` is measured by the client, by request: output tokens after the first
chunk / chunks after it. This is tokens per engine step, including steps without a
draft. It is too high if a busy API server sends several chunks together.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from bench.harness.arm import ArmRun, SegmentRun
from bench.harness.client import RequestResult
from bench.harness.common import rounded
from bench.harness.scrape import (
    ACCEPTED,
    DRAFTS,
    LAST_SWAP,
    LONGEST_SWAP,
    SWAP_SECONDS,
    SWAPS,
    Scrape,
    bucket_quantile,
)
from bench.harness.stream import StreamRequest
from bench.harness.trainers import TrainerWatch, trainer_facts, training_seconds
from vllm_tide.capture.policy import REFUSALS


def step_ms(results: Sequence[RequestResult]) -> float | None:
    """Return the median time between two chunks of a request (ms): one engine step."""
    gaps = []
    for result in results:
        times = [t_s for t_s, _ in result.chunks] if result.ok else []
        gaps += [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# Reasons of vllm_tide:dropped_rows for requests that are never captured.
REQUEST_REASONS = frozenset(REFUSALS)


def stretches(run: ArmRun) -> dict[str, list[SegmentRun]]:
    """Return the parts of each stretch of one domain, in order."""
    parts: dict[str, list[SegmentRun]] = {}
    for part in run.segments:
        parts.setdefault(part.name, []).append(part)
    return parts


def last_quarter(parts: Sequence[SegmentRun]) -> Sequence[SegmentRun]:
    return parts[-max(1, round(len(parts) / 4)) :]


def phases(run: ArmRun) -> dict[str, Sequence[SegmentRun]]:
    """Return parts before and after the first shift, and the last quarter."""
    before, *after = list(stretches(run).values()) or [[]]
    return {
        "before_shift": before,
        "after_shift": [part for parts in after for part in parts],
        "final": last_quarter(after[-1]) if after else [],
    }


def acceptance_length(edges: Sequence[tuple[Scrape, Scrape]]) -> float | None:
    """Return 1 + accepted / drafts over stretches; None without speculation."""
    drafts = sum(end.value(DRAFTS) - start.value(DRAFTS) for start, end in edges)
    accepted = sum(end.value(ACCEPTED) - start.value(ACCEPTED) for start, end in edges)
    return 1.0 + accepted / drafts if drafts > 0 else None


def arm_figures(run: ArmRun) -> dict[str, object]:
    ok = [result for result in run.results if result.ok]
    tpots = [result.tpot_s for result in ok if result.tpot_s is not None]
    ttfts = [result.ttft_s for result in ok if result.ttft_s is not None]
    by_phase = phases(run)
    return {
        "output_tokens_per_s": rounded(throughput(run.segments), 3),
        "mean_e2e_s": rounded(_mean([r.e2e_s for r in ok])),
        "tpot_ms": rounded(_mean([1e3 * tpot for tpot in tpots]), 3),
        "acceptance_length": {
            name: rounded(_acceptance(parts)) for name, parts in by_phase.items()
        },
        "output_tokens_per_s_by_phase": {
            name: rounded(throughput(parts), 3) for name, parts in by_phase.items()
        },
        "mean_e2e_s_by_phase": {
            name: rounded(_mean([r.e2e_s for p in parts for r in p.results if r.ok]))
            for name, parts in by_phase.items()
        },
        "stretches": [
            {"name": name, "whole": _rates(parts), "final": _rates(last_quarter(parts))}
            for name, parts in stretches(run).items()
        ],
        "mean_ttft_s": rounded(_mean(ttfts)),
        "startup_s": round(run.startup_s, 1),
        "num_requests": len(run.results),
        "failed_requests": sum(not r.ok for r in run.results),
        "memory": run.memory,
        "trainers": run.trainers,
    }


def _rates(parts: Sequence[SegmentRun]) -> dict[str, float | None]:
    return {
        "output_tokens_per_s": rounded(throughput(parts), 3),
        "acceptance_length": rounded(_acceptance(parts)),
    }


def swap_pauses_s(samples: Sequence[Scrape]) -> list[float] | None:
    """Return each swap's pause in seconds, or None if some are unknown.

    The gauge `last_swap_seconds` has only the latest pause, so a pause is exact if the
    counter grew by one between two samples.
    """
    pauses: list[float] = []
    for before, after in itertools.pairwise(samples):
        grown = after.value(SWAPS) - before.value(SWAPS)
        if grown > 1:
            return None
        if grown == 1:
            pauses.append(after.value(LAST_SWAP))
    return pauses


def swap_times_s(samples: Sequence[Scrape]) -> list[float]:
    """Return the times of readings with a newly installed draft."""
    pairs = itertools.pairwise(samples)
    return [b.t_s for a, b in pairs if b.value(SWAPS) > a.value(SWAPS)]


def swap_figures(samples: Sequence[Scrape]) -> dict[str, object]:
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
        longest = last.value(LONGEST_SWAP)
    # The server's maximum includes swaps between two samples.
    if longest is not None:
        longest = max(longest, last.value(LONGEST_SWAP))
    return {
        "count": count,
        "pause_ms_p50": rounded(None if p50 is None else 1e3 * p50, 3),
        "pause_ms_max": rounded(None if longest is None else 1e3 * longest, 3),
        "pause_ms_p50_is": "exact" if exact else "upper edge of histogram bucket",
        "refused": last.by_label("vllm_tide:refused_drafts", "reason"),
    }


def swaps_after_shifts_s(run: ArmRun) -> list[float | None]:
    """Return, for each shift, seconds from its first request to the next swap."""
    seconds = []
    for first, *_ in list(stretches(run).values())[1:]:
        began = min(result.start_s for result in first.results)
        before = first.start.value(SWAPS)
        later = (s for s in run.samples if s.t_s >= began and s.value(SWAPS) > before)
        seconds.append(rounded(next((s.t_s - began for s in later), None), 2))
    return seconds


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


def throughput(parts: Sequence[SegmentRun]) -> float | None:
    """Return output tokens per second of the time with running requests."""
    seconds = sum(part.duration_s for part in parts)
    tokens = sum(part.num_output_tokens for part in parts)
    return tokens / seconds if seconds > 0 else None


def tokens_per_step(results: Sequence[RequestResult]) -> float | None:
    """Return tokens per engine step, by chunks; None without a second chunk."""
    later = [chunk for result in results for chunk in result.chunks[1:]]
    return sum(count for _, count in later) / len(later) if later else None


def request_columns(results: Sequence[RequestResult]) -> dict[str, list[Any]]:
    """Return columns of successful requests, in the given order."""
    return {
        "index": [r.index for r in results],
        "start_s": [round(r.start_s, 2) for r in results],
        "end_s": [rounded(r.end_s, 2) for r in results],
        "tokens_per_step": [rounded(tokens_per_step([r]), 3) for r in results],
    }


def learning_figures(
    run: ArmRun, stream: Sequence[StreamRequest], watch: TrainerWatch
) -> dict[str, Any]:
    domains = {request.index: request.domain for request in stream}
    events = watch.events()
    ok = [result for result in run.results if result.ok]
    return {
        "output_tokens_per_s": rounded(throughput(run.segments), 3),
        "acceptance_length": rounded(_acceptance(run.segments)),
        "segments": [_segment(part) for part in run.segments],
        "training_s": rounded(training_seconds(run.trainers, events), 3),
        "requests": {
            **request_columns(ok),
            "domain": [domains[r.index] for r in ok],
        },
        "events": events,
        "trainers": trainer_facts(run.trainers),
        "swaps": swap_figures(run.samples),
        "capture": capture_figures(run.samples),
        "num_requests": len(run.results),
        "failed_requests": len(run.results) - len(ok),
        "startup_s": round(run.startup_s, 1),
        "memory": run.memory,
        "problems": list(run.problems),
    }


def _acceptance(parts: Sequence[SegmentRun]) -> float | None:
    return acceptance_length([(part.start, part.end) for part in parts])


def _segment(part: SegmentRun) -> dict[str, Any]:
    return {
        "name": part.name,
        "start_s": round(part.start.t_s, 2),
        "end_s": round(part.end.t_s, 2),
        "requests": len(part.results),
        "output_tokens": part.num_output_tokens,
        "duration_s": round(part.duration_s, 3),
        "output_tokens_per_s": rounded(throughput([part]), 3),
        "acceptance_length": rounded(_acceptance([part])),
    }
