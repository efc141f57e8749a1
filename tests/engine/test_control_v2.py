"""Control of Model Runner V2 on synthetic steps: decisions after a landed step."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.control.toys import published
from vllm_tide.capture.guard import Suspension
from vllm_tide.capture.step import Step
from vllm_tide.config import ControlConfig
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings, ThresholdPolicy
from vllm_tide.control.step_times import StepTimes
from vllm_tide.engine.control_v2 import ControlV2

K = 4


def scheduled(
    *running: str, new: str = "", preempted: str = "", grammar: str = ""
) -> SimpleNamespace:
    """The scheduler's output of a step; requests have single letters as names."""

    def arrived(name: str) -> SimpleNamespace:
        params = SimpleNamespace(
            max_tokens=500,
            temperature=0.0,
            extra_args=None,
            structured_outputs=object() if name in grammar else None,
        )
        return SimpleNamespace(req_id=name, prompt_len=9, sampling_params=params)

    return SimpleNamespace(
        scheduled_new_reqs=[arrived(name) for name in new],
        num_scheduled_tokens=dict.fromkeys(running, 1),
        preempted_req_ids=set(preempted),
    )


def begun(trims: bool = True, grammar: str = "") -> ControlV2:
    control = ControlV2(8, 1000, ControlConfig(policy="threshold"), K, trims)
    control.policy = ThresholdPolicy(K)
    control.admit(scheduled("a", "b", new="ab", grammar=grammar))
    going_on = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[20, 40])
    control.begin(
        SimpleNamespace(
            scheduled_new_reqs=[],
            preempted_req_ids=set(),
            scheduled_cached_reqs=going_on,
            scheduled_spec_decode_tokens={"a": [-1, -1], "b": [-1, -1]},
            num_scheduled_tokens={"a": 3, "b": 3},
            total_num_scheduled_tokens=6,
        )
    )
    return control


def landed(confidence: list[float], steps: int, **change: Any) -> Step:
    """Return a step in which one of two requests' two drafts was accepted."""
    values: dict[str, Any] = {
        "req_ids": ["a", "b"],
        "bounds": np.array([0, 3, 6]),
        "drafts": np.array([2, 2]),
        "padding": np.array([0, 0]),
        "logit_ends": np.array([3, 6]),
        "num_prompt_tokens": np.array([9, 9]),
        "steps": steps,
        "version": 0,
        "buffer": None,
        "start": np.array([20, 40]),
        "emitted": np.array([2, 1]),
        "sampled": np.array([[5, 6, -1], [7, -1, -1]]),
        "token_ids": np.arange(6),
        "confidence": np.tile(np.array(confidence, np.float32), (2, 1)),
        "drafted": np.array([1, 2]),
        "reading": lambda: None,
    }
    return Step(**values | change)


SURE, UNSURE = [0.9, 0.9, 0.9, 0.9], [0.9, 0.9, 0.3, 0.9]


def test_a_confident_draft_goes_one_step_deeper_up_to_k():
    control = begun()
    for steps, then in ((1, 2), (2, 3), (3, 4), (4, 4)):
        control.learn(landed(SURE, steps))
        assert control.depth == then
    assert control.policy.stats()["verified_tokens"] == 16
    assert control.policy.stats()["accepted_tokens"] == 4


def test_the_next_draft_ends_at_an_unsure_step():
    control = begun()
    step = landed(UNSURE, 4)
    control.learn(step)
    assert control.depth == 3
    assert control.choose(step.req_ids, [[-1] * 4, [-1] * 4]) == [[-1] * 3] * 2


