"""Day 0 in figures: how soon the head is good, and what it cost on the way."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .client import RequestResult
from .learning_summary import rounded


def blocks(
    results: Sequence[RequestResult], size: int
) -> list[tuple[str, Sequence[RequestResult]]]:
    """Cut a stream into blocks of consecutive requests, within its segments.

    Args:
        results: Of the whole stream.
        size: Requests of a block; a rest of less than half joins the block before.

    Returns:
        Segment and requests of each block.
    """
    parts: dict[str, list[RequestResult]] = {}
    for result in sorted(results, key=lambda r: r.index):
        parts.setdefault(result.segment, []).append(result)
    out: list[tuple[str, Sequence[RequestResult]]] = []
    for name, part in parts.items():
        count = max(1, (len(part) + size // 2) // size)
        for place in range(count):
            end = len(part) if place == count - 1 else (place + 1) * size
            out.append((name, part[place * size : end]))
    return out


def request_seconds(results: Sequence[RequestResult]) -> float:
    """Return the time that requests took in all, each from its start to its end (s).

    Not the first start to the last end: with other lengths of requests blocks overlap.
    """
    return sum(r.end_s - r.start_s for r in results if r.end_s is not None)


def slowdowns(
    plain: Sequence[Sequence[RequestResult]],
    drafted: Sequence[RequestResult],
    size: int,
) -> dict[str, Any]:
    """Compare the latency of every block of requests with the same block undrafted.

    Args:
        plain: Results without speculation, one sequence a repeat; the same stream.
        drafted: Results with the head that learns.
        size: Requests of a block.

    Returns:
        Columns `first_request`, `seconds` (of all its requests), `plain_seconds` (mean
        over repeats) and `slowdown`, their ratio - 1; `worst` of it and `whole`;
        `noise`, the largest |ratio - 1| between two repeats of the same block, None
        with one repeat: a slowdown below it may be the machine's.
    """
    mine = blocks(drafted, size)
    theirs = [blocks(results, size) for results in plain]
    out: dict[str, Any] = {
        "first_request": [],
        "seconds": [],
        "plain_seconds": [],
        "slowdown": [],
    }
    noise: list[float] = []
    for place, (_, block) in enumerate(mine):
        seconds = [request_seconds(found[place][1]) for found in theirs]
        mean, took = statistics.fmean(seconds), request_seconds(block)
        out["first_request"].append(block[0].index)
        out["seconds"].append(round(took, 3))
        out["plain_seconds"].append(round(mean, 3))
        out["slowdown"].append(round(took / mean - 1, 4))
        if len(seconds) > 1:
            noise.append(max(seconds) / min(seconds) - 1)
    whole = sum(out["seconds"]) / sum(out["plain_seconds"]) - 1 if mine else None
    return {
        **out,
        "worst": max(out["slowdown"], default=None),
        "whole": rounded(whole),
        "noise": rounded(max(noise, default=None)),
    }


def requests_to_reach(
    curve: dict[str, list[float]], length: float | None, share: float
) -> dict[str, Any]:
    """Find when the served acceptance length reaches a share of the ceiling's.

    Args:
        curve: Of `acceptance_by_requests`.
        length: The ceiling's acceptance length (tokens); None if it is not known.
        share: Of it, 0 to 1.

    Returns:
        `wanted`; `requests` finished when the first window that reaches it began, and
        `window_end` when it ended; `kept`: the mean of the windows from then on
        reaches it too. None where it was never reached.
    """
    out: dict[str, Any] = {
        "share": share,
        "wanted": rounded(None if length is None else share * length),
        "requests": None,
        "window_end": None,
        "kept": None,
    }
    values = curve["acceptance_length"]
    for place, value in enumerate(values):
        if length is not None and value >= share * length:
            out["requests"] = curve["requests"][place]
            out["window_end"] = curve["end_requests"][place]
            out["kept"] = statistics.fmean(values[place:]) >= share * length
            break
    return out
