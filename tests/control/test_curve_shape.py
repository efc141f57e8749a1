import numpy as np
import pytest

from sim.published import table_model
from vllm_tide.control.online_time import CurveShape, OnlineTime, RoundSample


def test_nothing_learnt_changes_nothing():
    np.testing.assert_array_equal(CurveShape().factors(1, 5000), 1.0)


def test_a_size_learns_its_own_factor_and_forgets_it_unseen():
    shape, rng = CurveShape(), np.random.default_rng(0)
    for _ in range(40):
        shape.learn(4, 0.8 * np.exp(0.02 * rng.standard_normal()))
        shape.learn(16, np.exp(0.02 * rng.standard_normal()))
    assert shape.factor(4) / shape.factor(16) == pytest.approx(0.8, abs=0.06)
    assert shape.factor(4) < shape.factor(6) < shape.factor(16)
    before = shape.factor(4)
    for _ in range(3000):
        shape.learn(16, 1.0)
    assert before < 0.95 * shape.factor(4)


def test_a_size_that_was_never_seen_is_like_those_near_it():
    shape = CurveShape()
    for _ in range(30):
        shape.learn(48, 0.7)
        shape.learn(96, 1.0)
    near, far = shape.factor(64), shape.factor(1024)
    assert shape.factor(48) < 0.95 * near < 0.95 * shape.factor(96)
    assert far == pytest.approx(1.0, abs=0.1)
    assert shape.factor(32) < 0.9


@pytest.mark.parametrize("seen", [0, 3])
def test_a_size_begins_at_what_is_believed_of_it(seen):
    """Also one that was seen long ago: its level has drifted with all others'."""
    shape = CurveShape()
    for _ in range(seen):
        shape.learn(32, 1.0)
    for turn in range(2000):
        shape.learn(16, 1.3 if turn % 7 else 0.9)  # drifts: what sizes share moves
        shape.learn(24, 1.2)
    before = shape.factor(32)
    assert before > 1.02
    for _ in range(3):
        shape.learn(32, before)
    assert shape.factor(32) == pytest.approx(before, rel=0.03)


@pytest.mark.parametrize("seen, served", [(48, 4), (4, 48)])
def test_noise_moves_no_size_that_is_not_served(seen, served):
    """The mean of logarithms is below that of the times, in every round."""
    model = table_model((1, 16, 64, 128), (0.01, 0.02, 0.05, 0.09), 1e-3, 0.0)
    times, rng = OnlineTime(model), np.random.default_rng(0)

    def serve(rows, rounds):
        for noise in np.exp(0.2 * rng.standard_normal(rounds) - 0.02):
            seconds = float(model.target_curve(rows, 0, 0)[0]) * noise
            times.observe(RoundSample(rows, 0, 0, 0, 0, 0, seconds))

    serve(seen, 200)
    serve(served, 600)
    believed = times.model.target_curve(seen, 0, 0) / model.target_curve(seen, 0, 0)
    assert abs(believed[0] - 1.0) < 0.15


def test_a_size_is_learnt_from_a_few_rounds():
    shape = CurveShape()
    for _ in range(4):
        shape.learn(48, 0.7)
    assert shape.factor(48) < 0.82


@pytest.mark.parametrize("rows", [1, 12_288, 122_880])
def test_ends_of_the_range(rows):
    shape = CurveShape()
    for _ in range(30):
        shape.learn(rows, 1.2)
    assert 1.0 < shape.factor(rows) < 1.2


def test_a_curve_wrong_at_its_beginning_is_bent():
    """Plain steps are measured 20% below the profile, drafted ones as it says."""
    knots, seconds = (1, 4, 16, 64), (0.010, 0.012, 0.014, 0.020)
    online = OnlineTime(table_model(knots, seconds, 0.001, 0.0))
    for turn in range(300):
        plain = turn % 16 == 0
        rows = 4 if plain else 16
        target = 0.8 * 0.012 if plain else 0.014
        online.observe(RoundSample(4, 0, rows - 4, 0, 0, 0, target))
    curve = online.model.target_curve(4, 0, 12)
    assert curve[0] == pytest.approx(0.0096, abs=0.25 * (0.0120 - 0.0096))
    assert curve[12] == pytest.approx(0.014, rel=0.03)
    assert online.model.round_seconds(
        requests=4, context=0, verified=0, prefill=0, steps=0, first_rows=0
    ) == pytest.approx(curve[0])
