"""The gate before publication: is a candidate better than the live draft?

Sees evaluations only; who made them, and on what data, is the trainer's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vllm_tide.config import TrainConfig
from vllm_tide.train.evaluate import FORMS, Evaluation, gain

LEAST_JUDGED = 4  # requests without which a candidate cannot be called harmful
ENOUGH = 20.0
"""Evidence that publishes: 1 / 0.05, the share of useless series that ever reach it."""
_DECAY = 0.95  # of what earlier requests say, per request
_CAUTION = 0.9  # share of the largest fall to be expected that a bet may risk
_LEAST = 0.05  # factor of a fall that is larger still
_FIRST = 0.75  # share of the wealth that is staked from the start
_PRIOR = 0.2  # as if two requests had gained 0.1 tokens, so that the first bet is 1
WARMUP_SHARE, DECAY_SHARE, FLOOR = 0.1, 0.3, 0.1
LEAST_RATE = 1 / 4
"""Share of the learning rate that a trainer begins with and always keeps: a draft that
fits its traffic is thrown off by more, and with less a shift is learnt too late."""
REGROWTH = 2.0**0.25
"""Growth of the learning rate after a cycle that neither helped nor did harm."""


@dataclass(frozen=True)
class CycleResult:
    """One cycle of steps and the decision after it.

    Attributes:
        loss: Mean training loss of the cycle; NaN without steps.
        new: Candidate on held-out requests, None where not evaluated; `live`: the draft
            being served.
        gain: Candidate minus live draft, expected tokens per verify step, over held-out
            and fresh requests together.
        gain_error: Paired standard error of `gain` over requests.
        improved: The candidate is better by more than chance, on fresh requests if any.
        fresh_requests: Requests judged before they were trained on.
        harmful: The candidate is worse than the live draft by more than chance, in
            tokens accepted and in probability mass, and worse on fresh requests.
        evidence: `Evidence.wealth` after the cycle; `ENOUGH` publishes.
        elsewhere_s: Time in the caller's hands, rests of a shared GPU included (s).
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


def unjudged(steps: int, loss: float, reason: str) -> CycleResult:
    return CycleResult(steps, loss, None, None, 0.0, math.inf, False, reason)