@pytest.mark.parametrize("trims", [True, False])
def test_old_drafts_decide_only_where_the_next_step_is_decided(trims):
    """With asynchronous scheduling forecasts decide, and all drafts are learned."""
    control = begun(trims)
    plan, go_on = control.policy.plan, control.policy.go_on
    control.policy.plan = lambda *args: replace(plan(*args), foreseen=2)
    shown = []
    control.policy.go_on = lambda step, conf: shown.append(step) or go_on(step, conf)
    for confidence, depth, observed in ((UNSURE, 3, 3), (SURE, 4, 4)):
        control.learn(landed(confidence, 4))
        assert control.depth == (depth if trims else 2)
        assert shown == list(range(1, (observed if trims else 4) + 1))
        shown.clear()
    assert control.faults == {}


@pytest.mark.parametrize("trims", [True, False])
def test_only_drafts_of_the_landed_step_are_cut(trims):
    control = begun(trims)
    step = landed(UNSURE, 4)
    control.learn(step)
    later = list(step.req_ids)
    assert control.choose(later, [[-1] * 4] * 2) == [[-1] * 4] * 2
    cut = [[-1] * 3] * 2 if trims else [[-1] * 4] * 2
    assert control.choose(step.req_ids, [[-1] * 4] * 2) == cut


def test_metrics_count_what_ran_and_not_what_the_policy_forecast():
    control = begun()
    control.learn(landed(UNSURE, 4))
    control.learn(landed(SURE, 0))
    stats = control.stats()
    assert (stats["steps"], stats["draft_passes"], stats["draft_depth"]) == (2, 4, 2)
    assert (stats["drafted_tokens"], stats["trimmed_tokens"]) == (8, 2)
    assert stats["steps_by_depth"] == {0: 1, 1: 0, 2: 0, 3: 0, 4: 1}
    assert control.stats()["draft_depth"] is None


def test_a_batch_of_prefill_chunks_does_not_inform_the_depth():
    control = begun()
    control.learn(landed(UNSURE, 4))
    none = np.array([0, 0])
    control.learn(landed(UNSURE, 3, drafts=none, emitted=none))
    assert control.depth == 3


def test_ended_and_unknown_requests_are_left_out():
    control = begun()
    control.end(["a", "never seen"])
    control.learn(landed(SURE, 4))
    assert control.policy.stats()["verified_tokens"] == 2
    control.end(["b"])
    control.learn(landed(SURE, 4))
    assert control.faults == {}


def test_placeholders_are_not_counted_as_verified():
    control = begun()
    control.learn(landed(SURE, 4, padding=np.array([2, 0])))
    assert control.policy.stats()["verified_tokens"] == 2


def test_a_step_after_a_lost_one_is_planned_for_but_not_learned():
    control = begun()
    control.learn(landed(SURE, 4))
    control.learn(landed(UNSURE, 4, after_gap=True))
    assert control.policy.stats()["verified_tokens"] == 4
    assert control.depth == 3


