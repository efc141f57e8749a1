"""Shares after the cap, against the definition."""

from __future__ import annotations

import random

import pytest

from vllm_tide.train.reservoir import cap_factors
from vllm_tide.transport.tenant import NOBODY


def shares(masses: dict[int, float], share: float) -> dict[int, float]:
    factors = cap_factors(masses, share)
    assert all(0 < f < 1 for f in factors.values())
    assert NOBODY not in factors
    after = {t: m * factors.get(t, 1.0) for t, m in masses.items()}
    total = sum(after.values())
    return {t: m / total for t, m in after.items()}


def test_a_share_that_cannot_be_kept_becomes_equal_shares():
    assert cap_factors({1: 10.0}, 0.25) == {}
    assert shares({1: 90.0, 2: 10.0}, 0.25) == pytest.approx({1: 0.5, 2: 0.5})


def test_nobody_is_never_capped():
    assert cap_factors({NOBODY: 10.0, 1: 1.0}, 0.5) == {}
    assert cap_factors({}, 0.5) == {}
    assert cap_factors({1: 10.0, 2: 1.0}, 1.0) == {}


def test_random_masses_keep_the_share_with_as_few_caps_as_possible():
    rng = random.Random(0)
    for _ in range(500):
        count = rng.randint(1, 8)
        masses = {t: 10 ** rng.uniform(-3, 3) for t in range(1, count + 1)}
        if rng.random() < 0.5:
            masses[NOBODY] = 10 ** rng.uniform(-3, 3)
        share = rng.uniform(0.05, 0.95)
        got = shares(masses, share)
        factors = cap_factors(masses, share)
        feasible = NOBODY in masses or count * share > 1
        if feasible:
            assert max(s for t, s in got.items() if t) <= share + 1e-9
            # Who is cut stands exactly at the bound, who is not keeps all.
            for tenant in factors:
                assert got[tenant] == pytest.approx(share)
        else:
            assert max(got.values()) == pytest.approx(1 / count)
