"""Confidence-prior verifier (AdaSpec section 5.2), exact, not by a single elimination.

Survival p_ij does not increase with j, so the m most likely tokens of the batch are a
prefix of every request. A sort gives the best set of each size m, and a scan over all m
gives the best size for any shape of the cost curve. O(nk log nk).

For greedy drafts only: the selection of a token depends on the confidences after it,
and so on the token. For sampled drafts this would bias the output.
"""

from __future__ import annotations

from math import nan

import numpy as np

from vllm_tide._shm import best_set


def select(
    survival: np.ndarray,
    plain_tokens: int,
    seconds: np.ndarray,
    limit: float = np.inf,
    bar: float | None = None,
) -> tuple[np.ndarray, float, float]:
    """Return the verified set of the highest value.

    Args:
        survival: float32 [s, n], probability that token j of request i and all before
            it are accepted (eq. 7), non-increasing along axis 0; below 0 where a
            request has no such token.
        plain_tokens: Tokens that the step emits without any draft token.
        seconds: float64 [>= s * n + 1], seconds of the whole step when m = 0, 1, ...
            tokens are verified; all include the draft time already spent (a sunk
            cost).
        limit: Time limit of the step (s); m = 0 is always allowed.
        bar: Value of a second, in tokens. None maximises tokens / seconds of this step
            (eq. 8); a number maximises tokens - bar * seconds, which gives the higher
            total over many unequal steps if `bar` is the long-run throughput.

    Returns:
        int64 [n], tokens of each request to verify (a prefix); expected emitted tokens
        of the step, including those without drafting; seconds of the step.
    """
    steps, n = survival.shape
    lengths = np.empty(survival.shape[1], np.int64)
    order = np.sort(survival, axis=None)  # ascending by SIMD
    worth = nan if bar is None else bar
    _, tokens, spent = best_set(
        order, survival, plain_tokens, seconds, limit, worth, lengths
    )
    return lengths, tokens, spent
