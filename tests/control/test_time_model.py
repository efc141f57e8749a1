import json

import numpy as np
import pytest

from vllm_tide.control.time_model import ForwardModel, TimeModel

ALPHA_T, GAMMA_T, DELTA_T = 3e-7, 2e-4, 5e-3
ALPHA_D, GAMMA_D, DELTA_D = 4e-8, 3e-5, 4e-4


def linear(alpha, gamma, delta, **more):
    return ForwardModel((1, 1001), (delta + gamma, delta + 1001 * gamma), alpha, **more)


def linear_model(**more):
    draft = linear(ALPHA_D, GAMMA_D, DELTA_D)
    return TimeModel(linear(ALPHA_T, GAMMA_T, DELTA_T, **more), draft, draft)


def test_token_cost_is_linear_between_knots_and_extends_the_ends():
    model = ForwardModel((2, 4, 8), (1.0, 2.0, 6.0), 0.0)
    tokens = np.array([1, 2, 3, 4, 6, 8, 10, 20_000])
    expected = [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 6.0 + 19_992]
    np.testing.assert_allclose(model.token_cost(tokens), expected)
    assert [model.token_cost(int(n)) for n in tokens] == pytest.approx(expected)


def test_staircase_rounds_tokens_up_to_a_graph_size():
    model = ForwardModel((1, 101), (1.0, 101.0), 0.0, sizes=(1, 2, 4, 8))
    tokens = np.arange(1, 12)
    expected = [1, 2, 4, 4, 8, 8, 8, 8, 9, 10, 11]
    np.testing.assert_allclose(model.token_cost(tokens), expected)
    curve = TimeModel(model, model, model).target_curve(3, 0, 6)
    np.testing.assert_allclose(curve, [4, 4, 8, 8, 8, 8, 9])


def test_a_round_is_the_quadratic_of_the_docstring():
    # Lemma 4.1 for multi-query verification, R = n (k + 1) rows in the first draft
    # pass as vLLM's runner has it.
    model, n, length = linear_model(), 6, 300
    for k in range(1, 9):
        rows = n * (k + 1)
        a = n * ALPHA_D / 2
        b = n * (ALPHA_D * (length - 0.5) + GAMMA_D + GAMMA_T) + DELTA_D
        c = n * (ALPHA_T * length + GAMMA_T) + DELTA_T + GAMMA_D * (rows - n)
        expected = a * k**2 + b * k + c
        found = model.round_seconds(
            requests=n,
            context=n * length,
            verified=n * k,
            prefill=0,
            steps=k,
            first_rows=rows,
        )
        assert found == pytest.approx(expected, rel=1e-12)


def test_curves_agree_with_single_rounds():
    model = linear_model(queries=(1.0, 2.0, 8.0), extra=(0.0, 1e-7, 2e-7), rounding=8.0)
    n, context, prefill = 3, 700, 11
    target = model.target_curve(n, context, 21, prefill)
    draft = model.draft_curve(n, context, 40, 7)
    assert target.shape == (22,)
    assert draft.shape == (8,)
    assert draft[0] == 0.0
    for verified, steps in ((0, 0), (5, 1), (21, 7)):
        whole = model.round_seconds(
            requests=n,
            context=context,
            verified=verified,
            prefill=prefill,
            steps=steps,
            first_rows=40,
        )
        assert whole == pytest.approx(target[verified] + draft[steps])


def test_longer_queries_read_the_context_at_a_higher_cost():
    model = linear_model(queries=(1.0, 4.0), extra=(0.0, 3e-7))
    curve = model.target_curve(2, 10_000, 6) - linear_model().target_curve(2, 10_000, 6)
    np.testing.assert_allclose(curve[[0, 2, 6]], [0.0, 1e-3, 3e-3], atol=1e-12)


def test_json_round_trip():
    model = TimeModel(
        ForwardModel((1, 8), (1e-3, 2e-3), 1e-7, (1, 2, 4), (1.0,), (0.0,), 8.0),
        ForwardModel((1,), (5e-4,), 0.0),
        ForwardModel((1,), (4e-4,), 0.0),
        host=1e-3,
        host_per_request=1e-5,
        catchup=ForwardModel((1, 9), (1e-4, 2e-4), 0.0),
    )
    assert TimeModel.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert hash(model) == hash(TimeModel.from_json(model.to_json()))


def test_catch_up_falls_back_on_the_first_draft_pass():
    model = linear_model()
    assert model.catchup_seconds(0) == 0.0
    assert model.catchup_seconds(50) == pytest.approx(DELTA_D + 50 * GAMMA_D)
