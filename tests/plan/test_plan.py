"""`vllm-tide plan`: formulas against integration and brute force, and the command."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from vllm_tide.cli.main import main
from vllm_tide.plan import allocate
from vllm_tide.plan.allocate import (
    DEDICATED,
    SHARE,
    STATIC,
    SWITCHING,
    Row,
    best_share,
    best_whole,
    break_even,
    rows,
)
from vllm_tide.plan.cluster import read_cluster
from vllm_tide.plan.paper import PRINTED, WITHIN
from vllm_tide.plan.report import best_of, latin_hypercube, make_plan, text
from vllm_tide.plan.throughput import (
    SATURATED,
    Accelerators,
    Case,
    Learning,
    SpeedUp,
)

HOUR = 3600.0


def random_case(rng, num_classes=2, most=6, step=1):
    classes = tuple(
        Accelerators(
            f"class{i}",
            int(rng.integers(1, most + 1)),
            serves=float(rng.uniform(100, 2000)),
            trains=float(rng.uniform(500, 50_000)),
            usd_per_hour=float(rng.uniform(0.5, 4)),
            step=step,
            speed=SpeedUp.of_step_cost(
                float(rng.uniform(1.0, 2.2)), prefill=float(rng.choice([0.0, 0.2]))
            ),
        )
        for i in range(num_classes)
    )
    before = float(rng.uniform(1.2, 2.2))
    learning = Learning(
        before,
        before + float(rng.uniform(0.1, 1.2)),
        tokens=float(10 ** rng.uniform(5, 7.5)),
        delay=float(rng.uniform(0, 300)),
    )
    every = float(rng.uniform(0.2, 30)) * HOUR
    return Case(classes, learning, every, switch=float(rng.uniform(0, 200)))


def one_class(count, serves, trains, learning, every):
    speed = SpeedUp.of_step_cost(1.0)
    group = Accelerators("H100", count, serves, trains, 2.5, 1, speed)
    return Case((group,), learning, every)


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: row.figure)
def test_the_paper_s_numbers_are_ours(row):
    assert row.computed() == pytest.approx(row.value, abs=WITHIN)


def test_the_paper_check_is_a_command(capsys):
    assert main(["plan", "--paper-check"]) == 0
    assert capsys.readouterr().out.count("agrees") == len(PRINTED)


@pytest.mark.parametrize("seed", range(12))
def test_tokens_equal_their_integral(seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    training = tuple(float(rng.uniform(0, c.count)) for c in case.classes)
    rate, learning = case.rate(training), case.learning
    for seconds in (0.5 * learning.delay, case.every):
        edges = np.linspace(learning.delay, max(seconds, learning.delay), 40_001)
        middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        expected = 0.0
        for x, group in zip(training, case.classes, strict=True):
            speeds = [group.speed(learning.length(rate * t)) for t in middle]
            whole = min(seconds, learning.delay) * group.speed(learning.before)
            whole += float(np.dot(speeds, width))
            expected += (group.count - x) * group.serves * whole
        assert case.tokens(training, seconds) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("switch", [0.0, 100.0, 1e6])
def test_tokens_of_switching_equal_their_integral(seed, switch):
    rng = np.random.default_rng(400 + seed)
    case = replace(random_case(rng), switch=switch)
    training = tuple(float(rng.uniform(0, c.count)) for c in case.classes)
    rate, learning = case.rate(training), case.learning
    most = SATURATED * learning.tokens
    back = most / rate + 2 * switch
    for seconds in (0.5 * learning.delay, 0.7 * back, 2 * back, case.every):
        bends = sorted({0.0, *(min(t, seconds) for t in (learning.delay, back))})
        edges = np.concatenate(
            [
                np.linspace(*ends, 2_001)
                for ends in zip(bends, [*bends[1:], seconds], strict=True)
            ]
        )
        middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        expected = 0.0
        for x, group in zip(training, case.classes, strict=True):
            lengths = (
                learning.length(min(rate * t, most))
                if t > learning.delay
                else learning.before
                for t in middle
            )
            speeds = np.array([group.speed(length) for length in lengths])
            serving = np.where(middle < back, group.count - x, group.count)
            expected += group.serves * float(np.dot(speeds * serving, width))
        found = case.switched_tokens(training, seconds)
        assert found == pytest.approx(expected, rel=1e-4)


def test_who_never_comes_back_does_not_pay_for_it():
    learning = Learning(1.9, 2.6, tokens=2e7, delay=60.0)
    slow = one_class(8, 1650.0, 50.0, learning, every=24 * HOUR)
    slow = replace(slow, switch=300.0)
    assert slow.switched_mean((4.0,)) == pytest.approx(slow.mean((4.0,)))
    # Nor does an endless change serve less than nothing, nor more than no return.
    fast = one_class(8, 1650.0, 5e4, learning, every=24 * HOUR)
    endless = replace(fast, switch=1e6)
    assert 0 < endless.switched_mean((7.0,)) <= fast.mean((7.0,))


def test_a_simulated_speed_up_is_integrated_piece_by_piece():
    speed = SpeedUp((1.0, 1.5, 2.0, 3.0), (0.99, 1.0, 1.2, 1.9))
    learning = Learning(1.2, 2.8, tokens=1000.0, delay=2.0)
    times = np.linspace(2, 30, 200_001)
    middle = (times[1:] + times[:-1]) / 2
    served = np.mean([speed(learning.length(150 * t)) for t in middle]) * 28
    expected = 2 * speed(1.2) + served
    assert learning.served(30.0, 150.0, speed) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("control", [True, False])
def test_speculation_does_not_shorten_prefill(control):
    speed = SpeedUp.of_step_cost(1.5, control, prefill=0.25)
    for length in (1.0, 1.2, 1.5, 1.77, 2.6, 4.0):
        expected = 1 / (0.25 + 0.75 * 1.5 / length)
        if control:
            expected = max(1.0, expected)
        assert speed(length) == pytest.approx(expected, rel=7e-4)


def test_what_is_trained_before_the_first_deployment_counts():
    speed = SpeedUp.of_step_cost(1.0)
    learning = Learning(1.0, 2.0, tokens=1000.0, delay=10.0)
    just_after = learning.served(10.001, 500.0, speed)
    just_after -= learning.served(10.0, 500.0, speed)
    assert just_after / 0.001 == pytest.approx(learning.length(5000.0), rel=1e-3)
    # Nothing more is trained than is to be: then the draft stays as it is.
    stopped = learning.served(30.0, 500.0, speed, most=1000.0)
    assert stopped == pytest.approx(10 + 20 * learning.length(1000.0))


def test_passes_are_what_limits_training(cluster_file):
    def rate(passes):
        cluster = read_cluster(cluster_file(draft__passes=passes))
        values = {name: x.at(0.5) for name, x in cluster.inputs.items()}
        values["H100.train_tokens_per_s"] = 1e9
        return cluster.case(values).rate((4.0, 0.0))

    assert rate(6) == pytest.approx(3 * rate(2))
    inputs = read_cluster(cluster_file(draft__passes=None)).inputs
    assert (inputs["draft.passes"].high, inputs["draft.passes"].source) == (
        8,
        "assumed",
    )


def test_no_more_is_trained_than_is_asked_for():
    case = one_class(8, 1650.0, 1e9, Learning(1.9, 2.6, 1e7, 60.0), 24 * HOUR)
    (group,) = case.classes
    assert case.rate((1.0,)) == pytest.approx(7 * 1650 * group.speed(1.9))
    asked = Case(case.classes, case.learning, case.every, demand=1000.0)
    assert asked.rate((1.0,)) == 1000.0


def test_the_square_root_law():
    learning = Learning(1.9, 2.533, tokens=2e7, delay=0.0)
    case = one_class(8, 1650.0, 5e4, learning, every=24 * HOUR)
    gain = (learning.after - learning.before) / learning.after
    expected = math.sqrt(8 * gain * learning.tokens / (5e4 * case.every))
    # It is the limit of kT >> 1, and of a data rate that is no limit.
    case = Case(case.classes, learning, case.every, captured=1e9)
    (found,) = best_share(case)
    assert 5e4 * found / learning.tokens * case.every > 20
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_share_beats_every_point_of_a_grid(seed):
    case = random_case(np.random.default_rng(100 + seed))
    best = case.mean(best_share(case))
    axes = [np.linspace(0, c.count, 33) for c in case.classes]
    assert best >= max(case.mean(point) for point in product(*axes)) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_whole_instances_equal_brute_force(seed, monkeypatch):
    rng = np.random.default_rng(200 + seed)
    case = random_case(rng, num_classes=3, most=16)
    axes = [range(c.count + 1) for c in case.classes]
    full = tuple(c.count for c in case.classes)
    fit = [x for x in product(*axes) if any(x) and x != full]
    brute = max(case.mean(x) for x in fit)
    found = best_whole(case, case.mean)
    assert case.mean(found) == pytest.approx(brute, rel=1e-12)
    # The order that large clusters are searched in loses next to nothing.
    monkeypatch.setattr(allocate, "_COMBINATIONS", 0)
    assert case.mean(best_whole(case, case.mean)) > 0.98 * brute


def test_of_many_instances_few_are_tried_and_the_best_is_near():
    case = one_class(1000, 1650.0, 4000.0, Learning(1.9, 2.6, 1e7, 60.0), 10 * HOUR)
    tried: list[float] = []

    def worth(training):
        tried.append(training[0])
        return case.mean(training)

    found = best_whole(case, worth)
    assert len(set(tried)) < 100
    every = max(case.mean((float(n),)) for n in range(1, 1000))
    assert case.mean(found) > 0.999 * every


def test_instances_stay_whole():
    rng = np.random.default_rng(1)
    case = random_case(rng, most=6)
    groups = (
        Accelerators("a", 8, 1000.0, 9000.0, 1.0, 4, SpeedUp.of_step_cost(1.5)),
        case.classes[1],
    )
    whole = best_whole(Case(groups, case.learning, case.every), lambda x: x[0])
    assert whole[0] in (4.0, 8.0)


@pytest.mark.parametrize("seed", range(6))
def test_break_even_is_where_the_static_draft_is_met(seed):
    case = random_case(np.random.default_rng(300 + seed))
    training = best_share(case)
    found = break_even(case, lambda s: case.tokens(training, s))
    if found is None:
        late = 1e9
        assert case.tokens(training, late) <= case.frozen * late
    else:
        assert case.tokens(training, found) == pytest.approx(case.frozen * found)
        assert case.tokens(training, 0.9 * found) < case.frozen * 0.9 * found


def test_what_trains_but_does_not_serve_has_paid_with_the_first_deployment():
    speed = SpeedUp.of_step_cost(1.1)
    serves = Accelerators("engine", 1, 59.3, 0.0, 0.0, 1, speed)
    trains = Accelerators("other", 1, 0.0, 2_440.0, 0.0, 1, speed)
    for delay in (17.3, 18.1, 19.9):
        case = Case((serves, trains), Learning(1.475, 2.5, 6e4, delay), 0.3 * HOUR)
        found = break_even(case, lambda s, case=case: case.tokens((0.0, 1.0), s))
        assert found == pytest.approx(delay, abs=0.01)


def test_no_flip_asks_for_more_than_a_whole(cluster_file):
    file = cluster_file(workload__prefill_share=0.6)
    said = make_plan(read_cluster(file), draws=1).flips
    values = [float(s.split()[-1]) for s in said if "prefill_share" in s]
    assert all(value < 1 for value in values)


def test_nobody_trains_where_nobody_can():
    case = one_class(8, 1650.0, 0.0, Learning(1.9, 2.6, 1e7, 60.0), HOUR)
    found = {row.name: row for row in rows(case)}
    assert found[DEDICATED].training is found[SHARE].training is None
    assert best_of([*found.values()]).name == STATIC


def test_one_accelerator_cannot_be_dedicated_but_shared():
    case = one_class(1, 1650.0, 5e4, Learning(1.9, 2.6, 1e7, 60.0), 24 * HOUR)
    found = {row.name: row for row in rows(case)}
    assert found[DEDICATED].training is None
    assert 0 < found[SHARE].training[0] < 0.5
    assert found[SHARE].tokens_per_s > found[STATIC].tokens_per_s


def test_a_draft_that_learns_at_once_leaves_the_paper_s_formula():
    learning = Learning(1.0, 1.3, tokens=1.0, delay=0.0)
    speed = SpeedUp.of_step_cost(1.0)
    groups = (
        Accelerators("H100", 8, 6.76, 2.44e4, 0.0, 4, speed),
        Accelerators("MI250", 4, 1.0, 1e4, 0.0, 4, speed),
    )
    case = Case(groups, learning, every=1e6, captured=1e9)
    share = 8 * 6.76 / case.plain
    assert case.mean((0.0, 4.0)) / case.plain == pytest.approx(1.3 * share, rel=1e-4)


def test_switching_serves_again_once_it_has_learnt():
    learning = Learning(1.9, 2.6, tokens=1e6, delay=60.0)
    case = one_class(8, 1650.0, 5e4, learning, every=24 * HOUR)
    found = {row.name: row for row in rows(case)}
    assert found[SWITCHING].tokens_per_s > 1.1 * found[DEDICATED].tokens_per_s


def test_no_demand_no_training():
    learning = Learning(1.9, 2.6, tokens=1e7, delay=60.0)
    case = one_class(8, 1650.0, 5e4, learning, every=24 * HOUR)
    idle = Case(case.classes, learning, case.every, demand=1000.0)
    assert best_of(rows(idle)).name not in (DEDICATED, SHARE, SWITCHING)
    # Nor is anything to be caught up with, but where more is asked for.
    assert {row.break_even_s for row in rows(idle)} == {None}
    asked = {row.name: row for row in rows(replace(case, demand=1.01 * case.frozen))}
    assert asked[SHARE].break_even_s is not None


def test_draws_fill_the_ranges(cluster_file):
    cluster = read_cluster(cluster_file())
    drawn = [v["draft.length_after"] for v in latin_hypercube(cluster, 50)]
    assert min(drawn) < 2.22
    assert max(drawn) > 2.75
    assert sorted(drawn)[25] == pytest.approx(math.sqrt(2.2 * 2.8), rel=0.02)


@pytest.mark.parametrize(("length", "said"), [(1.2, True), (1.9, False)])
def test_control_is_named_where_it_changes_the_static_draft(cluster_file, length, said):
    changes = {"draft__length_before": length, "draft__step_cost": 1.5}
    plan = make_plan(read_cluster(cluster_file(**changes)), draws=1)
    assert ("Without tide.control" in "\n".join(text(plan))) == said


def test_a_flip_is_where_the_decision_changes(cluster_file):
    plan = make_plan(read_cluster(cluster_file()), draws=20)
    assert plan.train
    said = next(s for s in plan.flips if s.startswith("draft.length_after below"))
    value = float(said.split()[-1])
    changed = make_plan(
        read_cluster(cluster_file(draft__length_after=0.999 * value)), draws=1
    )
    assert not changed.train


@pytest.mark.parametrize(("more", "name"), [(0.003, STATIC), (0.03, DEDICATED)])
def test_next_to_nothing_is_not_worth_a_trainer(more, name):
    found = [Row(STATIC, (0.0,), 1000.0), Row(DEDICATED, (1.0,), 1000.0 * (1 + more))]
    assert best_of(found).name == name
