"""Whether a process stays as it is: the criterion of the soak.

The first quarter of the minutes is warming up. Of the rest, the median of the last
third is compared with the median of the first third, figure by figure.
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
    """How much a figure may grow: by a share of itself and by an amount beside it."""

    share: float
    amount: float


BOUNDS = {
    "_rss_mib": Bound(0.05, 16.0),
    "_fds": Bound(0.0, 4.0),
    "shm_bytes": Bound(0.0, 0.0),
    "latency_ms": Bound(0.25, 0.0),
}


def bound_of(name: str) -> Bound | None:
    """The bound of a figure; None if it may be anything."""
    return next((b for part, b in BOUNDS.items() if part in name), None)


def growth(minutes: Sequence[Minute]) -> dict[str, tuple[float, float]]:
    """First and last median of every bounded figure; empty if the run was too short."""
    warm = minutes[len(minutes) // 4 :]
    third = len(warm) // 3
    if third < 1:
        return {}
    names = [n for n in warm[0] if bound_of(n) and all(n in m for m in warm)]
    return {
        name: (
            statistics.median(m[name] for m in warm[:third]),
            statistics.median(m[name] for m in warm[-third:]),
        )
        for name in names
    }


def grown(minutes: Sequence[Minute]) -> list[str]:
    """Sentences about figures that grew beyond their bounds; empty if all is flat."""
    found = []
    for name, (first, last) in growth(minutes).items():
        bound = bound_of(name)
        if bound is not None and last > first * (1 + bound.share) + bound.amount:
            found.append(f"{name} grew from {first:g} to {last:g}")
    for number, minute in enumerate(minutes):
        if not minute["swaps"]:
            found.append(f"no swap in minute {number + 1}")
    return found
