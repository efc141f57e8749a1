import numpy as np
import pytest

from bench.harness import hindsight
from bench.harness.hindsight import (
    CAUSES,
    Recording,
    Step,
    analyse,
    fitted_survival,
    recorded_verdict,
)

N, K = 8, 5
RNG_STEPS = 60
TARGET_S = 0.02 + 0.0004 * np.arange(N * K + 1)
BESIDE_S = 0.002 + 0.003 * np.arange(K + 1)


def recording(bias=0.0, own_target=TARGET_S, rate=None, seed=0, clock=1.0):
    """Steps whose chances are the confidences; the controller's are off by `bias`."""
    rng, steps = np.random.default_rng(seed), []
    for _ in range(RNG_STEPS):
        chance = np.tile(rng.uniform(0.2, 0.95, N), (K, 1))
        hit = rng.random((K, N)) < chance
        logit = np.log(chance / (1 - chance)) + bias
        own = np.cumprod(1 / (1 + np.exp(-logit)), axis=0).astype(np.float32)
        accepted = np.cumprod(hit, axis=0).sum(axis=0)
        steps.append(Step(chance, own, accepted, own_target, BESIDE_S))
    times = [(N * d, TARGET_S[N * d], d, BESIDE_S[d]) for d in (0, 1, 3, K)]
    found = Recording(N, K, steps, times * 2)
    found.tokens, found.seconds = rate or 400.0, 1.0
    for step in steps:
        step.draft_s = step.draft_s * clock
    return found


def test_a_right_controller_lost_to_not_knowing_verdicts_only():
    found = analyse(recording())
    lost = found["lost_to"]
    assert tuple(lost) == CAUSES and found["steps"] == RNG_STEPS
    assert found["best_per_request"] > found["best_uniform"] > N / 0.03
    assert lost["prediction"] > 0.1
    assert abs(lost["calibration"]) < 0.02 and abs(lost["times"]) < 0.001
    total = sum(lost.values()) * found["best_per_request"]
    assert total == pytest.approx(found["best_per_request"] - 400.0, rel=1e-3)


@pytest.mark.parametrize("bias", [-3.0, 3.0])
def test_wrong_chances_are_lost_to_calibration(bias):
    lost = analyse(recording(bias))["lost_to"]
    assert lost["calibration"] > 0.03 and abs(lost["times"]) < 0.001


def test_wrong_times_are_lost_to_times():
    wrong = 0.02 + 0.01 * np.arange(N * K + 1)
    found = analyse(recording(own_target=wrong))
    assert found["lost_to"]["times"] > 0.03 and found["time_error"] > 1.0
    assert analyse(recording())["time_error"] == 0.0


def test_a_clock_that_is_wrong_by_a_factor_costs_nothing():
    lost = analyse(recording(own_target=3 * TARGET_S, clock=3.0))["lost_to"]
    assert abs(lost["times"]) < 0.001


def test_what_nothing_explains_is_overhead():
    slow, fast = (analyse(recording(rate=r))["lost_to"] for r in (200.0, 400.0))
    assert slow["overhead"] > fast["overhead"] + 0.1
    assert slow["prediction"] == fast["prediction"]


def test_fitted_chances_are_those_that_came_true():
    steps = recording(bias=2.0).steps
    first = np.stack([survival[0] for survival in fitted_survival(steps)])
    confidence = np.stack([step.confidence[0] for step in steps])
    assert np.abs(first - confidence).mean() < 0.1
    for survival in fitted_survival(steps):
        assert (np.diff(survival, axis=0) <= 0).all()


def test_fixed_lengths_and_control_are_compared_on_the_same_steps():
    found = recording()
    for step in found.steps:
        step.depth, step.lengths = 3, np.full(N, 3)
    found.decisions = [(d, 0.001 * (d > 0)) for d in (1, 3, K)] * 2
    told = analyse(found)
    assert set(told["fixed"]) == {"none", "static1", "static3", "static5"}
    assert told["fixed"]["none"] == pytest.approx(N / (TARGET_S[0] + BESIDE_S[0]), 1e-3)
    # The same lengths, and a millisecond a step for its decisions.
    spent = TARGET_S[3 * N] + BESIDE_S[3]
    assert told["control"] / told["fixed"]["static3"] == pytest.approx(
        (spent - 0.001) / spent, rel=1e-3
    )
    low, high = told["to_none"][1:]
    assert low < told["control"] / told["fixed"]["none"] < high


def test_control_that_picks_what_is_accepted_beats_every_fixed_length():
    found = recording()
    for step in found.steps:
        step.lengths = step.accepted
        step.depth = int(step.accepted.max())
    told = analyse(found)
    assert told["to_best"][1] > 1.05 and told["best_fixed"] in told["fixed"]


def test_the_verdict_names_the_worst_cell_and_the_best_single_length():
    cells = []
    for number, depth in enumerate((1, 5)):
        found = recording(seed=number)
        for step in found.steps:
            step.depth, step.lengths = depth, np.full(N, depth)
        cells.append({"cell": f"cell {depth}", **analyse(found)})
    said = recorded_verdict(cells)
    worst = min(cells, key=lambda row: row["to_best"][0])
    assert said.startswith(f"on {2 * RNG_STEPS} recorded steps")
    assert f"({worst['cell']}: {worst['best_fixed']})" in said
    assert "the best single length" in said and recorded_verdict([]) == ""


def test_none_is_not_charged_with_a_draft_step_where_control_never_rested():
    found = recording()
    known = analyse(found)["fixed"]["none"]
    found.times = [t for t in found.times if t[2]]
    found.times += [(0, TARGET_S[0], 0, float("nan"))]
    found.hosts = [(3, BESIDE_S[0] + 0.001)] * 5 + [(0, float("nan"))]
    found.decisions = [(d, 0.001) for d in (1, 3, K)]
    assert analyse(found)["fixed"]["none"] == pytest.approx(known, rel=1e-3)


def test_one_strange_step_does_not_lift_all_that_is_longer():
    points = [(0, 1.0), (2, 9.0), *[(4, 2.0)] * 9, *[(6, 3.0)] * 9]
    curve = hindsight._curve(points, 8)
    shared = (9.0 + 9 * 2.0) / 10
    np.testing.assert_allclose(curve[[0, 2, 4, 6, 7]], [1.0, shared, shared, 3.0, 3.0])
    assert (np.diff(curve) >= 0).all()
    falling = [(0, 3.0), (1, 2.0), (2, 1.0)]
    np.testing.assert_allclose(hindsight._curve(falling, 3), 2.0)
