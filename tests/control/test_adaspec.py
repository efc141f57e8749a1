import dataclasses

import numpy as np
import pytest

from sim.clairvoyant import ClairvoyantPolicy
from tests.control.toys import (
    Acceptance,
    FixedTimes,
    World,
    batch_of,
    published,
)
from vllm_tide.control.allowance import Allowance
from vllm_tide.control.batch import Outcome
from vllm_tide.control.costs import FirstPassAlways
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings, StaticPolicy
from vllm_tide.control.step_times import StepTimes

HARD, EASY = Acceptance(level=-3.5), Acceptance(level=1.8)
nightly = pytest.mark.nightly


class NonePolicy(StaticPolicy):
    def _gate(self, batch, most):
        return "no_gain"


def adaspec(n, model, time=None, **knobs):
    settings = ControlSettings(max_requests=n, **knobs)
    return AdaSpecPolicy(settings, time or StepTimes(published(model)))


def world(n, model, acceptance, seed=1):
    acceptance = dataclasses.replace(acceptance)
    return World(n, published(model), acceptance, seed=seed, steps_each=60)


@pytest.mark.parametrize(
    ("model", "level"),
    [
        ("gpt-oss-120b", 1.8),
        ("Qwen3-235B", -1.0),
        pytest.param("gpt-oss-120b", -1.0, marks=nightly),
        pytest.param("gpt-oss-120b", 0.5, marks=nightly),
        pytest.param("Qwen3-235B", 1.8, marks=nightly),
        pytest.param("Llama-3.3-70B", 0.5, marks=nightly),
    ],
)
def test_close_to_clairvoyant_and_above_every_static(model, level):
    n, num_steps = 16, 400
    acceptance = Acceptance(level=level)
    throughput = (
        world(n, model, acceptance).run(adaspec(n, model), num_steps).throughput
    )
    best = ClairvoyantPolicy(published(model))
    ideal = world(n, model, acceptance).run(best, num_steps).throughput
    static = max(
        world(n, model, acceptance).run(StaticPolicy(k), num_steps).throughput
        for k in (1, 3, 5, 7)
    )
    assert throughput > 0.965 * ideal
    assert throughput > 0.995 * static


@pytest.mark.parametrize(("n", "skips"), [(16, False), (1, True)])
def test_off_costs_almost_nothing_when_nothing_pays(n, skips):
    model = "gpt-oss-120b"
    policy, where = adaspec(n, model), world(n, model, HARD)
    where.run(policy, 1000, skips=skips)  # until it has estimated the draft
    before = policy.stats()
    run = where.run(policy, 2000, skips=skips)
    plain = world(n, model, HARD).run(NonePolicy(7), 2000)
    assert run.throughput > 0.99 * plain.throughput
    stats = policy.stats()
    asked = stats["steps"] - before["steps"]
    assert stats["steps_without_drafts"]["no_gain"] > (100 if skips else 1900)
    assert asked < 300 if skips else asked == 2000
    assert stats["exploration_steps"] > 0
    # All steps since the last call are measured.
    plain, measured = stats["plain_step_seconds"], stats["step_seconds"]
    assert measured == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize(("acceptance", "skips"), [(EASY, False), (HARD, True)])
def test_the_seconds_give_the_speedup_over_plain_decoding(acceptance, skips):
    model, n = "gpt-oss-120b", 8
    policy = adaspec(n, model)
    run = world(n, model, acceptance).run(policy, 600, skips=skips)
    plain = world(n, model, acceptance).run(NonePolicy(7), 600)
    stats = policy.stats()
    speedup = stats["plain_step_seconds"] / stats["step_seconds"]
    assert speedup == pytest.approx(run.throughput / plain.throughput, rel=0.02)
    assert speedup > 1.3 if acceptance is EASY else 0.97 < speedup < 1.01


@pytest.mark.parametrize(
    ("n", "skips", "seeds"),
    [
        (16, True, (1,)),
        *(
            pytest.param(n, skips, (1, 2, 3), marks=nightly)
            for n in (1, 16)
            for skips in (False, True)
        ),
    ],
)
def test_drafting_resumes_when_the_workload_becomes_easier(n, skips, seeds):
    model = "gpt-oss-120b"
    for seed in seeds:
        policy = adaspec(n, model)
        where = world(n, model, HARD, seed=seed)
        where.run(policy, 1000, skips=skips)
        off = where.run(policy, 500, skips=skips)
        plain = n / float(published(model).target_curve(n, 500 * n, 0)[0])
        assert off.throughput > 0.98 * plain, "nothing but trials"
        where.acceptance.level = EASY.level
        begun = where.now
        steps: list[int] = []
        while where.now < begun + 10.0 and np.count_nonzero(steps[-50:]) < 45:
            steps += where.run(policy, 50, skips=skips).steps
        # Within a tenth of a regime of one minute.
        assert where.now < begun + 6.0
        where.acceptance.level = HARD.level
        where.run(policy, 1000, skips=skips)
        off = where.run(policy, 500, skips=skips)
        assert off.throughput > 0.98 * plain


