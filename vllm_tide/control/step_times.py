"""Seconds of the parts of a step, learnt while it serves.

They change: other processes take cores, clocks fall, real batches mix lengths. The
logarithm of a forward's seconds is that of a `TimeModel`'s curve plus a Gaussian
process over its rows, followed by a Kalman filter on a few knots: a size that was
measured says much of those near it, and little of others. Noise is Student's t, so one
strange step (first use of a kernel, a page fault) moves the curve by little; a lasting
change shows as surprises of one sign, and opens the curve again.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import exp, inf, isnan, log, nan, sqrt
from typing import Any

import numpy as np

from vllm_tide.control.time_model import TimeModel

Learnt = tuple[list[float], list[float], list[float], float]
"""Means of target, first and further draft passes, and seconds of asking."""

KNOTS = tuple(sorted({base << shift for base in (2, 3) for shift in range(12)} | {1}))
"""Rows at which a curve may bend; kernels change their ways as coarsely."""

_LEVEL_SD = 1.0  # of the logarithm, all sizes together: how wrong a prior may be
_SHAPE_SD, _SHAPE_LENGTH = 0.3, 5.0  # Gaussian process beside that; knots
_PLAIN_SD = 0.15  # of what kernels for one row of each request save
_FREE_ROWS = np.geomspace(1, 1024, 21)  # that take as long as reading the weights
_DRIFT = 0.005  # random walk of the logarithm, per root second
_DEGREES = 4.0  # of freedom of Student's t
_NOISE_MEMORY = 50  # measurements that the noise is known from
_LEAST_NOISE = 1e-4  # variance of the logarithm
_LEAN_SHARE, _LEANING = 0.1, 1.5  # smoothing of scores; mean of them that is no chance
_NEWS = 0.01  # of the noise: variance that is worth a step of the filter
_CHANGE = 0.02  # of a logarithm, that decisions are to hear of
_SMOOTH = 0.05


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step.

    Attributes:
        requests: Requests of the step, prefilling ones too; one row each.
        context: Tokens in the KV cache before the step, summed over the requests.
        prefill: Rows of prefilling requests beyond one each, so that
            `requests + verified + prefill` is the target's number of rows.
        first_rows: Rows of the first draft pass; 0 without one.
        target_s: Seconds from the begin of the step until its tokens were known.
        draft_first_s: Seconds of the first draft pass; nan if none.
        draft_next_s: Seconds of the further draft passes in all; nan if none.
        host_s: Seconds of the step outside those; nan if unknown (after idling).
        asked: Control was asked, and drafted: its own time is in `host_s`.
    """

    requests: int
    context: int
    verified: int
    prefill: int
    steps: int
    first_rows: int
    target_s: float
    draft_first_s: float = nan
    draft_next_s: float = nan
    host_s: float = nan
    asked: bool = False


