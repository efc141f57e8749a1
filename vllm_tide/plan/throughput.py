"""The planner's formulas: tokens per second of a cluster that serves and trains.

After a shift of the workload the old draft has the acceptance length A0. With the
tokens trained since, it rises as A1 - (A1 - A0) exp(-tokens / tau). Requests are served
S(A) times as fast as without speculation. There is a shift every T seconds. All results
are integrals of S(A(t)), in closed form for each piece.

Mean field: no queues, one kind of shift, no forgetting, and requests are distributed
over the accelerators in proportion to their serving rates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_GRID = [1.1**i for i in range(37)]  # lengths up to 31; interpolation error 0.06%

SATURATED = 3.0
"""Multiples of tau after which switching stops training: 95% of the gain."""


@dataclass(frozen=True)
class SpeedUp:
    """Speed of serving over serving without speculation, linear between lengths.

    Attributes:
        lengths: Ascending acceptance lengths, at least two.
        values: Speed-up at each length; extrapolated linearly beyond the ends.
    """

    lengths: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of_step_cost(cls, cost: float, prefill: float = 0.0) -> SpeedUp:
        """Return eq. 5 of the paper: the acceptance length over a verify step's cost.

        At least 1, as drafting is off where it does not pay.

        Args:
            cost: Time of a verify step, drafting included, over a plain decode step.
            prefill: Share of a request's time without speculation that is prefill,
                which speculation does not shorten.
        """
        if not prefill:
            return cls((cost - 1.0, cost, cost + 1.0), (1.0, 1.0, 1.0 + 1.0 / cost))
        lengths = sorted({*_GRID, cost})
        decode = [(1.0 - prefill) * cost / length for length in lengths]
        return cls(tuple(lengths), tuple(max(1.0, 1.0 / (prefill + d)) for d in decode))

    def __call__(self, length: float) -> float:
        place = bisect_right(self.lengths, length, 1, len(self.lengths) - 1)
        low, high = self.lengths[place - 1], self.lengths[place]
        share = (length - low) / (high - low)
        return self.values[place - 1] * (1.0 - share) + self.values[place] * share


@dataclass(frozen=True)
class Learning:
    """Learning curve of a draft after a shift.

    Attributes:
        before, after: Acceptance length at a shift and after training. A worse draft is
            not deployed: `after` counts as at least `before`.
        tokens: Trained tokens after which 63% of the gain is reached.
        delay: Seconds of training from a shift to the first deployment.
    """

    before: float
    after: float
    tokens: float
    delay: float

    @property
    def best(self) -> float:
        return max(self.before, self.after)

    def length(self, tokens: float) -> float:
        """Return the acceptance length after training on `tokens`."""
        gap = self.best - self.before
        return self.best - gap * math.exp(-tokens / self.tokens)

    def served(
        self, seconds: float, rate: float, speed: SpeedUp, most: float = math.inf
    ) -> float:
        """Integrate the speed-up over the first seconds after a shift."""
        best = self.best
        gap = best - self.before
        if seconds <= self.delay or rate <= 0 or gap == 0:
            return seconds * speed(self.before)
        learns = max(self.delay, min(seconds, most / rate))
        decay = rate / self.tokens
        bends = [
            -math.log((best - length) / gap) / decay
            for length in speed.lengths
            if self.before < length < best
        ]
        total = self.delay * speed(self.before)
        total += (seconds - learns) * speed(self.length(min(learns * rate, most)))
        begin, left = self.delay, math.exp(-decay * self.delay)
        first = best - gap * left
        low = speed(first)
        for end in (*(t for t in bends if self.delay < t < learns), learns):
            still = math.exp(-decay * end)
            last = best - gap * still
            high = speed(last)
            slope = (high - low) / (last - first) if last > first else 0.0
            # The integral of A - first: exact for the exponential.
            area = (best - first) * (end - begin) - gap * (left - still) / decay
            total += low * (end - begin) + slope * area
            begin, left, first, low = end, still, last, high
        return total


@dataclass(frozen=True)
class Accelerators:
    """One class of accelerators.

    Attributes:
        serves: Served tokens per second of one, without speculation, at planned load.
        trains: Trained tokens per second of one.
        step: Accelerators per instance, which train or serve together.
    """

    name: str
    count: int
    serves: float
    trains: float
    usd_per_hour: float
    step: int
    speed: SpeedUp


@dataclass(frozen=True)
class Case:
    """Input of the formulas: a cluster and its workload.

    Attributes:
        every: Seconds between two shifts.
        captured: Maximum trained tokens per served token: the captured share times the
            passes over it.
        switch: Seconds that an accelerator needs to change its role.
        demand: Requested tokens per second; inf: more than can be served.
    """

    classes: tuple[Accelerators, ...]
    learning: Learning
    every: float
    captured: float = 1.0
    switch: float = 0.0
    demand: float = math.inf

    @property
    def plain(self) -> float:
        """Tokens per second of all, without speculation."""
        return math.fsum(c.count * c.serves for c in self.classes)

    @property
    def frozen(self) -> float:
        """The same with the old draft, without training."""
        length = self.learning.before
        return math.fsum(c.count * c.serves * c.speed(length) for c in self.classes)

    @property
    def usd_per_hour(self) -> float:
        return math.fsum(c.count * c.usd_per_hour for c in self.classes)

    def rate(self, training: Sequence[float]) -> float:
        """Return trained tokens per second, limited by trainers and by capture."""
        capacity = math.fsum(
            x * c.trains for x, c in zip(training, self.classes, strict=True)
        )
        # Lower bound: served with the old draft.
        before = self.learning.before
        served = math.fsum(
            (c.count - x) * c.serves * c.speed(before)
            for x, c in zip(training, self.classes, strict=True)
        )
        return min(capacity, self.captured * min(served, self.demand))

    def tokens(self, training: Sequence[float], seconds: float) -> float:
        """Return tokens served in the first seconds after a shift.

        Args:
            training: Permanently training accelerators of each class; a fraction is
                a time share of one.
        """
        rate = self.rate(training)
        return math.fsum(
            (c.count - x) * c.serves * self.learning.served(seconds, rate, c.speed)
            for x, c in zip(training, self.classes, strict=True)
        )

    def mean(self, training: Sequence[float]) -> float:
        return self.tokens(training, self.every) / self.every

    def switched_tokens(self, training: Sequence[float], seconds: float) -> float:
        """Return `tokens` if trainers serve again after training."""
        learning, rate = self.learning, self.rate(training)
        if rate <= 0:
            return self.tokens(training, seconds)
        most = SATURATED * learning.tokens
        back = min(seconds, most / rate + 2 * self.switch)
        total = 0.0
        for x, c in zip(training, self.classes, strict=True):
            whole = learning.served(seconds, rate, c.speed, most)
            lost = learning.served(back, rate, c.speed, most)
            total += c.serves * (c.count * whole - x * lost)
        return total

    def switched_mean(self, training: Sequence[float]) -> float:
        return self.switched_tokens(training, self.every) / self.every
