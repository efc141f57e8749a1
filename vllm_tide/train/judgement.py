"""The gate: decides whether a candidate is published in place of the live draft.

Reads evaluations only; the trainer chooses the data and runs them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vllm_tide.config import TrainConfig
from vllm_tide.train.evaluate import FORMS, Evaluation, gain

MIN_HARM_REQUESTS = 4  # fewest requests for the verdict that a candidate is harmful
PUBLISH_EVIDENCE = 20.0
"""Evidence needed to publish: 1 / 0.05, where 0.05 is the false-positive rate."""
SIGN_OF_GAIN = 2.0
"""Evidence that useless candidates reach with probability 1/2 at most."""
_DECAY = 0.95  # weight of earlier requests, per request
_MAX_RISK = 0.9  # share of the wealth at risk at the largest loss seen
_MIN_FACTOR = 0.05  # wealth factor of a larger loss
_INITIAL_STAKE = 0.75  # share of the wealth at stake from the start
_PRIOR = 0.2  # as if two requests had gained 0.1 tokens, so that the first bet is 1
WARMUP_SHARE, DECAY_SHARE, FLOOR = 0.1, 0.3, 0.1
MIN_RATE = 1 / 4
"""Initial and smallest share of the learning rate: more harms a draft that fits its
traffic, less adapts too late to a shift."""
RATE_GROWTH = 2.0**0.25
"""Growth of the learning rate after a cycle that was neither better nor harmful."""


@dataclass(frozen=True)
class CycleResult:
    """Result of one training cycle and the publication decision.

    Attributes:
        loss: Mean training loss of the cycle; NaN without steps.
        new: Candidate on held-out requests, None if not evaluated; `live`: the live
            draft on the same requests.
        gain: Candidate minus live draft, expected tokens per verify step, over held-out
            and fresh requests together.
        gain_error: Paired standard error of `gain` over requests.
        improved: The candidate is significantly better, on fresh requests if any.
        fresh_requests: Requests scored before they were trained on.
        harmful: The candidate is significantly worse than the live draft in accepted
            tokens and in probability mass, and worse on fresh requests.
        evidence: `Evidence.wealth` after the cycle; `PUBLISH_EVIDENCE` publishes.
        elsewhere_s: Time in `progress` and in pauses of a shared GPU (s).
    """

    steps: int
    loss: float
    new: Evaluation | None
    live: Evaluation | None
    gain: float
    gain_error: float
    publish: bool
    reason: str
    improved: bool = False
    fresh_requests: int = 0
    harmful: bool = False
    evidence: float = 1.0
    evaluation_s: float = 0.0
    elsewhere_s: float = 0.0

    @property
    def gaining(self) -> bool:
        """True if the candidate is published, or may be with more evidence."""
        return self.publish or self.evidence >= SIGN_OF_GAIN


def without_evaluation(steps: int, loss: float, reason: str) -> CycleResult:
    return CycleResult(steps, loss, None, None, 0.0, math.inf, False, reason)


@dataclass
class Evidence:
    """Sequential test by betting that candidates are better than one live draft.

    Null hypothesis: no request's expected gain is above zero, given all earlier ones. A
    bet of lambda on gains g multiplies the wealth by 1 + lambda * sum(g). As lambda
    depends on earlier requests only, the wealth is a supermartingale under the null and
    reaches 20 with probability 1/20 at most, under continuous monitoring (Ville;
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
    2023). The candidate changes with every cycle: the test covers the series of
    candidates, each at the time of its scores. The recent gain and the held-out
    requests test the current candidate.

    * lambda is the recent mean gain over the recent mean square, at least zero.
    * A bet risks at most 0.9 of the wealth at the largest |sum(g)| seen, initially 0.8
      tokens; a larger loss leaves 1/20. So the bound is exact unless a loss exceeds all
      earlier ones (`scripts/bench/judges.py` measures the effect).
    * Requests of one batch are correlated: one bet covers two of them, or four of many,
      and lambda decreases with the correlation of neighbours (`alike` over `spread`).
    * A quarter of the wealth is a reserve that is staked gradually, so that a long
      series of worse candidates does not block a better one.

    Attributes:
        running: Wealth at stake; `running` + `reserve` is 1 at the start.
        total: Decayed sum of gains (tokens), of `weight` requests.
        squares: Decayed sum of squared bet outcomes (tokens^2).
        largest: Largest absolute bet outcome (tokens).
        alike: Decayed autocovariance of neighbouring gains; `spread`: their variance.
    """

    running: float = _INITIAL_STAKE
    reserve: float = 1 - _INITIAL_STAKE
    total: float = 0.0
    weight: float = 0.0
    squares: float = _PRIOR
    largest: float = 0.8
    alike: float = 0.0
    spread: float = 0.0
    requests: int = 0

    @property
    def wealth(self) -> float:
        """Evidence: 1 is none, `PUBLISH_EVIDENCE` suffices to publish."""
        return self.running + self.reserve

    @property
    def gain(self) -> float:
        """Decayed mean gain (tokens); 0 without requests."""
        return self.total / self.weight if self.weight else 0.0

    def add(self, gains: Sequence[float]) -> None:
        """Bet on gains (tokens) of a batch of requests that were not counted before."""
        count = len(gains)
        parts = math.ceil(count / min(4, max(2, count // 4)))
        for i in range(parts):
            self._bet(gains[i * count // parts : (i + 1) * count // parts])
        if count < 2:
            return
        mean, decay = sum(gains) / count, 0.99**count
        residuals = [gain - mean for gain in gains]
        squares = sum(r * r for r in residuals)
        self.alike = decay * self.alike + sum(a * b for a, b in pairwise(residuals))
        self.alike += squares / count  # corrects the bias from the sample mean
        self.spread = decay * self.spread + squares

    def dropped(self) -> Evidence:
        """Return the evidence after the candidate is discarded; it does not grow."""
        left = min(self.running, 1 - self.reserve)
        return replace(self, running=left, total=0.0, weight=0.0, squares=_PRIOR)

    def _bet(self, block: Sequence[float]) -> None:
        outcome, decay = sum(block), _DECAY ** len(block)
        more = self.reserve * len(block) / (self.requests + 100)
        self.reserve -= more
        grown = (self.running + more) * max(_MIN_FACTOR, 1 + self._lambda() * outcome)
        self.running = min(grown, 2 * PUBLISH_EVIDENCE)  # limits the carry-over
        self.total = decay * self.total + outcome
        self.weight = decay * self.weight + len(block)
        self.squares = decay * self.squares + outcome**2
        self.largest = max(self.largest, abs(outcome), *map(abs, block))
        self.requests += len(block)

    def _lambda(self) -> float:
        total = self.total + _PRIOR * _DECAY**self.requests
        bound = min(max(0.0, total) / max(self.squares, 1e-9), _MAX_RISK / self.largest)
        # Twice the estimate minus its error: the correlation is underestimated.
        error = 1 / math.sqrt(min(self.requests, 100) + 1)
        estimate = self.alike / max(self.spread, 1e-9) - error
        correlation = min(0.8, max(0.0, 2 * estimate))
        return bound * (1 - correlation) / (1 + correlation)


@dataclass(frozen=True)
class Pair:
    """Evaluations of the candidate and of the live draft on the same documents."""

    new: Evaluation
    live: Evaluation

    def __add__(self, other: Pair) -> Pair:
        return Pair(self.new + other.new, self.live + other.live)

    def gains(self, form: str) -> dict[int, float]:
        """Return the candidate's gain in tokens per verify step by request key."""
        column, out = 1 + FORMS.index(form), {}
        for key, row in self.new.requests.items():
            if row[0]:
                gain = (row[column] - self.live.requests[key][column]) / row[0]
                # A non-finite score counts as no accepted token.
                out[key] = gain if math.isfinite(gain) else -float(self.new.num_steps)
        return out


