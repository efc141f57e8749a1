import dataclasses

import numpy as np
import pytest

from sim.published import table_model
from vllm_tide.control.step_times import StepSample, StepTimes, step_cost
from vllm_tide.control.time_model import ForwardModel, TimeModel

TRUTH = TimeModel(
    ForwardModel((1, 16, 64, 256), (5e-3, 6e-3, 1.6e-2, 6e-2), 2e-7),
    ForwardModel((1, 64, 256), (7e-4, 1.5e-3, 4e-3), 4e-8),
    ForwardModel((1, 32), (4e-4, 9e-4), 3e-8),
    host=5e-4,
)


def sample(model, shape, rng, noise=0.0, outliers=0.0):
    n, context, verified, prefill, steps, rows = shape

    def noisy(seconds):
        factor = 1.0 + noise * rng.standard_normal()
        if rng.random() < outliers:
            factor *= rng.uniform(2.0, 20.0)
        return float(seconds) * factor

    drafts = model.draft_curve(n, context, rows, max(steps, 1))[1:]
    first, drafts = drafts[0], drafts[-1]
    return StepSample(
        *shape,
        target_s=noisy(model.target(n + verified + prefill, context)),
        draft_first_s=noisy(first) if steps >= 1 else float("nan"),
        draft_next_s=noisy(drafts - first) if steps >= 2 else float("nan"),
        host_s=noisy(model.host),
    )