def wrong(model):
    """Return a model with a third of the draft's cost, for an expensive draft."""
    right = published(model)
    dear = dataclasses.replace(right.draft_next, seconds=(0.004,))
    cheap = dataclasses.replace(right.draft_next, seconds=(0.004 / 3,))
    return (
        dataclasses.replace(right, draft_first=dear, draft_next=dear),
        dataclasses.replace(right, draft_first=cheap, draft_next=cheap),
    )


def test_a_wrong_time_model_is_corrected():
    n = 16
    truth, model = wrong("gpt-oss-120b")
    acceptance = Acceptance(level=0.5)
    policy = adaspec(n, "", StepTimes(model))
    where = World(n, truth, acceptance, seed=1, steps_each=60)
    run = where.run(policy, 1500)
    where = World(n, truth, acceptance, seed=1, steps_each=60)
    plain = where.run(NonePolicy(7), 1500)
    assert run.throughput > 0.97 * plain.throughput
    trusting = World(n, truth, acceptance, seed=1, steps_each=60)
    static = trusting.run(StaticPolicy(2), 300)
    assert static.throughput < 0.9 * plain.throughput, "drafting does not pay here"


@pytest.mark.parametrize(("slowdown", "guessed"), [(1.3, False), (1.5, True)])
def test_plain_steps_are_measured_again_while_drafting_pays(slowdown, guessed):
    """Nothing was drafted while the machine was slow, and then drafting pays."""
    n, model = 4, published("Llama-3.3-70B")
    forwards = ("target", "draft_first", "draft_next")
    slow = {}
    for name in forwards:
        each = getattr(model, name)
        seconds = tuple(slowdown * s for s in each.seconds)
        alpha = slowdown * each.alpha
        slow[name] = dataclasses.replace(each, seconds=seconds, alpha=alpha)
    policy = adaspec(n, "", StepTimes(model, guessed=guessed), k_max=3)
    acceptance = Acceptance(level=-4.0, between=0.3)
    where = World(n, dataclasses.replace(model, **slow), acceptance, k=3, seed=1)
    where.run(policy, 800)
    where.time, where.acceptance.level = model, EASY.level
    policy.draft_swapped()
    begun, steps = where.now, []
    while where.now < begun + 100.0:
        steps += where.run(policy, 200).steps
    plain = policy._times.target_curve(n, 500 * n, 0)[0]
    assert plain == pytest.approx(model.target_curve(n, 500 * n, 0)[0], rel=0.05)
    assert np.count_nonzero(steps) > 0.98 * len(steps), "checks are few"


def test_limits_bound_the_steps_that_can_meet_them():
    model, n = "Qwen3-235B", 16
    costs = published(model)
    plain = float(costs.target_curve(n, 0, 0)[0])
    policy = adaspec(n, model)
    limit = 1.3 * plain
    result = world(n, model, EASY).run(policy, 300, limit)
    assert max(result.times) <= limit * 1.0001
    assert np.mean(result.steps) > 0.5
    assert policy.stats()["slo_unreachable_steps"] == 0
    # Nothing meets half of the plain time: treated as no limit, and counted.
    policy = adaspec(n, model)
    result = world(n, model, EASY).run(policy, 300, 0.5 * plain)
    assert np.mean(result.steps) > 4
    assert policy.stats()["slo_unreachable_steps"] == 300
    # Only plain decoding fits.
    policy = adaspec(n, model)
    result = world(n, model, EASY).run(policy, 100, 1.001 * plain)
    assert max(result.steps) == 0
    assert policy.stats()["steps_without_drafts"]["slo"] == 100


