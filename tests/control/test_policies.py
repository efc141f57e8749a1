import numpy as np
import pytest

from sim.tide_gate import TideGatePolicy
from tests.control.toys import Acceptance, FixedTimes, World, batch_of, published
from vllm_tide.control.batch import Outcome
from vllm_tide.control.policies import (
    AdaSpecPolicy,
    ControlSettings,
    StaticPolicy,
    ThresholdPolicy,
)


def made(name):
    times = FixedTimes(published("Qwen3-235B"))
    if name == "adaspec":
        return AdaSpecPolicy(ControlSettings(max_requests=4), times)
    kinds = dict(static=StaticPolicy, threshold=ThresholdPolicy, gate=TideGatePolicy)
    return kinds[name](3, times)


def test_static_drafts_k_and_verifies_all():
    policy = StaticPolicy(3)
    assert policy.plan(batch_of([7, 2, 0]), 0.0).passes == 3
    assert [policy.go_on(s, np.zeros(3)) for s in (1, 2, 3)] == [True, True, False]
    assert policy.choose().tolist() == [3, 2, 0]
    assert policy.plan(batch_of([0, 0]), 0.0).reason == "no_room"
    assert policy.plan(batch_of([2, 1]), 0.0).passes == 2


def test_threshold_stops_below_the_mean():
    policy = ThresholdPolicy(7)
    assert policy.plan(batch_of([7, 7, 0]), 0.0).passes == 7
    assert policy.go_on(1, np.array([0.9, 0.4, 0.0])), "the third is not drafted for"
    assert not policy.go_on(2, np.array([0.7, 0.4, 1.0]))
    assert policy.choose().tolist() == [2, 2, 0]


def test_tide_gate_is_equation_5():
    d0, table = 0.393, {8: 5.236, 32: 7.637}  # TIDE's Table 5, milliseconds
    policy = TideGatePolicy(3, FixedTimes(published("gpt-oss-120b")))
    a, b, k = policy.acceptance, 8, 3
    c, beta = d0 / table[b], table[b * (k + 1)] / table[b]
    paper = (1 - a ** (k + 1)) / ((1 - a) * (c * k + beta))
    assert policy.speedup(b, 1000, b, k) == pytest.approx(paper)


def test_tide_gate_closes_and_tries_again():
    policy = TideGatePolicy(3, FixedTimes(published("gpt-oss-120b")))
    world = World(8, published("gpt-oss-120b"), Acceptance(level=-3.0))
    steps = world.run(policy, 600).steps
    assert 0 < np.count_nonzero(steps[100:]) <= 5
    assert policy.acceptance < 0.4


@pytest.mark.parametrize("name", ["adaspec", "static", "threshold", "gate"])
def test_every_policy_reports_the_same_keys(name):
    policy = made(name)
    World(4, published("Qwen3-235B"), Acceptance()).run(policy, 50)
    stats = policy.stats()
    assert stats["steps"] == 50 == sum(stats["steps_by_depth"])
    assert stats["drafted_tokens"] == (
        stats["verified_tokens"] + stats["trimmed_tokens"]
    )
    assert 0 < stats["accepted_tokens"] <= stats["verified_tokens"]
    assert stats.keys() == made("adaspec").stats().keys()
    # vLLM sends them to the API server by msgpack, which has no type for NumPy's.
    assert {type(value) for value in stats.values()} <= {int, float, dict, list}
    assert {type(one) for one in stats["steps_by_depth"]} == {int}


@pytest.mark.parametrize("name", ["adaspec", "static", "threshold", "gate"])
def test_unusual_steps_do_no_harm(name):
    policy = made(name)
    none = np.zeros(0, np.int64)
    policy.observe(Outcome(none, none, none, none, 0.0))
    assert policy.plan(batch_of([]), 0.0).passes == 0
    for slot in range(3):
        policy.add(slot, slot == 1, 0.0)
    # A step that was never observed, then one with other requests.
    policy.plan(batch_of([7, 7, 7]), 0.1)
    policy.go_on(1, np.full(3, 0.9, np.float32))
    assert policy.plan(batch_of([7, 7, 0]), 0.2).passes
    policy.go_on(1, np.full(3, 0.9, np.float32))
    lengths = policy.choose()
    assert lengths[2] == 0
    slots = np.array([3, 0])
    zero, one = np.zeros(2, np.int64), np.array([0, 1])
    policy.add(3, False, 0.3)
    policy.observe(Outcome(slots, np.array([0, 1]), one, one + 1, 0.3))
    policy.observe(Outcome(slots, zero, zero, zero + 1, 0.4))
    policy.draft_swapped()
    assert policy.stats()["steps"] >= 2


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="k_max"):
        ControlSettings(k_max=0)
