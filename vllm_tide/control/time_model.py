"""Predicted seconds of a step of speculative decoding.

Source: AdaSpec (arXiv 2503.05096) eq. 1-5. One forward costs
`alpha * context + gamma * rows + delta`. Two changes to the paper's form: the cost of
rows is piecewise linear, because a GEMM is bound by the traffic of weights for few rows
and by arithmetic for many; and verification is multi-query, so a request's context is
read once for any number of verified tokens, where the paper's batch expansion reads it
k + 1 times.

The step time as a quadratic in k, within one linear piece (t: target, d: draft; n
requests of mean context l; R rows in the first draft pass)::

    target            alpha_t n l + gamma_t n (k + 1) + delta_t
    draft pass 0      alpha_d n l + gamma_d R + delta_d
    draft pass j      alpha_d n (l + j) + gamma_d n + delta_d,   j = 1..k-1

    T(k) = a k^2 + b k + c for k >= 1 with
    a = n alpha_d / 2
    b = n (alpha_d (l - 1/2) + gamma_d + gamma_t) + delta_d
    c = n (alpha_t l + gamma_t) + delta_t + gamma_d (R - n)

With R = n this is the paper's Lemma 4.1 without its `alpha_t` terms in a and b, which
exist only because batch expansion reads the context again. T(0) is plain decoding: the
first line with k = 0.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ForwardModel:
    """Seconds of one forward by rows and context (AdaSpec eq. 2).

    Attributes:
        knots: Ascending numbers of rows, the first at least 1.
        seconds: Cost at each knot including the fixed cost (delta); non-decreasing.
            Linear between knots, linear with the last slope beyond the last knot,
            constant below the first knot.
        alpha: Seconds per token in the KV cache, summed over the requests.
    """

    knots: tuple[int, ...]
    seconds: tuple[float, ...]
    alpha: float

    def __post_init__(self) -> None:
        knots, seconds = self.knots, self.seconds
        if not knots or len(knots) != len(seconds):
            raise ValueError("a forward model needs one cost for each knot")
        if knots[0] < 1 or any(a >= b for a, b in zip(knots, knots[1:], strict=False)):
            raise ValueError(f"knots must ascend from at least 1: {knots}")
        numbers = np.array([*seconds, self.alpha])
        if not np.isfinite(numbers).all() or (numbers < 0).any():
            raise ValueError("costs must be finite and not negative")
        if any(a > b for a, b in zip(seconds, seconds[1:], strict=False)):
            raise ValueError(f"costs must not fall with more rows: {seconds}")

    def rows(self, start: int, count: int) -> np.ndarray:
        """Return the cost of `start`, `start + 1`, ... rows, float64 [count]."""
        rows = np.arange(start, start + count, dtype=np.float64)
        cost = np.interp(rows, self.knots, self.seconds)
        if len(self.knots) > 1:
            run = self.knots[-1] - self.knots[-2]
            slope = (self.seconds[-1] - self.seconds[-2]) / run
            cost += slope * np.maximum(rows - self.knots[-1], 0.0)
        return np.asarray(cost)

    def __call__(self, rows: int, context: float) -> float:
        knots, seconds = self.knots, self.seconds
        high = min(bisect_right(knots, rows), len(knots) - 1)
        cost = seconds[0]
        if high:
            low = high - 1
            slope = (seconds[high] - seconds[low]) / (knots[high] - knots[low])
            cost = seconds[low] + slope * (rows - knots[low])
        return cost + self.alpha * context


NO_PASS = ForwardModel((1,), (0.0,), 0.0)
"""A forward that is not run."""


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of a step: target, draft passes, and everything else.

    Rows are counted once: the target's rows are requests + verified + prefill, where
    every request has one row and prefilling requests have `prefill` additional rows.

    Attributes:
        target: From the start of a step until its sampled tokens are known.
        draft_first: First draft pass: all rows of the step, including rejected ones.
            Also used for a pass that adds missed rows to the draft's KV cache.
        draft_next: Every further draft pass: one row per request.
        host: Seconds outside the forwards: scheduling, messages, bookkeeping.
        block_rows: Rows per request of a draft that drafts all tokens in its first
            pass (DFlash), for any number of tokens; 0: the passes are as above.
    """

    target: ForwardModel
    draft_first: ForwardModel
    draft_next: ForwardModel
    host: float = 0.0
    block_rows: int = 0

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Return seconds of the target's forward that verifies 0..most tokens.

        Args:
            context: Tokens in the KV cache, summed over the requests.

        Returns:
            float64 [most + 1].
        """
        model = self.target
        return model.rows(requests + prefill, most + 1) + model.alpha * context

    def further(self, requests: int, context: int) -> tuple[float, float]:
        """Return a, b: j draft passes after the first take `a j + b j^2` seconds.

        Args:
            context: Tokens in the KV cache before the first pass.
        """
        # Pass j also reads j appended tokens per request; the sum over 1..j is taken.
        grown = self.draft_next.alpha * requests * 0.5
        return self.draft_next(requests, context) + grown, grown

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Return seconds of 0..most draft passes, float64 [most + 1]."""
        first = self.draft_first(requests * self.block_rows or first_rows, context)
        each, grown = self.further(requests, context)
        return np.array([0.0, *(first + (each + grown * j) * j for j in range(most))])

    def step_seconds(
        self,
        *,
        requests: int,
        context: int,
        verified: int,
        prefill: int,
        steps: int,
        first_rows: int,
    ) -> float:
        """Return seconds of a step with `steps` draft passes."""
        target = self.target(requests + verified + prefill, context)
        draft = self.draft_curve(requests, context, first_rows, steps)
        return target + float(draft[steps]) + self.host
