import numpy as np
import pytest

from tests.control.toys import sigmoid
from vllm_tide.control.history import CENTRES, GRID, History


def feed(history, rng, slots, level, rounds, steps=4):
    for _ in range(rounds):
        logit = level + 1.2 * rng.standard_normal((steps, len(slots)))
        drafted = np.ones(logit.shape, bool)
        history.learn(slots, logit, sigmoid(logit), drafted)
    history.refresh()


def test_requests_differ_and_new_ones_are_like_the_batch():
    rng = np.random.default_rng(2)
    history = History(7, 16)
    slots = np.arange(16)
    level = np.where(slots < 8, 2.5, -1.0)
    feed(history, rng, slots, level, 60)

    def predicted(slot):
        return float(history.accepted(np.array([slot]), np.array([1]))[0])

    assert predicted(0) > 0.8 and predicted(15) < 0.45
    history.add(0)
    assert 0.45 < predicted(0) < 0.8
    for _ in range(1000):
        history.idle()
    assert predicted(15) == pytest.approx(predicted(0), abs=0.02)


def test_survival_over_positions_is_their_convolution():
    rng = np.random.default_rng(4)
    history = History(5, 64)
    feed(history, rng, np.arange(64), 1.0, 80, steps=5)
    alone = [history.gained[start][:, 0] for start in range(5)]
    for start, table in enumerate(history.gained):
        assert table.shape == (len(CENTRES), 5 - start, GRID)
        wanted = alone[start]
        for j in range(start, 5):
            if j > start:
                pairs = zip(wanted, alone[j], strict=True)
                wanted = np.stack([np.convolve(a, b)[:GRID] for a, b in pairs])
            np.testing.assert_allclose(table[:, j - start], wanted, atol=1e-15)
