"""Tells a fall of a noisy series from its noise: TIDE's two averages with errors.

TIDE (equation 6, algorithm 1) calls it a shift when the short exponential average is a
fixed epsilon below the long one. How far the two differ by chance alone depends on how
noisy the series is, which is known: both are weighted sums of the same values, so the
variance of their difference is the variance of one value times the sum of the squared
differences of the weights. No torch.
"""

from __future__ import annotations

import math

SIGMAS = 3.0
"""Standard errors that chance is granted."""
_PRIOR_VARIANCE, _PRIOR_VALUES = 0.04, 4.0  # of one request's acceptance


class Averages:
    """Short and long exponential average (TIDE, algorithm 1).

    Args:
        short_decay: Decay per value of the short one.
        long_decay: Decay per value of the long one.
        init_values: Values whose mean starts both.

    Attributes:
        short: Short average; NaN until started.
        long: Long average; NaN until started.
        count: Values seen.
        squares: Sums over all values of the squared weight in `short`, in `long`, and
            of the product of both: variances and covariance in units of one value's.
    """

    def __init__(self, short_decay: float, long_decay: float, init_values: int) -> None:
        self.short_decay, self.long_decay = short_decay, long_decay
        self.init_values = init_values
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.short = self.long = math.nan
        self.count = 0
        self._sum = 0.0
        self.squares = (0.0, 0.0, 0.0)

    @property
    def started(self) -> bool:
        """Whether the first values are in."""
        return self.count >= self.init_values

    def add(self, value: float) -> bool:
        """Take a value; True if it moved averages that had been started before."""
        self.count += 1
        if self.count <= self.init_values:
            self._sum += value
            if self.started:
                self.short = self.long = self._sum / self.count
                self.squares = (1 / self.count,) * 3
            return False
        keep_short, keep_long = self.short_decay, self.long_decay
        new_short, new_long = 1.0 - keep_short, 1.0 - keep_long
        self.short = keep_short * self.short + new_short * value
        self.long = keep_long * self.long + new_long * value
        short, long, both = self.squares
        self.squares = (
            keep_short**2 * short + new_short**2,
            keep_long**2 * long + new_long**2,
            keep_short * keep_long * both + new_short * new_long,
        )
        return True


class ShiftTest:
    """Watches one series of acceptances in [0, 1] for a fall.

    Two tests. *Step*: the short average below the long one, as in TIDE. *Drift*: the
    long average below the mean of the first values, which a slow fall drags along too
    little for the first test to see. Both must exceed epsilon and `SIGMAS` standard
    errors.

    Args:
        short_decay: See `Averages`.
        long_decay: See `Averages`.
        init_values: See `Averages`.
        epsilon: Smallest fall that counts.

    Attributes:
        anchor: Mean of the first 1 / (1 - long_decay) values; NaN until then.
    """

    def __init__(
        self, short_decay: float, long_decay: float, init_values: int, epsilon: float
    ) -> None:
        self.averages = Averages(short_decay, long_decay, init_values)
        self.epsilon = epsilon
        self.num_anchor = max(init_values, math.ceil(1.0 / (1.0 - long_decay)))
        self._noise = self._noise_weight = 0.0
        self.restart()

    def restart(self) -> None:
        """Learn the level anew; what is known of the noise stays."""
        self.averages.restart()
        self.anchor = math.nan
        self._anchor_sum = 0.0
        self._last: float | None = None

    @property
    def variance(self) -> float:
        """Variance of one value around its level.

        From successive differences (von Neumann 1941), which a step or a drift of the
        level hardly touches.
        """
        prior = _PRIOR_VALUES * _PRIOR_VARIANCE
        return (self._noise + prior) / (self._noise_weight + _PRIOR_VALUES)

    @property
    def step_limit(self) -> float:
        """Fall of the short average below the long one that counts as a shift."""
        short, long, both = self.averages.squares
        return self._limit(short + long - 2.0 * both)

    @property
    def drift_limit(self) -> float:
        """Fall of the long average below the anchor that counts as a shift."""
        return self._limit(self.averages.squares[1] + 1.0 / self.num_anchor)

    def add(self, value: float) -> str | None:
        """Take a value.

        Returns:
            Why this is a shift, in words, or None. After a shift the caller restarts.
        """
        if self._last is not None:
            keep = self.averages.long_decay
            self._noise = keep * self._noise + 0.5 * (value - self._last) ** 2
            self._noise_weight = keep * self._noise_weight + 1.0
        self._last = value
        moved = self.averages.add(value)
        if self.averages.count <= self.num_anchor:
            self._anchor_sum += value
            if self.averages.count == self.num_anchor:
                self.anchor = self._anchor_sum / self.num_anchor
        if not moved:
            return None
        short, long = self.averages.short, self.averages.long
        if short < long - self.step_limit:
            return f"acceptance fell from {long:.3f} to {short:.3f}"
        # Before that the long average still consists of the anchor's values.
        settled = self.averages.count >= 2 * self.num_anchor
        if settled and long < self.anchor - self.drift_limit:
            return f"acceptance drifted from {self.anchor:.3f} to {long:.3f}"
        return None

    def _limit(self, squares: float) -> float:
        return max(self.epsilon, SIGMAS * math.sqrt(self.variance * max(squares, 0.0)))
