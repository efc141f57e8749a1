import numpy as np
import pytest

from vllm_tide.control.time_model import ForwardModel, TimeModel

ALPHA_T, GAMMA_T, DELTA_T = 3e-7, 2e-4, 5e-3
ALPHA_D, GAMMA_D, DELTA_D = 4e-8, 3e-5, 4e-4


def linear(alpha, gamma, delta):
    return ForwardModel((1, 1001), (delta + gamma, delta + 1001 * gamma), alpha)


def linear_model():
    draft = linear(ALPHA_D, GAMMA_D, DELTA_D)
    return TimeModel(linear(ALPHA_T, GAMMA_T, DELTA_T), draft, draft)


def test_cost_of_rows_is_linear_between_knots_and_extends_the_ends():
    model = ForwardModel((2, 4, 8), (1.0, 2.0, 6.0), 0.0)
    tokens = np.array([1, 2, 3, 4, 6, 8, 10, 20_000])
    expected = [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 6.0 + 19_992]
    assert [model(int(n), 0.0) for n in tokens] == pytest.approx(expected)
    np.testing.assert_allclose(model.rows(1, 4), expected[:4])
    # Beyond the table, and across its end.
    np.testing.assert_allclose(model.rows(8190, 9)[-1], model(8198, 0.0))


def test_a_step_follows_the_quadratic_of_the_docstring():
    # Lemma 4.1 for multi-query verification, R = n (k + 1) rows in the first draft
    # pass as vLLM's runner has it.
    model, n, length = linear_model(), 6, 300
    for k in range(1, 9):
        rows = n * (k + 1)
        a = n * ALPHA_D / 2
        b = n * (ALPHA_D * (length - 0.5) + GAMMA_D + GAMMA_T) + DELTA_D
        c = n * (ALPHA_T * length + GAMMA_T) + DELTA_T + GAMMA_D * (rows - n)
        expected = a * k**2 + b * k + c
        actual = model.step_seconds(
            requests=n,
            context=n * length,
            verified=n * k,
            prefill=0,
            steps=k,
            first_rows=rows,
        )
        assert actual == pytest.approx(expected, rel=1e-12)


def test_curves_agree_with_single_steps():
    model = linear_model()
    n, context, prefill = 3, 700, 11
    target = model.target_curve(n, context, 21, prefill)
    draft = model.draft_curve(n, context, 40, 7)
    assert target.shape == (22,)
    assert draft.shape == (8,)
    assert draft[0] == 0.0
    for verified, steps in ((0, 0), (5, 1), (21, 7)):
        whole = model.step_seconds(
            requests=n,
            context=context,
            verified=verified,
            prefill=prefill,
            steps=steps,
            first_rows=40,
        )
        assert whole == pytest.approx(target[verified] + draft[steps])