def test_unusual_requests_get_their_own_lengths():
    """Same confidences, different acceptance: only the offset distinguishes them."""
    model, n = "Qwen3-235B", 16

    class Split(Acceptance):
        def draw(self, rng, ease, k):
            chance, confidence = super().draw(rng, np.zeros(n), k)
            logit = np.log(chance / (1 - chance))
            logit[:, : n // 2] += 1.5
            logit[:, n // 2 :] -= 1.5
            return 1 / (1 + np.exp(-logit)), confidence

    policy = adaspec(n, model)
    verified = np.zeros(n)
    choose = policy.choose

    def recorded():
        lengths = choose()
        verified[:] += lengths
        return lengths

    where = World(n, published(model), Split(level=0.5), seed=1)
    where.left[:] = 1 << 30
    where.run(policy, 100)
    policy.choose = recorded
    policy.add = lambda *args: None
    where.run(policy, 200)
    assert verified[: n // 2].mean() > 2 * verified[n // 2 :].mean()


def test_a_swapped_draft_is_tried_at_once():
    model, n = "gpt-oss-120b", 16
    policy = adaspec(n, model)
    where = world(n, model, HARD)
    where.run(policy, 2000)
    policy.draft_swapped()
    where.acceptance.level = EASY.level
    policy.add = lambda *args: None
    where.run(policy, 250)
    before = policy.stats()["steps_without_drafts"]
    steps = where.run(policy, 50).steps
    # Off only to measure the time of an undrafted step, once at most.
    after = policy.stats()["steps_without_drafts"]
    checks = after.pop("check", 0) - before.pop("check", 0)
    assert after == before and checks <= 1
    assert np.count_nonzero(steps) == 50 - checks


def test_calibration_error_falls_and_calibration_pays(monkeypatch):
    model, n = "Qwen3-235B", 16
    acceptance = Acceptance(level=0.0, slope=1.5, bias=1.5)
    errors, speed = [], []
    for calibrate in (True, False):
        policy = adaspec(n, model)
        if not calibrate:  # the confidence is taken for the probability
            monkeypatch.setattr(policy.acceptance, "_fit", lambda kind: None)
            monkeypatch.setattr(policy.acceptance.requests, "learn", lambda *_: None)
        speed.append(world(n, model, acceptance).run(policy, 400).throughput)
        errors.append(policy.stats()["calibration_error"])
    assert errors[0] < 0.05 < 0.15 < errors[1]
    assert speed[0] > 1.02 * speed[1]


def test_verification_pays_where_verified_tokens_cost():
    model, n = "Qwen3-235B", 16
    acceptance = Acceptance(level=0.0)
    speed = [
        world(n, model, acceptance)
        .run(adaspec(n, model, verify=verify), 400)
        .throughput
        for verify in (True, False)
    ]
    assert speed[0] > 1.02 * speed[1]


def test_a_slots_next_request_inherits_nothing():
    policy = adaspec(2, "Qwen3-235B")
    for slot in range(2):
        policy.add(slot, False, 0.0)
    slots, drafts = np.arange(2), np.full(2, 7)
    for number in range(5):
        plan = policy.plan(batch_of([7, 7]), 0.01 * number)
        step, more = 0, plan.passes > 0
        while more:
            step += 1
            more = policy.go_on(step, np.full(2, 0.9))
        sent = np.minimum(policy.choose(), drafts)
        none = np.zeros(2, np.int64)
        policy.observe(Outcome(slots, sent, none, none + 1, 0.01 * number + 0.009))
    policy.add(1, False, 0.1)
    policy.draft_swapped = lambda: None
    policy._learn()
    value = policy.acceptance.requests.value
    assert value[0] < -0.1 and value[1] == 0.0


def test_whole_drafts_are_verified_in_every_64th_step():
    """Before any confidence; only outcomes with a verify chance are learned."""
    n, model = 64, "Llama-3.3-70B"
    for shift in (-1.0, 2.0):
        rng = np.random.default_rng(3)
        policy = adaspec(n, model, FixedTimes(published(model)))
        policy.allowance = Allowance(0.0)  # no checks, which would be due in each step
        where = World(n, published(model), Acceptance(), seed=1)
        for slot in range(n):
            policy.add(slot, False, 0.0)
        wholes = []
        for number in range(1, 193):
            now = 10.0 * number  # the budget suffices for anything
            batch = where.batch()
            plan = policy.plan(batch, now)
            step, more = 0, plan.passes > 0
            confidence = 1.0 / (1.0 + np.exp(-rng.normal(shift, 1.5, (7, n))))
            while more and step < plan.passes:
                step += 1
                more = policy.go_on(step, confidence[step - 1])
            lengths = policy.choose()
            draws = (rng.random((7, n)) < confidence) & (
                np.arange(7)[:, None] < lengths
            )
            accepted = np.cumprod(draws, axis=0).sum(axis=0)
            outcome = Outcome(batch.slots, lengths, accepted, accepted + 1, now + 5.0)
            policy.observe(outcome)
            chance = policy.verify_chance
            if chance is not None:
                wholes.append(number)
                assert (lengths == np.minimum(batch.caps, step)).all()
                assert set(chance.tolist()) <= {1.0, 1.0 / 64}
        assert wholes and all(number % 64 == 0 for number in wholes)


def test_nothing_is_explored_without_a_share():
    n, model = 16, "gpt-oss-120b"
    policy = adaspec(n, model, probe_share=0.0)
    run = world(n, model, HARD).run(policy, 600)
    assert not any(run.steps[300:])
    assert policy.stats()["exploration_steps"] == 0 and policy.verify_chance is None


@pytest.mark.parametrize("acceptance", [EASY, HARD])
def test_decisions_do_not_depend_on_the_clocks_origin(acceptance):
    """`time.monotonic` begins when the machine does."""
    runs = []
    for start in (0.0, 3e6):
        where = world(4, "gpt-oss-120b", acceptance)
        where.now = start
        policy = adaspec(4, "gpt-oss-120b", StepTimes(published("Llama-3.3-70B")))
        runs.append(where.run(policy, 300).steps)
    assert runs[0] == runs[1]


def test_a_depth_that_is_not_offered_does_not_stop_a_planned_one():
    """On GPUs there are graphs for some depths only."""
    for limit in (np.inf, 0.1):
        times = FirstPassAlways(FixedTimes(published("gpt-oss-120b")), (0, 1, 3, 5, 7))
        policy = AdaSpecPolicy(ControlSettings(max_requests=4), times)
        plan = policy.plan(batch_of([7] * 4, limit=np.full(4, limit)), 0.0)
        step = 1
        while policy.go_on(step, np.full(4, 0.97, np.float32)):
            step += 1
        assert step >= plan.foreseen > 1


def test_whole_drafts_do_not_use_the_budget_of_a_check():
    allowance = Allowance(0.01)
    price, now = 0.6, 0.0  # three times the unconditional budget
    allowance.earn(now)
    assert not allowance.pay(price, now)
    while now < 100.0 and not allowance.pay(price, now):
        assert allowance.may_borrow
        allowance.borrow(1e-4)
        now += 1.0
        allowance.earn(now)
    assert 40.0 < now < 50.0


def test_a_debt_is_paid_before_more_is_borrowed():
    allowance = Allowance(0.01)
    allowance.borrow(0.4)
    assert not allowance.may_borrow
    allowance.earn(0.0)
    allowance.earn(19.0)
    assert not allowance.may_borrow
    allowance.earn(21.0)
    assert allowance.may_borrow and not Allowance(0.0).may_borrow


def test_whole_drafts_of_many_requests_are_learned():
    n, model = 128, "Llama-3.3-70B"
    policy = adaspec(n, model)
    explore, learn = policy._explore, policy._learn_drafts
    whole, learnt = [], []

    def exploring(step, *more):
        lengths = explore(step, *more)
        if policy.verify_chance is not None:
            whole.append(step.number)
        return lengths

    def learning(steps, outcomes):
        learnt.extend(step.number for step in steps)
        learn(steps, outcomes)

    policy._explore, policy._learn_drafts = exploring, learning
    world(n, model, Acceptance()).run(policy, 640)
    policy.stats()
    assert len(whole) > 4 and set(whole) <= set(learnt)
    assert len(learnt) < 640


def test_a_check_lasts_as_many_steps_as_were_paid_for():
    """Also where the engine calls `plan` in each of them, as on Model Runner V2."""
    n, model = 16, "gpt-oss-120b"
    policy, where = adaspec(n, model), world(n, model, EASY)
    where.run(policy, 300)
    before = policy.stats()
    policy._check = 4
    steps = where.run(policy, 5).steps
    assert steps[:4] == [0] * 4 and steps[4] > 0
    after = policy.stats()
    assert after["exploration_steps"] == before["exploration_steps"] + 4
    checks = [each["steps_without_drafts"].get("check", 0) for each in (before, after)]
    assert checks[1] == checks[0] + 4


def test_unused_forecasts_are_not_stored():
    n = 4
    policy = adaspec(n, "gpt-oss-120b", FixedTimes(published("gpt-oss-120b")))
    where, sizes = world(n, "gpt-oss-120b", EASY), []
    for number in range(40):
        where.run(policy, 64, limit=0.02 * 1.02**number)
        sizes.append(len(policy._forecaster._known) + len(policy._forecaster._before))
    assert max(sizes[20:]) <= max(sizes[:20]) + 16


def test_a_draft_that_improves_is_drafted_deep_again_without_deep_drafts():
    """On asynchronous V2 the predicted depth is drafted, and no pass more."""
    policy = adaspec(4, "Llama-3.3-70B")
    policy._learn()
    belief = policy.acceptance
    for mean, seconds in ((-4.0, 100.0), (4.0, 100.0)):
        for number in range(20):
            logits = np.full((7, 64), np.nan)
            logits[:1] = mean
            belief.drafted(logits, seconds + number)
    policy._refresh()
    plan = policy.plan(batch_of([7] * 4), 200.0)
    assert plan.foreseen > 3
