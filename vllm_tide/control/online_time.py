"""Measured rounds refine the time model while it serves.

A profile ages: other processes take cores, clocks fall, real batches mix lengths. Each
part of a round keeps a factor on the profile's token cost, one on its context cost, and
a time per pass that no profile knows (sampling parameters, the control's own work),
followed by recursive least squares with forgetting. Residuals are relative and clipped,
so that one strange round (first-use compilation, a page fault) moves a factor by
little. A lasting change shows as residuals that keep their sign: then the factors are
as open as at first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vllm_tide.control.curve_shape import CurveShape
from vllm_tide.control.time_model import TimeModel

NAN = float("nan")

Triple = tuple[float, float, float]
Learnt = tuple[tuple[Triple, ...], tuple[float, ...]]
"""Factors of the target and of draft passes, and the target's by size (logarithms)."""

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
_OPEN = (_PRIOR, 0.0, 0.0, _PRIOR, 0.0, _PRIOR)
_FREE = (0.0, 1e6)
_FORWARD_LIMITS = ((0.05, 20.0), (0.05, 20.0), _FREE)
# Units of the times that are learnt in absolute terms, per pass or round and per
# request: a profile is measured inside the worker and knows no scheduler and no RPC.
_UNIT = 1e-3
_REQUEST_UNIT = 1e-4
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
    """Factors on a cost's three components, by robust recursive least squares.

    Plain numbers, not arrays: it runs up to four times in every round.

    Args:
        initial: The factors before anything was observed.
        forgetting: Weight of the past per observation.
        limits: Smallest and largest value of each factor.

    Attributes:
        initial: As given.
        value: The factors now.
    """

    def __init__(
        self,
        initial: Triple,
        forgetting: float,
        limits: tuple[tuple[float, float], ...] = _FORWARD_LIMITS,
    ) -> None:
        self.value = self.initial = initial
        self._forgetting = forgetting
        self._limits = limits
        # The symmetric covariance's upper triangle: xx xy xz yy yz zz.
        self._covariance = _OPEN
        self._spread = 0.1  # standard deviation of the relative residuals
        self._before = self._lean = 0.0

    def predict(self, parts: Triple) -> float:
        """Seconds of a cost with these components."""
        return _dot(self.value, parts)

    def observe(self, parts: Triple, measured: float) -> None:
        """Take one measurement of a cost.

        Args:
            parts: Its components, seconds.
            measured: Seconds.
        """
        if not measured > 0.0:
            return
        total = max(_dot(self.value, parts), _LEAST)
        residual = measured / total - 1.0
        score = residual / self._spread
        weight = min(1.0, _CLIP / max(abs(score), _CLIP))
        share = parts[0] / total, parts[1] / total, parts[2] / total
        self._move(share, residual, weight)
        self._lean += 0.1 * (weight * score - self._lean)
        if abs(self._lean) > _LEANING:
            self._covariance = _OPEN
            self._lean = 0.0
        # From differences, which a lasting change does not widen: 0.89 of their mean
        # size make a standard deviation.
        size = min(0.89 * abs(residual - self._before), 2.0 * _CLIP * self._spread)
        self._before = residual
        self._spread = max(self._spread + 0.02 * (size - self._spread), 0.01)

    def _move(self, share: Triple, residual: float, weight: float) -> None:
        """One step of recursive least squares for the regressors `share`."""
        xx, xy, xz, yy, yz, zz = self._covariance
        x = _dot((xx, xy, xz), share)
        y = _dot((xy, yy, yz), share)
        z = _dot((xz, yz, zz), share)
        noise = self._forgetting * self._spread**2 / weight
        scale = 1.0 / (noise + _dot((x, y, z), share))
        step = scale * residual
        old, (first, second, third) = self.value, self._limits
        self.value = (
            min(max(old[0] + x * step, first[0]), first[1]),
            min(max(old[1] + y * step, second[0]), second[1]),
            min(max(old[2] + z * step, third[0]), third[1]),
        )
        xx, yy, zz = xx - x * x * scale, yy - y * y * scale, zz - z * z * scale
        grow = min(1.0 / self._forgetting, _MOST_VARIANCE / (xx + yy + zz))
        self._covariance = (
            grow * xx,
            grow * (xy - x * y * scale),
            grow * (xz - x * z * scale),
            grow * yy,
            grow * (yz - y * z * scale),
            grow * zz,
        )


def _dot(left: Triple, right: Triple) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]


