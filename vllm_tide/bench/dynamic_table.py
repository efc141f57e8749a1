"""Tunes vLLM's ``num_speculative_tokens_per_batch_size`` from measured static arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .control_arms import Arm

# Batch sizes at which static arms are measured where no sweep does it anyway.
CALIBRATION_BATCHES = (1, 2, 4, 8, 16, 32, 48)


def calibration_plan(
    arms: Sequence[Arm], first: Arm, largest: int, *, tuned: bool
) -> list[tuple[Arm, int]]:
    """Return which arms are measured at which batch sizes before a replay.

    Args:
        arms: Of the run.
        first: Its rate at the largest batch size is the capacity.
        largest: Most requests a server takes.
        tuned: Measure every static arm at every batch size, for the schedule.
    """
    batches = sorted({b for b in CALIBRATION_BATCHES if b <= largest} | {largest})
    static = [arm for arm in arms if arm.is_static]
    plan = [(arm, batch) for arm in static for batch in batches] if tuned else []
    return plan if (first, largest) in plan else [(first, largest), *plan]


def best_lengths(
    rates: Mapping[tuple[int, str, int], float],
) -> dict[int, int]:
    """Return the static length that was best at each batch size.

    vLLM's schedule knows the batch size only, so the domains have to agree: the
    length with the largest geometric mean over them is taken, among the lengths
    measured in all domains of that batch size.

    Args:
        rates: Output tokens per second by (batch size, domain, draft tokens).
    """
    best: dict[int, int] = {}
    for batch in sorted({batch for batch, _, _ in rates}):
        here = {(d, k): rate for (b, d, k), rate in rates.items() if b == batch}
        domains = {domain for domain, _ in here}
        scores = {}
        for k in sorted({k for _, k in here}):
            logs = [math.log(max(here[d, k], 1e-9)) for d in domains if (d, k) in here]
            if len(logs) == len(domains):
                scores[k] = sum(logs) / len(logs)
        if scores:
            # The shorter one of equals: it needs less memory and verifies less.
            best[batch] = max(sorted(scores), key=lambda k: scores[k])
    return best


def schedule_of(
    best: Mapping[int, int], largest_batch: int
) -> list[tuple[int, int, int]]:
    """Return the schedule: each batch size takes the nearest measured one's length.

    Nearest by ratio (the boundary is the geometric mean), since cost and gain change
    with the logarithm of the batch size rather than with its difference.

    Args:
        best: Length by measured batch size.
        largest_batch: Where the last range ends.
    """
    if not best:
        raise ValueError("no batch size was measured")
    batches = sorted(best)
    ends = [math.isqrt(a * b) for a, b in zip(batches, batches[1:], strict=False)]
    ends.append(max(largest_batch, batches[-1]))
    ranges: list[tuple[int, int, int]] = []
    first = 1
    for batch, end in zip(batches, ends, strict=True):
        length = best[batch]
        if end < first:
            continue
        if ranges and ranges[-1][2] == length:
            ranges[-1] = (ranges[-1][0], end, length)
        else:
            ranges.append((first, end, length))
        first = end + 1
    return ranges
