"""When to collect and train: the state machine on synthetic series."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from scripts.bench.schedule_sim import (
    SCENARIOS,
    detect,
    loop,
    loop_frozen,
    make_request,
)
from vllm_tide.config import ScheduleConfig
from vllm_tide.deploy import schedule as rules
from vllm_tide.deploy.schedule import (
    ACTIVE_REQUESTS,
    EPSILON,
    INIT_REQUESTS,
    LONG_DECAY,
    NEW_GROUP_REQUESTS,
    SHORT_DECAY,
    Averages,
    Schedule,
    ShiftTest,
)
from vllm_tide.deploy.served import ServedRequest


def schedule(mode, *, min_new_tokens=100, day0=False):
    return Schedule(ScheduleConfig(mode=mode), min_new_tokens, day0=day0)


@pytest.fixture
def patience(monkeypatch):
    return partial(monkeypatch.setattr, rules, "PATIENCE")


def shared(value, *, group=0, version=0, engine=""):
    """A request of which `value` (of 1000) first tokens were accepted."""
    n = round(1000 * value)
    return ServedRequest(
        key=1,
        engine=engine,
        group=group,
        versions=(version,),
        tries=1000.0,
        hits=float(n),
        squares=1000.0,
    )


def feed(machine, values, **fields):
    """First index at which collection is on, or None."""
    for index, value in enumerate(values):
        machine.observe(shared(value, **fields))
        if machine.collecting:
            return index
    return None


def pause(machine):
    for _ in range(rules.PATIENCE):
        machine.cycle_done(False)
    assert not machine.collecting


# --- averages


def test_averages_follow_algorithm_1():
    averages = Averages(0.9, 0.99, 3)
    values = [0.5, 0.6, 0.7, 0.2, 0.3, 0.9]
    moved = [averages.add(v) for v in values]
    assert moved == [False] * 3 + [True] * 3
    short = long = sum(values[:3]) / 3
    for value in values[3:]:
        short = 0.9 * short + 0.1 * value
        long = 0.99 * long + 0.01 * value
    assert averages.short == pytest.approx(short, abs=1e-15)
    assert averages.long == pytest.approx(long, abs=1e-15)


def test_variances_of_the_averages_are_those_of_their_weights():
    init, count = 4, 40
    weights = {}
    for name in ("short", "long"):
        rows = []
        for i in range(count):
            averages = Averages(0.9, 0.99, init)
            for j in range(count):
                averages.add(float(i == j))
            rows.append(getattr(averages, name))
        weights[name] = np.array(rows)
    short, long = weights["short"], weights["long"]
    assert short.sum() == pytest.approx(1.0)
    expected = ((short**2).sum(), (long**2).sum(), (short * long).sum())
    assert averages.squares == pytest.approx(expected, abs=1e-14)


def test_noise_is_measured_in_spite_of_drift():
    rng = np.random.default_rng(0)
    test = ShiftTest(0.9, 0.99, 16, 0.05)
    for i in range(2000):
        test.add(float(rng.normal(0.8 - 0.0003 * i, 0.1)))
    assert test.variance == pytest.approx(0.01, rel=0.25)


# --- always


def test_always_trains_on_new_data_only():
    machine = schedule("always")
    assert machine.collecting
    assert not machine.should_train(99)
    assert machine.should_train(100)
    for _ in range(10):
        machine.cycle_done(False)
    assert machine.collecting
    assert machine.wanted_groups() is None


# --- tide


def literal(values, cycles):
    """Algorithm 1 written down again: states after each request.

    `cycles` maps a request to the outcome of the cycle that ends after it.
    """
    on, out = False, []
    start = values[:INIT_REQUESTS]
    short = long = sum(start) / len(start)
    out += [False] * len(start)
    for index, alpha in enumerate(values[INIT_REQUESTS:], start=INIT_REQUESTS):
        short = SHORT_DECAY * short + (1 - SHORT_DECAY) * alpha
        long = LONG_DECAY * long + (1 - LONG_DECAY) * alpha
        if short < long - EPSILON:
            on = True
        if on and cycles.get(index) is False:
            on = False
        out.append(on)
    return out


def test_tide_is_algorithm_1_on_first_token_acceptance():
    rng = np.random.default_rng(3)
    level = np.where(np.arange(600) % 200 < 120, 0.7, 0.45)
    values = (np.round(1000 * np.clip(rng.normal(level, 0.08), 0, 1)) / 1000).tolist()
    cycles = {i: bool(rng.random() < 0.5) for i in range(20, 600, 17)}
    machine = schedule("tide")
    states = []
    for index, value in enumerate(values):
        machine.observe(shared(value))
        if index in cycles and machine.collecting:
            machine.cycle_done(cycles[index])
        states.append(machine.collecting)
    assert states == literal(values, cycles)
    assert True in states
    assert False in states[20:]


def test_tide_starts_paused_unless_the_draft_is_fresh():
    assert not schedule("tide").collecting
    fresh = schedule("tide", day0=True)
    assert fresh.collecting
    fresh.cycle_done(True)
    assert fresh.collecting
    fresh.cycle_done(False)
    assert not fresh.collecting
    assert fresh.wanted_groups() == frozenset()


@pytest.mark.parametrize("mode", ["tide", "gated"])
def test_requests_with_little_evidence_make_a_value_together(mode):
    machine = schedule(mode)
    short = ServedRequest(key=1, tries=6.0, hits=2.0, squares=6.0)
    for _ in range(6):
        machine.observe(short)
    assert machine.averages.count == 2  # 18 tries each
    # One look of weight 50 is one look.
    rare = ServedRequest(key=1, tries=50.0, hits=50.0, squares=2500.0)
    for _ in range(15):
        machine.observe(rare)
    assert machine.averages.count == 2
    machine.observe(rare)
    assert machine.averages.count == 3


@pytest.mark.parametrize("mode", ["tide", "gated"])
def test_requests_without_drafts_are_passed_over(mode):
    machine = schedule(mode)
    for _ in range(50):
        machine.observe(ServedRequest(key=1))
    assert machine.averages.count == 0


# --- gated


def settled(levels, **changes):
    """A gated machine that has seen groups at these levels and is paused."""
    machine = schedule("gated", **changes)
    for i in range(200):
        for group, level in enumerate(levels):
            machine.observe(shared(level + 0.02 * (i % 2), group=group))
    pause(machine)
    return machine


def test_gated_starts_when_a_group_is_more_than_an_odd_request():
    machine = schedule("gated")
    assert not machine.collecting
    at = feed(machine, [0.6] * 20, group=5)
    assert at == NEW_GROUP_REQUESTS - 1
    assert machine.wanted_groups() == {5}
    assert "group 5" in machine.reason
    assert machine.shifts == 1


def test_gated_collects_at_once_for_a_fresh_draft():
    machine = schedule("gated", day0=True)
    assert machine.collecting
    assert machine.wanted_groups() is None
    feed(machine, [0.1])
    for _ in range(NEW_GROUP_REQUESTS):
        machine.observe(shared(0.1))
    assert machine.wanted_groups() == {0}


def test_gated_pauses_after_patience_and_resumes_on_a_shift_of_one_group():
    machine = settled([0.7, 0.5, 0.3])
    assert "3 cycles without improvement" in machine.reason
    assert machine.pauses == 1
    assert feed(machine, [0.7, 0.71] * 20, group=0) is None
    delay = feed(machine, [0.3] * 50, group=1)
    assert delay is not None
    assert delay < 15
    assert machine.wanted_groups() == {1}
    assert "fell" in machine.reason


def test_one_improvement_starts_the_patience_anew(patience):
    patience(2)
    machine = schedule("gated")
    feed(machine, [0.5] * NEW_GROUP_REQUESTS)
    for improved in (False, True, False):
        machine.cycle_done(improved)
        assert machine.collecting
    machine.cycle_done(False)
    assert not machine.collecting


def test_a_cycle_without_improvement_makes_the_next_wait_for_twice_the_tokens(patience):
    patience(4)
    machine = schedule("gated")
    base = machine.min_new_tokens
    feed(machine, [0.5] * NEW_GROUP_REQUESTS)
    for doublings in range(3):
        assert machine.tokens_needed == base << doublings
        assert not machine.should_train((base << doublings) - 1)
        assert machine.should_train(base << doublings)
        machine.cycle_done(False)
    machine.cycle_done(True)
    assert machine.should_train(base)


def test_a_shift_of_one_group_does_not_wait_for_another_that_is_nearly_saturated(
    patience,
):
    patience(4)
    machine = schedule("gated")
    feed_all(machine, 0.5, 0, NEW_GROUP_REQUESTS)
    for _ in range(3):
        machine.cycle_done(False)
    assert machine.tokens_needed == machine.min_new_tokens << 3
    feed_all(machine, 0.5, 1, NEW_GROUP_REQUESTS)
    assert machine.wanted_groups() == {0, 1}
    assert machine.tokens_needed == machine.min_new_tokens


def test_what_was_given_up_is_tried_once_more_when_its_requests_have_doubled(patience):
    patience(2)
    machine = schedule("gated")
    feed_all(machine, 0.5, 0, NEW_GROUP_REQUESTS)
    feed_all(machine, 0.5, 0, 20)
    pause(machine)
    for doubled in (40, 80, 160):
        have = machine.snapshot()["groups"][0]["requests"] - NEW_GROUP_REQUESTS
        assert feed(machine, [0.5] * 400) == doubled - have - 1
        assert "twice as many" in machine.reason
        assert machine.shifts == 1
        # One cycle that does not help is enough now.
        assert machine.tokens_needed == 2 * machine.min_new_tokens
        machine.cycle_done(False)
        assert not machine.collecting
    feed(machine, [0.5] * 400)
    machine.cycle_done(True)
    assert machine.collecting


@pytest.mark.parametrize("mode", ["always", "tide"])
def test_other_modes_never_wait_for_more_tokens(mode):
    machine = schedule(mode)
    for _ in range(5):
        machine.cycle_done(False)
    assert machine.tokens_needed == machine.min_new_tokens


def test_groups_saturate_one_by_one(patience):
    patience(1)
    machine = schedule("gated")
    for group in (0, 1):
        feed_all(machine, 0.5, group, NEW_GROUP_REQUESTS)
    machine.cycle_done(True, {0: False, 1: True})
    assert machine.wanted_groups() == {1}
    machine.cycle_done(False)
    assert not machine.collecting
    assert machine.pauses == 1


def feed_all(machine, value, group, count, **fields):
    for _ in range(count):
        machine.observe(shared(value, group=group, **fields))


def test_a_group_that_stopped_coming_is_not_waited_for():
    machine = settled([0.7, 0.5])
    feed(machine, [0.2] * 50, group=1)
    assert machine.wanted_groups() == {1}
    feed_all(machine, 0.7, 0, ACTIVE_REQUESTS + 1)
    assert 1 not in machine.wanted_groups()
    machine.observe(shared(0.2, group=1))
    assert 1 in machine.wanted_groups()


def test_a_new_draft_restarts_only_groups_in_training():
    machine = settled([0.7, 0.5])
    feed(machine, [0.2] * 50, group=1)
    machine.observe(shared(0.7, group=0, version=1))
    machine.observe(shared(0.4, group=1, version=1))
    kept, begun = machine.snapshot()["groups"]
    assert kept["long"] is not None
    assert begun["long"] is None


def test_a_draft_that_forgot_a_group_is_noticed():
    machine = settled([0.7, 0.5])
    delay = feed(machine, [0.4] * 50, group=0, version=1)
    assert delay is not None
    assert machine.wanted_groups() == {0}


def test_slow_drift_is_seen_by_gated_and_not_by_tide():
    drift = [0.6 + 0.02 * (i % 2) - 0.15 * min(i / 1500, 1) for i in range(1800)]
    tide = schedule("tide")
    for i in range(400):
        tide.observe(shared(0.6 + 0.02 * (i % 2)))
    assert feed(tide, drift) is None
    gated = settled([0.6])
    before = gated.shifts
    for value in drift:
        gated.observe(shared(value))
        if gated.shifts > before:
            break
    assert "drifted" in gated.reason


def test_number_of_groups_watched_is_bounded(monkeypatch):
    monkeypatch.setattr(rules, "MAX_GROUPS", 2)
    machine = schedule("gated")
    for group in range(10):
        feed_all(machine, 0.5, group, 5)
    assert [g["group"] for g in machine.snapshot()["groups"]] == [7, 8, 9]


@pytest.mark.parametrize("mode", ["always", "tide", "gated"])
def test_snapshot_is_json_at_any_time(mode):
    machine = schedule(mode)
    json.dumps(machine.snapshot(), allow_nan=False)
    feed_all(machine, 0.5, 0, 40)
    found = json.loads(json.dumps(machine.snapshot(), allow_nan=False))
    assert found["mode"] == mode
    assert found["short"] == pytest.approx(0.5)


# --- synthetic series, the figures of scripts/bench/schedule_sim.py in small


def _runs(name, mode, seeds):
    (scenario,) = [s for s in SCENARIOS if s.name == name]
    return [detect(scenario, mode, seed) for seed in range(seeds)]


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS if "noise" in s.name])
def test_gated_raises_few_false_alarms(name):
    runs = _runs(name, "gated", 4)
    alarms = sum(r.false_alarms for r in runs)
    assert 1000 * alarms / sum(r.watched for r in runs) <= 1.0


def test_tide_raises_more_of_them_on_short_requests():
    tide = _runs("noise, short requests", "tide", 3)
    gated = _runs("noise, short requests", "gated", 3)
    alarms = [sum(r.false_alarms for r in runs) for runs in (tide, gated)]
    assert alarms[0] > 5 * alarms[1]


def test_both_see_a_step_of_the_whole_stream():
    for mode in ("tide", "gated"):
        delays = [r.delay for r in _runs("step -0.20, one domain", mode, 4)]
        assert all(d is not None and d < 40 for d in delays), mode


def test_gated_sees_the_shift_of_one_domain_of_four():
    runs = _runs("step -0.20 in one of four", "gated", 4)
    assert all(r.delay is not None and r.delay < 150 for r in runs)


def test_after_a_shift_training_recovers_at_less_cost():
    for stream in ("shifting", "mixed"):
        always, gated = loop(stream, "always", 0), loop(stream, "gated", 0)
        frozen = loop_frozen(stream)
        gain = always["mean_acceptance"] - frozen
        assert gated["mean_acceptance"] - frozen >= 0.97 * gain
        assert gated["cycles"] <= 0.5 * always["cycles"]


def test_simulated_requests_are_consistent():
    request = make_request(np.random.default_rng(0), 0.5)
    steps = sum(cost for _, cost in request.cells.values())
    tokens = sum(made for made, _ in request.cells.values())
    assert steps == request.tries == request.squares
    assert steps + request.hits <= tokens <= steps + 3 * request.hits