class RefinedTime:
    """A `TimeModel` with factors on its parts: the same curves, refined.

    Its methods take and return what those of `TimeModel` do.

    Args:
        profile: The time model that the factors multiply.
        forgetting: See `OnlineTime`.
    """

    def __init__(self, profile: TimeModel, forgetting: float) -> None:
        self.profile = profile
        once = (1.0, 1.0, 0.0)
        self.target = Factors(once, forgetting)
        self.draft_first = Factors(once, forgetting)
        self.draft_next = Factors(once, forgetting)
        known = profile.host / _UNIT, profile.host_per_request / _REQUEST_UNIT, 0.0
        self.host = Factors(known, forgetting, (_FREE, _FREE, _FREE))
        self.shape = CurveShape()

    def learnt(self) -> Learnt:
        """What was learnt, as plain numbers for another process's `take`."""
        factors = tuple(part.value for part in self._parts())
        return factors, tuple(self.shape.believed.tolist())

    def take(self, learnt: Learnt) -> None:
        """Put what the same profile has `learnt` elsewhere in the place of ours."""
        factors, shape = learnt
        for part, value in zip(self._parts(), factors, strict=True):
            part.value = value
        self.shape.take(shape)

    def _parts(self) -> tuple[Factors, ...]:
        return self.target, self.draft_first, self.draft_next, self.host

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Seconds [most + 1] of the target step that verifies 0..most draft tokens."""
        tokens, cached = self.profile.target_curves(requests, context, most, prefill)
        on_tokens, on_cached, more = self.target.value
        curve = tokens * on_tokens + (cached * on_cached + more * _UNIT)
        curve *= self.shape.factors(requests + prefill, most + 1)
        return np.asarray(curve)

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Cumulative seconds [most + 1] of 0..most draft steps."""
        profile, curve = self.profile, np.zeros(most + 1)
        first = profile.draft_first_parts(requests, context, first_rows)
        after = np.arange(most)
        tokens, cached = profile.draft_next_parts(requests, context, after)
        on_tokens, on_cached, more = self.draft_next.value
        curve[1:] = tokens * on_tokens + cached * on_cached + after * (more * _UNIT)
        curve[1:] += self.draft_first.predict((*first, _UNIT))
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
        target = self.target.predict((*parts, _UNIT))
        target *= self.shape.factor(requests + verified + prefill)
        draft = self.draft_curve(requests, context, first_rows, steps)[steps]
        return target + float(draft) + self.overhead(requests)


def host_parts(requests: int) -> Triple:
    """Unit costs of host time, per round and for its requests, seconds."""
    return _UNIT, _REQUEST_UNIT * requests, 0.0


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
        shape, rows = self.model.shape, sample.requests + sample.verified
        for factors, parts, seconds in self._measurements(sample):
            bent = 1.0
            if factors is self.model.target:
                bent = shape.factor(rows + sample.prefill)
            refined += factors.predict(parts) * bent
            unrefined += _dot(factors.initial, parts)
            measured += seconds
            factors.observe(parts, seconds / bent)
            if factors is self.model.target and seconds > 0.0:
                usual = max(factors.predict(parts), _LEAST)
                shape.learn(rows + sample.prefill, seconds / usual)
        if measured <= 0.0:
            return NAN, NAN
        errors = abs(refined / measured - 1.0), abs(unrefined / measured - 1.0)
        self._errors[:, self._count % _KEPT_ERRORS] = errors
        self._count += 1
        return errors

    def _measurements(self, sample: RoundSample) -> list[tuple[Factors, Triple, float]]:
        """The parts of the round that were measured: factors, components, seconds."""
        profile, model = self.profile, self.model
        n, context = sample.requests, sample.context
        target = profile.target_parts(n, context, sample.verified, sample.prefill)
        found: list[tuple[Factors, Triple, float]] = [
            (model.target, (*target, _UNIT), sample.target_s)
        ]
        if sample.steps >= 1:
            first = profile.draft_first_parts(n, context, sample.first_rows)
            found.append((model.draft_first, (*first, _UNIT), sample.draft_first_s))
        if sample.steps >= 2:
            passes = sample.steps - 1
            tokens, cached = profile.draft_next_parts(n, context, passes)
            further = float(tokens), float(cached), _UNIT * passes
            found.append((model.draft_next, further, sample.draft_next_s))
        found.append((model.host, host_parts(n), sample.host_s))
        return [entry for entry in found if math.isfinite(entry[2])]

    def _median(self, row: int) -> float:
        known = self._errors[row, : min(self._count, _KEPT_ERRORS)]
        return float(np.median(known)) if known.size else NAN


def step_cost(
    model: RefinedTime, requests: int, context: int, verified: int, steps: int
) -> float:
    """Predicted seconds of a decode step over those of one without speculation.

    Args:
        model: Time model.
        requests: Requests that decode; prefilling ones are left out.
        context: Tokens in their KV cache before the step.
        verified: Their draft tokens.
        steps: Draft passes that ran.

    Returns:
        Above 0; 1 where no request decodes or the times are no numbers.
    """
    if not requests or not (verified or steps):
        return 1.0
    seconds = [
        model.round_seconds(
            requests=requests, context=context, verified=sent, prefill=0,
            steps=passes, first_rows=requests + sent,
        )
        for sent, passes in ((0, 0), (verified, steps))
    ]  # fmt: skip
    cost = seconds[1] / seconds[0] if seconds[0] > 0.0 else NAN
    return cost if 0.0 < cost < math.inf else 1.0
