"""Comparison of the served speed of two drafts on different requests.

The measure is tokens per second at equal batch and context: tokens over the cost of
their decode steps, in units of steps without drafts (`Record.cost`). Steps without
drafts count too, and nothing is conditioned on the lengths that control chose, so a
draft with shorter lengths has a lower speed.

Requests before and after a swap differ in position and batch. So each request is
compared with the speed of the baseline window in the same cells: engine and group,
position, concurrency, cached share of the prompt. Cells with little data borrow from
coarser ones (partial pooling). Both windows have requests in the order of their
*start*, finished or not: the first to finish are the easy ones. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from vllm_tide.deploy.served import Cell, ServedRequest

POOL_COST = 20.0
"""Weight of the next coarser cell in a cell's speed (steps without drafts)."""
MIN_COST = 16.0
"""Minimum cost before the swap to compare a group or a concurrency."""
_HALF_WEIGHT_COST = 16.0  # cost where sampling noise equals the spread of requests
_PRIOR_SPREAD, _PRIOR_REQUESTS = 0.15, 4.0  # relative spread within a cell; its weight

Stratum = tuple[str, int]
Key = tuple[object, ...]
Table = dict[Key, list[float]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speed over plain decoding after a swap, compared with the baseline window.

    Attributes:
        before: Baseline speed in the cells of the compared requests, in tokens per step
            without drafts.
        change: after / before - 1, requests weighted by their information.
        bound: Half width of the confidence sequence around `change`.
        settled: Every compared request has finished or has nearly full weight.
        drafted: Compared requests with at least one verified draft token.
    """

    requests: int
    before: float
    after: float
    change: float
    error: float
    bound: float
    settled: bool
    drafted: int


def stratum_of(request: ServedRequest) -> Stratum:
    """Return the stratum; requests of different strata are not compared."""
    return request.engine, request.group


class Window:
    """Baseline window: requests served before a swap.

    A request's score is its tokens over those expected in its cells, minus one. The
    mean score of the window compares each request with the *others*; it is not 0,
    because easy requests have a larger share of requests than of steps. The requests
    must not change afterwards.
    """

    def __init__(self, requests: Sequence[ServedRequest]) -> None:
        self._table = _table(requests)
        self._own: dict[Stratum, list[tuple[float, float]]] = {}
        for request in requests:
            score = self.score(request, _table([request]))
            if score is not None:
                entries = self._own.setdefault(stratum_of(request), [])
                entries.append((score.value, score.weight))
        every = [entry for entries in self._own.values() for entry in entries]
        spread = _squares(every) + _PRIOR_REQUESTS * _PRIOR_SPREAD**2
        self.variance = spread / max(len(every) - 1 + _PRIOR_REQUESTS, 1.0)
        """Variance of a score of weight 1."""

    def mean(self, strata: Iterable[Stratum]) -> tuple[float, float]:
        """Return the mean score of the strata's requests, and the sum of weights."""
        entries = [entry for s in set(strata) for entry in self._own.get(s, ())]
        return _mean(entries)

    def score(
        self, request: ServedRequest, own: Mapping[Key, list[float]] | None = None
    ) -> _Score | None:
        """Return a request's score, excluding `own`; None if not comparable."""
        stratum = stratum_of(request)
        if self._sums(stratum, own)[1] < MIN_COST:
            return None
        tokens = cost = expected = 0.0
        for cell, (made, spent) in request.cells.items():
            speed = self._speed(stratum, cell, own)
            if speed is None:
                continue
            tokens += made
            cost += spent
            expected += spent * speed
        if not expected:
            return None
        weight = cost / (cost + _HALF_WEIGHT_COST)
        return _Score(tokens / expected - 1.0, weight, expected, cost)

    def _speed(
        self, stratum: Stratum, cell: Cell, own: Mapping[Key, list[float]] | None
    ) -> float | None:
        """Return tokens per cost of a cell; None at a rare concurrency."""
        speed: float | None = None
        for key in _keys(stratum, cell):
            tokens, cost = self._sums(key, own)
            if speed is None:
                if cost < MIN_COST:
                    return None
                speed = tokens / cost
            else:
                speed = (tokens + POOL_COST * speed) / (cost + POOL_COST)
        return speed

    def _sums(
        self, key: Key, own: Mapping[Key, list[float]] | None
    ) -> tuple[float, float]:
        tokens, cost = self._table.get(key, (0.0, 0.0))
        if own is None or key not in own:
            return tokens, cost
        return tokens - own[key][0], cost - own[key][1]


def compare(
    before: Window,
    after: Iterable[ServedRequest],
    *,
    cap: int,
    miss: float = 0.005,
    limit: int | None = None,
) -> Comparison | None:
    """Compare requests with a baseline window.

    A request of cost c has weight c / (c + 16), which limits long ones. The variance of
    a score is estimated from both sides. The interval in `bound` is Robbins' normal
    mixture as an asymptotic confidence sequence (Waudby-Smith et al. 2021), valid at
    every evaluation, plus the error of `before`.

    Args:
        after: Requests begun with the new draft, finished or not.
        cap: Approximate number of requests at which the interval is narrowest.
        miss: Probability that the true change is ever beyond one end of the interval.
        limit: Maximum number of compared requests, first ones first; None: all.

    Returns:
        None if no request is comparable.
    """
    scores: list[_Score] = []
    strata: set[Stratum] = set()
    settled, drafted = True, 0
    for request in sorted(after, key=lambda r: r.began):
        if len(scores) == limit:
            break
        score = before.score(request)
        if score is not None:
            scores.append(score)
            strata.add(stratum_of(request))
            drafted += request.tries > 0
            settled &= request.ended or score.cost >= 4.0 * _HALF_WEIGHT_COST
    if not scores:
        return None
    baseline, baseline_weight = before.mean(strata)
    entries = [(score.value, score.weight) for score in scores]
    value, weight = _mean(entries)
    # The window's variance is a prior worth a few requests.
    variance = _squares(entries) + 2.0 * _PRIOR_REQUESTS * before.variance
    variance /= len(scores) - 1 + 2.0 * _PRIOR_REQUESTS
    base = before.variance / max(baseline_weight, 1e-9)
    bound = mixture_bound(weight, cap / 3, 2 * miss) * math.sqrt(variance)
    quantile = NormalDist().inv_cdf(1.0 - miss)
    expected, cost = sum(s.expected for s in scores), sum(s.cost for s in scores)
    speed = (1.0 + baseline) * expected / cost
    change = (1.0 + value) / (1.0 + baseline) - 1.0
    return Comparison(
        requests=len(scores),
        before=speed,
        after=speed * (1.0 + change),
        change=change,
        error=math.sqrt(variance / weight + base),
        bound=math.hypot(bound, quantile * math.sqrt(base)),
        settled=settled,
        drafted=drafted,
    )


def mixture_bound(weight: float, best_at: float, miss: float) -> float:
    """Return the half width of a confidence sequence, narrowest at `best_at`."""
    log = -2.0 * math.log(miss)
    rho = (log + math.log(log + 1.0)) / max(best_at, 1.0)
    grown = weight * rho + 1.0
    return math.sqrt(
        2.0 * grown / (weight**2 * rho) * math.log(math.sqrt(grown) / miss)
    )


@dataclass(frozen=True, slots=True)
class _Score:
    value: float  # tokens over expected tokens, minus one
    weight: float
    expected: float
    cost: float


def _mean(entries: Sequence[tuple[float, float]]) -> tuple[float, float]:
    weight = sum(w for _, w in entries)
    return (sum(v * w for v, w in entries) / weight if weight else 0.0), weight


def _squares(entries: Sequence[tuple[float, float]]) -> float:
    mean, _ = _mean(entries)
    return sum(w * (v - mean) ** 2 for v, w in entries)


def _keys(stratum: Stratum, cell: Cell) -> tuple[Key, ...]:
    bucket, load, cached = cell
    return (
        (load,),
        (bucket, load),
        (stratum, load),
        (stratum, bucket, load),
        (stratum, bucket, load, cached),
    )


def _table(requests: Sequence[ServedRequest]) -> Table:
    table: Table = {}
    for request in requests:
        stratum = stratum_of(request)
        for cell, (tokens, cost) in request.cells.items():
            for key in (*_keys(stratum, cell), stratum):
                entry = table.setdefault(key, [0.0, 0.0])
                entry[0] += tokens
                entry[1] += cost
    return table
