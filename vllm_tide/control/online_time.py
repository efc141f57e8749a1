"""Measured rounds refine the time model while it serves.

A profile ages: other processes take cores, clocks fall, real batches mix lengths. Each
part of a round keeps factors on the profile's token cost and context cost, followed by
recursive least squares with forgetting. Residuals are relative and clipped, so that one
strange round (first-use compilation, a page fault) moves a factor by little. A
lasting change shows as residuals that keep their sign: then the factors are as open as
at first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vllm_tide.control.time_model import TimeModel

NAN = float("nan")

# Prior variance of a factor: a profile may well be 30% off.
_PRIOR = 0.1
# A factor that nothing excites would otherwise become arbitrarily uncertain, and jump
# at the first round that does excite it.
_MOST_VARIANCE = 0.2
_CLIP = 3.0  # standard deviations
# Mean of the last ten or so residuals, in standard deviations, that is no chance: of
# independent ones it has a standard deviation of 0.23.
_LEANING = 1.5
_LEAST = 1e-5  # seconds; residuals are relative to at least this
_FACTORS = (0.05, 20.0)
# Host time is learnt in absolute terms: a profile is measured inside the worker and
# knows nothing of scheduler and RPC, so there is no cost to multiply.
_HOST_UNIT = (1e-3, 1e-4)  # seconds per round, per request
_KEPT_ERRORS = 256


@dataclass(frozen=True, slots=True)
class RoundSample:
    """One measured round.

    Attributes:
        requests: Requests of the step, prefilling ones too; one row each.
        context: Tokens in the KV cache before the step, summed over the requests.
        verified: Draft tokens verified in this step.
        prefill: Rows of prefilling requests beyond one each, so that
            `requests + verified + prefill` is the target's number of rows.
        steps: Draft passes run after the target.
        first_rows: Rows of the first draft pass; 0 without one.
        target_s: Seconds from the begin of the step until its tokens were known.
        draft_first_s: Seconds of the first draft pass; nan if none.
        draft_next_s: Seconds of the further draft passes in all; nan if none.
        host_s: Seconds of the round outside those; nan if unknown (after idling).
    """

    requests: int
    context: int
    verified: int
    prefill: int
    steps: int
    first_rows: int
    target_s: float
    draft_first_s: float = NAN
    draft_next_s: float = NAN
    host_s: float = NAN


class Factors:
    """Factors on a cost's two components, by robust recursive least squares.

    Scalars, not arrays: it runs up to four times in every round.

    Args:
        initial: The factors before anything was observed.
        forgetting: Weight of the past per observation.
        limits: Smallest and largest factor.

    Attributes:
        initial: As given.
        value: The factors now.
    """

    def __init__(
        self,
        initial: tuple[float, float],
        forgetting: float,
        limits: tuple[float, float] = _FACTORS,
    ) -> None:
        self.value = self.initial = initial
        self._forgetting = forgetting
        self._limits = limits
        # Covariance of the factors: variance, covariance, variance.
        self._covariance = (_PRIOR, 0.0, _PRIOR)
        self._spread = 0.1  # standard deviation of the relative residuals
        self._before = self._lean = 0.0

    def predict(self, parts: tuple[float, float]) -> float:
        """Seconds of a cost with these components."""
        return self.value[0] * parts[0] + self.value[1] * parts[1]

    def observe(self, parts: tuple[float, float], measured: float) -> None:
        """Take one measurement of a cost.

        Args:
            parts: Its components, seconds.
            measured: Seconds.
        """
        if not measured > 0.0:
            return
        total = max(self.predict(parts), _LEAST)
        residual = measured / total - 1.0
        score = residual / self._spread
        weight = min(1.0, _CLIP / max(abs(score), _CLIP))
        self._move(parts[0] / total, parts[1] / total, residual, weight)
        self._lean += 0.1 * (weight * score - self._lean)
        if abs(self._lean) > _LEANING:
            self._covariance = (_PRIOR, 0.0, _PRIOR)
            self._lean = 0.0
        # From differences, which a lasting change does not widen: 0.89 of their mean
        # size make a standard deviation.
        size = min(0.89 * abs(residual - self._before), 2.0 * _CLIP * self._spread)
        self._before = residual
        self._spread = max(self._spread + 0.02 * (size - self._spread), 0.01)

    def _move(self, x: float, y: float, residual: float, weight: float) -> None:
        """One step of recursive least squares for the regressors x and y."""
        xx, xy, yy = self._covariance
        px, py = xx * x + xy * y, xy * x + yy * y
        noise = self._forgetting * self._spread**2 / weight
        scale = 1.0 / (noise + x * px + y * py)
        low, high = self._limits
        self.value = (
            min(max(self.value[0] + px * scale * residual, low), high),
            min(max(self.value[1] + py * scale * residual, low), high),
        )
        xx = (xx - px * px * scale) / self._forgetting
        xy = (xy - px * py * scale) / self._forgetting
        yy = (yy - py * py * scale) / self._forgetting
        shrink = min(1.0, _MOST_VARIANCE / (xx + yy))
        self._covariance = (xx * shrink, xy * shrink, yy * shrink)


class RefinedTime:
    """A `TimeModel` with factors on its parts: the same curves, refined.

    Its methods take and return what those of `TimeModel` do.

    Args:
        profile: The time model that the factors multiply.
        forgetting: See `OnlineTime`.
    """

    def __init__(self, profile: TimeModel, forgetting: float) -> None:
        self.profile = profile
        self.target = Factors((1.0, 1.0), forgetting)
        self.draft_first = Factors((1.0, 1.0), forgetting)
        self.draft_next = Factors((1.0, 1.0), forgetting)
        known = (
            profile.host / _HOST_UNIT[0],
            profile.host_per_request / _HOST_UNIT[1],
        )
        self.host = Factors(known, forgetting, (0.0, 1e6))

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Seconds [most + 1] of the target step that verifies 0..most draft tokens."""
        tokens, cached = self.profile.target_curves(requests, context, most, prefill)
        on_tokens, on_cached = self.target.value
        return np.asarray(tokens * on_tokens + cached * on_cached)

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Cumulative seconds [most + 1] of 0..most draft steps."""
        profile, curve = self.profile, np.zeros(most + 1)
        first = profile.draft_first_parts(requests, context, first_rows)
        tokens, cached = profile.draft_next_parts(requests, context, np.arange(most))
        on_tokens, on_cached = self.draft_next.value
        curve[1:] = tokens * on_tokens + cached * on_cached
        curve[1:] += self.draft_first.predict(first)
        return curve

    def catchup_seconds(self, rows: int, context: int = 0) -> float:
        """Seconds of one batched pass over `rows` missed rows."""
        return self.profile.catchup_seconds(rows, context) * self.draft_first.value[0]

    def overhead(self, requests: int) -> float:
        """Seconds of a round outside the target step and the draft passes."""
        return self.host.predict(host_parts(requests))

    def round_seconds(
        self,
        *,
        requests: int,
        context: int,
        verified: int,
        prefill: int,
        steps: int,
        first_rows: int,
    ) -> float:
        """Seconds of a round that verifies `verified` tokens and drafts `steps`."""
        parts = self.profile.target_parts(requests, context, verified, prefill)
        target = self.target.predict(parts)
        draft = self.draft_curve(requests, context, first_rows, steps)[steps]
        return target + float(draft) + self.overhead(requests)


def host_parts(requests: int) -> tuple[float, float]:
    """Unit costs of host time, per round and for its requests, seconds."""
    return _HOST_UNIT[0], _HOST_UNIT[1] * requests


class OnlineTime:
    """A profile and what serving teaches about it.

    Args:
        profile: The fitted or published time model.
        forgetting: Weight of the past per round; 0.995 remembers some 200 rounds.

    Attributes:
        profile: The profile as given.
        model: The refined model; the same object for good, its factors move.
    """

    def __init__(self, profile: TimeModel, forgetting: float = 0.995) -> None:
        if not 0.5 < forgetting <= 1.0:
            raise ValueError(f"forgetting must be in (0.5, 1], not {forgetting}")
        self.profile = profile
        self.model = RefinedTime(profile, forgetting)
        self._errors = np.full((2, _KEPT_ERRORS), np.nan)
        self._count = 0

    @property
    def error(self) -> float:
        """Median relative error over recent rounds, each predicted before it was seen.

        Over what was measured of a round; nan before the first one.
        """
        return self._median(0)

    @property
    def profile_error(self) -> float:
        """The same of the profile alone: what refinement is worth."""
        return self._median(1)

    def observe(self, sample: RoundSample) -> tuple[float, float]:
        """Refine the model by one measured round.

        Returns:
            Relative errors of the prediction before this update, refined and of the
            profile alone, over what was measured of the round; nan if nothing was.
        """
        refined = unrefined = measured = 0.0
        for factors, parts, seconds in self._measurements(sample):
            refined += factors.predict(parts)
            unrefined += factors.initial[0] * parts[0] + factors.initial[1] * parts[1]
            measured += seconds
            factors.observe(parts, seconds)
        if measured <= 0.0:
            return NAN, NAN
        errors = abs(refined / measured - 1.0), abs(unrefined / measured - 1.0)
        self._errors[:, self._count % _KEPT_ERRORS] = errors
        self._count += 1
        return errors

    def _measurements(
        self, sample: RoundSample
    ) -> list[tuple[Factors, tuple[float, float], float]]:
        """The parts of the round that were measured: factors, components, seconds."""
        profile, model = self.profile, self.model
        n, context = sample.requests, sample.context
        target = profile.target_parts(n, context, sample.verified, sample.prefill)
        found = [(model.target, target, sample.target_s)]
        if sample.steps >= 1:
            first = profile.draft_first_parts(n, context, sample.first_rows)
            found.append((model.draft_first, first, sample.draft_first_s))
        if sample.steps >= 2:
            tokens, cached = profile.draft_next_parts(n, context, sample.steps - 1)
            further = (float(tokens), float(cached))
            found.append((model.draft_next, further, sample.draft_next_s))
        found.append((model.host, host_parts(n), sample.host_s))
        return [entry for entry in found if math.isfinite(entry[2])]

    def _median(self, row: int) -> float:
        known = self._errors[row, : min(self._count, _KEPT_ERRORS)]
        return float(np.median(known)) if known.size else NAN
