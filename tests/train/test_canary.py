"""Served acceptance after a swap decides whether the draft stays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from scripts.bench.schedule_sim import make_request
from vllm_tide.config import DeployConfig
from vllm_tide.train.canary import MAX_OUTDONE, MIN_COMPARED, PATIENCE, Canary
from vllm_tide.train.comparison import compare, mixture_bound
from vllm_tide.train.served import ServedRequest


def canary(**changes):
    return Canary(DeployConfig(**changes))


def window(machine, rng, level=0.6, count=64, **fields):
    for _ in range(count):
        machine.observe(make_request(rng, level, version=1, **fields))


def trial(machine, rng, level, *, version=2, most=400, **fields):
    """Verdict of requests at `level` begun under the new draft."""
    machine.begin(fields.get("engine", ""), version)
    verdict = machine.poll()
    for _ in range(most):
        if verdict is not None:
            return verdict
        machine.observe(make_request(rng, level, version=version, **fields))
        verdict = machine.poll()
    raise AssertionError("undecided")


def decisions(level, seeds, **changes):
    out = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        machine = canary(**changes)
        window(machine, rng)
        out.append(trial(machine, rng, level))
    return out


def test_a_ruined_draft_is_taken_back_within_ten_requests():
    verdicts = decisions(0.05, 20)
    assert {v.decision for v in verdicts} == {"rollback"}
    assert max(v.requests for v in verdicts) <= 10


def test_a_much_better_draft_is_kept_early():
    verdicts = decisions(0.85, 20)
    assert {v.decision for v in verdicts} == {"keep"}
    assert max(v.requests for v in verdicts) < 32


def test_an_equal_draft_is_seldom_taken_back():
    verdicts = decisions(0.6, 30)
    assert sum(v.decision == "rollback" for v in verdicts) <= 5


def test_a_slightly_worse_draft_is_mostly_taken_back():
    verdicts = decisions(0.52, 20)  # acceptance length about 9% lower
    assert sum(v.decision == "rollback" for v in verdicts) >= 16
    assert all(v.requests <= 32 for v in verdicts)


def test_the_cap_ends_a_trial():
    verdicts = decisions(0.6, 10, canary_requests=8)
    assert all(v.requests <= 8 for v in verdicts)


def test_change_is_relative_and_within_its_error():
    rng = np.random.default_rng(0)
    before = [make_request(rng, 0.6) for _ in range(400)]
    after = [make_request(rng, 0.5) for _ in range(400)]
    found = compare(before, after, cap=32)
    direct = [
        1 + sum(r.accepted for r in side) / sum(r.rounds for r in side)
        for side in (before, after)
    ]
    assert found.before == pytest.approx(direct[0], rel=0.02)
    assert found.after == pytest.approx(direct[1], rel=0.02)
    assert found.change == pytest.approx(direct[1] / direct[0] - 1, abs=0.01)
    assert 0.004 < found.error < 0.03
    assert found.bound > found.error


def test_error_covers_the_spread_of_repeats():
    changes, errors = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        before = [make_request(rng, 0.6) for _ in range(64)]
        after = [make_request(rng, 0.6) for _ in range(16)]
        found = compare(before, after, cap=32)
        changes.append(found.change)
        errors.append(found.error)
    assert abs(np.mean(changes)) < 0.01
    assert np.std(changes) == pytest.approx(np.mean(errors), rel=0.35)


def test_mixture_bound_holds_at_every_look():
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(300):
        n = np.arange(1, 201)
        means = np.cumsum(rng.standard_normal(200)) / n
        bounds = np.array([mixture_bound(float(k), 10.0, 0.1) for k in n])
        missed += bool((np.abs(means) > bounds).any())
    assert missed / 300 < 0.1
    assert mixture_bound(32.0, 10.0, 0.1) > 1.645 / math.sqrt(32)


def test_more_drafts_per_round_do_not_pass_for_a_better_draft():
    rng = np.random.default_rng(0)
    before = [make_request(rng, 0.6, drafts=k) for k in (1, 3) for _ in range(60)]
    after = [make_request(rng, 0.6, drafts=3) for _ in range(60)]
    found = compare(before, after, cap=32)
    assert abs(found.change) < 3 * found.error
    shorter = [make_request(rng, 0.6, drafts=1) for _ in range(60)]
    found = compare(before, shorter, cap=32)
    assert abs(found.change) < 3 * found.error


def _at(bucket, accepted, rounds=40, **fields):
    return ServedRequest(
        key=0,
        rounds=rounds,
        drafted=3 * rounds,
        accepted=accepted,
        cells={(bucket, 3): (rounds, accepted)},
        **fields,
    )


def test_rounds_are_matched_by_generation_position():
    # early rounds accept 1.0 a round, late ones 2.0; after the swap all are early
    before = [_at(0, 40) for _ in range(30)] + [_at(3, 80) for _ in range(30)]
    found = compare(before, [_at(0, 40) for _ in range(30)], cap=32)
    assert found.change == pytest.approx(0.0, abs=0.02)


def test_requests_are_matched_by_group_and_new_groups_are_left_out():
    before = [_at(0, 40, group=0), _at(0, 80, group=1)] * 30
    found = compare(before, [_at(0, 40, group=0)] * 30, cap=32)
    assert found.change == pytest.approx(0.0, abs=0.03)
    assert compare(before, [_at(0, 10, group=2)] * 30, cap=32) is None


def test_engines_are_compared_each_with_itself():
    before = [_at(0, 40, engine="a"), _at(0, 80, engine="b")] * 30
    found = compare(before, [_at(0, 80, engine="b")] * 30, cap=32)
    assert found.change == pytest.approx(0.0, abs=0.03)


def test_only_whole_requests_begun_after_the_swap_count():
    rng = np.random.default_rng(0)
    machine = canary()
    window(machine, rng)
    machine.begin("", 2)
    bad = make_request(rng, 0.05)
    for request in (
        replace(bad, versions=(1, 2)),
        replace(bad, versions=(2,), whole=False),
    ):
        for _ in range(50):
            machine.observe(request)
    assert machine.undecided
    assert machine.comparison is None


def test_requests_that_end_later_under_the_old_draft_join_the_window():
    rng = np.random.default_rng(0)
    machine = canary()
    window(machine, rng, count=4)
    machine.begin("", 2)
    window(machine, rng, count=60)
    assert trial_on(machine, rng, 0.05).decision == "rollback"


def trial_on(machine, rng, level, version=2):
    """Go on with a trial that has begun."""
    for _ in range(400):
        verdict = machine.poll()
        if verdict is not None:
            return verdict
        machine.observe(make_request(rng, level, version=version))
    raise AssertionError("undecided")


def test_nothing_drafted_before_means_keep():
    machine = canary()
    machine.observe(ServedRequest(key=1, plain_rounds=20))
    machine.begin("", 2)
    assert machine.poll().decision == "keep"
    assert machine.poll() is None
    assert machine.may_publish


def test_a_draft_with_which_drafting_stops_is_taken_back():
    rng = np.random.default_rng(0)
    machine = canary(canary_requests=8)
    window(machine, rng)
    machine.begin("", 2)
    for _ in range(8 * PATIENCE):
        machine.observe(ServedRequest(key=1, versions=(2,), plain_rounds=20))
    assert machine.poll().decision == "rollback"


def test_only_new_kinds_of_requests_after_the_swap_mean_keep():
    rng = np.random.default_rng(0)
    machine = canary(canary_requests=8)
    window(machine, rng)
    machine.begin("", 2)
    for _ in range(8 * PATIENCE):
        machine.observe(make_request(rng, 0.3, version=2, group=9))
    assert machine.poll().decision == "keep"


def test_publishing_waits_for_the_verdict_and_for_the_backoff():
    rng = np.random.default_rng(0)
    machine = canary(backoff_cycles=2)
    window(machine, rng)
    assert machine.may_publish
    machine.begin("", 2)
    assert not machine.may_publish
    assert trial_on(machine, rng, 0.05).decision == "rollback"
    waited = 0
    while not machine.may_publish:
        machine.cycle_done()
        waited += 1
    assert waited == 2


def test_a_trial_that_shows_no_harm_so_far_does_not_hold_a_better_draft_up():
    rng = np.random.default_rng(0)
    held_up = []
    for level in (0.58, 0.05):  # hardly worse than 0.6, and far worse
        machine = canary()
        window(machine, rng, 0.6)
        machine.begin("", 2)
        waited = 0
        while not machine.may_publish and machine.undecided:
            machine.observe(make_request(rng, level, version=2))
            waited += 1
        held_up.append((waited, machine.undecided))
    (waited, undecided), (_, still) = held_up
    assert waited == MIN_COMPARED and undecided
    assert not still


def test_a_trial_that_can_say_nothing_does_not_hold_a_better_draft_up():
    rng = np.random.default_rng(0)
    machine = canary(canary_requests=8)
    window(machine, rng, engine="a")
    machine.begin("a", 2)
    for _ in range(8):  # of another group: there is nothing to compare them with
        assert not machine.may_publish
        other = make_request(rng, 0.5, version=2, engine="a")
        machine.observe(replace(other, group=99))
    assert machine.undecided
    assert machine.may_publish


def test_backoff_doubles_and_a_kept_draft_resets_it():
    rng = np.random.default_rng(0)
    machine = canary(backoff_cycles=2)
    window(machine, rng)
    backoffs = []
    for version, level in enumerate((0.05, 0.05, 0.05, 0.85, 0.05), start=2):
        machine.begin("", version)
        trial_on(machine, rng, level, version)
        backoffs.append(machine.backoff)
        machine.backoff = 0
    assert backoffs == [2, 4, 8, 0, 2]
    assert machine.rollbacks == 4


def test_requests_of_a_bad_draft_never_enter_the_window():
    rng = np.random.default_rng(0)
    machine = canary()
    window(machine, rng)
    assert trial(machine, rng, 0.05).decision == "rollback"
    for _ in range(200):  # they were still running
        machine.observe(make_request(rng, 0.05, version=2))
        machine.observe(replace(make_request(rng, 0.05), versions=(2, 3)))
    # version 3 is the old draft put back; version 4 is half as bad as version 2
    for _ in range(8):
        machine.observe(make_request(rng, 0.6, version=3))
    assert trial(machine, rng, 0.3, version=4).decision == "rollback"


def test_a_second_engine_joins_the_trial():
    rng = np.random.default_rng(0)
    machine = canary()
    for engine, level in (("a", 0.7), ("b", 0.4)):
        window(machine, rng, level, engine=engine)
    machine.begin("a", 2)
    machine.begin("b", 2)
    verdict = None
    while verdict is None:
        machine.observe(make_request(rng, 0.05, version=2, engine="b"))
        verdict = machine.poll()
    assert verdict.decision == "rollback"
    assert not machine.undecided


def test_a_newer_draft_during_a_trial_begins_it_anew():
    rng = np.random.default_rng(0)
    machine = canary()
    window(machine, rng)
    machine.begin("", 2)
    machine.observe(make_request(rng, 0.05, version=2))
    assert trial(machine, rng, 0.85, version=3).decision == "keep"


def test_an_engine_that_is_gone_ends_its_trial_without_a_verdict():
    rng = np.random.default_rng(0)
    machine = canary()
    window(machine, rng, engine="a")
    machine.begin("a", 2)
    machine.observe(make_request(rng, 0.05, version=2, engine="a"))
    machine.forget("a")
    assert machine.poll() is None
    assert not machine.undecided
    assert machine.may_publish
    assert trial(machine, rng, 0.05, version=2, engine="a").decision == "rollback"


def test_engines_never_try_two_versions_at_once():
    rng = np.random.default_rng(0)
    machine = canary()
    for engine in "ab":
        window(machine, rng, engine=engine)
    machine.begin("a", 2)
    machine.begin("b", 3)  # newer: b has skipped version 2
    machine.observe(make_request(rng, 0.05, version=2, engine="a"))
    machine.begin("a", 3)
    machine.begin("b", 2)  # said late
    verdict = None
    while verdict is None:
        machine.observe(make_request(rng, 0.85, version=3, engine="b"))
        verdict = machine.poll()
    assert (verdict.decision, verdict.version) == ("keep", 3)


def test_a_verdict_is_not_lost_to_an_engine_that_is_late():
    rng = np.random.default_rng(0)
    machine = canary()
    for engine in "ab":
        window(machine, rng, engine=engine)
    machine.begin("a", 2)
    while machine.undecided:
        machine.observe(make_request(rng, 0.05, version=2, engine="a"))
    machine.begin("b", 2)
    assert not machine.undecided
    assert machine.poll().decision == "rollback"


def test_outdone_drafts_do_not_put_a_verdict_off_for_ever():
    rng = np.random.default_rng(0)
    machine = canary()
    window(machine, rng)
    machine.begin("", 2)
    version = 2
    for _ in range(200):
        machine.observe(make_request(rng, 0.62, version=version))
        verdict = machine.poll()
        if verdict is not None:
            break
        if machine.may_publish:
            version += 1
            machine.begin("", version)
    assert verdict is not None
    assert verdict.version == version <= 2 + MAX_OUTDONE


def test_switched_off_it_never_waits():
    rng = np.random.default_rng(0)
    machine = canary(canary=False)
    window(machine, rng)
    machine.begin("", 2)
    window(machine, rng, 0.01)
    assert machine.may_publish
    assert machine.poll() is None
