"""`vllm-tide plan`: formulas against integration and brute force, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.plan.paper import PRINTED, WITHIN
from vllm_tide.cli.main import main
from vllm_tide.plan import allocate
from vllm_tide.plan.allocate import (
    DEDICATED,
    NONE,
    SHARE,
    STATIC,
    SWITCHING,
    Row,
    best_of,
    best_share,
    best_whole,
    rows,
)
from vllm_tide.plan.cluster import EXAMPLE, read_cluster
from vllm_tide.plan.throughput import (
    SATURATED,
    Accelerators,
    Case,
    Learning,
    SpeedUp,
)

HOUR = 3600.0


def random_case(rng, num_classes=2, most=6):
    classes = tuple(
        Accelerators(
            f"class{i}",
            int(rng.integers(1, most + 1)),
            serves=float(rng.uniform(100, 2000)),
            trains=float(rng.uniform(500, 50_000)),
            usd_per_hour=float(rng.uniform(0.5, 4)),
            step=1,
            speed=SpeedUp.of_step_cost(
                float(rng.uniform(1.0, 2.2)), float(rng.choice([0.0, 0.2]))
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
def test_printed_numbers_of_the_paper(row):
    assert row.computed() == pytest.approx(row.value, abs=WITHIN)


def integral(case, training, seconds, most=math.inf, back=math.inf):
    """Return served tokens, by the midpoint rule between the discontinuities."""
    rate, learning = case.rate(training), case.learning
    bends = sorted({0.0, *(min(t, seconds) for t in (learning.delay, back))})
    pieces = zip(bends, [*bends[1:], seconds], strict=True)
    edges = np.concatenate([np.linspace(*ends, 4_001) for ends in pieces])
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    total = 0.0
    for x, group in zip(training, case.classes, strict=True):
        lengths = (
            learning.length(min(rate * t, most))
            if t > learning.delay
            else learning.before
            for t in middle
        )
        speeds = np.array([group.speed(length) for length in lengths])
        serving = np.where(middle < back, group.count - x, group.count)
        total += group.serves * float(np.dot(speeds * serving, width))
    return total


@pytest.mark.parametrize("seed", range(3))
def test_tokens_equal_their_integral(seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    training = tuple(float(rng.uniform(0, c.count)) for c in case.classes)
    for seconds in (0.5 * case.learning.delay, case.every):
        expected = integral(case, training, seconds)
        assert case.tokens(training, seconds) == pytest.approx(expected, rel=5e-5)


@pytest.mark.parametrize(("seed", "switch"), [(0, 0.0), (1, 100.0), (2, 1e6)])
def test_tokens_of_switching_equal_their_integral(seed, switch):
    rng = np.random.default_rng(400 + seed)
    case = replace(random_case(rng), switch=switch)
    training = tuple(float(rng.uniform(0, c.count)) for c in case.classes)
    most = SATURATED * case.learning.tokens
    back = most / case.rate(training) + 2 * switch
    for seconds in (0.5 * case.learning.delay, 0.7 * back, 2 * back, case.every):
        expected = integral(case, training, seconds, most, back)
        served = case.switched_tokens(training, seconds)
        assert served == pytest.approx(expected, rel=1e-4)


def test_accelerators_that_never_switch_back_have_no_second_switch():
    learning = Learning(1.9, 2.6, tokens=2e7, delay=60.0)
    slow = replace(one_class(8, 1650.0, 50.0, learning, 24 * HOUR), switch=300.0)
    assert slow.switched_mean((4.0,)) == pytest.approx(slow.mean((4.0,)))
    # An endless switch serves something, and no more than without a return.
    fast = one_class(8, 1650.0, 5e4, learning, every=24 * HOUR)
    endless = replace(fast, switch=1e6)
    assert 0 < endless.switched_mean((7.0,)) <= fast.mean((7.0,))


def test_prefill_is_not_shortened_by_speculation():
    speed = SpeedUp.of_step_cost(1.5, prefill=0.25)
    for length in (1.0, 1.2, 1.5, 1.77, 2.6, 4.0):
        expected = max(1.0, 1 / (0.25 + 0.75 * 1.5 / length))
        assert speed(length) == pytest.approx(expected, rel=7e-4)


def test_training_before_the_first_deployment_counts():
    speed = SpeedUp.of_step_cost(1.0)
    learning = Learning(1.0, 2.0, tokens=1000.0, delay=10.0)
    just_after = learning.served(10.001, 500.0, speed)
    just_after -= learning.served(10.0, 500.0, speed)
    assert just_after / 0.001 == pytest.approx(learning.length(5000.0), rel=1e-3)
    # The draft does not change once training stops.
    stopped = learning.served(30.0, 500.0, speed, most=1000.0)
    assert stopped == pytest.approx(10 + 20 * learning.length(1000.0))


def test_captured_tokens_and_demand_limit_training(cluster_file):
    def rate(passes):
        changes = {"draft__passes": passes, "classes__0__train_tokens_per_s": 1e9}
        return read_cluster(cluster_file(**changes)).case().rate((4.0, 0.0))

    assert rate(6) == pytest.approx(3 * rate(2))
    assert rate(None) == pytest.approx(4 * rate(2))  # tide.train.max_passes
    case = one_class(8, 1650.0, 1e9, Learning(1.9, 2.6, 1e7, 60.0), 24 * HOUR)
    (group,) = case.classes
    assert case.rate((1.0,)) == pytest.approx(7 * 1650 * group.speed(1.9))
    assert replace(case, demand=1000.0).rate((1.0,)) == 1000.0


def test_the_square_root_law():
    """The best share for kT >> 1 where the data rate is no limit."""
    learning = Learning(1.9, 2.533, tokens=2e7, delay=0.0)
    case = one_class(8, 1650.0, 5e4, learning, every=24 * HOUR)
    case = replace(case, captured=1e9)
    gain = (learning.after - learning.before) / learning.after
    expected = math.sqrt(8 * gain * learning.tokens / (5e4 * case.every))
    best = max(np.linspace(0.001, 1, 1000), key=lambda x: case.mean((x,)))
    assert 5e4 * best / learning.tokens * case.every > 20
    assert best == pytest.approx(expected, rel=0.05)
    assert case.mean(best_share(case)) > 0.999 * case.mean((best,))


@pytest.mark.parametrize("seed", range(3))
def test_whole_instances_equal_brute_force(seed, monkeypatch):
    case = random_case(np.random.default_rng(200 + seed), num_classes=3, most=9)
    axes = [range(c.count + 1) for c in case.classes]
    full = tuple(c.count for c in case.classes)
    brute = max(case.mean(x) for x in product(*axes) if any(x) and x != full)
    best = best_whole(case, case.mean)
    assert case.mean(best) == pytest.approx(brute, rel=1e-12)
    # Where there are too many, a coarser grid of numbers loses little.
    monkeypatch.setattr(allocate, "_COMBINATIONS", 200)
    assert case.mean(best_whole(case, case.mean)) > 0.95 * brute


def test_instances_stay_whole():
    speed = SpeedUp.of_step_cost(1.5)
    groups = (
        Accelerators("a", 8, 1000.0, 9000.0, 1.0, 4, speed),
        Accelerators("b", 5, 1000.0, 9000.0, 1.0, 1, speed),
    )
    case = Case(groups, Learning(1.9, 2.6, 1e7, 60.0), HOUR)
    assert best_whole(case, lambda x: x[0])[0] in (4.0, 8.0)


def by_name(case):
    return {row.name: row for row in rows(case)}


def test_without_a_training_accelerator_the_static_draft_is_best():
    case = one_class(8, 1650.0, 0.0, Learning(1.9, 2.6, 1e7, 60.0), HOUR)
    compared = by_name(case)
    assert compared[DEDICATED].training is compared[SHARE].training is None
    assert best_of([*compared.values()]).name == STATIC


def test_one_accelerator_cannot_be_dedicated_but_shared():
    case = one_class(1, 1650.0, 5e4, Learning(1.9, 2.6, 1e7, 60.0), 24 * HOUR)
    compared = by_name(case)
    assert compared[DEDICATED].training is None
    assert 0 < compared[SHARE].training[0] < 0.5
    assert compared[SHARE].tokens_per_s > compared[STATIC].tokens_per_s


def test_a_draft_that_learns_at_once_leaves_the_papers_formula():
    learning = Learning(1.0, 1.3, tokens=1.0, delay=0.0)
    speed = SpeedUp.of_step_cost(1.0)
    groups = (
        Accelerators("H100", 8, 6.76, 2.44e4, 0.0, 4, speed),
        Accelerators("MI250", 4, 1.0, 1e4, 0.0, 4, speed),
    )
    case = Case(groups, learning, every=1e6, captured=1e9)
    share = 8 * 6.76 / case.plain
    assert case.mean((0.0, 4.0)) / case.plain == pytest.approx(1.3 * share, rel=1e-4)


def test_switching_serves_again_after_training():
    learning = Learning(1.9, 2.6, tokens=1e6, delay=60.0)
    compared = by_name(one_class(8, 1650.0, 5e4, learning, every=24 * HOUR))
    ratio = compared[SWITCHING].tokens_per_s / compared[DEDICATED].tokens_per_s
    assert ratio > 1.1


def test_without_demand_training_gains_nothing():
    learning = Learning(1.9, 2.6, tokens=1e7, delay=60.0)
    case = one_class(8, 1650.0, 5e4, learning, every=24 * HOUR)
    compared = rows(replace(case, demand=1000.0))
    assert {row.tokens_per_s for row in compared} == {1000.0}
    assert best_of(compared).name == NONE


@pytest.mark.parametrize(("more", "name"), [(0.003, STATIC), (0.03, DEDICATED)])
def test_a_negligible_gain_does_not_justify_a_trainer(more, name):
    compared = [
        Row(STATIC, (0.0,), 1000.0),
        Row(DEDICATED, (1.0,), 1000.0 * (1 + more)),
    ]
    assert best_of(compared).name == name


@pytest.fixture
def cluster_file(tmp_path):
    """Write the example with changes: `classes__0__count=3`; None removes a key."""

    def write(**changes):
        content = json.loads(json.dumps(EXAMPLE))
        for key, value in changes.items():
            *path, last = (int(x) if x.isdigit() else x for x in key.split("__"))
            section = content
            for part in path:
                section = section[part]
            if value is None:
                section.pop(last)
            else:
                section[last] = value
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(content))
        return path

    return write


def test_the_command_recommends_training(cluster_file, tmp_path, capsys):
    assert main(["plan", "--example"]) == 0
    example = tmp_path / "example.json"
    example.write_text(capsys.readouterr().out)
    out = tmp_path / "plan.json"
    argv = ["plan", "--cluster", str(example)]
    assert main([*argv, "--json", "--output", str(out)]) == main(argv) == 0
    text = capsys.readouterr().out
    assert "switching has the highest throughput on 8 H100 and 4 MI250." in text
    plan = json.loads(out.read_text())
    assert plan["train"] is True
    assert [row["name"] for row in plan["rows"]][:2] == [NONE, STATIC]
    assert all(f"{row['tokens_per_s']:,.0f}" in text for row in plan["rows"])


def test_the_command_recommends_no_training_without_a_gain(cluster_file, capsys):
    path = cluster_file(draft__length_after=1.9)
    assert main(["plan", "--cluster", str(path)]) == 1
    assert "Do not train: all serve, static draft" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"classes__0__cuont": 3},
            "classes.0.cuont: unknown key; did you mean 'count'",
        ),
        ({"draft__length_after": [3, 2]}, "draft.length_after: must be a number, got "),
        ({"draft__length_after": None}, "draft.length_after: missing."),
        ({"classes__0__count": -1}, "classes.0.count: must be at least 0, got -1."),
        (
            {"workload__prefill_share": 1},
            "workload.prefill_share: must be at most 0.99",
        ),
        ({"deploy_seconds": float("nan")}, "deploy_seconds: must be a finite number"),
        ({"classes__0__serve_tokens_per_s": 10**400}, "classes.0.serve_tokens_per_s"),
        (
            {"classes__0__name": "a\nb\x1b[2J"},
            "classes.0.name: must be printable ASCII",
        ),
        ({"classes__1": None, "classes__0__count": 0}, "classes: none can serve;"),
    ],
)
def test_a_wrong_file_gives_one_line(cluster_file, capsys, change, sentence):
    path = cluster_file(**change)
    assert main(["plan", "--cluster", str(path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {path}: ")
    assert sentence in message
    assert message.count("\n") == 1


def test_unreadable_and_unwritable_files(cluster_file, tmp_path, capsys):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for arguments in (
        ["--cluster", str(tmp_path / "none.json")],
        ["--cluster", str(deep)],
        [
            "--cluster",
            str(cluster_file()),
            "--output",
            str(tmp_path / "no" / "out.json"),
        ],
    ):
        assert main(["plan", *arguments]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1
