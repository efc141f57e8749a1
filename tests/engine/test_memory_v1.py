"""The memory on Model Runner V1 without vLLM: proposals and their outcomes."""

import numpy as np
import pytest

from tests.control.toys import published
from tests.engine.runner_v1 import Engine, K, N
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings, StaticPolicy
from vllm_tide.control.step_times import StepTimes


def started(policy=None, **config):
    engine = Engine(memory=True, **config)
    engine.control.policy = policy or StaticPolicy(K)
    engine.control.start = lambda: None
    return engine


def adaspec(engine, **knobs):
    engine.control.times = StepTimes(published("Llama-3.3-70B", host=1e-3))
    settings = ControlSettings(k_max=K, max_requests=4, **knobs)
    engine.control.policy = AdaSpecPolicy(settings, engine.control.times)


def watch(engine):
    """Outcomes that the policy gets."""
    got, observe = [], engine.control.policy.observe

    def keep(outcome):
        got.append(outcome)
        observe(outcome)

    engine.control.policy.observe = keep
    return got


def catch_up(engine):
    engine.control._backlog.missing[:] = 0  # nothing here can catch up


def test_a_repeating_text_needs_no_draft_pass():
    """After three sevens the memory proposes seven and soon learns that it is right."""
    engine = started()
    passes, own = [], []
    for _ in range(12):
        before = engine.drafts
        steps, _ = engine.step()
        passes.append(steps)
        own.append({tuple(d) for d in before.values()})
        assert engine.control.faults == {}
    assert passes[0] == K
    assert passes[-4:] == [0] * 4
    assert own[-1] == {(7,) * K}, "the proposals are what is verified"
    stats = engine.control.stats()
    assert stats["steps_without_drafts"]["memory"] >= 4
    assert stats["memory_proposals"] >= 2 * 4
    assert stats["memory_accepted_tokens"] == K * stats["memory_proposals"]


@pytest.mark.parametrize("kind", ["static", "adaspec"])
def test_only_drafted_tokens_update_the_drafts_estimate(kind):
    engine = started()
    if kind == "adaspec":
        adaspec(engine)
    got, sent = watch(engine), []
    control = engine.control
    for _ in range(40):
        catch_up(engine)
        verified = {r: list(d) for r, d in engine.drafts.items()}
        engine.step(sure=0.6)
        sent.append(verified)
        flagged = {r for r, d in verified.items() if 7 in d}
        assert flagged <= control.verified_memory
        assert all(1 not in verified.get(r, ()) for r in control.verified_memory)
    assert control.faults == {}
    memory = sum(7 in d for v in sent for d in v.values())
    drafts = sum(d.count(1) for v in sent for d in v.values())
    assert memory > 20
    assert sum(int(o.verified.sum()) for o in got) == drafts
    assert sum(int(o.accepted.sum()) for o in got) == 0, "the draft's are all wrong"
    stats = control.stats()
    assert stats["verified_tokens"] == drafts and stats["accepted_tokens"] == 0
    assert stats["memory_proposals"] == memory
    if kind == "adaspec":
        # Conditional on the tokens before, all of them are rejected.
        tries, hits = control.policy.acceptance._counts.swapaxes(0, 1)
        assert hits.sum() == 0 and tries.sum() <= drafts


def test_the_canary_counts_the_drafts_passes_beside_the_memory():
    """Each second step verifies the memory's proposals, and the draft runs in it."""
    engine = started()
    control = engine.control
    control.times = times = StepTimes(published("Llama-3.3-70B", host=1e-3))
    recall, number, own = control._recall, 0, 0

    def every_second(**step):
        proposals = recall(**step)
        return proposals if number % 2 else None

    control._recall = every_second
    for number in range(40):
        catch_up(engine)
        context = int(engine.batch.num_computed_tokens_cpu.sum())
        drafts = [token for draft in engine.drafts.values() for token in draft]
        engine.step()
        if number > 12 and 7 not in drafts:  # the memory has its record by then
            own += 1
            assert drafts == [1] * N * K and engine.ended_step.memory is None
            curve = times.target_curve(N, context, N * K)
            passes = times.draft_curve(N, context, N, K)[K]
            assert engine.cost == pytest.approx((curve[-1] + passes) / curve[0])
        elif number > 12:
            assert engine.ended_step.memory.all(), "left out by the canary"
    assert control.faults == {} and own > 10


