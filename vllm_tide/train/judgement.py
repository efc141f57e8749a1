"""Whether a candidate is better than the live draft: the gate before publication.

Sees evaluations only; who made them, and on what data, is the trainer's business.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from vllm_tide.config import TrainConfig
from vllm_tide.train.evaluate import Evaluation, gain
from vllm_tide.train.sample import Sample

MIN_HOLDOUT_REQUESTS = 2


@dataclass(frozen=True)
class CycleResult:
    """One cycle of steps and the decision after it.

    Attributes:
        steps: Optimizer steps done.
        loss: Mean training loss of the cycle; NaN without steps.
        new: Evaluation of the candidate on held-out requests, or None when not
            evaluated.
        live: The same of the draft being served.
        gain: Candidate minus live draft, expected tokens per verify step, over held-out
            and fresh requests together.
        gain_error: Paired standard error of `gain` over requests.
        publish: The candidate passed the gate.
        reason: Why, in words.
        improved: The candidate is better than the live draft by more than chance.
        by_group: The same for each group of similar requests that was evaluated.
        fresh_requests: Requests judged before they were trained on.
        harmful: The candidate is worse than the live draft by more than chance, in
            tokens accepted and in probability mass.
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
    by_group: dict[int, bool] = field(default_factory=dict)
    fresh_requests: int = 0
    harmful: bool = False


def unjudged(steps: int, loss: float, reason: str) -> CycleResult:
    """A cycle without an evaluation."""
    return CycleResult(steps, loss, None, None, 0.0, math.inf, False, reason)


@dataclass(frozen=True)
class Pair:
    """Documents, and what the candidate and the live draft would accept of them."""

    samples: list[Sample]
    new: Evaluation
    live: Evaluation

    def __add__(self, other: Pair) -> Pair:
        """Both together."""
        return Pair(
            self.samples + other.samples, self.new + other.new, self.live + other.live
        )


def newest_within(samples: Iterable[Sample], max_tokens: int) -> list[Sample]:
    """The newest documents that fit into `max_tokens` rows, oldest first.

    Args:
        samples: Newest first.
        max_tokens: Bound (tokens).
    """
    out: deque[Sample] = deque()
    for sample in samples:
        max_tokens -= sample.num_tokens
        if max_tokens < 0:
            break
        # As held-out ones are: also rows whose token a pruned draft cannot say.
        out.appendleft(replace(sample, in_vocab=None))
    return list(out)


def judge(
    steps: int,
    loss: float,
    held_out: Pair,
    ahead: Pair | None,
    config: TrainConfig,
    metric: str,
) -> CycleResult:
    """Decide whether the candidate is published.

    Args:
        steps: Of the cycle.
        loss: Of the cycle.
        held_out: Judged after it.
        ahead: Requests that were judged before the cycle trained on them.
        config: `min_gain` is the least gain that is worth a swap.
        metric: Form of the acceptance length.
    """
    both = held_out if ahead is None else held_out + ahead
    difference, error = gain(both.new, both.live, metric)
    held, held_error = gain(held_out.new, held_out.live, metric)
    improved = difference > max(error, 0.0)
    publish = False
    if len(both.new.requests) < MIN_HOLDOUT_REQUESTS:
        reason = f"only {len(both.new.requests)} requests to judge by"
        improved = True  # nothing speaks against going on
    elif difference < config.min_gain:
        reason = f"gain {difference:+.4f} below min_gain {config.min_gain}"
        improved = False
    elif held < -held_error:
        # What was judged before the cycle cannot speak for what the cycle did.
        reason = f"held-out requests got worse: {held:+.4f} +- {held_error:.4f}"
        improved = False
    elif not improved:
        reason = f"gain {difference:+.4f} within its standard error {error:.4f}"
    else:
        publish, reason = True, f"gain {difference:+.4f} +- {error:.4f}"
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
        _by_group(both, config.min_gain, metric),
        0 if ahead is None else len(ahead.new.requests),
        difference < -max(error, config.min_gain) and _moved_away(both),
    )


def _moved_away(pair: Pair) -> bool:
    """Whether the candidate's distribution is further from the target's.

    A head that comes nearer may lose best tokens on the way, which is all there is to
    lose while it is untrained.
    """
    difference, error = gain(pair.new, pair.live, "mass")
    return difference < -error


def _by_group(pair: Pair, min_gain: float, metric: str) -> dict[int, bool]:
    """Whether each group with enough requests got better."""
    members: dict[int, set[int]] = {}
    for sample in pair.samples:
        if sample.group >= 0:
            members.setdefault(sample.group, set()).add(sample.key)
    out = {}
    for group, keys in members.items():
        if len(keys & pair.new.requests.keys()) < MIN_HOLDOUT_REQUESTS:
            continue
        part, error = gain(pair.new.only(keys), pair.live.only(keys), metric)
        out[group] = part >= min_gain and part > error
    return out
