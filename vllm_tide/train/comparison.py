"""Served acceptance of one draft against another's, on different requests.

Requests after a swap are other requests than before it, at other positions, drafted
for at other lengths. So each round is held against the mean of the window before in
its own cell: engine and group, bucket of generation position, number of drafts. Thin
cells lean on coarser ones (partial pooling). Held-out rows rank drafts offline; only
this says what was served. No torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from vllm_tide.train.served import Cell, ServedRequest

POOL_ROUNDS = 20.0
"""Rounds' worth of the next coarser cell in the mean of a cell."""
MIN_STRATUM_ROUNDS = 16
"""Rounds before the swap without which an engine's group says nothing."""
_ONE_REQUEST = 16.0  # rounds at which sampling adds as much noise as requests differ
_PRIOR_SPREAD, _PRIOR_REQUESTS = 0.15, 4.0  # relative, of requests of one cell

Stratum = tuple[str, int]
Counts = dict[tuple[object, ...], list[int]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Acceptance length after a swap against what was to be expected.

    Attributes:
        requests: Requests compared.
        before: Acceptance length of the window before, at the cells of the requests
            compared (tokens).
        after: Acceptance length of the requests compared (tokens).
        change: after / before - 1, requests weighted by what they tell.
        error: Standard error of `change`.
        bound: Half width of the interval around `change` that holds at every look.
    """

    requests: int
    before: float
    after: float
    change: float
    error: float
    bound: float


def stratum_of(request: ServedRequest) -> Stratum:
    """Requests of different strata are never compared."""
    return request.engine, request.group


def compare(
    before: Sequence[ServedRequest],
    after: Sequence[ServedRequest],
    *,
    cap: int,
    miss: float = 0.05,
) -> Comparison | None:
    """Compare two sets of requests.

    The expected number of accepted tokens of a round is the pooled mean of its cell in
    `before`. A request's score is its mean difference per round; it weighs
    n / (n + 16) for n rounds, so that neither a long nor a short one decides. The
    variance of a score comes from both sides, in `before` against the *other* requests.
    The interval in `bound` is Robbins' normal mixture as an asymptotic confidence
    sequence (Waudby-Smith et al. 2021), valid whenever one looks, plus the error of
    `before`.

    Args:
        before: Requests served by the draft before.
        after: Requests begun with the new one, in order.
        cap: Requests at which the interval is made narrowest, about.
        miss: Chance that the true change lies beyond one end of the interval, at
            any look.

    Returns:
        None if nothing can be compared.
    """
    table = _table(before)
    known = {s for s in map(stratum_of, before) if _enough(table, s)}
    scores = [
        s for r in after if stratum_of(r) in known and (s := _score(table, r, None))
    ]
    if not scores:
        return None
    used = {stratum_of(r) for r in after} & known
    own = [(r, s) for r in before if (s := _score(table, r, _table([r]))) is not None]
    weight = sum(s.weight for s in scores)
    difference = sum(s.weight * s.value for s in scores) / weight
    expected = sum(s.weight * s.expected for s in scores) / weight
    length = 1.0 + expected
    squares = sum(s.weight * (s.value - difference) ** 2 for s in scores)
    squares += sum(s.weight * s.value**2 for _, s in own)
    squares += _PRIOR_REQUESTS * (_PRIOR_SPREAD * length) ** 2
    variance = squares / (len(scores) - 1 + len(own) + _PRIOR_REQUESTS)
    base = variance / max(sum(s.weight for r, s in own if stratum_of(r) in used), 1e-9)
    bound = mixture_bound(weight, cap / 3, 2 * miss) * math.sqrt(variance)
    beyond = NormalDist().inv_cdf(1.0 - miss)
    return Comparison(
        requests=len(scores),
        before=length,
        after=length + difference,
        change=difference / length,
        error=math.sqrt(variance / weight + base) / length,
        bound=math.hypot(bound, beyond * math.sqrt(base)) / length,
    )


def mixture_bound(weight: float, best_at: float, miss: float) -> float:
    """Half width of a mean's interval that holds at all sample sizes at once.

    Args:
        weight: Observations of unit variance so far.
        best_at: Number of them at which the interval is narrowest, about.
        miss: Chance of ever missing, both ends together.
    """
    log = -2.0 * math.log(miss)
    rho = (log + math.log(log + 1.0)) / max(best_at, 1.0)
    grown = weight * rho + 1.0
    return math.sqrt(
        2.0 * grown / (weight**2 * rho) * math.log(math.sqrt(grown) / miss)
    )


@dataclass(frozen=True, slots=True)
class _Score:
    """Accepted minus expected per round, expected, and the weight of the request."""

    value: float
    expected: float
    weight: float


def _keys(stratum: Stratum, cell: Cell) -> tuple[tuple[object, ...], ...]:
    """From the coarsest to the finest."""
    bucket, drafts = cell
    return (drafts,), (bucket, drafts), (stratum, drafts), (stratum, bucket, drafts)


def _table(requests: Sequence[ServedRequest]) -> Counts:
    """Rounds and accepted tokens of every cell, coarse ones and strata included."""
    table: Counts = defaultdict(lambda: [0, 0])
    for request in requests:
        stratum = stratum_of(request)
        for cell, (rounds, accepted) in request.cells.items():
            for key in (*_keys(stratum, cell), stratum):
                entry = table[key]
                entry[0] += rounds
                entry[1] += accepted
    return dict(table)


def _enough(table: Counts, stratum: Stratum) -> bool:
    return table.get(stratum, [0, 0])[0] >= MIN_STRATUM_ROUNDS


def _score(
    table: Counts,
    request: ServedRequest,
    own: Mapping[tuple[object, ...], list[int]] | None,
) -> _Score | None:
    """Score of a request; `own` is taken out of the table first."""
    stratum = stratum_of(request)
    rounds = accepted = 0
    expected = 0.0
    for cell, (count, taken) in request.cells.items():
        mean: float | None = None
        for key in _keys(stratum, cell):
            n, a = table.get(key, [0, 0])
            if own is not None:
                n, a = n - own[key][0], a - own[key][1]
            if mean is None:
                if n == 0:
                    break
                mean = a / n
            else:
                mean = (a + POOL_ROUNDS * mean) / (n + POOL_ROUNDS)
        if mean is None:
            continue  # so many drafts were never made before: nothing to hold against
        rounds += count
        accepted += taken
        expected += count * mean
    if not rounds:
        return None
    value = (accepted - expected) / rounds
    return _Score(value, expected / rounds, rounds / (rounds + _ONE_REQUEST))
