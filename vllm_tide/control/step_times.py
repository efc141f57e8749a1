"""Step times by part, updated by measurements while serving.

Step times change with other processes, clock frequencies and the mix of lengths. The
logarithm of a forward's seconds is that of a `TimeModel`'s curve plus a Gaussian
process over its rows, tracked by a Kalman filter at a few knots. A measurement mainly
updates similar numbers of rows. Residuals are clipped, so that one outlier (a page
fault, a stall) has little effect. A lasting change gives residuals of one sign; the
filter then restarts from its initial covariance.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import exp, inf, isnan, log, nan, sqrt
from typing import Any

import numpy as np

from vllm_tide.control.time_model import TimeModel

Learnt = tuple[list[float], list[float], list[float], float]
"""Means of target, first and further draft passes, and seconds of control itself."""

KNOTS = tuple(sorted({base << shift for base in (2, 3) for shift in range(12)} | {1}))
"""Rows at which the slope may change, about as coarse as the choice of kernels."""

_LEVEL_SD = 1.0  # of the prior's error, common to all rows (logarithm)
_SHAPE_SD, _SHAPE_LENGTH = 0.3, 5.0  # Gaussian process over the knots
_PLAIN_SD = 0.15  # of the savings by kernels for one row per request
_FREE_ROWS = np.geomspace(1, 1024, 21)  # possible numbers of rows without cost
_DRIFT = 0.005  # random walk of the logarithm, per square root of a second
_NOISE_MEMORY = 50  # measurements in the estimate of the noise
_LEAST_NOISE = 1e-4  # minimum variance of the logarithm
_CLIP = 3.0  # maximum residual, in standard deviations
_LEANING = 1.5  # mean residual, in standard deviations, of a lasting change
_TOLERANCE = 0.02  # change of a logarithm that increments the version
_SMOOTH = 0.1


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step.

    Attributes:
        requests: Requests of the step, including prefilling ones; one row each.
        context: Tokens in the KV cache before the step, summed over the requests.
        prefill: Rows of prefilling requests beyond one each, so that
            `requests + verified + prefill` is the target's number of rows.
        first_rows: Rows of the first draft pass; 0 without one.
        target_s: Seconds from the start of the step until its tokens were known.
        draft_first_s: Seconds of the first draft pass; nan if none.
        draft_next_s: Total seconds of the further draft passes; nan if none.
        host_s: Seconds of the step outside the passes; nan if unknown (after idling).
        asked: Control ran and chose to draft, so `host_s` includes its own time.
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
    """Factor on the seconds of one kind of forward, by its rows.

    A forward of one row per request (`plain`) may use faster kernels: a second factor.

    Args:
        shaped: Whether the prior has the shape of the curve. If not, it is linear, as
            in AdaSpec (eq. 2), with an unknown slope: an unknown number of first rows
            has no cost, because the weights are read anyway.

    Attributes:
        version: Incremented when predictions have changed noticeably.
    """

    def __init__(self, *, shaped: bool) -> None:
        count = len(KNOTS)
        gap = np.subtract.outer(np.arange(count), np.arange(count)) / _SHAPE_LENGTH
        local = np.exp(-0.5 * gap**2) + 1e-4 * np.eye(count)
        # Of the logarithm at the knots; the last entry is the plain factor.
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
        self._since = inf  # time of the newest filter update; inf: none yet
        self._versioned = self._mean.copy()
        self.version = 0

    def factor(self, rows: int, plain: bool = False) -> float:
        return exp(_at(rows, plain, self._mean))

    @property
    def plain(self) -> float:
        """Factor of one row per request over the same rows of fewer requests."""
        return exp(self._mean[-1])

    def factors(self, count: int) -> np.ndarray:
        """Return the factors for 0, 1, ... rows, float64 [count]."""
        factors = np.exp(self._mean[:-1])
        return np.asarray(np.interp(np.arange(count), KNOTS, factors))

    def variance(self, rows: int, now: float, *, over_plain: bool = False) -> float:
        """Return the variance of the factor's logarithm at `now` (s).

        Args:
            over_plain: For the ratio to a plain forward of half the rows.
        """
        column = _at(rows, False, self._covariance)
        if over_plain:
            column = column - _at(rows // 2, True, self._covariance)
        value = _at(rows, False, column)
        if over_plain:
            value = value - _at(rows // 2, True, column)
        return max(float(value), 0.0) + _DRIFT**2 * max(now - self._since, 0.0)

    def observe(
        self,
        rows: int,
        predicted: float,
        seconds: float,
        now: float,
        plain: bool = False,
    ) -> None:
        """Update the filter with a measurement.

        Args:
            predicted: Predicted seconds without the factor.
        """
        if not (seconds > 0.0 and predicted > 0.0):
            return
        if self._first:  # it includes the compilation of kernels
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
        # Inverse gamma, from the share of the residual due to measurement noise.
        self._count = min(self._count + 1, _NOISE_MEMORY)
        own = noise * clipped * clipped
        self._noise = max(noise + (own - noise) / (self._count + 2), _LEAST_NOISE)
        if abs(self._lean) > _LEANING:
            covariance[:] = self._open
            clipped, self._lean = score, 0.0
        else:
            covariance += passed * self._walk
        if passed or self._since == inf:  # a late sample does not move it back
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
        """Replace the means by `learnt`, from another instance."""
        self._mean[:] = learnt
        self.version += 1


def _at(rows: int, plain: bool, state: np.ndarray) -> Any:
    """Interpolate a vector [knots + 1], or the rows of a matrix, at `rows`."""
    low = min(max(bisect_right(KNOTS, rows), 1), len(KNOTS) - 1) - 1
    share = (rows - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])
    share = min(max(share, 0.0), 1.0)
    value = state[low] * (1.0 - share) + state[low + 1] * share
    return value + state[-1] if plain else value


class StepTimes:
    """Seconds of a step's parts: a `TimeModel` corrected by measurements.

    The target's curve includes all time outside the forwards.

    Args:
        guessed: Whether the prior's dependence on the number of rows is a guess.

    Attributes:
        prior: The initial time model.
        error: Moving average of the relative error of step times; nan at first.
    """

    def __init__(self, prior: TimeModel, *, guessed: bool = False) -> None:
        self.prior = prior
        self.target, self.first = (PassTime(shaped=not guessed) for _ in range(2))
        self.further = PassTime(shaped=True)
        # For 0, 1, ... rows: seconds without context, and per token of context.
        self._rows = np.zeros(0), np.zeros(0)
        self._prior_rows = np.zeros(0)
        self._rows_version = -1
        self._host = 0.0  # seconds outside the forwards minus the prior's
        self._asking = 0.0  # seconds of control itself in a step that drafts
        self.error = nan

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Return seconds of a step that verifies 0..most tokens, without drafting.

        Args:
            context: Tokens in the KV cache, summed over the requests.
            prefill: Rows of prefilling requests beyond one each.

        Returns:
            float64 [most + 1].
        """
        start, end = requests + prefill, requests + prefill + most + 1
        changed = self._rows_version != self.target.version
        if changed or end > len(self._rows[0]):
            self._rows_version = self.target.version
            # After a change only as many as this call needs: a prefill has thousands.
            if end > len(self._prior_rows):
                self._prior_rows = self.prior.target.rows(0, 2 * end) + self.prior.host
            factors = self.target.factors(end)
            base = self._prior_rows[:end] * factors
            self._rows = base, factors * self.prior.target.alpha
        base, each = self._rows
        curve = base[start:end] + context * each[start:end]
        if not prefill:
            curve[0] *= self.target.plain
        return np.asarray(curve)

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Return seconds of 0..most draft passes, float64 [most + 1]."""
        first_rows = requests * self.prior.block_rows or first_rows
        first = self.prior.draft_first(first_rows, context)
        first = first * self.first.factor(first_rows) + self._asking
        factor = self.first.factor(requests) * self.further.factor(requests)
        each, grown = (x * factor for x in self.prior.further(requests, context))
        return np.array([0.0, *(first + (each + grown * j) * j for j in range(most))])

    def catchup_seconds(self, rows: int, context: int = 0) -> float:
        """Return seconds of a pass that adds missed rows to the draft's KV cache."""
        if not rows:
            return 0.0
        return self.prior.draft_first(rows, context) * self.first.factor(rows)

    def ratio_sd(self, requests: int, now: float) -> float:
        """Return the standard deviation of log(step time / plain step time)."""
        target = self.target.variance(2 * requests, now, over_plain=True)
        first = self.first.variance(requests, now)
        passes = self.draft_curve(requests, 0, requests, 1)[1]
        share = passes / (passes + self.target_curve(requests, 0, 1)[1])
        return sqrt(target + share * share * first)

    def observe(self, sample: StepSample, now: float) -> None:
        """Update the model with one measured step; `now` in seconds."""
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
            rows = n * prior.block_rows or sample.first_rows
            predicted = prior.draft_first(rows, context)
            self.first.observe(rows, predicted, sample.draft_first_s, now)
        if sample.steps > 1 and sample.draft_next_s > 0.0:
            count = sample.steps - 1
            each, grown = prior.further(n, context)
            # Relative to the first pass, which runs the same model: its factor also
            # applies to further passes before any of them is measured.
            predicted = (each + grown * count) * count * self.first.factor(n)
            self.further.observe(n, predicted, sample.draft_next_s, now)

    def _compare(self, predicted: float, seconds: float) -> None:
        error = min(abs(predicted / seconds - 1.0), 1.0)
        before = error if isnan(self.error) else self.error
        self.error = before + _SMOOTH * (error - before)

    @property
    def version(self) -> int:
        """Version of the predictions; increases when they change."""
        return self.target.version + self.first.version + self.further.version

    def learnt(self) -> Learnt:
        """Return the learnt means as plain numbers, for another process's `take`."""
        passes = self.target, self.first, self.further
        target, first, further = (each.learnt() for each in passes)
        return target, first, further, self._asking

    def take(self, learnt: Learnt) -> None:
        """Replace the means by `learnt`, from an instance with the same prior."""
        target, first, further, self._asking = learnt
        self.target.take(target)
        self.first.take(first)
        self.further.take(further)


def step_cost(
    times: StepTimes,
    requests: int,
    context: int,
    verified: int,
    drafted_by: tuple[int, int],
) -> float:
    """Return predicted seconds of a decode step over those without speculation.

    The time of draft passes counts in the step that verifies their tokens: a step that
    verifies other proposals is no evidence about the draft.

    Args:
        requests: Decoding requests, without prefilling ones.
        context: Tokens in their KV cache before the step.
        drafted_by: Draft passes of the step before, and their rows in the first pass.

    Returns:
        Above 0; 1 if no request decodes or the times are not finite.
    """
    steps, rows = drafted_by
    if not requests or not (verified or steps):
        return 1.0
    target = times.target_curve(requests, context, verified)
    drafts = times.draft_curve(requests, context, rows, steps)[-1]
    cost = float((target[-1] + drafts) / target[0]) if target[0] > 0.0 else nan
    return cost if 0.0 < cost < inf else 1.0
