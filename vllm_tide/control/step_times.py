"""Seconds of the parts of a step, learnt while it serves.

They change: other processes take cores, clocks fall, real batches mix lengths. The
logarithm of a forward's seconds is that of a `TimeModel`'s curve plus a Gaussian
process over its rows, followed by a Kalman filter on a few knots: what one number of
rows takes bears on those near it, and little on others. The residual is clipped, so
one strange step (a page fault, a stall) moves the curve by little; a lasting change
shows as residuals of one sign, and the curve is learnt anew.
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

_LEVEL_SD = 1.0  # of the logarithm, of all rows together: the prior's error
_SHAPE_SD, _SHAPE_LENGTH = 0.3, 5.0  # its Gaussian process; knots
_PLAIN_SD = 0.15  # of what kernels for one row of each request save
_FREE_ROWS = np.geomspace(1, 1024, 21)  # that reading the weights hides
_DRIFT = 0.005  # random walk of the logarithm, per root second
_NOISE_MEMORY = 50  # measurements that the noise is known from
_LEAST_NOISE = 1e-4  # variance of the logarithm
_CLIP = 3.0  # standard deviations of a residual
_LEANING = 1.5  # mean of them, in standard deviations, that is a lasting change
_TOLERANCE = 0.02  # change of a logarithm that makes a new version
_SMOOTH = 0.1


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
        shaped: Whether the prior has how seconds rise with rows. If not, they are
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
        covariance, self._walk = np.zeros((2, count + 1, count + 1))
        covariance[-1, -1], self._walk[-1, -1] = _PLAIN_SD**2, _DRIFT**2
        covariance[:-1, :-1] = _LEVEL_SD**2 + _SHAPE_SD**2 * local
        self._walk[:-1, :-1] = _DRIFT**2 * (0.5 + 0.5 * local)
        self._mean = np.zeros(count + 1)
        if not shaped:
            linear = np.log1p(np.array(KNOTS) / _FREE_ROWS[:, None])
            self._mean[:-1] += linear.mean(axis=0) - linear[:, 0].mean()
            covariance[:-1, :-1] += np.cov(linear, rowvar=False)
        self._covariance, self._first = covariance, True
        self._open = covariance.copy()
        self._noise, self._count, self._lean = _SHAPE_SD**2, 0, 0.0
        self._since = inf  # seconds of the newest step of the filter; inf: none yet
        self._versioned = self._mean.copy()
        self.version = 0

    def factor(self, rows: int, plain: bool = False) -> float:
        return exp(_at(rows, plain, self._mean))

    @property
    def plain(self) -> float:
        """Of one row of each request, over as many rows of fewer."""
        return exp(self._mean[-1])

    def factors(self, count: int) -> np.ndarray:
        """Of 0, 1, ... rows: float64 [count]."""
        factors = np.exp(self._mean[:-1])
        return np.asarray(np.interp(np.arange(count), KNOTS, factors))

    def variance(self, rows: int, now: float, *, over_plain: bool = False) -> float:
        """Of the logarithm of the factor at `now`, seconds.

        Args:
            over_plain: Of the ratio to a plain forward of half the rows.
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
        """Take a measurement: a step of the filter.

        Args:
            predicted: Seconds without the factor.
        """
        if not (seconds > 0.0 and predicted > 0.0):
            return
        if self._first:  # kernels are made in it
            self._first = False
            return
        mean, covariance, noise = self._mean, self._covariance, self._noise
        passed = max(now - self._since, 0.0)
        residual = log(seconds / predicted) - float(_at(rows, plain, mean))
        column = _at(rows, plain, covariance)
        prior = float(_at(rows, plain, column)) + _DRIFT**2 * passed
        score = residual / sqrt(prior + noise)
        clipped = max(min(score, _CLIP), -_CLIP)
        self._lean += _SMOOTH * (clipped - self._lean)
        # Inverse gamma: the share of the residual that is the measurement's own.
        self._count = min(self._count + 1, _NOISE_MEMORY)
        own = noise * clipped * clipped
        self._noise = max(noise + (own - noise) / (self._count + 2), _LEAST_NOISE)
        if abs(self._lean) > _LEANING:
            covariance[:] = self._open
            clipped, self._lean = score, 0.0
        else:
            covariance += passed * self._walk
        if passed or self._since == inf:  # a sample may come late
            self._since = now
        column = _at(rows, plain, covariance)
        gain = column / (float(_at(rows, plain, column)) + noise)
        mean += gain * residual * (clipped / score if score else 1.0)
        covariance -= np.outer(gain, column)
        if np.abs(mean - self._versioned).max() > _TOLERANCE:
            self._versioned[:] = mean
            self.version += 1

    def learnt(self) -> list[float]:
        """Return the mean of the logarithm at `KNOTS`, and of the plain factor."""
        return self._mean.tolist()

    def take(self, learnt: list[float]) -> None:
        """Put what was `learnt` elsewhere in the place of ours."""
        self._mean[:] = learnt
        self.version += 1


def _at(rows: int, plain: bool, state: np.ndarray) -> Any:
    """Interpolate a state, [knots + 1], at so many rows; of a matrix its row."""
    low = min(max(bisect_right(KNOTS, rows), 1), len(KNOTS) - 1) - 1
    share = (rows - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])
    share = min(max(share, 0.0), 1.0)
    value = state[low] * (1.0 - share) + state[low + 1] * share
    return value + state[-1] if plain else value


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
        # Of 0, 1, ... rows: seconds without context, and of a token of context.
        self._rows = np.zeros(0), np.zeros(0)
        self._rows_version = -1
        self._host = 0.0  # seconds outside the forwards beyond the prior's
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
        start, end = requests + prefill, requests + prefill + most + 1
        if end > len(self._rows[0]) or self._rows_version != self.target.version:
            self._rows_version = self.target.version
            count = max(end, len(self._rows[0]))
            factors = self.target.factors(count)
            base = (self.prior.target.rows(0, count) + self.prior.host) * factors
            self._rows = base, factors * self.prior.target.alpha
        base, each = self._rows
        curve = base[start:end] + context * each[start:end]
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

    def ratio_sd(self, requests: int, now: float) -> float:
        """Return the standard deviation of log(a step's time over a plain step's)."""
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
            # On the first one's factor, which is of the same model: until one of these
            # was measured, theirs is that of the first.
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
        """Return the learnt means as plain numbers, for another process's `take`."""
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
    target = times.target_curve(requests, context, verified)
    drafts = times.draft_curve(requests, context, requests + verified, steps)[-1]
    cost = float((target[-1] + drafts) / target[0]) if target[0] > 0.0 else nan
    return cost if 0.0 < cost < inf else 1.0
