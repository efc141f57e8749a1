"""The order in which arms and cells are visited; vLLM's schedule tuned from arms.

Arms take turns within a cell, and every other cell and repeat takes them backwards, so
that a drift of the machine does not favour the arms at one end. Arm `none` opens every
cell of the first repeat: it settles how much work the cell is and what its TPOT limits
are. vLLM's `num_speculative_tokens_per_batch_size` is tuned from measured static arms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.harness.arms import Arm


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the plan: a closed loop at a batch size, or a trace."""

    domain: str
    batch: int | None = None
    trace: str | None = None

    @property
    def name(self) -> str:
        place = f"batch {self.batch}" if self.trace is None else self.trace
        return f"{place}, {self.domain}"


@dataclass(frozen=True, slots=True)
class Visit:
    """One measurement."""

    repeat: int
    cell: Cell
    arm: Arm


def _turn(arms: Sequence[Arm], repeat: int, place: int) -> list[Arm]:
    order = list(arms) if (repeat + place) % 2 == 0 else list(reversed(arms))
    if repeat == 0:
        order.sort(key=lambda arm: arm.name != "none")  # stable: the rest stays
    return order


def visit_order(
    cells: Sequence[Cell],
    arms: Sequence[Arm],
    repeats: int,
    *,
    interleaved: bool,
    defer_dynamic: bool,
) -> Iterator[Visit]:
    for repeat in range(repeats):
        late = defer_dynamic and repeat == 0
        now = [arm for arm in arms if not (late and arm.is_dynamic)]
        after = [arm for arm in arms if late and arm.is_dynamic]
        if interleaved:
            for place, cell in enumerate(cells):
                for arm in _turn(now, repeat, place):
                    yield Visit(repeat, cell, arm)
        else:
            for arm in _turn(now, repeat, 0):
                for cell in cells:
                    yield Visit(repeat, cell, arm)
        for arm in after:
            for cell in cells:
                yield Visit(repeat, cell, arm)


# Batch sizes at which static arms are measured where no sweep does it anyway.
CALIBRATION_BATCHES = (1, 2, 4, 8, 16, 32, 48)


def calibration_plan(
    arms: Sequence[Arm], first: Arm, largest: int, *, tuned: bool
) -> list[tuple[Arm, int]]:
    """Arms and batch sizes that are measured before a replay."""
    batches = sorted({b for b in CALIBRATION_BATCHES if b <= largest} | {largest})
    static = [arm for arm in arms if arm.is_static]
    plan = [(arm, batch) for arm in static for batch in batches] if tuned else []
    return plan if (first, largest) in plan else [(first, largest), *plan]


def best_lengths(rates: Mapping[tuple[int, str, int], float]) -> dict[int, int]:
    """Static length that was best at each batch size.

    vLLM's schedule knows the batch size only, so the domains have to agree: the
    length with the largest geometric mean over them is taken, among the lengths
    measured in all domains of that batch size.
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
    """Schedule: each batch size takes the nearest measured one's length.

    Nearest by ratio (the boundary is the geometric mean), since cost and gain change
    with the logarithm of the batch size rather than with its difference.
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
