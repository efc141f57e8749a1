"""The served speed after a swap decides whether a draft stays."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from vllm_tide.config import DeployConfig
from vllm_tide.deploy.canary import MAX_WAIT, MIN_COMPARED, Canary
from vllm_tide.deploy.comparison import Window, compare, mixture_bound
from vllm_tide.deploy.served import ServedRequest, bucket_of

BEGAN = itertools.count(1)


def make_request(rng, level, *, group=0, version=0, engine=""):
    """Return a request of 15 to 45 steps of 3 drafts, a share `level` accepted."""
    chance = float(np.clip(rng.normal(level, 0.05), 0.01, 0.99))
    count = int(rng.integers(15, 46))
    accepted = np.cumprod(rng.random((count, 3)) < chance, axis=1).sum(axis=1)
    cells, generated = {}, 0
    for taken in accepted.tolist():
        sums = cells.setdefault((bucket_of(generated), 1, 0), [0.0, 0.0])
        sums[0] += taken + 1
        sums[1] += 1.0
        generated += taken + 1
    return ServedRequest(
        key=0,
        engine=engine,
        group=group,
        versions=(version,),
        began=next(BEGAN),
        cells=cells,
        tries=float(count),
        hits=float((accepted > 0).sum()),
        squares=float(count),
    )


def canary(**changes):
    return Canary(DeployConfig(**changes))


def window(machine, rng, level=0.6, count=96, **fields):
    for _ in range(count):
        machine.observe(make_request(rng, level, **{"version": 1} | fields))


def trial(machine, rng, level, *, version=2, most=400, **fields):
    """Return the verdict of requests at `level` begun under the new draft."""
    machine.begin(fields.get("engine", ""), version)
    return trial_on(machine, rng, level, version, most=most, **fields)


def trial_on(machine, rng, level, version=2, most=400, **fields):
    """Continue a canary that has begun."""
    for _ in range(most):
        machine.evaluate()
        verdict = machine.poll()
        if verdict is not None:
            return verdict
        machine.observe(make_request(rng, level, version=version, **fields))
    raise AssertionError("undecided")


def on_trial(**changes):
    """Return a canary with a full window and version 2 under test."""
    machine, rng = canary(**changes), np.random.default_rng(0)
    window(machine, rng)
    machine.begin("", 2)
    return machine, rng


FEW_OR_MANY = pytest.mark.parametrize(
    "seeds", [4, pytest.param(40, marks=pytest.mark.nightly)]
)


@FEW_OR_MANY
@pytest.mark.parametrize(
    ("level", "decision", "most", "cap"),
    [
        (0.05, "rollback", 10, 48),  # useless
        (0.5, "rollback", 48, 48),  # speed about 14% lower
        (0.6, "keep", 48, 48),  # equal
        (0.6, "keep", 8, 8),
        (0.85, "keep", 31, 48),  # much better
    ],
)
def test_a_worse_draft_is_rolled_back_and_a_better_one_stays(
    level, decision, most, cap, seeds
):
    verdicts = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        machine = canary(canary_requests=cap)
        window(machine, rng)
        verdicts.append(trial(machine, rng, level))
    others = sum(v.decision != decision for v in verdicts)
    assert others <= seeds // 20
    assert max(v.requests for v in verdicts) <= most


def test_the_mixture_bound_holds_at_every_check():
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(300):
        n = np.arange(1, 201)
        means = np.cumsum(rng.standard_normal(200)) / n
        bounds = np.array([mixture_bound(float(k), 10.0, 0.1) for k in n])
        missed += bool((np.abs(means) > bounds).any())
    assert missed / 300 < 0.1
    assert mixture_bound(32.0, 10.0, 0.1) > 1.645 / math.sqrt(32)


def _served(tokens, cost, cell=(0, 1, 0), steps=40, **fields):
    """Return a request of as many steps, each of so many tokens and such a cost."""
    cells = {cell: [steps * tokens, steps * cost]}
    return ServedRequest(key=0, cells=cells, **fields)


def test_a_draft_that_control_shortens_is_measured_as_slower():
    # three tokens in steps of cost 1.5; then two, in steps of cost 1.2, of which every
    # second token is accepted as before: what is gained per draft is the same
    before = [_served(3.0, 1.5) for _ in range(60)]
    comparison = compare(Window(before), [_served(2.0, 1.2) for _ in range(60)], cap=32)
    assert comparison.change == pytest.approx(2.0 / 1.2 / 2.0 - 1)
    assert (comparison.before, comparison.after) == pytest.approx((2.0, 2.0 / 1.2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cell": (0, 1, 0)}, {"cell": (3, 1, 0)}),  # position
        ({"cell": (0, 1, 0)}, {"cell": (0, 1, 2)}),  # cached share of the prompt
        ({"group": 0}, {"group": 1}),
        ({"engine": "a"}, {"engine": "b"}),
    ],
)
def test_requests_are_compared_within_their_class(one, other):
    before = Window([_served(2.0, 1.0, **one), _served(3.0, 1.0, **other)] * 30)
    comparison = compare(before, [_served(2.0, 1.0, **one)] * 30, cap=32)
    assert comparison.change == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("unlike", [{"cell": (0, 7, 0)}, {"group": 2}])
def test_another_batch_size_or_a_new_group_cannot_be_compared(unlike):
    before = Window([_served(2.0, 1.0) for _ in range(60)])
    assert compare(before, [_served(1.2, 1.0, **unlike)] * 60, cap=32) is None


def test_only_whole_requests_begun_after_the_swap_count():
    machine, rng = on_trial()
    bad = make_request(rng, 0.05)
    for request in (
        replace(bad, versions=(1, 2)),
        replace(bad, versions=(2,), whole=False),
    ):
        for _ in range(50):
            machine.observe(request)
    machine.evaluate()
    assert machine.undecided
    assert machine.comparison is None


def test_a_draft_that_slows_plain_decoding_down_is_rolled_back():
    machine, rng = canary(), np.random.default_rng(0)
    for i in range(96):
        machine.observe(_served(1.0, 1.0, began=i + 1))
    machine.begin("", 2)
    for i in range(48):
        cost = float(rng.normal(1.25, 0.05))
        machine.observe(_served(1.05, cost, versions=(2,), began=100 + i))
        machine.evaluate()
    assert machine.poll().decision == "rollback"


def test_open_requests_count_on_both_sides():
    """Of 96 requests that begin together the easy half ends first."""
    machine = canary()

    def serve(version, began):
        return [
            _served(2.0 + 0.4 * (i % 2), 1.0, steps=60 - 20 * (i % 2),
                    versions=(version,), began=began + i)
            for i in range(96)
        ]  # fmt: skip

    for request in serve(1, 0):
        machine.observe(request)
    machine.begin("", 2)
    still = []
    for request in serve(2, 1000):
        if request.began % 2:
            machine.observe(request)
        else:
            request.ended = False
            still.append(request)
    machine.evaluate(still)
    assert abs(machine.comparison.change) < 0.01
    machine.evaluate()  # without them, as before
    assert machine.comparison is None or machine.comparison.change > 0.06


def test_a_full_window_has_every_request_since_one_moment():
    """Evicted requests ended early; those that began with them are evicted as well."""
    machine = canary(canary_requests=16)  # 64 before
    slow = [_served(2.0, 1.0, began=i) for i in range(10)]
    for i in range(10, 80):
        machine.observe(_served(2.5, 1.0, began=i))
    for request in slow:
        machine.observe(request)
    machine.begin("", 2)
    after = [
        _served(2.5, 1.0, began=100 + i, versions=(2,), ended=False) for i in range(8)
    ]
    machine.evaluate(after)
    assert machine.comparison.change == pytest.approx(0.0, abs=1e-6)


def test_a_draft_with_only_new_kinds_of_requests_stays():
    machine, rng = on_trial(canary_requests=8)
    for _ in range(8 * MAX_WAIT):
        assert machine.may_publish and machine.poll() is None
        machine.observe(make_request(rng, 0.3, version=2, group=9))
        machine.evaluate()
    assert machine.poll().decision == "keep"


def test_a_canary_with_a_regression_delays_the_next_draft():
    machine, rng = on_trial()
    for _ in range(MIN_COMPARED):
        machine.observe(make_request(rng, 0.42, version=2))
    machine.evaluate()
    assert machine.undecided
    assert not machine.may_publish


def superseded(level, seed, each):
    """Return the verdict if each draft is superseded after `each` requests."""
    rng = np.random.default_rng(seed)
    machine = canary()
    window(machine, rng)
    version = 1
    for i in range(400):
        if i % each == 0 and machine.may_publish:
            version += 1
            machine.begin("", version)
        machine.observe(make_request(rng, level, version=version))
        machine.evaluate()
        verdict = machine.poll()
        if verdict is not None:
            return verdict, version
    return None, version


@FEW_OR_MANY
def test_a_regression_over_a_chain_of_superseded_drafts_is_detected(seeds):
    detected = [superseded(0.45, seed, 2) for seed in range(seeds)]
    back = sum(v is not None and v.decision == "rollback" for v, _ in detected)
    assert back >= 0.95 * seeds
    assert all(v.version == version for v, version in detected if v is not None)


def test_a_rollback_by_command_ends_the_comparison():
    machine, rng = on_trial()
    assert trial_on(machine, rng, 0.8).decision == "keep"
    assert machine.comparison is not None
    machine.reject(2)
    assert machine.comparison is None


def test_after_a_rollback_no_draft_of_the_chain_enters_the_window():
    machine, rng = canary(), np.random.default_rng(0)
    window(machine, rng)
    for _ in range(300):  # a fast draft served all of their steps: they evict nothing
        machine.observe(ServedRequest(key=0, versions=(1,), began=next(BEGAN)))
    machine.begin("", 2)
    machine.begin("", 3)
    assert trial_on(machine, rng, 0.05, 3).decision == "rollback"
    for version in (2, 3):  # they were still open
        window(machine, rng, 0.05, 100, version=version)
    for _ in range(100):
        machine.observe(replace(make_request(rng, 0.05), versions=(3, 4)))
    window(machine, rng, 0.6, 8, version=4)  # the old draft, republished
    assert trial(machine, rng, 0.3, version=5).decision == "rollback"


def test_backoff_doubles_and_an_accepted_draft_resets_it():
    machine, rng = canary(), np.random.default_rng(0)
    window(machine, rng)
    backoffs = []
    for version, level in enumerate((0.05, 0.05, 0.05, 0.85, 0.05), start=2):
        machine.begin("", version)
        trial_on(machine, rng, level, version)
        backoffs.append(machine.backoff)
        machine.backoff = 0
    assert backoffs == [2, 4, 8, 0, 2]
    assert machine.rollbacks == 4


def test_the_end_of_an_engine_ends_its_canary_without_a_verdict():
    machine, rng = canary(), np.random.default_rng(0)
    window(machine, rng, engine="a")
    machine.begin("a", 2)
    machine.observe(make_request(rng, 0.05, version=2, engine="a"))
    machine.forget("a")
    assert machine.poll() is None
    assert not machine.undecided
    assert machine.may_publish
    assert trial(machine, rng, 0.05, version=2, engine="a").decision == "rollback"


def test_engines_never_test_two_versions_at_once():
    machine, rng = canary(), np.random.default_rng(0)
    for engine in "ab":
        window(machine, rng, engine=engine)
    machine.begin("a", 2)
    machine.begin("b", 3)  # newer: b has skipped version 2
    machine.observe(make_request(rng, 0.05, version=2, engine="a"))
    machine.begin("a", 3)
    machine.begin("b", 2)  # reported late
    verdict = None
    while verdict is None:
        machine.observe(make_request(rng, 0.85, version=3, engine="b"))
        machine.evaluate()
        verdict = machine.poll()
    assert (verdict.decision, verdict.version) == ("keep", 3)


def test_it_never_waits_when_switched_off():
    machine, rng = on_trial(canary=False)
    window(machine, rng, 0.01)
    assert machine.may_publish
    assert machine.poll() is None


def undrafted(request):
    """The same request, had control never drafted."""
    cells = {cell: [cost, cost] for cell, (_, cost) in request.cells.items()}
    return replace(request, cells=cells, tries=0.0, hits=0.0, squares=0.0)


def test_an_unused_draft_is_neither_accepted_nor_blocks_the_next():
    rng, machine = np.random.default_rng(0), canary()
    for _ in range(96):
        machine.observe(undrafted(make_request(rng, 0.6, version=1)))
    machine.begin("", 2)
    for _ in range(300):
        machine.observe(undrafted(make_request(rng, 0.6, version=2)))
        machine.evaluate()
    assert machine.undecided and machine.may_publish and machine.poll() is None
    # Load falls, control drafts with it, and it slows requests down.
    slow = [make_request(rng, 0.05, version=2) for _ in range(60)]
    for request in slow:
        cells = {c: [made, 2.0 * made] for c, (made, _) in request.cells.items()}
        machine.observe(replace(request, cells=cells))
        machine.evaluate()
    assert machine.poll().decision == "rollback"


def test_a_rollback_command_also_rejects_superseded_drafts():
    machine, rng = on_trial()
    machine.observe(make_request(rng, 0.6, version=2))
    machine.begin("", 3)
    machine.reject(3)
    machine.restore(4, same=1)
    machine.observe(make_request(rng, 0.1, version=2))
    assert {r.first_version for r in machine._before} == {1}


@FEW_OR_MANY
def test_a_draft_is_compared_with_the_one_restored_by_command(seeds):
    """Not with better drafts that the command removed."""
    for seed in range(seeds):
        machine, rng = canary(), np.random.default_rng(seed)
        window(machine, rng, 0.4, version=0)
        for version in (1, 2):
            assert trial(machine, rng, 0.8, version=version).decision == "keep"
        window(machine, rng, 0.8, version=2)
        for version in (2, 3):  # to a stored draft, then to the initial one
            machine.reject(version)
            machine.restore(version + 1)
        for version in (1, 2, 3):  # they were still open
            window(machine, rng, 0.8, 20, version=version)
        window(machine, rng, 0.4, 20, version=4)
        assert trial(machine, rng, 0.6, version=5).decision == "keep"


def test_a_slower_draft_that_stays_names_the_limit():
    for seed in range(40):
        machine, rng = canary(), np.random.default_rng(seed)
        window(machine, rng)
        verdict = trial(machine, rng, 0.57)
        if verdict.decision == "keep" and verdict.comparison.change < -0.02:
            assert "rolled back only if 2% and two standard errors" in verdict.reason
            return
        assert "rolled back only" not in verdict.reason
    raise AssertionError("none is slower and stays")
