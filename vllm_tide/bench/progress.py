"""Progress lines on stderr with an estimate of the time left."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TextIO


def clock_text(seconds: float) -> str:
    """Return ``12s``, ``3m05s`` or ``1h02m``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


@dataclass
class Progress:
    """Counts visits and estimates what is left from those that are done.

    Attributes:
        plan: The cell of every visit ahead, first to last.
        others_like_this: Further plans of the same length (other model sizes).
        deadline_s: ``clock`` value at which the run stops; None: never.
    """

    plan: Sequence[Hashable] = ()
    others_like_this: int = 0
    deadline_s: float | None = None
    out: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic
    num_done: int = 0
    further_s: float = 0.0  # known to come beside the visits: server starts
    _began_s: float | None = None
    _seconds: dict[Hashable, list[float]] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """Print a line."""
        now = self.clock()
        if self._began_s is None:
            self._began_s = now
        count = f" {self.num_done}/{len(self.plan)}" if self.plan else ""
        left = self.left_s()
        eta = f", {clock_text(left)} left" if left is not None else ""
        elapsed = clock_text(now - self._began_s)
        self.out.write(f"[{elapsed}{count}{eta}] {text}\n")
        self.out.flush()

    def start(self, plan: Sequence[Hashable], others_like_this: int) -> None:
        """Begin a new plan; what is known of its cells' durations is forgotten."""
        self.plan, self.others_like_this = plan, others_like_this
        self.num_done = 0
        self._seconds = {}

    def done(self, cell: Hashable, seconds: float) -> None:
        """Note that the next visit of the plan is over and how long it took."""
        self._seconds.setdefault(cell, []).append(seconds)
        self.num_done += 1

    def expected_s(self, cell: Hashable) -> float | None:
        """Return how long a visit of the cell is expected to take."""
        if cell in self._seconds:
            return statistics.fmean(self._seconds[cell])
        known = [s for seconds in self._seconds.values() for s in seconds]
        return statistics.fmean(known) if known else None

    def left_s(self) -> float | None:
        """Return the seconds left; None while nothing is known."""
        ahead = [self.expected_s(cell) for cell in self.plan[self.num_done :]]
        every = [self.expected_s(cell) for cell in self.plan]
        if not every or None in every:
            return None
        known = [seconds for seconds in ahead if seconds is not None]
        further = sum(seconds for seconds in every if seconds is not None)
        return sum(known) + self.further_s + self.others_like_this * further

    def out_of_time(self, cell: Hashable) -> bool:
        """Return whether a visit of the cell would end after the deadline."""
        if self.deadline_s is None:
            return False
        return self.clock() + (self.expected_s(cell) or 0.0) > self.deadline_s
