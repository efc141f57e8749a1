"""Predicted seconds of a round of speculative decoding.

Source: AdaSpec (arXiv 2503.05096) eq. 1-5. One forward costs
`alpha * context + gamma * tokens + delta`. Two changes to the paper's form:

* The token part is piecewise linear, with a staircase where CUDA graphs round tokens
  up: a GEMM is bound by weight traffic first and by arithmetic later, so one gamma
  fits neither end.
* Verification is multi-query: a request's context is read once whatever the number of
  tokens it verifies, where the paper's batch expansion reads it k + 1 times.

The round as a quadratic in k, inside one linear piece of the token parts
(t: target, d: draft; n requests of mean context l; R rows in the first draft pass)::

    target            alpha_t n l + gamma_t n (k + 1) + delta_t
    draft pass 0      alpha_d n l + gamma_d R + delta_d
    draft pass j      alpha_d n (l + j) + gamma_d n + delta_d,   j = 1..k-1

    T(k) = a k^2 + b k + c for k >= 1 with
    a = n alpha_d / 2
    b = n (alpha_d (l - 1/2) + gamma_d + gamma_t) + delta_d
    c = n (alpha_t l + gamma_t) + delta_t + gamma_d (R - n)

With R = n this is the paper's Lemma 4.1 less its `alpha_t` terms in a and b: those
exist only because batch expansion reads the context again. T(0) is plain decoding,
the first line with k = 0.

A round counts its work so that nothing is counted twice:
`tokens of the target = requests + verified + prefill`. Every request of the step,
prefilling or not, has one row in *requests*; *prefill* is what prefilling requests
have beyond that one row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

# Token counts below this are looked up, not interpolated: the curves below are taken
# several times per round with changing context. 64 KiB per model.
_DENSE = 8192


@dataclass(frozen=True, slots=True)
class ForwardModel:
    """Seconds of one forward: `token_cost(N_batch) + alpha N_context`.

    AdaSpec eq. 2 with a piecewise-linear token part.

    Attributes:
        knots: Ascending token counts, the first at least 1.
        seconds: Cost at each knot, the fixed cost (delta) included; non-decreasing.
            Linear between knots, linear with the last slope beyond the last one, the
            first value below the first one.
        alpha: Seconds per context token: the sum over requests of the tokens already
            in the KV cache, each read once per request (multi-query verification).
        queries: Ascending query lengths (rows of one request), for `extra`.
        extra: Seconds per context token beyond `alpha` at each of them, linear between
            and constant outside. A kernel may be tuned for one query: on CPU, reading a
            context for four queries costs twice as much as for one.
        rounding: Tokens by which a request's context is rounded up on average:
            kernels read whole blocks of the KV cache.
        sizes: CUDA-graph sizes: tokens are rounded up to the next one. Empty: no
            staircase. Beyond the last: no rounding.
    """

    knots: tuple[int, ...]
    seconds: tuple[float, ...]
    alpha: float
    sizes: tuple[int, ...] = ()
    queries: tuple[float, ...] = ()
    extra: tuple[float, ...] = ()
    rounding: float = 0.0
    _dense: np.ndarray = field(init=False, repr=False, compare=False)
    _by_query: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        knots, seconds = self.knots, self.seconds
        if not knots or len(knots) != len(seconds):
            raise ValueError("a forward model needs one cost for each knot")
        if knots[0] < 1 or any(a >= b for a, b in zip(knots, knots[1:], strict=False)):
            raise ValueError(f"knots must ascend from at least 1: {knots}")
        if len(self.queries) != len(self.extra):
            raise ValueError("a forward model needs one extra for each query length")
        numbers = np.array([*seconds, self.alpha, self.rounding, *self.extra])
        if not np.isfinite(numbers).all() or (numbers < 0).any():
            raise ValueError("costs must be finite and not negative")
        if any(a > b for a, b in zip(seconds, seconds[1:], strict=False)):
            raise ValueError(f"costs must not fall with more tokens: {seconds}")
        by_query = np.array([self.queries, self.extra], float)
        object.__setattr__(self, "_by_query", by_query)
        dense = self._evaluate(np.arange(_DENSE))
        dense.setflags(write=False)
        object.__setattr__(self, "_dense", dense)

    def token_cost(self, tokens: np.ndarray | int) -> np.ndarray | float:
        """Token part of the cost, the fixed cost included.

        Args:
            tokens: N_batch, an integer or an integer array of any shape.

        Returns:
            Seconds, a float or float64 of the same shape.
        """
        if isinstance(tokens, np.ndarray):
            if tokens.size == 0 or tokens.max() < _DENSE:
                return np.asarray(self._dense[tokens])
            return self._evaluate(tokens)
        if tokens < _DENSE:
            return float(self._dense[tokens])
        return float(self._evaluate(np.array([tokens]))[0])

    def token_costs(self, start: int, count: int) -> np.ndarray:
        """Token part for `start`, `start + 1`, ...: [count] float64, not to be written.

        A view where the counts are tabulated, so it costs a slice.
        """
        if start + count <= _DENSE:
            return self._dense[start : start + count]
        return self._evaluate(np.arange(start, start + count))

    def context_cost(
        self, requests: int, context: float, query: np.ndarray | float = 1.0
    ) -> np.ndarray | float:
        """Context part of the cost, seconds.

        Args:
            context: Tokens in the KV cache, summed over the requests.
            query: Mean query length: rows per request, any shape.
        """
        cost: np.ndarray | float = self.alpha
        if self.queries:
            first = isinstance(query, float) and query <= self.queries[0]
            more = (
                self.extra[0]
                if first
                else np.interp(query, self._by_query[0], self._by_query[1])
            )
            cost = cost + more
        return cost * (context + self.rounding * requests)

    def forward(self, tokens: int, context: float) -> float:
        """Seconds of one forward with one query per request, `extra` left out."""
        return float(self.token_cost(tokens)) + self.alpha * context

    def padded(self, tokens: np.ndarray) -> np.ndarray:
        """Rows that really run: int64, rounded up to a CUDA-graph size."""
        tokens = np.asarray(tokens, np.int64)
        if not self.sizes:
            return tokens
        sizes = np.asarray(self.sizes, np.int64)
        stair = np.searchsorted(sizes, tokens)
        inside = stair < len(sizes)
        return np.where(inside, sizes[np.minimum(stair, len(sizes) - 1)], tokens)

    def _evaluate(self, tokens: np.ndarray) -> np.ndarray:
        rows = self.padded(tokens).astype(np.float64)
        cost = np.interp(rows, self.knots, self.seconds)
        if len(self.knots) > 1:
            run = self.knots[-1] - self.knots[-2]
            slope = (self.seconds[-1] - self.seconds[-2]) / run
            cost = cost + slope * np.maximum(rows - self.knots[-1], 0.0)
        return np.asarray(cost)

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ForwardModel:
        def read(name: str) -> Any:
            kind: type[float] = int if name in ("knots", "sizes") else float
            value = data[name]
            if isinstance(value, list | tuple):
                return tuple(kind(each) for each in value)
            return kind(value)

        return cls(**{f.name: read(f.name) for f in fields(cls) if f.init})


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of one round: target step, draft passes, and everything else.

    Attributes:
        target: From the begin of a step until its sampled tokens are known: forward,
            logits, sampling or rejection.
        draft_first: First draft pass; N_batch = all rows of this step, committed and
            rejected, prefill rows too.
        draft_next: Every further draft pass; N_batch = number of requests.
        host: Seconds per round outside those: scheduling, RPC, bookkeeping.
        host_per_request: The same, per request of the round.
        catchup: Batched pass that feeds missed rows to the draft's KV cache; None: as
            dear as `draft_first`.
    """

    target: ForwardModel
    draft_first: ForwardModel
    draft_next: ForwardModel
    host: float = 0.0
    host_per_request: float = 0.0
    catchup: ForwardModel | None = None

    def target_parts(
        self, requests: int, context: int, verified: int, prefill: int = 0
    ) -> tuple[float, float]:
        """Token part and context part of one target step, seconds.

        Args:
            context: Tokens in the KV cache, summed over the requests.
            prefill: Rows beyond one per request that prefilling requests add.
        """
        # Which request a draft belongs to is not known here: mean query length.
        query = 1.0 + verified / max(requests, 1)
        tokens = self.target.token_cost(requests + verified + prefill)
        cached = self.target.context_cost(requests, context, query)
        return float(tokens), float(cached)

    def target_curves(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> tuple[np.ndarray, np.ndarray | float]:
        """`target_parts` for 0..most verified tokens.

        Returns:
            Token part, [most + 1] float64 seconds, not to be written, and context part,
            the same or a number if it is the same for all.
        """
        model = self.target
        tokens = model.token_costs(requests + prefill, most + 1)
        if not model.queries:
            return tokens, model.context_cost(requests, context)
        query = 1.0 + np.arange(most + 1) / max(requests, 1)
        return tokens, model.context_cost(requests, context, query)

    def draft_first_parts(
        self, requests: int, context: int, first_rows: int
    ) -> tuple[float, float]:
        """Token part and context part of the first draft pass, seconds."""
        model, query = self.draft_first, first_rows / max(requests, 1)
        cost = float(model.token_cost(first_rows))
        return cost, float(model.context_cost(requests, context, query))

    def draft_next_terms(
        self, requests: int, context: int
    ) -> tuple[float, float, float]:
        """Seconds of a pass after the first, growing by what was appended before.

        Args:
            context: Tokens in the KV cache before the first pass.

        Returns:
            Token part of each; context part of j of them: the second number times j and
            the third times j squared.
        """
        model = self.draft_next
        # Pass j reads what the j passes before it appended: the sum over 1..count.
        grown = model.alpha * requests * 0.5
        each = float(model.context_cost(requests, context))
        return float(model.token_cost(requests)), each + grown, grown

    def draft_next_parts(
        self, requests: int, context: int, passes: np.ndarray | int
    ) -> tuple[np.ndarray | float, np.ndarray | float]:
        """Token part and context part of the passes after the first, in all.

        Args:
            context: Tokens in the KV cache before the first pass.
            passes: Number of passes, an integer or an integer array.
        """
        cost, each, grown = self.draft_next_terms(requests, context)
        return cost * passes, (each + grown * passes) * passes

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Seconds of the target step that verifies 0..most draft tokens in all.

        Args:
            context: Tokens in the KV cache, summed over the requests.
            most: Largest number of draft tokens, summed over the requests.
            prefill: Rows beyond one per request that prefilling requests add.

        Returns:
            [most + 1] float64 seconds.
        """
        tokens, cached = self.target_curves(requests, context, most, prefill)
        return tokens + cached

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Cumulative seconds of 0..most draft steps.

        Args:
            requests: Requests that are drafted for, one row in each further pass.
            context: Tokens in the KV cache, summed over the requests.

        Returns:
            [most + 1] float64 seconds, the first 0.
        """
        curve = np.zeros(most + 1)
        first = sum(self.draft_first_parts(requests, context, first_rows))
        tokens, cached = self.draft_next_parts(requests, context, np.arange(most))
        curve[1:] = first + tokens + cached
        return curve

    def catchup_seconds(self, rows: int, context: int = 0) -> float:
        if rows == 0:
            return 0.0
        return (self.catchup or self.draft_first).forward(rows, context)

    def overhead(self, requests: int) -> float:
        return self.host + self.host_per_request * requests

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
        draft = self.draft_curve(requests, context, first_rows, steps)[steps]
        target = sum(self.target_parts(requests, context, verified, prefill))
        return target + float(draft) + self.overhead(requests)

    def to_json(self) -> dict[str, Any]:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: part.to_json() if isinstance(part, ForwardModel) else part
            for name, part in parts.items()
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TimeModel:
        catchup = data["catchup"]
        return cls(
            target=ForwardModel.from_json(data["target"]),
            draft_first=ForwardModel.from_json(data["draft_first"]),
            draft_next=ForwardModel.from_json(data["draft_next"]),
            host=float(data["host"]),
            host_per_request=float(data["host_per_request"]),
            catchup=None if catchup is None else ForwardModel.from_json(catchup),
        )
