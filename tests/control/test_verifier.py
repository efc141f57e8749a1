import itertools

import numpy as np
import pytest

from vllm_tide.control.verifier import select


def brute_force(survival, tokens, seconds, limit, bar):
    """Return the best value over every set of prefixes."""
    steps, n = survival.shape
    caps = [(survival[:, i] >= 0).sum() for i in range(n)]
    best = -np.inf
    for lengths in itertools.product(*(range(cap + 1) for cap in caps)):
        m = sum(lengths)
        expect = tokens + sum(
            float(survival[:length, i].sum()) for i, length in enumerate(lengths)
        )
        if m and seconds[m] > limit:
            continue
        value = expect / seconds[m] if bar is None else expect - bar * seconds[m]
        best = max(best, value)
    return best


def value_of(selected, survival, tokens, seconds, bar):
    lengths, expected, spent = selected
    expect = tokens + sum(
        float(survival[:length, i].sum()) for i, length in enumerate(lengths)
    )
    cost = seconds[lengths.sum()]
    assert expected == pytest.approx(expect, rel=1e-6)
    assert spent == cost
    return expect / cost if bar is None else expect - bar * cost


def instance(rng, stairs, ties):
    n, steps = rng.integers(1, 5), rng.integers(1, 4)
    chance = (
        rng.choice([0.25, 0.5, 1.0], (steps, n)) if ties else rng.random((steps, n))
    )
    survival = np.cumprod(chance, axis=0).astype(np.float32)
    caps = rng.integers(0, steps + 1, n)
    survival[np.arange(steps)[:, None] >= caps] = -1.0
    size = steps * n + 1
    rise = rng.random(size) * 0.4
    if stairs:
        rise *= rng.random(size) < 0.3
    return survival, 1.0 + np.cumsum(rise)


@pytest.mark.parametrize("stairs", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("barred", [False, True])
def test_choice_equals_brute_force(stairs, ties, limited, barred):
    rng = np.random.default_rng(8 * stairs + 4 * ties + 2 * limited + barred)
    for _ in range(60):
        survival, seconds = instance(rng, stairs, ties)
        n = survival.shape[1]
        limit = rng.choice(seconds) if limited else np.inf
        bar = n / seconds[0] * rng.uniform(0.5, 3.0) if barred else None
        selected = lengths, _, spent = select(survival, n, seconds, limit, bar)
        assert (lengths <= (survival >= 0).sum(axis=0)).all()
        assert lengths.sum() == 0 or spent <= limit
        value = value_of(selected, survival, n, seconds, bar)
        best = brute_force(survival, n, seconds, limit, bar)
        assert value == pytest.approx(best, rel=1e-6)


def test_ties_keep_prefixes_and_the_exact_number():
    survival = np.full((3, 4), 0.5, np.float32)
    seconds = np.concatenate([np.ones(8), np.full(5, 100.0)])
    lengths, *_ = select(survival, 4, seconds)
    assert lengths.sum() == 7
    assert (lengths <= 3).all()
