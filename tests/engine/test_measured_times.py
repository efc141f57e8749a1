"""A time model of vLLM's tables returns the times of the tables."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tide.engine.verification import times_of_tables

K = 3


def stairs(most: int, *steps: tuple[int, float]) -> np.ndarray:
    """Return each size's cost up to that size, as with padded graphs, then a slope."""
    table = np.zeros(most + 1)
    done = 0
    for size, cost in steps:
        table[done : size + 1] = cost
        done = size + 1
    table[done:] = steps[-1][1] + 0.01 * np.arange(1, most + 2 - done)
    return table


DRAFT = stairs(16, (1, 3.0), (4, 3.3), (8, 4.5))
TARGET = stairs(64, (1, 10.0), (8, 10.5), (16, 12.0), (32, 20.0))


def test_the_targets_steps_are_exact():
    times = times_of_tables(DRAFT, TARGET, K)
    for requests in (1, 3, 16):
        most = 64 - requests
        curve = 1e3 * times.target_curve(requests, 5000, most)
        np.testing.assert_allclose(curve, TARGET[requests:], rtol=1e-6)
    assert len(times.target.knots) < 12


def test_all_passes_together_take_the_measured_draft_time():
    times = times_of_tables(DRAFT, TARGET, K)
    for n in range(1, 17):
        drafted = 1e3 * times.draft_curve(n, 5000, n * (1 + K), K)
        assert drafted[K] == pytest.approx(DRAFT[n])
        assert np.all(np.diff(drafted) > 0)
