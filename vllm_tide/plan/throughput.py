"""Tokens per second of a cluster that serves, trains, or both: the planner's formulas.

After a shift of the workload the acceptance length is that of the draft of before, A0.
It rises with the tokens that were trained since: A1 - (A1 - A0) exp(-tokens / tau).
Requests are served S(A) times as fast as without speculation. Shifts come every T
seconds. Everything below is an integral of S(A(t)), in closed form piece by piece.

Mean field: no queues, one kind of shift, no forgetting, and requests that are spread
over the accelerators by what each of them serves.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_GRID = [1.1**i for i in range(37)]  # lengths, to 31; lines between lose 0.06%

SATURATED = 3.0
"""Multiples of tau after which role switching stops training: 95% is learnt."""


@dataclass(frozen=True)
class SpeedUp:
    """Speed of serving over that without speculation, linear between lengths.

    Attributes:
        lengths: Ascending acceptance lengths, at least two.
        values: At each of them; beyond the ends the lines go on.
    """

    lengths: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of_step_cost(cls, cost: float, prefill: float = 0.0) -> SpeedUp:
        """Return eq. 5 of the paper: the acceptance length over a verify step's cost.

        At least 1: nothing is drafted where it does not pay.

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
    """How a draft learns after a shift.

    Attributes:
        before, after: Acceptance length when a shift comes and when all is learnt.
            A worse draft is not deployed: `after` counts as at least `before`.
        tokens: Trained tokens after which 63% is learnt.
        delay: Seconds from a shift to the first deployment; training goes on in them.
    """

    before: float
    after: float
    tokens: float
    delay: float

    @property
    def best(self) -> float:
        return max(self.before, self.after)

    def length(self, tokens: float) -> float:
        """Return the acceptance length once so many tokens were trained."""
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
    """One class of accelerator.

    Attributes:
        serves: Tokens per second of one, without speculation, at the planned load.
        trains: Trained tokens per second of one.
        step: Accelerators of one instance: as many train or serve together.
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
    """A cluster in numbers.

    Attributes:
        every: Seconds between two shifts.
        captured: Trained tokens per served token, at most: the share captured, times
            the passes over it.
        switch: Seconds in which an accelerator that changes its role does nothing.
        demand: Tokens per second asked for; inf: more than can be served.
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
        """The same with the draft of before, which is never trained."""
        length = self.learning.before
        return math.fsum(c.count * c.serves * c.speed(length) for c in self.classes)

    @property
    def usd_per_hour(self) -> float:
        return math.fsum(c.count * c.usd_per_hour for c in self.classes)

    def rate(self, training: Sequence[float]) -> float:
        """Return trained tokens per second: what trainers can, and what is captured."""
        can = math.fsum(
            x * c.trains for x, c in zip(training, self.classes, strict=True)
        )
        # At least: by the draft of before.
        before = self.learning.before
        served = math.fsum(
            (c.count - x) * c.serves * c.speed(before)
            for x, c in zip(training, self.classes, strict=True)
        )
        return min(can, self.captured * min(served, self.demand))

    def tokens(self, training: Sequence[float], seconds: float) -> float:
        """Return tokens served in the first seconds after a shift.

        Args:
            training: Accelerators of each class that always train; a fraction is a
                share of one's time.
        """
        rate = self.rate(training)
        return math.fsum(
            (c.count - x) * c.serves * self.learning.served(seconds, rate, c.speed)
            for x, c in zip(training, self.classes, strict=True)
        )

    def mean(self, training: Sequence[float]) -> float:
        return self.tokens(training, self.every) / self.every

    def switched_tokens(self, training: Sequence[float], seconds: float) -> float:
        """Return `tokens` where accelerators serve again once the draft has learnt."""
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