@pytest.mark.parametrize("trims", [True, False])
def test_after_a_fault_nothing_is_drafted_for_one_then_two_minutes(trims, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    control = begun(trims)
    control.suspension = Suspension(lambda: now[0])
    policies = []

    def start():
        policies.append(ThresholdPolicy(K))
        added = policies[-1].added = []
        policies[-1].add = lambda slot, *_: added.append(slot)
        control.policy = policies[-1]

    control.start = start
    for minutes in (1, 2):
        control.learn(landed(UNSURE, 4, emitted=None))
        assert control.policy is None and control.depth == 0
        assert control.faults == {"control": minutes}
        assert control.stats() == {"control_suspended_s": 60.0 * minutes}
        now[0] += 60.0 * minutes - 1.0
        step = landed(SURE, 0)
        control.learn(step)
        assert control.policy is None and control.depth == 0
        assert step.cost == 0.0, "no estimate of the draft"
        now[0] += 1.0
        control.learn(landed(SURE, 4))
        assert control.policy is policies[-1] and control.depth > 0
        assert sorted(policies[-1].added) == sorted(slots_in(control))
        assert control.stats()["control_suspended_s"] == 0.0
        assert control.stats()["steps"] >= 0
    assert len(policies) == 2


def slots_in(control: ControlV2) -> list[int]:
    return list(control._requests.slot_of.values())


def test_a_step_reports_its_cost_and_its_verify_chance(monkeypatch):
    control = begun()
    control.times = StepTimes(published("Llama-3.3-70B"))
    control.learn(landed(SURE, 4))  # its draft passes count in the next step
    step = landed(SURE, 4)
    control.learn(step)
    model = control.times
    plain = model.target_curve(2, 60, 4)
    dear = plain[4] + model.draft_curve(2, 60, 6, 4)[4]
    assert step.cost == pytest.approx(dear / plain[0])
    prefill = landed(SURE, 4, bounds=np.array([0, 40, 80]), drafts=np.array([0, 0]))
    control.learn(prefill)
    assert prefill.cost == 1.0
    control.policy = AdaSpecPolicy(
        ControlSettings(k_max=K, max_requests=8), control.times
    )
    monkeypatch.setattr(control.policy, "choose", lambda: np.array([2, 3]))
    control.policy.verify_chance = np.array([1.0, 0.125])
    step = landed(SURE, 4)
    control.learn(step)
    assert control.explored == {}, "not before the scheduler's call"
    control.choose(step.req_ids, [[-1] * 4] * 2)
    assert control.explored == {"b": 0.125}
    control.choose(["a", "b"], [[-1] * 4] * 2)  # of a step that has not landed
    assert control.explored == {}


def slots_of(control: ControlV2) -> set[str]:
    return set(control._requests.slot_of)


def test_a_preempted_request_releases_its_slot_and_a_running_one_does_not():
    control = ControlV2(2, 1000, ControlConfig(policy="threshold"), K, True)
    control.policy = ThresholdPolicy(K)
    control.admit(scheduled("a", "b", new="ab"))
    # `a` runs and has no tokens in this step; `b` makes room for `c`.
    control.admit(scheduled("c", new="c", preempted="b"))
    assert slots_of(control) == {"a", "c"}
    control.end(["a"])
    control.admit(scheduled("c", "b", new="b"))
    assert slots_of(control) == {"b", "c"}


def test_drafts_rejected_by_a_grammar_unverified_are_no_outcome():
    for trims, grammar, accepted in ((False, "b", 2), (False, "", 4), (True, "b", 4)):
        control = begun(trims, grammar)
        control.learn(landed(SURE, 4))
        stats = control.policy.stats()
        assert (stats["verified_tokens"], stats["accepted_tokens"]) == (accepted, 1)
        assert control.stats()["drafted_tokens"] == 8  # it is drafted for as before


@pytest.mark.parametrize(
    ("requests", "trims", "every"), [(8, False, 1), (200, False, 4), (200, True, 1)]
)
def test_many_requests_decide_in_some_of_the_steps(requests, trims, every):
    names = [f"r{i}" for i in range(requests)]
    control = ControlV2(256, 1000, ControlConfig(), K, trims)
    times = StepTimes(published("Qwen3-235B"))
    settings = ControlSettings(k_max=K, max_requests=256)
    policy = control.policy = AdaSpecPolicy(settings, times)
    calls, plan, observe = [], policy.plan, policy.observe
    policy.plan = lambda *args: (calls.append("plan"), plan(*args))[1]
    policy.observe = lambda outcome: (calls.append("observe"), observe(outcome))[1]
    control.admit(scheduled(*names, new=names))
    num_steps, ones = 12, np.ones(requests, np.int64)
    for number in range(num_steps):
        step = landed(
            [],
            K,
            req_ids=names,
            bounds=np.arange(requests + 1) * (K + 1),
            drafts=K * ones,
            padding=0 * ones,
            start=20 * ones + number,
            emitted=3 * ones,
            sampled=np.tile(ones, (K + 1, 1)).T,
            drafted=ones,
            reading=lambda: None,
        )
        step.confidence = np.full((requests, K), 0.9, np.float32)
        control.learn(step)
        calls.append("step")
    assert not control.faults
    assert calls.count("plan") == calls.count("observe") == num_steps // every
    if every > 1:
        # What was planned after one step is observed when the next has landed.
        after = calls.index("plan")
        assert calls[after : after + 3] == ["plan", "step", "observe"]
    assert control.stats()["steps"] == num_steps
    assert control.stats()["drafted_tokens"] == num_steps * requests * K
    assert control.stats()["verified_tokens"] == num_steps * requests * K
    assert control.stats()["accepted_tokens"] == num_steps * requests * 2


def with_memory(trims: bool = True) -> ControlV2:
    """Control in which a first token below 0 selects the memory's drafts."""
    from vllm_tide.engine.memory_v2 import MemoryV2

    control = begun(trims)
    control.memory = SimpleNamespace(from_memory=MemoryV2.from_memory)
    return control


def observed(control: ControlV2) -> list[Any]:
    got: list[Any] = []
    observe = control.policy.observe
    control.policy.observe = lambda seen: (got.append(seen), observe(seen))
    return got


def test_the_policy_does_not_observe_drafts_of_the_memory():
    control = with_memory()
    got = observed(control)
    first = landed(SURE, 4, drafted=np.array([-1 - 5, 2]))
    control.learn(first)
    assert first.memory.tolist() == [False, False]
    assert first.drafted.tolist() == [5, 2], "the draft's own"
    second = landed(SURE, 4, drafted=np.array([1, -1 - 0]))
    control.learn(second)
    assert second.memory.tolist() == [True, False]
    assert [seen.verified.tolist() for seen in got] == [[2, 2], [0, 2]]
    assert [seen.accepted.tolist() for seen in got] == [[1, 0], [0, 0]]
    stats = control.stats()
    assert (stats["memory_proposals"], stats["memory_accepted_tokens"]) == (1, 1)
    assert (stats["verified_tokens"], stats["accepted_tokens"]) == (6, 1)
    assert control.remembered == {"b"} and control.faults == {}
    control.end(["b"])
    assert control.remembered == set()
    late = landed(SURE, 4, drafted=np.array([1, -1]))
    control.learn(late)
    assert control.remembered == set(), "it had ended"


def test_drafts_after_a_lost_step_are_not_learned():
    control = with_memory()
    got = observed(control)
    step = landed(SURE, 4, after_gap=True)
    control.learn(step)
    assert step.memory.tolist() == [True, True] and got == []
    assert control.stats()["memory_proposals"] == 0
    assert control.stats()["verified_tokens"] == 0


def test_the_scheduler_counts_a_step_once_its_draft_source_is_known():
    from tests.engine.idle_scheduler import idle_scheduler
    from vllm_tide.config import TideConfig
    from vllm_tide.engine.scheduler import _WAITING, SchedulerTide

    tide = SchedulerTide(K, idle_scheduler(), TideConfig())

    def step(number: int, settled: list[tuple[int, list[str]]]) -> dict[str, Any]:
        tide.observe({"step": number, "settled": settled, "staged": 0})
        for name in ("r0", "r1"):
            tide.verified(SimpleNamespace(request_id=name, num_tokens=9), 3, 2)
        return tide.stats()

    assert step(1, [])["prefix_verified"] == {}
    assert step(2, [(1, ["r1"])])["prefix_verified"] == {"none": 3}
    report = step(4, [(2, []), (3, ["r0"])])
    assert report["prefix_verified"] == {"none": 6}, "more than before"
    assert sum(report["step_accepted"]["0-1k"].values()) == 2
    # On a CPU a step has landed when it is observed.
    assert step(5, [(4, ["r0", "r1"]), (5, ["r1"])])["prefix_verified"] == {"none": 3}
    assert step(6, [(6, [])])["prefix_verified"] == {"none": 6}
    for number in range(7, 100):  # none of these lands
        step(number, [])
    assert len(tide._waiting) <= _WAITING + 1