def scaled(model, target=1.0, draft=1.0):
    def times(forward, factor):
        return dataclasses.replace(
            forward,
            seconds=tuple(factor * value for value in forward.seconds),
            alpha=factor * forward.alpha,
        )

    return dataclasses.replace(
        model,
        target=times(model.target, target),
        draft_first=times(model.draft_first, draft),
        draft_next=times(model.draft_next, draft),
        host=target * model.host,
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


class Clock:
    """Feeds measurements, a hundredth of a second apart."""

    def __init__(self, times, seed=0):
        self.times, self.rng, self.now = times, np.random.default_rng(seed), 0.0

    def feed(self, truth, count, noise=0.02, outliers=0.0):
        for shape in shapes(self.rng, count):
            self.take(sample(truth, shape, self.rng, noise, outliers))

    def take(self, measured):
        self.now += 0.01
        self.times.observe(measured, self.now)


def step_of(times):
    return times.target_curve(8, 2400, 24)[-1] + times.draft_curve(8, 2400, 32, 3)[-1]


def truth_of(model):
    return model.step_seconds(
        requests=8, context=2400, verified=24, prefill=0, steps=3, first_rows=32
    )


def test_the_prior_holds_before_any_step():
    times = StepTimes(TRUTH)
    np.testing.assert_allclose(
        times.target_curve(4, 900, 20, 3),
        TRUTH.target_curve(4, 900, 20, 3) + TRUTH.host,
    )
    np.testing.assert_allclose(
        times.draft_curve(4, 900, 20, 7), TRUTH.draft_curve(4, 900, 20, 7)
    )
    assert step_of(times) == pytest.approx(truth_of(TRUTH))
    assert np.isnan(times.error) and times.version == 0
    assert times.ratio_sd(8, 0.0) > 0.2


def test_a_wrong_prior_is_corrected():
    truth, times = scaled(TRUTH, target=1.4, draft=0.7), StepTimes(TRUTH)
    Clock(times).feed(truth, 300)
    assert step_of(times) == pytest.approx(truth_of(truth), rel=0.04)
    assert times.error < 0.04 and times.version > 0
    assert times.ratio_sd(8, 3.0) < 0.1


def test_kernels_for_one_row_per_request_are_learned_apart_from_the_curve():
    clock = Clock(StepTimes(TRUTH), seed=3)
    for shape in shapes(clock.rng, 300):
        measured = sample(TRUTH, shape, clock.rng, 0.02)
        if not (measured.verified or measured.prefill):
            measured = dataclasses.replace(measured, target_s=0.75 * measured.target_s)
        clock.take(measured)
    for n in (3, 8, 20):
        curve = clock.times.target_curve(n, 300 * n, 3 * n)
        truth = TRUTH.target_curve(n, 300 * n, 3 * n) + TRUTH.host
        assert curve[0] == pytest.approx(0.75 * truth[0], rel=0.05)
        assert curve[1] == pytest.approx(truth[1], rel=0.05)
        assert curve[-1] == pytest.approx(truth[-1], rel=0.05)
        assert clock.times.ratio_sd(n, clock.now) < 0.05
    # Prefill rows run with one of each request: no such kernels.
    curve = clock.times.target_curve(8, 2400, 3, 100)
    assert curve[0] == pytest.approx(curve[1], rel=0.02)


def test_drift_is_followed():
    clock = Clock(StepTimes(TRUTH), seed=1)
    for factor in np.linspace(1.0, 2.0, 20):
        clock.feed(scaled(TRUTH, target=factor, draft=factor), 40)
        clock.now += 5.0
    assert step_of(clock.times) == pytest.approx(2 * truth_of(TRUTH), rel=0.08)


def test_a_lasting_change_opens_the_curve_again():
    clock = Clock(StepTimes(TRUTH), seed=2)
    clock.feed(TRUTH, 300)
    clock.feed(scaled(TRUTH, target=2.0, draft=2.0), 60)
    assert step_of(clock.times) == pytest.approx(2 * truth_of(TRUTH), rel=0.08)


def test_single_outliers_move_the_estimate_little():
    clock = Clock(StepTimes(TRUTH), seed=3)
    clock.feed(TRUTH, 300, outliers=0.03)
    assert step_of(clock.times) == pytest.approx(truth_of(TRUTH), rel=0.03)
    before = step_of(clock.times)
    compiled = sample(TRUTH, (8, 2400, 24, 0, 3, 32), clock.rng)
    clock.take(dataclasses.replace(compiled, target_s=100 * compiled.target_s))
    assert step_of(clock.times) == pytest.approx(before, rel=0.02)


def test_unmeasured_parts_change_nothing():
    clock = Clock(StepTimes(TRUTH))
    nan = float("nan")
    blank = sample(TRUTH, (4, 400, 0, 0, 0, 0), np.random.default_rng(6))
    clock.take(dataclasses.replace(blank, target_s=nan, host_s=nan))
    assert np.isnan(clock.times.error)
    assert step_of(clock.times) == pytest.approx(truth_of(TRUTH))
    # An unknown host time counts as the usual one.
    for _ in range(100):
        clock.take(dataclasses.replace(blank, host_s=4e-3))
    usual = clock.times.target_curve(4, 400, 0)[0]
    for _ in range(20):
        clock.take(dataclasses.replace(blank, host_s=nan))
    assert clock.times.target_curve(4, 400, 0)[0] == pytest.approx(usual, rel=0.01)


def test_a_curve_wrong_at_its_beginning_is_bent():
    """Plain steps are measured 20% below the prior, drafted ones at the prior."""
    knots, seconds = (1, 4, 16, 64), (0.010, 0.012, 0.014, 0.020)
    clock = Clock(StepTimes(table_model(knots, seconds, 0.001, 0.0)))
    for number in range(300):
        rows, target = (4, 0.8 * 0.012) if number % 16 == 0 else (16, 0.014)
        clock.take(StepSample(4, 0, rows - 4, 0, 0, 0, target))
    curve = clock.times.target_curve(4, 0, 12)
    assert curve[0] == pytest.approx(0.0096, abs=0.25 * (0.0120 - 0.0096))
    assert curve[12] == pytest.approx(0.014, rel=0.03)


def test_another_process_takes_the_learned_times():
    truth, times, other = scaled(TRUTH, 1.5, 0.8), StepTimes(TRUTH), StepTimes(TRUTH)
    Clock(times).feed(truth, 100)
    other.take(times.learnt())
    assert step_of(other) == step_of(times) != pytest.approx(truth_of(TRUTH))


def test_a_step_costs_a_plain_step_plus_the_cost_of_drafts():
    times = StepTimes(TRUTH)
    assert step_cost(times, 0, 0, 0, (3, 8)) == 1.0
    assert step_cost(times, 4, 100, 0, (0, 0)) == 1.0
    plain = TRUTH.step_seconds(
        requests=8, context=2400, verified=0, prefill=0, steps=0, first_rows=0
    )
    assert step_cost(times, 8, 2400, 24, (3, 32)) == pytest.approx(
        truth_of(TRUTH) / plain
    )
