"""Served speed of one draft against another's, on different requests.

What a user gets is tokens per second at equal batch and context: tokens over the cost
of the decode steps that made them, in steps without drafts (`Record.cost`). Steps
without drafts count like others and nothing is conditioned on what control chose, so a
draft that control has to cut shorter is seen to be slower.

Requests after a swap are other requests than before it, at other positions and batches.
So each request is held against the speed of the window before in its own cells: engine
and group, position, concurrency, cached share of the prompt. Thin cells lean on coarser
ones (partial pooling). Both windows are requests in the order in which they *began*,
ended or not: those that end first are the easy ones. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from vllm_tide.deploy.served import Cell, ServedRequest

POOL_COST = 20.0
"""Cost (steps without drafts) of the next coarser cell in the speed of a cell."""
MIN_COST = 16.0
"""Cost before the swap without which a group or a concurrency cannot be compared."""
_ONE_REQUEST = 16.0  # cost at which sampling adds as much noise as requests differ
_PRIOR_SPREAD, _PRIOR_REQUESTS = 0.15, 4.0  # relative, of requests of one cell

Stratum = tuple[str, int]
Key = tuple[object, ...]
Table = dict[Key, list[float]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speed over plain decoding after a swap against what was to be expected.

    Attributes:
        before: Speed of the window before at the cells of the requests compared, in
            tokens per step without drafts.
        change: after / before - 1, requests weighted by what they tell.
        bound: Half width of the interval around `change` that holds at every look.
        settled: Every request compared has ended or tells nearly all it can.
        drafted: How many of them had a drafted token verified.
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
    """Requests of different strata are never compared."""
    return request.engine, request.group


class Window:
    """Requests served before a swap: what they say of others like them.

    A request's score is its tokens over those expected of its cells, less one. The mean
    score of the window is that of each of its requests against the *others*: not 0, for
    easy requests are fewer steps than they are requests. These must not grow any more.
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
        """Of a score that weighs 1."""

    def mean(self, strata: Iterable[Stratum]) -> tuple[float, float]:
        """Mean score of its requests of some strata, and the sum of their weights."""
        entries = [entry for s in set(strata) for entry in self._own.get(s, ())]
        return _mean(entries)

    def score(
        self, request: ServedRequest, own: Mapping[Key, list[float]] | None = None
    ) -> _Score | None:
        """Score of a request, None if nothing is like it; without its `own` part."""
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
        weight = cost / (cost + _ONE_REQUEST)
        return _Score(tokens / expected - 1.0, weight, expected, cost)

    def _speed(
        self, stratum: Stratum, cell: Cell, own: Mapping[Key, list[float]] | None
    ) -> float | None:
        """Tokens per cost of a cell; None at a concurrency that was hardly seen."""
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
    """Compare requests with a window.

    A request weighs c / (c + 16) for a cost of c, so that neither a long nor a short
    one decides. The variance of a score comes from both sides. The interval in `bound`
    is Robbins' normal mixture as an asymptotic confidence sequence (Waudby-Smith et al.
    2021), valid whenever one looks, plus the error of `before`.

    Args:
        after: Requests begun with the new draft, ended or not; the first that can be
            compared are.
        cap: Requests at which the interval is made narrowest, about.
        miss: Chance that the true change lies beyond one end of the interval, at
            any look.
        limit: Most requests compared; None: all.

    Returns:
        None if nothing can be compared.
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
            settled &= request.ended or score.cost >= 4.0 * _ONE_REQUEST
    if not scores:
        return None
    usual, known = before.mean(strata)
    entries = [(score.value, score.weight) for score in scores]
    value, weight = _mean(entries)
    # What the window says of the spread is worth a few requests here.
    variance = _squares(entries) + 2.0 * _PRIOR_REQUESTS * before.variance
    variance /= len(scores) - 1 + 2.0 * _PRIOR_REQUESTS
    base = before.variance / max(known, 1e-9)
    bound = mixture_bound(weight, cap / 3, 2 * miss) * math.sqrt(variance)
    beyond = NormalDist().inv_cdf(1.0 - miss)
    speed = (
        (1.0 + usual) * sum(s.expected for s in scores) / sum(s.cost for s in scores)
    )
    change = (1.0 + value) / (1.0 + usual) - 1.0
    return Comparison(
        requests=len(scores),
        before=speed,
        after=speed * (1.0 + change),
        change=change,
        error=math.sqrt(variance / weight + base),
        bound=math.hypot(bound, beyond * math.sqrt(base)),
        settled=settled,
        drafted=drafted,
    )


def mixture_bound(weight: float, best_at: float, miss: float) -> float:
    """Half width of an interval that holds at all sizes, narrowest at `best_at`."""
    log = -2.0 * math.log(miss)
    rho = (log + math.log(log + 1.0)) / max(best_at, 1.0)
    grown = weight * rho + 1.0
    return math.sqrt(
        2.0 * grown / (weight**2 * rho) * math.log(math.sqrt(grown) / miss)
    )


@dataclass(frozen=True, slots=True)
class _Score:
    value: float  # tokens over expected tokens, less one
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
