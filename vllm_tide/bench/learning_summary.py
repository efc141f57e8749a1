"""The figures of one arm of a learning suite: by stretch, and over time.

Acceptance length is vLLM's, from its counters. `tokens_per_step` is the client's view,
by request: output tokens after the first chunk / chunks after it, that is tokens per
engine step, steps without a draft included; chunks that a busy API server sends
together make it too high.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .client import RequestResult
from .learning_events import TrainerWatch, trainer_facts, training_seconds
from .learning_stream import Stretch
from .scrape import DRAFT_VERSION, DRAFTS, GENERATED, SWAPS, Scrape
from .stream import StreamRequest
from .summary import (
    ArmRun,
    SegmentRun,
    acceptance_length,
    capture_figures,
    swap_figures,
)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Return a figure for the report."""
    return None if value is None else round(value, digits)


def throughput(parts: Sequence[SegmentRun]) -> float | None:
    """Return output tokens per second of the time requests were running."""
    seconds = sum(part.duration_s for part in parts)
    tokens = sum(part.num_output_tokens for part in parts)
    return tokens / seconds if seconds > 0 else None


def tokens_per_step(results: Sequence[RequestResult]) -> float | None:
    """Return the client's tokens per engine step; None without a second chunk."""
    later = [chunk for result in results for chunk in result.chunks[1:]]
    return sum(count for _, count in later) / len(later) if later else None


def windows(
    samples: Sequence[Scrape], width_s: float, watch: TrainerWatch | None = None
) -> dict[str, list[float | None]]:
    """Return the columns of the curves over time; a row is one window.

    Args:
        samples: Readings of the metrics.
        width_s: Least width of a window (s).
        watch: Knows the seconds trained.

    Returns:
        `t_s`, the window's end; `output_tokens_per_s`; `acceptance_length`, None where
        nothing was drafted; `draft_version` and `swaps` at its end; `training_s`
        until then.
    """
    names = (
        "t_s",
        "output_tokens_per_s",
        "acceptance_length",
        "draft_version",
        "swaps",
        "training_s",
    )
    out: dict[str, list[float | None]] = {name: [] for name in names}
    ordered = sorted(samples, key=lambda sample: sample.t_s)
    start = ordered[0] if ordered else None
    for sample in ordered:
        if start is None or sample.t_s - start.t_s < width_s:
            continue
        generated = sample.value(GENERATED) - start.value(GENERATED)
        seconds = sample.t_s - start.t_s
        row = (
            round(sample.t_s, 2),
            round(generated / seconds, 3),
            rounded(acceptance_length([(start, sample)])),
            sample.value(DRAFT_VERSION) if sample.has(DRAFT_VERSION) else None,
            sample.value(SWAPS) if sample.has(SWAPS) else None,
            rounded(watch.training_s(sample.t_s), 2) if watch else None,
        )
        for name, value in zip(names, row, strict=True):
            out[name].append(value)
        start = sample
    return out


def acceptance_by_requests(
    samples: Sequence[Scrape],
    results: Sequence[RequestResult],
    width: int,
    least_drafts: int = 1,
) -> dict[str, list[float]]:
    """Return the acceptance length over windows of finished requests.

    Args:
        samples: Readings of the metrics.
        results: Of the whole stream.
        width: Least number of requests that end in a window.
        least_drafts: Verified drafts that a window needs to count.

    Returns:
        Columns `requests`, finished at the window's start; `end_requests`, at its end;
        `acceptance_length`. Windows in which nothing was drafted are left out; they
        overlap.
    """
    ends = sorted(r.end_s for r in results if r.end_s is not None)
    ordered = sorted(samples, key=lambda sample: sample.t_s)
    counts = _finished(ends, [sample.t_s for sample in ordered])
    out: dict[str, list[float]] = {
        "requests": [],
        "end_requests": [],
        "acceptance_length": [],
    }
    last = 0
    for first, start in enumerate(ordered):
        while last < len(ordered) and counts[last] < counts[first] + width:
            last += 1
        if last == len(ordered):
            break
        if first and counts[first] == counts[first - 1]:
            continue
        drafts = ordered[last].value(DRAFTS) - start.value(DRAFTS)
        length = acceptance_length([(start, ordered[last])])
        if length is not None and drafts >= least_drafts:
            out["requests"].append(counts[first])
            out["end_requests"].append(counts[last])
            out["acceptance_length"].append(round(length, 4))
    return out


def _finished(ends: Sequence[float], times: Sequence[float]) -> list[int]:
    counts, place = [], 0
    for t_s in times:
        while place < len(ends) and ends[place] <= t_s:
            place += 1
        counts.append(place)
    return counts


def arm_figures(
    run: ArmRun,
    stream: Sequence[StreamRequest],
    stretches: Sequence[Stretch],
    watch: TrainerWatch,
    window_s: float,
) -> dict[str, Any]:
    """Return the JSON object of one arm.

    Args:
        run: What the arm produced.
        stream: What was sent.
        stretches: Of the stream.
        watch: Of the arm's trainer.
        window_s: Width of the curves' windows (s).
    """
    domains = {request.index: request.domain for request in stream}
    by_name = {stretch.name: stretch for stretch in stretches}
    events = watch.events()
    shifted = [part for part in run.segments if by_name[part.name].shifted]
    ok = [result for result in run.results if result.ok]
    return {
        "output_tokens_per_s": rounded(throughput(run.segments), 3),
        "acceptance_length": rounded(_acceptance(run.segments)),
        "shifted": {
            "output_tokens": sum(part.num_output_tokens for part in shifted),
            "duration_s": round(sum(part.duration_s for part in shifted), 3),
            "output_tokens_per_s": rounded(throughput(shifted), 3),
            "acceptance_length": rounded(_acceptance(shifted)),
        },
        "segments": [
            _segment(part, by_name[part.name], domains, watch) for part in run.segments
        ],
        "training_s": rounded(training_seconds(run.trainers, events), 3),
        "windows": windows(run.samples, window_s, watch),
        "requests": {
            "index": [r.index for r in ok],
            "domain": [domains[r.index] for r in ok],
            "start_s": [round(r.start_s, 2) for r in ok],
            "end_s": [rounded(r.end_s, 2) for r in ok],
            "tokens_per_step": [rounded(tokens_per_step([r]), 3) for r in ok],
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


def _segment(
    part: SegmentRun,
    stretch: Stretch,
    domains: Mapping[int, str],
    watch: TrainerWatch,
) -> dict[str, Any]:
    by_domain: dict[str, list[RequestResult]] = {}
    for result in part.results:
        by_domain.setdefault(domains[result.index], []).append(result)
    trained = [watch.training_s(edge.t_s) for edge in (part.start, part.end)]
    before, after = trained
    known = before is not None and after is not None
    return {
        "name": part.name,
        "domain": stretch.domain,
        "shifted": stretch.shifted,
        "start_s": round(part.start.t_s, 2),
        "end_s": round(part.end.t_s, 2),
        "requests": len(part.results),
        "output_tokens": part.num_output_tokens,
        "duration_s": round(part.duration_s, 3),
        "output_tokens_per_s": rounded(throughput([part]), 3),
        "acceptance_length": rounded(_acceptance([part])),
        "training_s": round(after - before, 3) if known else None,  # type: ignore[operator]
        "tokens_per_step": {
            domain: rounded(tokens_per_step(results))
            for domain, results in sorted(by_domain.items())
        },
    }
