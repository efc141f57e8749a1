"""Criterion of the soak: figures of a process stay flat.

The first quarter of the minutes is warm-up. Of the remaining ones, the median of the
last third is compared with the median of the first third, figure by figure. Figures of
a restarted process begin with the minute after its start.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CRITERION = (
    "after the first quarter, the median of the last third of the minutes against that "
    "of the first third: memory of each process at most 5% and 16 MiB more, file "
    "descriptors at most 4 more, shared memory equal, latency percentiles at most 25% "
    "more; no answer wrong or missing, swaps in every minute"
)

Minute = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Bound:
    """Permitted growth of a figure: a share of itself plus an amount."""

    share: float
    amount: float


BOUNDS = {
    "_rss_mib": Bound(0.05, 16.0),
    "_fds": Bound(0.0, 4.0),
    "shm_bytes": Bound(0.0, 0.0),
    "latency_ms": Bound(0.25, 0.0),
}


def bound_of(name: str) -> Bound | None:
    """Return the bound of a figure; None if it is unbounded."""
    return next((b for part, b in BOUNDS.items() if part in name), None)


@dataclass(frozen=True, slots=True)
class Growth:
    """Course of a figure over the minutes after warming up.

    Attributes:
        first: Median of the first third.
        last: Median of the last third.
        limit: Largest `last` that is flat.
        slope_per_hour: Of the least-squares line.
        minutes: How many minutes there were.
    """

    first: float
    last: float
    limit: float
    slope_per_hour: float
    minutes: int


def growth(minutes: Sequence[Minute]) -> dict[str, Growth]:
    """Return the growth of every bounded figure; of a long enough run only."""
    quantities = {}
    for name in minutes[-1] if minutes else ():
        bound, values = bound_of(name), _warm(minutes, name)
        third = len(values) // 3
        if bound is None or third < 1:
            continue
        first, last = map(statistics.median, (values[:third], values[-third:]))
        line = statistics.linear_regression(range(len(values)), values)
        limit = round(first * (1 + bound.share) + bound.amount, 1)
        slope = round(60 * line.slope, 2)
        quantities[name] = Growth(first, last, limit, slope, len(values))
    return quantities


def _warm(minutes: Sequence[Minute], name: str) -> list[float]:
    """Return a figure in the evaluated minutes; empty if one has none."""
    process = name.partition("_")[0] + "_started"
    again = [n for n, minute in enumerate(minutes, 1) if minute.get(process)]
    own = minutes[max(again, default=0) :]
    warm = own[len(own) // 4 :]
    return [m[name] for m in warm] if all(name in m for m in warm) else []


def grown(minutes: Sequence[Minute]) -> list[str]:
    """Return messages about figures that exceed their bounds; empty if flat."""
    growing = [
        f"{name} grew from {one.first:g} to {one.last:g}"
        for name, one in growth(minutes).items()
        if one.last > one.limit
    ]
    for number, minute in enumerate(minutes):
        if not minute["swaps"]:
            growing.append(f"no swap in minute {number + 1}")
    return growing
