"""Confidence-prior verifier (AdaSpec section 5.2), exact instead of one elimination.

Survival p_ij never rises with j, so the m most likely tokens of the whole batch are a
prefix of every request: the best set of each size m is a sort, and the best size is a
scan over all m, across every stair of the cost. O(nk log nk).

For greedy drafts only: whether a token is in the set depends on the confidences after
it, so on the token. Of a sampled draft such a choice would bias the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np

from vllm_tide._shm import best_set


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
    """Find the verified set of the highest value.

    Args:
        survival: float32 [s, n], probability that token j of request i and all before
            it are accepted (eq. 7), non-increasing along axis 0; below 0 where a
            request has no such token.
        plain_tokens: Tokens that the step emits without any draft token.
        seconds: float64 [>= s * n + 1], seconds of the whole step when m = 0, 1, ...
            tokens are verified; draft time already spent is in all of them, so it is
            sunk.
        limit: Seconds the step may take; m = 0 is always allowed.
        bar: Tokens per second that time is worth. None maximises tokens / seconds of
            this step (eq. 8); a number maximises tokens - bar * seconds, which over
            many unequal steps gives the higher total when `bar` is the throughput
            reached in the long run.
    """
    steps, n = survival.shape
    lengths = np.empty(survival.shape[1], np.int64)
    order = np.sort(survival, axis=None)  # ascending by SIMD
    worth = nan if bar is None else bar
    total, tokens, spent = best_set(
        order, survival, plain_tokens, seconds, limit, worth, lengths
    )
    return Choice(lengths, total, tokens, spent)