def judge(
    steps: int,
    loss: float,
    holdout: Pair,
    prequential: Pair | None,
    config: TrainConfig,
    metric: str,
    evidence: Evidence,
) -> CycleResult:
    """Decide whether the candidate is published.

    `holdout` was scored after the cycle, `prequential` before the cycle trained on it;
    `evidence` is of this cycle's and of all earlier scores.
    """
    both = holdout if prequential is None else holdout + prequential
    difference, error = gain(both.new, both.live, metric)
    change, change_error = gain(holdout.new, holdout.live, metric)
    # Held-out requests may be of earlier traffic: several fresh ones take precedence.
    num_fresh, fresh = 0, (0.0, 0.0)
    if prequential is not None:
        num_fresh = len(prequential.new.requests)
        fresh = gain(prequential.new, prequential.live, metric)
    now = fresh if num_fresh > 1 else (difference, error)
    # Prequential scores precede the cycle, so only held-out ones measure its effect.
    forgot = steps > 0 and change < -change_error
    # One request has no standard error: treat it as an improvement.
    improved = len(both.new.requests) < 2 or now[0] >= max(config.min_gain, now[1])
    worse = difference < -max(2 * error, config.min_gain) and _moved_away(both)
    harmful = worse and fresh[0] < 0 and len(both.new.requests) >= MIN_HARM_REQUESTS
    publish = False
    # Rounded down: 20 must mean that it suffices.
    shown = math.floor(10 * min(evidence.wealth, PUBLISH_EVIDENCE)) / 10
    scored = evidence.requests
    reason = (
        f"gain {evidence.gain:+.4f} over {scored} request{'s' * (scored != 1)}: "
        f"evidence {shown:g} of {PUBLISH_EVIDENCE:.0f}"
    )
    if not evidence.requests:
        reason = "no request has been scored against the served draft yet"
    elif evidence.gain < config.min_gain:
        reason += f"; gain below min_gain {config.min_gain}"
    elif forgot:
        reason += f"; held-out requests got worse: {change:+.4f} +- {change_error:.4f}"
    elif now[0] < -now[1]:
        reason += f"; the newest requests got worse: {now[0]:+.4f} +- {now[1]:.4f}"
    else:
        # A harmful candidate is discarded, not served.
        publish = evidence.wealth >= PUBLISH_EVIDENCE and not harmful
    return CycleResult(
        steps,
        loss,
        holdout.new,
        holdout.live,
        difference,
        error,
        publish,
        reason,
        improved,
        num_fresh,
        harmful,
        evidence.wealth,
    )


