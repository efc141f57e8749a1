"""Control on Model Runner V1 without vLLM: faults, costs and chances of a step."""

import time

import numpy as np
import pytest

from tests.control.toys import published
from tests.engine.runner_v1 import Engine, K, N
from vllm_tide.capture.guard import Suspension
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings, ThresholdPolicy
from vllm_tide.control.step_times import StepTimes


def failing(engine, where):
    def fail(*args):
        raise ValueError("negative elements")

    setattr(engine.control.policy, where, fail)


@pytest.mark.parametrize("where", ["plan", "observe", "go_on", "choose"])
def test_after_a_fault_nothing_is_drafted_for_one_then_two_minutes(
    where, monkeypatch, caplog
):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine = Engine()
    control = engine.control
    control.suspension = Suspension(lambda: now[0])
    added = []

    def start():
        control.policy = ThresholdPolicy(K)
        added.clear()
        control.policy.add = lambda slot, *_: added.append(slot)

    control.start = start
    start()
    assert engine.step() == (K, [K] * N)
    for minutes in (1, 2):
        failing(engine, where)
        assert engine.step()[1] == [0] * N
        assert control.policy is None
        assert sum(control.faults.values()) == minutes
        assert control.stats() == {"control_suspended_s": 60.0 * minutes}
        for _ in range(2):  # the draft is left out, its rows are kept
            now[0] += 60.0 * minutes / 2 - 1.0
            before = control._backlog.missing.sum() + control._backlog.holes
            assert engine.step() == (0, [0] * N)
            assert engine.cost == 0.0, "no estimate of the draft"
            assert control._backlog.missing.sum() + control._backlog.holes > before
        now[0] += 2.0
        control._backlog.missing[:] = 0  # nothing here can catch up
        assert engine.step() == (K, [K] * N)
        assert sorted(added) == sorted(control._requests.slot_of.values())
        assert control.stats()["control_suspended_s"] == 0.0
        assert (control.stats()["draft_depth"] or 0.0) >= 0.0
    assert "negative elements" not in caplog.text


def test_a_policy_that_cannot_begin_is_retried_with_backoff(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine, tries = Engine(), []
    engine.control.suspension = Suspension(lambda: now[0])

    def start():
        tries.append(now[0])
        raise ValueError

    engine.control.start = start
    while now[0] < 4 * 3600:
        assert engine.step() == (0, [0] * N)
        now[0] += 30.0
    waits = np.diff(tries)
    assert waits[:6].tolist() == [60, 120, 240, 480, 960, 1920]
    assert set(waits[6:]) == {3600.0}


def test_followers_follow_and_the_length_is_static_before_a_start():
    assert Engine().step() == (K, [K] * N)
    codes = iter([0, 0])
    follower = Engine(agree=lambda value: next(codes), leader=False)
    assert follower.step() == (0, [0] * N)


def test_a_step_reports_its_cost_and_its_verify_chance():
    engine = Engine()
    control = engine.control
    control.times = StepTimes(published("Llama-3.3-70B", host=1e-3))
    model = control.times
    control.policy = ThresholdPolicy(K)
    engine.step()
    assert engine.cost == 1.0  # its draft passes count where their tokens are verified
    context = int(engine.batch.num_computed_tokens_cpu.sum())
    engine.step()
    curve = model.target_curve(N, context, N * K)
    draft = model.draft_curve(N, context, N, K)[K]
    assert engine.cost == pytest.approx((curve[-1] + draft) / curve[0])
    control.policy = AdaSpecPolicy(
        ControlSettings(k_max=K, max_requests=4, probe_share=0.0), control.times
    )
    control.policy.choose = lambda: np.array([1, 2])
    control.policy.verify_chance = np.array([1.0, 0.125])
    engine.step(sure=0.999)
    assert engine.explored_slots == {}
    engine.step(sure=0.999)
    assert engine.explored_slots == {"r1": 0.125}, "the drafts that this step verified"


@pytest.mark.parametrize("where", ["_requests.add", "_requests.remove"])
def test_a_fault_outside_the_policy_does_not_leave_the_step(where):
    engine = Engine()
    control = engine.control

    def fail(*_args):
        raise OverflowError

    part, name = where.split(".")
    setattr(getattr(control, part), name, fail)
    control.start = lambda: None
    control.policy = ThresholdPolicy(K)
    engine.step()
    control._contain("forget", control._forget, ["gone"])
    assert control.policy is None and sum(control.faults.values()) >= 1
    assert engine.step() == (0, [0] * N)


def test_a_fault_in_a_draft_swap_does_not_leave_the_step():
    engine = Engine()
    control = engine.control
    control.start = lambda: None
    control.policy = ThresholdPolicy(K)

    def fail():
        raise OverflowError

    control.policy.draft_swapped = fail
    control.draft_swapped()
    assert control.policy is None and control.faults == {"control_swap": 1}
    assert engine.step() == (0, [0] * N)
