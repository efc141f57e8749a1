import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.toys import logits, sigmoid
from vllm_tide.control.calibration import Calibration
from vllm_tide.control.history import History


def teach(calibration, rng, rounds, truth, n=64, position=0, sampled=0):
    """Labels drawn from `truth` (log-odds of acceptance, of confidence's log-odds)."""
    errors = []
    for _ in range(rounds):
        z = rng.normal(1.0, 1.5, n)
        kind = np.full(n, sampled)
        seen, logit = logits(calibration, position + 1, sigmoid(z), kind)
        accepted = (rng.random(n) < sigmoid(truth(z))).astype(float)
        where = np.full(n, position)
        calibration.learn(where, kind, seen, sigmoid(logit), accepted)
        errors.append(calibration.error())
    return errors


def predicted(calibration, z, position=0, sampled=0):
    kind = np.full(len(z), sampled)
    return sigmoid(logits(calibration, position + 1, sigmoid(z), kind)[1])


@pytest.mark.parametrize(
    "truth",
    [
        lambda z: 0.6 * z - 1.0,
        lambda z: 2.0 * np.tanh(2.0 * z - 2.0),  # no line
        lambda z: z,
    ],
)
def test_converges_to_the_true_map_and_error_falls(truth):
    rng = np.random.default_rng(0)
    calibration = Calibration(7, half_life_tokens=20000)
    errors = teach(calibration, rng, 600, truth)
    z = np.array([-1.5, -0.5, 0.25, 1.75, 2.5, 3.5])
    found = predicted(calibration, z)
    assert np.abs(found - sigmoid(truth(z))).max() < 0.06
    assert errors[-1] < 0.03
    if not np.allclose(truth(z), z):
        assert errors[-1] < 0.3 * errors[0]


def test_positions_and_kinds_differ():
    rng = np.random.default_rng(2)
    calibration = Calibration(7, half_life_tokens=20000)
    for _ in range(10):
        teach(calibration, rng, 20, lambda z: z, position=0)
        teach(calibration, rng, 20, lambda z: z - 2.0, position=3)
        teach(calibration, rng, 20, lambda z: 0.5 * z - 1.0, sampled=1)
    z = np.array([0.5, 1.5])
    first, later = predicted(calibration, z), predicted(calibration, z, position=3)
    drawn = predicted(calibration, z, sampled=1)
    assert np.abs(first - sigmoid(z)).max() < 0.07
    assert np.abs(later - sigmoid(z - 2.0)).max() < 0.07
    assert np.abs(drawn - sigmoid(0.5 * z - 1.0)).max() < 0.07


confidences = st.sampled_from([0.0, 1e-30, 0.5, 0.999, 1.0 - 1e-9, 1.0, float("nan")])
phase = st.tuples(confidences, st.floats(0.0, 1.0), st.integers(2, 40))


@settings(max_examples=15, deadline=None)
@given(
    k=st.integers(1, 8),
    phases=st.lists(phase, min_size=1, max_size=4),
    seed=st.integers(0, 3),
)
def test_every_table_and_forecast_stays_finite(k, phases, seed):
    rng = np.random.default_rng(seed)
    calibration, history, n = Calibration(k), History(k, 32), 32
    slots = np.arange(n)
    for confidence, acceptance, rounds in phases:
        for _ in range(rounds):
            kind = rng.integers(0, 2, n)
            at = rng.integers(0, k, n)
            seen = np.empty((k, n))
            logit = np.empty((k, n))
            for step in range(k):
                told = np.full(n, confidence, np.float32)
                seen[step], logit[step] = logits(calibration, step + 1, told, kind)
            accepted = (rng.random(n) < acceptance).astype(float)
            own = seen[at, slots], sigmoid(logit[at, slots])
            calibration.learn(at, kind, *own, accepted, rng.choice([1.0, 500.0], n))
            history.learn(slots, logit, sigmoid(logit), np.ones((k, n), bool))
        history.refresh()
        assert 0.0 <= calibration.error() <= 1.0
        for table in (history.sets, history.gains, *history.gained):
            assert np.isfinite(table).all()
        assert (history.survival > -1e-9).all()
    calibration.forget(0.2)
    for kind in (0, 1):
        chance = predicted(calibration, np.linspace(-9.0, 9.0, 37), sampled=kind)
        assert (chance > 0.0).all() and (chance < 1.0).all()
