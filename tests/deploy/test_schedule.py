"""When to collect and train: the state machine on synthetic series."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vllm_tide.config import ScheduleConfig
from vllm_tide.deploy.schedule import (
    EPSILON,
    IDLE_CYCLES,
    INIT_REQUESTS,
    LONG_DECAY,
    MAX_WAIT,
    SHORT_DECAY,
    Schedule,
)
from vllm_tide.deploy.served import ServedRequest

NOW = 1000.0  # monotonic (s)


def schedule(mode, *, min_new_tokens=100, day0=False):
    return Schedule(ScheduleConfig(mode=mode), min_new_tokens, day0=day0)


def shared(value):
    """Return a request with `value` (of 1000) first tokens accepted."""
    n = round(1000 * value)
    return ServedRequest(key=1, tries=1000.0, hits=float(n), squares=1000.0)


def test_always_trains_on_new_data_only():
    machine = schedule("always")
    assert machine.collecting
    assert not machine.should_train(99, NOW)
    assert machine.should_train(100, NOW)
    for _ in range(10):
        machine.cycle_done(False, False, 2.0, NOW)
    assert machine.collecting


def test_training_waits_while_it_shows_no_gain():
    machine, now, trained = schedule("always"), NOW, 0.0
    shares = []
    for cycle in range(1, 20 * IDLE_CYCLES):
        assert machine.should_train(100, now)
        now, trained = now + 2.0, trained + 2.0
        machine.cycle_done(False, False, 2.0, now)
        wait = 2.0 * min(max(0.0, cycle / IDLE_CYCLES - 1), MAX_WAIT)
        if wait:
            assert not machine.should_train(100, now)
            why = f"{wait:.0f} s, as {cycle} cycles showed no gain"
            assert machine.waiting_for(100, now) == why
        now += wait
        shares.append(trained / (now - NOW))
    assert shares[IDLE_CYCLES - 1] == 1.0
    assert shares[-1] < 0.15
    assert machine.collecting  # capture goes on


def test_a_fresh_draft_is_trained_without_a_wait_until_it_gains():
    machine = schedule("always", day0=True)
    for _ in range(3 * IDLE_CYCLES):
        machine.cycle_done(False, False, 2.0, NOW)
    assert machine.should_train(100, NOW)
    machine.cycle_done(True, True, 2.0, NOW)
    for _ in range(2 * IDLE_CYCLES):
        machine.cycle_done(False, False, 2.0, NOW)
    assert not machine.should_train(100, NOW)


def test_requests_that_differ_do_not_end_the_wait():
    machine, rng = schedule("always"), np.random.default_rng(0)
    for _ in range(4 * IDLE_CYCLES):
        machine.cycle_done(False, False, 2.0, NOW)
    for value in np.clip(rng.normal(0.6, 0.2, 1000), 0, 1):
        machine.observe(shared(value))
    assert not machine.should_train(100, NOW)


@pytest.mark.parametrize("end", ["gain", "shift"])
def test_a_sign_of_a_gain_and_a_shift_end_the_wait(end):
    machine = schedule("always")
    for _ in range(4 * INIT_REQUESTS):
        machine.observe(shared(0.8))
    for _ in range(4 * IDLE_CYCLES):
        machine.cycle_done(False, False, 2.0, NOW)
    assert not machine.should_train(100, NOW)
    if end == "gain":
        machine.cycle_done(False, True, 2.0, NOW)
    else:
        for _ in range(10):
            machine.observe(shared(0.5))
    assert machine.should_train(100, NOW)
    machine.cycle_done(False, False, 2.0, NOW)
    assert machine.should_train(100, NOW)


def literal(values, cycles):
    """Compute algorithm 1 independently: states after each request.

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
            machine.cycle_done(cycles[index], False, 0.0, NOW)
        states.append(machine.collecting)
    assert states == literal(values, cycles)
    assert True in states
    assert False in states[20:]


def test_tide_starts_paused_unless_the_draft_is_fresh():
    assert not schedule("tide").collecting
    fresh = schedule("tide", day0=True)
    assert fresh.collecting
    fresh.cycle_done(True, False, 0.0, NOW)
    assert fresh.collecting
    fresh.cycle_done(False, False, 0.0, NOW)
    assert not fresh.collecting


def test_requests_with_little_evidence_make_a_value_together():
    machine = schedule("tide")
    for _ in range(50):
        machine.observe(ServedRequest(key=1))  # nothing was drafted
    assert machine.averages.count == 0
    short = ServedRequest(key=1, tries=6.0, hits=2.0, squares=6.0)
    for _ in range(6):
        machine.observe(short)
    assert machine.averages.count == 2  # 18 tries each
    # One observation of weight 50 is one observation.
    rare = ServedRequest(key=1, tries=50.0, hits=50.0, squares=2500.0)
    for _ in range(15):
        machine.observe(rare)
    assert machine.averages.count == 2
    machine.observe(rare)
    assert machine.averages.count == 3


def test_snapshot_is_json_at_any_time():
    machine = schedule("tide")
    json.dumps(machine.snapshot(), allow_nan=False)
    for _ in range(40):
        machine.observe(shared(0.5))
    snapshot = json.loads(json.dumps(machine.snapshot(), allow_nan=False))
    assert snapshot["mode"] == "tide"
    assert snapshot["short"] == pytest.approx(0.5)