def _moved_away(pair: Pair) -> bool:
    """Return whether the candidate's distribution is further from the target's.

    An untrained draft that gets closer may lose some argmax matches meanwhile.
    """
    difference, error = gain(pair.new, pair.live, "mass")
    return difference < -error


def cycle_lr_scale(step: int, total: int) -> float:
    """Return the learning rate scale: linear warm-up, plateau, linear decay."""
    warm = max(1, round(total * WARMUP_SHARE))
    if step < warm:
        return (step + 1) / (warm + 1)
    tail = max(1, round(total * DECAY_SHARE))
    left = total - step
    return 1.0 if left > tail else FLOOR + (1 - FLOOR) * left / (tail + 1)


def next_rate(rate: float, result: CycleResult) -> float:
    """Return the share of the learning rate for the next cycle.

    Steps of the size that a traffic shift needs harm a draft that fits its traffic; it
    then takes many cycles to recover, in which it does not learn a shift either. So the
    rate halves after harm and grows again with every other cycle. A detected shift does
    not raise it: a gate that pauses after a useless cycle detects the shift again, and
    every cycle would restart with steps that are too large.
    """
    if result.harmful:
        return max(MIN_RATE, 0.5 * rate)
    helped = result.improved and (result.gain > 0 or result.fresh_requests > 1)
    return min(1.0, rate * (2.0 if helped else RATE_GROWTH))