def test_proposals_of_a_request_that_waits_a_step_stay_the_memorys():
    engine = started()
    got = watch(engine)
    for _ in range(12):
        engine.step()
    assert engine.control.remembered == set(engine.reqs)
    waits, drafts = engine.reqs.pop(), dict(engine.drafts)
    engine.step()
    assert engine.control.verified_memory == set(engine.reqs)
    assert engine.ended_step.memory.all(), "marked in its records"
    engine.reqs.append(waits)
    engine.drafts[waits] = drafts[waits]
    before = sum(int(o.verified.sum()) for o in got)
    engine.step()
    assert waits in engine.control.verified_memory
    assert sum(int(o.verified.sum()) for o in got) == before
    assert engine.control.faults == {}
    engine.remove()
    engine.step()
    assert engine.control.remembered <= set(engine.reqs), "nothing of who has ended"


def test_steps_are_skipped_while_off_only_where_nothing_is_proposed():
    """A skipped step assumes that every row is committed."""
    engine = started()
    adaspec(engine, min_gain=1e9, probe_share=0.0)
    control = engine.control
    got = watch(engine)
    calls, keep = [], control._backlog.keep
    control._backlog.keep = lambda *step: (calls.append(step[3].copy()), keep(*step))
    for _ in range(40):
        before = engine.batch.num_tokens_no_spec.copy()
        engine.step()
        emitted = engine.batch.num_tokens_no_spec - before
        assert np.array_equal(calls[-1], emitted), "rows that are committed"
    assert control.faults == {}
    assert control._memory_count[0] > 20, "proposals are verified all the same"
    assert sum(int(o.verified.sum()) for o in got) == 0


def test_a_new_request_in_a_slot_gets_no_proposals_of_the_previous_one():
    engine = started()
    for _ in range(12):
        engine.step()
    catch_up(engine)
    engine.replace(0, "new")
    engine.batch.token_ids_cpu[0, :PROMPT_TOKENS] = [7, 7, 7, 7, 3]
    steps, lengths = engine.step()
    assert steps == K, "one request has no proposal"
    assert engine.drafts["new"] == [1] * K
    assert engine.drafts["r1"] == [7] * K
    assert lengths == [K] * N


PROMPT_TOKENS = 5


@pytest.mark.parametrize("where", ["recall", "drafted"])
def test_a_fault_of_the_memory_is_contained(where):
    engine = started()

    def fail(*args):
        raise ValueError

    setattr(engine.control._memory, where, fail)
    for _ in range(3):
        engine.step()
    assert engine.control.faults["control_memory"] >= 1
    assert engine.control.policy is None


def test_the_scheduler_counts_only_the_drafts_tokens():
    """Its report comes before the verification results of the same step."""
    from types import SimpleNamespace

    from tests.engine.idle_scheduler import idle_scheduler
    from vllm_tide.config import TideConfig
    from vllm_tide.engine.scheduler import SchedulerTide

    tide = SchedulerTide(K, idle_scheduler(), TideConfig())
    for memory in ([], ["r1"], []):
        tide.observe({"drafts": None, "memory": memory} if memory else {})
        for name in ("r0", "r1"):
            tide.verified(SimpleNamespace(request_id=name, num_tokens=9), 3, 2)
    tide.observe({"staged": 0})
    stats = tide.stats()
    assert sum(sum(steps.values()) for steps in stats["step_accepted"].values()) == 5
    assert stats["prefix_verified"] == {"none": 3 * 5}
    assert stats["prefix_accepted"] == {"none": 2 * 5}
