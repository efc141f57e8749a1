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
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
_MOST_RESIDUAL = 1.0  # a first call may take ten times what the next ones do
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
        prefill: Rows of prefilling requests beyond one each, so that
            `requests + verified + prefill` is the target's number of rows.
        first_rows: Rows of the first draft pass; 0 without one.
        target_s: Seconds from the begin of the step until its tokens were known.
        draft_first_s: Seconds of the first draft pass; nan if none.
        draft_next_s: Seconds of the further draft passes in all; nan if none.
        host_s: Seconds of the round outside those; nan if unknown (after idling).
        asked: Control was asked, and drafted: its own time is in `host_s`.
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
    asked: bool = False


class Factors:
    """Factors on a cost's three components, by robust recursive least squares.

    Plain numbers, not arrays: it runs up to four times in every round.
    """

    _FORGETTING = 0.995  # weight of the past per round: some 200 rounds are remembered

    def __init__(
        self,
        initial: Triple,
        limits: tuple[tuple[float, float], ...] = _FORWARD_LIMITS,
    ) -> None:
        self.value = initial
        self._limits = limits
        # The symmetric covariance's upper triangle: xx xy xz yy yz zz.
        self._covariance = _OPEN
        self._spread = 0.1  # standard deviation of the relative residuals
        self._before = self._lean = 0.0

    def predict(self, parts: Triple) -> float:
        return _dot(self.value, parts)

    def observe(self, parts: Triple, measured: float) -> None:
        """Take one measurement of a cost.

        Args:
            parts: Its components, seconds.
        """
        if not measured > 0.0:
            return
        total = max(_dot(self.value, parts), _LEAST)
        residual = min(measured / total - 1.0, _MOST_RESIDUAL)
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
        xx, xy, xz, yy, yz, zz = self._covariance
        x = _dot((xx, xy, xz), share)
        y = _dot((xy, yy, yz), share)
        z = _dot((xz, yz, zz), share)
        noise = self._FORGETTING * self._spread**2 / weight
        scale = 1.0 / (noise + _dot((x, y, z), share))
        step = scale * residual
        old, (first, second, third) = self.value, self._limits
        self.value = (
            min(max(old[0] + x * step, first[0]), first[1]),
            min(max(old[1] + y * step, second[0]), second[1]),
            min(max(old[2] + z * step, third[0]), third[1]),
        )
        xx, yy, zz = xx - x * x * scale, yy - y * y * scale, zz - z * z * scale
        grow = min(1.0 / self._FORGETTING, _MOST_VARIANCE / (xx + yy + zz))
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
    """

    def __init__(self, profile: TimeModel) -> None:
        self.profile = profile
        once = (1.0, 1.0, 0.0)
        self.target = Factors(once)
        self.draft_first = Factors(once)
        self.draft_next = Factors(once)
        known = profile.host / _UNIT, profile.host_per_request / _REQUEST_UNIT, 0.0
        self.host = Factors(known, (_FREE, _FREE, _FREE))
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
        tokens, cached = self.profile.target_curves(requests, context, most, prefill)
        on_tokens, on_cached, more = self.target.value
        curve = tokens * on_tokens + (cached * on_cached + more * _UNIT)
        curve *= self.shape.factors(requests + prefill, most + 1)
        return np.asarray(curve)

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        profile = self.profile
        first = profile.draft_first_parts(requests, context, first_rows)
        tokens, cached, grown = profile.draft_next_terms(requests, context)
        on_tokens, on_cached, more = self.draft_next.value
        each = tokens * on_tokens + cached * on_cached + more * _UNIT
        grown *= on_cached
        # A round that is not drafted in is mostly one that control is not asked about.
        asked = self.host.value[2] * _UNIT
        begun = self.draft_first.predict((*first, _UNIT)) + asked
        after = [begun + (each + grown * j) * j for j in range(most)]
        return np.array([0.0, *after])

    def catchup_seconds(self, rows: int, context: int = 0) -> float:
        return self.profile.catchup_seconds(rows, context) * self.draft_first.value[0]

    def overhead(self, requests: int) -> float:
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
        parts = self.profile.target_parts(requests, context, verified, prefill)
        target = self.target.predict((*parts, _UNIT))
        target *= self.shape.factor(requests + verified + prefill)
        draft = self.draft_curve(requests, context, first_rows, steps)[steps]
        return target + float(draft) + self.overhead(requests)


def host_parts(requests: int, asked: bool = False) -> Triple:
    """Unit costs of host time: per round, for its requests, for control (s)."""
    return _UNIT, _REQUEST_UNIT * requests, _UNIT * asked


class OnlineTime:
    """A profile and what serving teaches about it.

    Attributes:
        model: The refined model; the same object for good, its factors move.
    """

    def __init__(self, profile: TimeModel) -> None:
        self.profile = profile
        self.model = RefinedTime(profile)
        self._errors: deque[float] = deque(maxlen=_KEPT_ERRORS)

    @property
    def error(self) -> float:
        """Median relative error over recent rounds, each predicted before it was seen.

        Over what was measured of a round; nan before the first one.
        """
        return float(np.median(self._errors)) if self._errors else NAN

    def observe(self, sample: RoundSample) -> None:
        """Refine the model by one measured round."""
        predicted = measured = 0.0
        shape, rows = self.model.shape, sample.requests + sample.verified
        for factors, parts, seconds in self._measurements(sample):
            bent = 1.0
            if factors is self.model.target:
                bent = shape.factor(rows + sample.prefill)
            predicted += factors.predict(parts) * bent
            measured += seconds
            factors.observe(parts, seconds / bent)
            if factors is self.model.target and seconds > 0.0:
                usual = max(factors.predict(parts), _LEAST)
                shape.learn(rows + sample.prefill, seconds / usual)
        if measured > 0.0:
            self._errors.append(abs(predicted / measured - 1.0))

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
        found.append((model.host, host_parts(n, sample.asked), sample.host_s))
        return [entry for entry in found if math.isfinite(entry[2])]


def step_cost(
    model: RefinedTime, requests: int, context: int, verified: int, steps: int
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
    seconds = [
        model.round_seconds(
            requests=requests, context=context, verified=sent, prefill=0,
            steps=passes, first_rows=requests + sent,
        )
        for sent, passes in ((0, 0), (verified, steps))
    ]  # fmt: skip
    cost = seconds[1] / seconds[0] if seconds[0] > 0.0 else NAN
    return cost if 0.0 < cost < math.inf else 1.0


# Sizes that remember; between them it is linear. Kernels change theirs as coarsely.
KNOTS = tuple(sorted({b << s for b in (2, 3) for s in range(13)} | {1}))
_KNOTS = np.array(KNOTS, float)
# How much a size says of another: 1/e at a factor of two.
_NEAR = np.exp(-0.5 * abs(np.subtract.outer(*[np.arange(len(KNOTS))] * 2)))
_FADE_KEEP = 0.5 ** (1 / 256)  # of every weight, per round
_MOST = 32.0  # rounds that a size remembers
_SIZE_PRIOR = 2.0  # rounds of agreement that it starts with
_SURPRISE = 0.1  # of a size's first rounds, a share of its time
_LEAST_SURPRISE = 0.005
_SIZE_CLIP = 2.0  # usual surprises; one round is not believed beyond
_SMALL, _LAG = 512, 8  # a larger table is made anew only after so many changes
_CENTRE = 0.05  # of what all sizes have in common goes to the curve's own factors
_LUCK = 0.3  # usual surprises, of which it may be by chance


class CurveShape:
    """Factors on a curve by size: what a fit gets wrong there, learnt while serving.

    A factor on the whole curve cannot bend it: with rounds of 16 rows it learns what 16
    rows cost, and a plain step of 4 stays as wrong as the profile had it. So every size
    keeps what its own rounds took beside the refined prediction. A size that is not
    seen, or not any more, is believed to be like those near it.

    Attributes:
        level: Per knot, natural logarithm of measured over predicted time.
        usual: Per knot, mean size of a round's surprise.
        believed: Per knot, natural logarithm of its factor: `level` as far as its
            `weight` goes, and the mean of its neighbours.
    """

    def __init__(self) -> None:
        self.level = np.zeros(len(KNOTS))
        self.weight = np.zeros(len(KNOTS))
        self.usual = np.full(len(KNOTS), _SURPRISE)
        self.believed = np.zeros(len(KNOTS))
        self._table = np.ones(0)
        self._unread = 0  # times that `believed` changed since the table was made

    def factors(self, start: int, count: int) -> np.ndarray:
        """Factors at `start`, `start + 1`, ... rows: float64 [count], a view."""
        late = self._unread >= (_LAG if len(self._table) > _SMALL else 1)
        if late or start + count > len(self._table):
            size = max(start + count, len(self._table))
            self._table = np.interp(np.arange(size), _KNOTS, np.exp(self.believed))
            self._unread = 0
        return self._table[start : start + count]

    def factor(self, rows: int) -> float:
        return float(self.factors(rows, 1)[0])

    def take(self, believed: Sequence[float] | np.ndarray) -> None:
        """Believe what another process does, or what was just learnt."""
        self.believed = np.asarray(believed, float)
        self._unread += 1

    def learn(self, rows: int, ratio: float) -> None:
        """Take a step's measured time over its prediction without these factors.

        Args:
            rows: Rows of the step, at least 1.
            ratio: Seconds over seconds, above 0.
        """
        above = min(max(bisect_right(KNOTS, rows), 1), len(KNOTS) - 1)
        low, high = KNOTS[above - 1], KNOTS[above]
        share = min(max((rows - low) / (high - low), 0.0), 1.0)
        level, weight = self.level, self.weight
        for knot in (above - 1, above):
            if weight[knot] < 0.05:  # (as good as) new: it begins at what is believed
                level[knot] = self.believed[knot]
        known = level[above - 1] * (1.0 - share) + level[above] * share
        usual = self.usual
        here = usual[above - 1] * (1.0 - share) + usual[above] * share
        limit = _SIZE_CLIP * here
        # Of the mean, about as the curve's factors: one of logarithms is below it.
        surprise = min(max(ratio * math.exp(-known) - 1.0, -limit), limit)
        weight *= _FADE_KEEP
        for knot, part in ((above - 1, 1.0 - share), (above, share)):
            weight[knot] = min(weight[knot] + part, _MOST)
            level[knot] += surprise * part / max(weight[knot], 1.0)
            quick = part * max(0.1, 1.0 / (1.0 + weight[knot]))
            usual[knot] += quick * (abs(surprise) - usual[knot])
            usual[knot] = max(usual[knot], _LEAST_SURPRISE)
        common = float(level @ weight) / max(float(weight.sum()), 1.0)
        luck = _LUCK * here  # else chance would move what is not served
        level -= _CENTRE * math.copysign(max(abs(common) - luck, 0.0), common)
        around = _NEAR @ (weight * level) / (_NEAR @ weight + _SIZE_PRIOR)
        self.take(around + (level - around) * weight / (weight + _SIZE_PRIOR))
