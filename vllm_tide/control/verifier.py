"""Confidence-prior verifier (AdaSpec section 5.2), exact instead of one elimination.

Survival p_ij never rises with j, so the m most likely tokens of the whole batch are a
prefix of every request: the best set of each size m is a sort, and the best size is a
scan over all m, across every stair of the cost. O(nk log nk).

For greedy drafts only: whether a token is in the set depends on the confidences after
it, so on the token. Of a sampled draft such a choice would bias the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ABSENT = np.float32(-1.0)
"""Survival of a token that does not exist: sorts last and is never chosen."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen set.

    Attributes:
        lengths: int64 [n], tokens of each request to verify (a prefix).
        tokens: Expected tokens emitted, those without drafting included.
    """

    lengths: np.ndarray
    total: int
    tokens: float
    seconds: float


def select(
    survival: np.ndarray,
    plain_tokens: int,
    seconds: np.ndarray,
    limit: float = np.inf,
    bar: float | None = None,
) -> Choice:
    """The verified set of most value.

    Args:
        survival: float32 [s, n], probability that token j of request i and all before
            it are accepted (eq. 7), non-increasing along axis 0; `ABSENT` where a
            request has no such token.
        plain_tokens: Tokens that the step emits without any draft token.
        seconds: float64 [>= s * n + 1], seconds of the whole round when m = 0, 1, ...
            tokens are verified; draft time already spent is in all of them, so it is
            sunk.
        limit: Seconds the round may take; m = 0 is always allowed.
        bar: Tokens per second that time is worth. None maximises tokens / seconds of
            this round (eq. 8); a number maximises tokens - bar * seconds, which over
            many unequal rounds gives the higher total when `bar` is the throughput
            reached in the long run.
    """
    steps, n = survival.shape
    # Ascending by SIMD; the descending view costs nothing.
    order = np.sort(survival, axis=None)[::-1]
    if order[-1] < 0:
        order = order[: np.count_nonzero(survival >= 0)]
    tokens = np.empty(len(order) + 1)
    tokens[0] = plain_tokens
    np.cumsum(order, dtype=np.float64, out=tokens[1:])
    tokens[1:] += plain_tokens
    cost = seconds[: len(tokens)]
    value = tokens / cost if bar is None else tokens - bar * cost
    if limit < np.inf:
        value[1:][cost[1:] > limit] = -np.inf
    best = int(value.argmax())
    if best == 0:
        return Choice(np.zeros(n, np.int64), 0, float(plain_tokens), float(seconds[0]))
    least = order[best - 1]
    if best == len(order):
        lengths = (survival >= 0).sum(axis=0)
    else:
        lengths = (survival >= least).sum(axis=0)
        surplus = int(lengths.sum()) - best
        if surplus:  # Ties: give the last of them up, request by request.
            ties = (survival == least).sum(axis=0)
            before = np.cumsum(ties) - ties
            keep = int(ties.sum()) - surplus
            lengths -= ties - np.clip(keep - before, 0, ties)
    return Choice(lengths, best, float(tokens[best]), float(cost[best]))