@dataclass
class Evidence:
    """Wealth of a bettor that candidates are better than one live draft.

    The null hypothesis: no request's expected gain is above zero, given all earlier
    ones. A bet of lambda on gains g multiplies the wealth by 1 + lambda * sum(g), with
    lambda from earlier requests alone, so that under the null the wealth is a
    supermartingale and reaches 20 with probability 1/20 at most, however often one
    looks (Ville; Waudby-Smith and Ramdas, "Estimating means of bounded random variables
    by betting", 2023). The candidate changes with every cycle: the test is of the
    series of candidates, each as it was when it was scored. That it is better now is
    for the recent gain and the held-out requests to say.

    * lambda is the recent mean gain over the recent mean square, never below zero.
    * It risks at most 0.9 of the largest |sum(g)| seen, taken as 0.8 tokens before; a
      larger fall leaves a twentieth. So the bound is exact unless gains fall further
      than they ever did (`scripts/bench/judges.py` has what that costs).
    * Requests that came together are alike: they are bet on by two, of many by four,
      and lambda falls as neighbours' gains go together (`alike` over `spread`).
    * A quarter of the wealth is held back and staked bit by bit, so that candidates
      that were worse for long do not bury a better one.

    Attributes:
        running: Wealth at stake; with `reserve` it is 1 at the start.
        total: Decayed sum of gains (tokens), of `weight` requests.
        squares: Decayed sum of squares of what was bet on (tokens^2).
        largest: Of what was bet on, the largest (tokens).
    """

    running: float = _FIRST
    reserve: float = 1 - _FIRST
    total: float = 0.0
    weight: float = 0.0
    squares: float = _PRIOR
    largest: float = 0.8
    alike: float = 0.0
    spread: float = 0.0
    requests: int = 0

    @property
    def wealth(self) -> float:
        """The evidence: 1 says nothing, `ENOUGH` is enough."""
        return self.running + self.reserve

    @property
    def gain(self) -> float:
        """Mean gain (tokens), recent requests first; 0 without any."""
        return self.total / self.weight if self.weight else 0.0

    def add(self, gains: Sequence[float]) -> None:
        """Bet on gains of requests (tokens) that come together, none counted before."""
        count = len(gains)
        parts = math.ceil(count / min(4, max(2, count // 4)))
        for i in range(parts):
            self._bet(gains[i * count // parts : (i + 1) * count // parts])
        if count < 2:
            return
        mean, decay = sum(gains) / count, 0.99**count
        apart = [gain - mean for gain in gains]
        squares = sum(a * a for a in apart)
        self.alike = decay * self.alike + sum(a * b for a, b in pairwise(apart))
        self.alike += squares / count  # without their mean they seem to go apart
        self.spread = decay * self.spread + squares

    def dropped(self) -> Evidence:
        """Evidence left when the candidate is given up: never more."""
        left = min(self.running, 1 - self.reserve)
        return replace(self, running=left, total=0.0, weight=0.0, squares=_PRIOR)

    def _bet(self, block: Sequence[float]) -> None:
        together, decay = sum(block), _DECAY ** len(block)
        more = self.reserve * len(block) / (self.requests + 100)
        self.reserve -= more
        grown = (self.running + more) * max(_LEAST, 1 + self._lambda() * together)
        self.running = min(grown, 2 * ENOUGH)  # more would only outlast its candidate
        self.total = decay * self.total + together
        self.weight = decay * self.weight + len(block)
        self.squares = decay * self.squares + together**2
        self.largest = max(self.largest, abs(together), *map(abs, block))
        self.requests += len(block)

    def _lambda(self) -> float:
        total = self.total + _PRIOR * _DECAY**self.requests
        bound = min(max(0.0, total) / max(self.squares, 1e-9), _CAUTION / self.largest)
        # Twice what is seen, less its error: the correlation is underestimated.
        error = 1 / math.sqrt(min(self.requests, 100) + 1)
        found = self.alike / max(self.spread, 1e-9) - error
        tie = min(0.8, max(0.0, 2 * found))
        return bound * (1 - tie) / (1 + tie)


@dataclass(frozen=True)
class Pair:
    """Evaluations of the candidate and of the live draft on the same documents."""

    new: Evaluation
    live: Evaluation

    def __add__(self, other: Pair) -> Pair:
        return Pair(self.new + other.new, self.live + other.live)

    def gains(self, form: str) -> dict[int, float]:
        """Tokens per verify step that the candidate gains, by request key."""
        column, out = 1 + FORMS.index(form), {}
        for key, row in self.new.requests.items():
            if row[0]:
                gain = (row[column] - self.live.requests[key][column]) / row[0]
                # What is no number accepts nothing.
                out[key] = gain if math.isfinite(gain) else -float(self.new.num_steps)
        return out


def judge(
    steps: int,
    loss: float,
    held_out: Pair,
    ahead: Pair | None,
    config: TrainConfig,
    metric: str,
    evidence: Evidence,
) -> CycleResult:
    """Decide whether the candidate is published.

    `held_out` was judged after the cycle, `ahead` before the cycle trained on it;
    `evidence` is of this cycle's and of all earlier scores.
    """
    both = held_out if ahead is None else held_out + ahead
    difference, error = gain(both.new, both.live, metric)
    held, held_error = gain(held_out.new, held_out.live, metric)
    # What is held out may be of traffic that is gone: what comes decides, if it can.
    fresh = (0.0, 0.0) if ahead is None else gain(ahead.new, ahead.live, metric)
    several = ahead is not None and len(ahead.new.requests) > 1
    now = fresh if several else (difference, error)
    # What was judged before the cycle cannot speak for what the cycle did.
    forgot = steps > 0 and held < -held_error
    # With one request nothing speaks against going on.
    improved = len(both.new.requests) < 2 or now[0] >= max(config.min_gain, now[1])
    worse = difference < -max(2 * error, config.min_gain) and _moved_away(both)
    harmful = worse and fresh[0] < 0 and len(both.new.requests) >= LEAST_JUDGED
    publish = False
    reason = (
        f"gain {evidence.gain:+.4f} over {evidence.requests} requests: evidence "
        f"{min(evidence.wealth, ENOUGH):.2g} of {ENOUGH:.0f}"
    )
    if not evidence.requests:
        reason = "no request has been scored yet"
    elif evidence.gain < config.min_gain:
        reason += f"; gain below min_gain {config.min_gain}"
    elif forgot:
        reason += f"; held-out requests got worse: {held:+.4f} +- {held_error:.4f}"
    elif now[0] < -now[1]:
        reason += f"; the newest requests got worse: {now[0]:+.4f} +- {now[1]:.4f}"
    else:
        # A harmful candidate is dropped, not served.
        publish = evidence.wealth >= ENOUGH and not harmful
    return CycleResult(
        steps,
        loss,
        held_out.new,
        held_out.live,
        difference,
        error,
        publish,
        reason,
        improved,
        0 if ahead is None else len(ahead.new.requests),
        harmful,
        evidence.wealth,
    )


def _moved_away(pair: Pair) -> bool:
    """True if the candidate's distribution is further from the target's.

    One that comes nearer may lose best tokens on the way, which is all there is to
    lose while it is untrained.
    """
    difference, error = gain(pair.new, pair.live, "mass")
    return difference < -error


def cycle_lr_scale(step: int, total: int) -> float:
    """Linear warm-up, plateau, linear decay, so that a cycle ends at a quiet point."""
    warm = max(1, round(total * WARMUP_SHARE))
    if step < warm:
        return (step + 1) / (warm + 1)
    tail = max(1, round(total * DECAY_SHARE))
    left = total - step
    return 1.0 if left > tail else FLOOR + (1 - FLOOR) * left / (tail + 1)


def next_rate(rate: float, result: CycleResult) -> float:
    """Share of the learning rate for the next cycle.

    A draft that already fits its traffic is thrown off by steps that a shift needs, and
    takes many cycles to come back; those are cycles in which a shift is not learnt
    either. Steps grow again with every cycle that does no harm. Not with a shift: a
    gate that pauses after a useless cycle sees the shift again right after, and would
    have every cycle start over with steps that are too large.
    """
    if result.harmful:
        return max(LEAST_RATE, 0.5 * rate)
    helped = result.improved and (result.gain > 0 or result.fresh_requests > 1)
    return min(1.0, rate * (2.0 if helped else REGROWTH))
