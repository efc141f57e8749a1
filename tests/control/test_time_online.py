import dataclasses

import numpy as np
import pytest

from sim.published import table_model
from tests.control.test_time_fit import TRUTH, sample
from vllm_tide.control.online_time import OnlineTime, RoundSample


def scaled(model, target=1.0, draft=1.0):
    def times(forward, factor):
        return dataclasses.replace(
            forward,
            seconds=tuple(factor * value for value in forward.seconds),
            alpha=factor * forward.alpha,
            extra=tuple(factor * value for value in forward.extra),
        )

    return dataclasses.replace(
        model,
        target=times(model.target, target),
        draft_first=times(model.draft_first, draft),
        draft_next=times(model.draft_next, draft),
    )


def shapes(rng, count):
    for _ in range(count):
        n = int(rng.integers(1, 33))
        k = int(rng.integers(0, 8))
        prefill = int(rng.integers(0, 2) * rng.integers(10, 200))
        yield (
            n,
            n * int(rng.integers(20, 900)),
            n * k,
            prefill,
            k,
            n * (k + 1) + prefill,
        )


def feed(online, truth, rng, count, noise=0.02, outliers=0.0):
    for shape in shapes(rng, count):
        online.observe(sample(truth, shape, rng, noise, outliers))


def round_of(model):
    return model.round_seconds(
        requests=8, context=2400, verified=24, prefill=0, steps=3, first_rows=32
    )


def test_before_any_round_it_is_the_profile():
    online = OnlineTime(TRUTH)
    np.testing.assert_allclose(
        online.model.target_curve(4, 900, 20, 3), TRUTH.target_curve(4, 900, 20, 3)
    )
    np.testing.assert_allclose(
        online.model.draft_curve(4, 900, 20, 7), TRUTH.draft_curve(4, 900, 20, 7)
    )
    assert online.model.overhead(5) == pytest.approx(TRUTH.overhead(5))
    assert round_of(online.model) == pytest.approx(round_of(TRUTH))
    assert np.isnan(online.error)


def test_wrong_profile_is_corrected():
    truth = scaled(TRUTH, target=1.4, draft=0.7)
    online, rng = OnlineTime(TRUTH), np.random.default_rng(0)
    feed(online, truth, rng, 200)
    assert round_of(online.model) == pytest.approx(round_of(truth), rel=0.03)
    assert online.error < 0.03


def test_drift_is_followed():
    online, rng = OnlineTime(TRUTH), np.random.default_rng(1)
    for factor in np.linspace(1.0, 2.0, 20):
        feed(online, scaled(TRUTH, target=factor, draft=factor), rng, 40)
    assert round_of(online.model) == pytest.approx(2 * round_of(TRUTH), rel=0.06)


def test_single_strange_rounds_move_little():
    online, rng = OnlineTime(TRUTH), np.random.default_rng(3)
    feed(online, TRUTH, rng, 300, outliers=0.03)
    assert round_of(online.model) == pytest.approx(round_of(TRUTH), rel=0.03)
    before = round_of(online.model)
    compiled = sample(TRUTH, (8, 2400, 24, 0, 3, 32), rng)
    online.observe(dataclasses.replace(compiled, target_s=100 * compiled.target_s))
    assert round_of(online.model) == pytest.approx(before, rel=0.02)


def test_context_and_tokens_are_told_apart():
    known = TRUTH.target
    more = tuple(2 * value for value in known.extra)
    slow = dataclasses.replace(known, alpha=2 * known.alpha, extra=more)
    truth, online = dataclasses.replace(TRUTH, target=slow), OnlineTime(TRUTH)
    feed(online, truth, np.random.default_rng(4), 600, noise=0.01)
    np.testing.assert_allclose(online.model.target.value[:2], [1.0, 2.0], rtol=0.05)


def test_unmeasured_parts_change_nothing():
    online = OnlineTime(TRUTH)
    blank = sample(TRUTH, (4, 400, 0, 0, 0, 0), np.random.default_rng(6))
    nan = float("nan")
    online.observe(dataclasses.replace(blank, target_s=nan, host_s=nan))
    assert np.isnan(online.error)
    assert round_of(online.model) == pytest.approx(round_of(TRUTH))


def test_a_curve_wrong_at_its_beginning_is_bent():
    """Plain steps are measured 20% below the profile, drafted ones as it says."""
    knots, seconds = (1, 4, 16, 64), (0.010, 0.012, 0.014, 0.020)
    online = OnlineTime(table_model(knots, seconds, 0.001, 0.0))
    for turn in range(300):
        rows, target = (4, 0.8 * 0.012) if turn % 16 == 0 else (16, 0.014)
        online.observe(RoundSample(4, 0, rows - 4, 0, 0, 0, target))
    curve = online.model.target_curve(4, 0, 12)
    assert curve[0] == pytest.approx(0.0096, abs=0.25 * (0.0120 - 0.0096))
    assert curve[12] == pytest.approx(0.014, rel=0.03)
