import numpy as np
import pytest

from vllm_tide.control.fit import (
    fit,
)
from vllm_tide.control.online_time import RoundSample
from vllm_tide.control.time_model import ForwardModel, TimeModel

TRUTH = TimeModel(
    ForwardModel(
        (1, 16, 64, 256),
        (5e-3, 6e-3, 1.6e-2, 6e-2),
        2e-7,
        queries=(1.0, 2.0, 4.0, 8.0),
        extra=(0.0, 1e-7, 2e-7, 3e-7),
        rounding=64.0,
    ),
    ForwardModel((1, 64, 256), (7e-4, 1.5e-3, 4e-3), 4e-8),
    ForwardModel((1, 32), (4e-4, 9e-4), 3e-8),
    host=5e-4,
    host_per_request=2e-5,
)


def rounds(rng, noise=0.0, outliers=0.0, repeats=3):
    found = []
    for n in (1, 2, 4, 8, 16, 32):
        for length in (40, 200, 900):
            for k in (0, 1, 3, 5, 7):
                for prefill in (0, 100):
                    shape = (n, n * length, n * k, prefill, k, n * (k + 1) + prefill)
                    found += [
                        sample(TRUTH, shape, rng, noise, outliers)
                        for _ in range(repeats)
                    ]
    return found


def sample(model, shape, rng, noise=0.0, outliers=0.0):
    n, context, verified, prefill, steps, rows = shape

    def noisy(seconds):
        factor = 1.0 + noise * rng.standard_normal()
        if rng.random() < outliers:
            factor *= rng.uniform(2.0, 20.0)
        return float(seconds) * factor

    first = sum(model.draft_first_parts(n, context, rows))
    further = sum(model.draft_next_parts(n, context, max(steps - 1, 0)))
    return RoundSample(
        *shape,
        target_s=noisy(sum(model.target_parts(n, context, verified, prefill))),
        draft_first_s=noisy(first) if steps >= 1 else float("nan"),
        draft_next_s=noisy(further) if steps >= 2 else float("nan"),
        host_s=noisy(model.overhead(n)),
    )


def worst(model, samples):
    pairs = [
        (
            sum(model.target_parts(s.requests, s.context, s.verified, s.prefill)),
            sum(TRUTH.target_parts(s.requests, s.context, s.verified, s.prefill)),
        )
        for s in samples
    ]
    return max(abs(found / true - 1.0) for found, true in pairs)


def test_exact_rounds_give_the_coefficients_back():
    model, report = fit(rounds(np.random.default_rng(2)))
    assert report.r2 > 0.9999
    assert report.held_out_median_abs_error < 0.01
    assert model.target.alpha == pytest.approx(2e-7, rel=0.02)
    assert model.target.rounding == 64.0
    assert model.draft_first.alpha == pytest.approx(4e-8, rel=0.05)
    assert model.draft_next.alpha == pytest.approx(3e-8, rel=0.05)
    assert model.host == pytest.approx(5e-4, rel=0.02)
    assert model.host_per_request == pytest.approx(2e-5, rel=0.02)
    assert set(report.parts) == {"target", "draft_first", "draft_next", "host"}


def test_noise_and_outliers_are_borne():
    samples = rounds(np.random.default_rng(3), noise=0.03, outliers=0.1)
    model, report = fit(samples)
    assert worst(model, samples) < 0.12
    assert report.held_out_median_abs_error < 0.04


def test_without_drafts_the_target_alone_is_fitted():
    shapes = [(n, n * 50, 0, 0, 0, 0) for n in (1, 2, 4, 8, 16)]
    rng = np.random.default_rng(7)
    model, report = fit([sample(TRUTH, shape, rng) for shape in shapes])
    assert set(report.parts) == {"target", "host"}
    assert model.draft_curve(4, 100, 8, 3).max() == 0.0