class PassTime:
    """A factor on the seconds of one kind of forward, by its rows.

    One row of each request (`plain`) may have faster kernels, which is one factor more.

    Args:
        shaped: Whether the prior knows how seconds rise with rows. If not, they are
            linear, as AdaSpec has it (eq. 2), with an unknown slope: the first rows
            cost nothing, as weights are read anyway, and how many do is unknown.

    Attributes:
        version: Of what was learnt, as far as predictions change by it.
    """

    def __init__(self, *, shaped: bool) -> None:
        count = len(KNOTS)
        gap = np.subtract.outer(np.arange(count), np.arange(count)) / _SHAPE_LENGTH
        local = np.exp(-0.5 * gap**2) + 1e-4 * np.eye(count)
        # Of the logarithm at the knots, and last of the plain factor.
        self._open, self._walk = np.zeros((2, count + 1, count + 1))
        self._open[-1, -1], self._walk[-1, -1] = _PLAIN_SD**2, _DRIFT**2
        self._open[:-1, :-1] = _LEVEL_SD**2 + _SHAPE_SD**2 * local
        self._walk[:-1, :-1] = _DRIFT**2 * (0.5 + 0.5 * local)
        self._mean = np.zeros(count + 1)
        if not shaped:
            linear = np.log1p(np.array(KNOTS) / _FREE_ROWS[:, None])
            self._mean[:-1] += linear.mean(axis=0) - linear[:, 0].mean()
            self._open[:-1, :-1] += np.cov(linear, rowvar=False)
        self._covariance, self._first = self._open.copy(), True
        self._noise, self._told = _SHAPE_SD**2, 0
        self._lean = self._since = 0.0
        self._told_mean = self._mean.copy()
        self._table, self._table_version = np.ones(0), 0
        self.version = 0

    def factor(self, rows: int, plain: bool = False) -> float:
        return exp(_at(rows, plain, self._mean))

    @property
    def plain(self) -> float:
        """Of one row of each request, over as many rows of fewer."""
        return exp(self._mean[-1])

    def factors(self, start: int, count: int) -> np.ndarray:
        """Of `start`, `start + 1`, ... rows: float64 [count], a view."""
        late = self._table_version != self.version
        if late or start + count > len(self._table):
            size = max(start + count, len(self._table))
            self._table = np.interp(np.arange(size), KNOTS, np.exp(self._mean[:-1]))
            self._table_version = self.version
        return self._table[start : start + count]

    def variance(self, rows: int, now: float, *, over_plain: bool = False) -> float:
        """Of the logarithm of the factor at `now`, seconds.

        Args:
            over_plain: Of its ratio to that of a plain forward of half the rows.
        """
        column = _at(rows, False, self._covariance)
        if over_plain:
            column = column - _at(rows // 2, True, self._covariance)
        known = _at(rows, False, column)
        if over_plain:
            known = known - _at(rows // 2, True, column)
        return max(float(known), 0.0) + _DRIFT**2 * max(now - self._since, 0.0)

    def observe(
        self,
        rows: int,
        predicted: float,
        seconds: float,
        now: float,
        plain: bool = False,
    ) -> None:
        """Take a measurement: a step of the filter, where it would teach anything.

        Args:
            predicted: Seconds without the factor.
        """
        if not (seconds > 0.0 and predicted > 0.0):
            return
        if self._first:  # kernels are made in it
            self._first = False
            return
        mean, covariance, noise = self._mean, self._covariance, self._noise
        surprise = log(seconds / predicted) - float(_at(rows, plain, mean))
        column, passed = _at(rows, plain, covariance), max(now - self._since, 0.0)
        known = float(_at(rows, plain, column)) + _DRIFT**2 * passed
        score = surprise / sqrt(known + noise)
        bounded = max(min(score, 3.0), -3.0)
        self._lean += _LEAN_SHARE * (bounded - self._lean)
        # Inverse gamma: the share of the surprise that is the measurement's own.
        self._told = min(self._told + 1, _NOISE_MEMORY)
        own = noise * bounded * bounded
        self._noise = max(noise + (own - noise) / (self._told + 2), _LEAST_NOISE)
        if abs(self._lean) > _LEANING:
            covariance[:] = self._open
            self._lean = 0.0
        elif known < _NEWS * noise and abs(score) < 3.0:
            return
        else:
            covariance += passed * self._walk
        self._since = now
        column = _at(rows, plain, covariance)
        spread = float(_at(rows, plain, column))
        gain = column / (spread + noise * (_DEGREES + score * score) / (_DEGREES + 1.0))
        mean += gain * surprise
        covariance -= np.outer(gain, column)
        if np.abs(mean - self._told_mean).max() > _CHANGE:
            self._told_mean[:] = mean
            self.version += 1

    def learnt(self) -> list[float]:
        """The mean of the logarithm at `KNOTS`, and of the plain factor."""
        return self._mean.tolist()

    def take(self, learnt: list[float]) -> None:
        """Put what was `learnt` elsewhere in the place of ours."""
        self._mean[:] = learnt
        self.version += 1


def _at(rows: int, plain: bool, state: np.ndarray) -> Any:
    """A state, [knots + 1], at so many rows; of a matrix its row."""
    low = min(max(bisect_right(KNOTS, rows), 1), len(KNOTS) - 1) - 1
    share = (rows - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])
    share = min(max(share, 0.0), 1.0)
    found = state[low] * (1.0 - share) + state[low + 1] * share
    return found + state[-1] if plain else found


class StepTimes:
    """Seconds of a step's parts: a `TimeModel` and what serving teaches about it.

    Everything outside the forwards is in the target's curve.

    Args:
        guessed: Whether nothing is known of how the prior rises with rows.

    Attributes:
        prior: The time model that it began with.
        error: Relative error of a step's predictions lately; nan before the first.
    """

    def __init__(self, prior: TimeModel, *, guessed: bool = False) -> None:
        self.prior = prior
        self.target, self.first = (PassTime(shaped=not guessed) for _ in range(2))
        self.further = PassTime(shaped=True)
        self._host = 0.0  # seconds outside the forwards that the prior knows nothing of
        self._asking = 0.0  # seconds that control itself takes where it drafts
        self.error = nan

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Seconds of a step that verifies 0..most tokens, without drafting.

        Args:
            context: Tokens in the KV cache, summed over the requests.
            prefill: Rows beyond one per request that prefilling requests add.

        Returns:
            float64 [most + 1].
        """
        prior = self.prior.target_curve(requests, context, most, prefill)
        factors = self.target.factors(requests + prefill, most + 1)
        curve = (prior + self.prior.host) * factors
        if not prefill:
            curve[0] *= self.target.plain
        return np.asarray(curve)

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Seconds of 0..most draft passes, float64 [most + 1]."""
        first = self.prior.draft_first(first_rows, context)
        first = first * self.first.factor(first_rows) + self._asking
        factor = self.first.factor(requests) * self.further.factor(requests)
        each, grown = (x * factor for x in self.prior.further(requests, context))
        return np.array([0.0, *(first + (each + grown * j) * j for j in range(most))])

    def catchup_seconds(self, rows: int, context: int = 0) -> float:
        """Of a pass that feeds missed rows to the draft's KV cache."""
        if not rows:
            return 0.0
        return self.prior.draft_first(rows, context) * self.first.factor(rows)

    def step_seconds(
        self, requests: int, context: int, verified: int, steps: int, first_rows: int
    ) -> float:
        """Of a step without prefill rows."""
        target = self.target_curve(requests, context, verified)
        return float(
            target[-1] + self.draft_curve(requests, context, first_rows, steps)[-1]
        )

    def doubt(self, requests: int, now: float) -> float:
        """Standard deviation of the logarithm of a step's time over a plain step's."""
        target = self.target.variance(2 * requests, now, over_plain=True)
        first = self.first.variance(requests, now)
        passes = self.draft_curve(requests, 0, requests, 1)[1]
        share = passes / (passes + self.target_curve(requests, 0, 1)[1])
        return sqrt(target + share * share * first)

    def observe(self, sample: StepSample, now: float) -> None:
        """Learn from one measured step; `now` in seconds."""
        prior, n, context = self.prior, sample.requests, sample.context
        host, known = prior.host + self._host, not isnan(sample.host_s)
        if known and sample.asked:
            more = max(sample.host_s - host, 0.0)
            self._asking += _SMOOTH * (more - self._asking)
        elif known:
            host = sample.host_s
            self._host += _SMOOTH * (host - prior.host - self._host)
        if sample.target_s > 0.0:
            rows = n + sample.verified + sample.prefill
            predicted, seconds = prior.target(rows, context), sample.target_s + host
            predicted += prior.host
            plain = rows == n
            self._compare(predicted * self.target.factor(rows, plain), seconds)
            self.target.observe(rows, predicted, seconds, now, plain)
        if sample.steps and sample.draft_first_s > 0.0:
            rows = sample.first_rows
            predicted = prior.draft_first(rows, context)
            self.first.observe(rows, predicted, sample.draft_first_s, now)
        if sample.steps > 1 and sample.draft_next_s > 0.0:
            count = sample.steps - 1
            each, grown = prior.further(n, context)
            # Beside the first one's, which is of the same model: what is known of that
            # is believed of these before any of them was seen.
            predicted = (each + grown * count) * count * self.first.factor(n)
            self.further.observe(n, predicted, sample.draft_next_s, now)

    def _compare(self, predicted: float, seconds: float) -> None:
        error = min(abs(predicted / seconds - 1.0), 1.0)
        before = error if isnan(self.error) else self.error
        self.error = before + _SMOOTH * (error - before)

    @property
    def version(self) -> int:
        """Changes with what was learnt."""
        return self.target.version + self.first.version + self.further.version

    def learnt(self) -> Learnt:
        """What was learnt, as plain numbers for another process's `take`."""
        passes = self.target, self.first, self.further
        target, first, further = (each.learnt() for each in passes)
        return target, first, further, self._asking

    def take(self, learnt: Learnt) -> None:
        """Put what the same prior has `learnt` elsewhere in the place of ours."""
        target, first, further, self._asking = learnt
        self.target.take(target)
        self.first.take(first)
        self.further.take(further)


def step_cost(
    times: StepTimes, requests: int, context: int, verified: int, steps: int
) -> float:
    """Predicted seconds of a decode step over those of one without speculation.

    Args:
        requests: Requests that decode; prefilling ones are left out.
        context: Tokens in their KV cache before the step.

    Returns:
        Above 0; 1 where no request decodes or the times are no numbers.
    """
    if not requests or not (verified or steps):
        return 1.0
    plain, seconds = (
        times.step_seconds(requests, context, sent, passes, requests + sent)
        for sent, passes in ((0, 0), (verified, steps))
    )
    cost = seconds / plain if plain > 0.0 else nan
    return cost if 0.0 < cost < inf else 1.0
