"""A time model made of vLLM's tables says what the tables say."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tide.control.costs import KeptPass
from vllm_tide.control.online_time import OnlineTime
from vllm_tide.control.time_model import TimeModel
from vllm_tide.engine.verification import times_of_tables

K = 3


def stairs(most: int, *steps: tuple[int, float]) -> np.ndarray:
    """Up to each size its cost, as where graphs pad; a slope beyond the last."""
    table = np.zeros(most + 1)
    done = 0
    for size, cost in steps:
        table[done : size + 1] = cost
        done = size + 1
    table[done:] = steps[-1][1] + 0.01 * np.arange(1, most + 2 - done)
    return table


DRAFT = stairs(16, (1, 3.0), (4, 3.3), (8, 4.5))
TARGET = stairs(64, (1, 10.0), (8, 10.5), (16, 12.0), (32, 20.0))


def test_the_targets_stairs_are_exact():
    times = times_of_tables(DRAFT, TARGET, K)
    for requests in (1, 3, 16):
        most = 64 - requests
        curve = 1e3 * times.target_curve(requests, 5000, most)
        np.testing.assert_allclose(curve, TARGET[requests:], rtol=1e-6)
    assert len(times.target.knots) < 12


def test_all_passes_together_take_what_the_draft_took():
    times = times_of_tables(DRAFT, TARGET, K)
    for n in range(1, 17):
        drafted = 1e3 * times.draft_curve(n, 5000, n * (1 + K), K)
        assert drafted[K] == pytest.approx(DRAFT[n])
        assert np.all(np.diff(drafted) > 0)


def test_the_model_goes_through_json_and_is_refined():
    times = times_of_tables(DRAFT, TARGET, K)
    assert TimeModel.from_json(times.to_json()) == times
    kept = KeptPass(OnlineTime(times).model)
    plain = 1e3 * kept.target_curve(2, 100, 0)[0]
    assert plain == pytest.approx(TARGET[2] + DRAFT[1] / K, rel=1e-6)


def test_tables_of_one_entry():
    times = times_of_tables(np.array([0.0, 2.0]), np.array([0.0, 5.0]), 1)
    assert 1e3 * times.target_curve(1, 0, 0)[0] == pytest.approx(5.0)
