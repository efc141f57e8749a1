"""`vllm-tide plan`: formulas against integration and brute force, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest

from vllm_tide.cli.main import main
from vllm_tide.config import ConfigError
from vllm_tide.control.profile_store import save
from vllm_tide.control.time_model import ForwardModel, TimeModel
from vllm_tide.plan import allocate
from vllm_tide.plan.allocate import (
    DEDICATED,
    SHARE,
    STATIC,
    SWITCHING,
    best_share,
    best_whole,
    break_even,
    rows,
)
from vllm_tide.plan.cluster import EXAMPLE, fit_curve, learnt, read_cluster
from vllm_tide.plan.paper import PRINTED, WITHIN
from vllm_tide.plan.report import best_of, latin_hypercube, make_plan
from vllm_tide.plan.throughput import (
    SATURATED,
    Accelerators,
    Case,
    Learning,
    SpeedUp,
)
from vllm_tide.transport.rendezvous import EngineManifest

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


@pytest.fixture
def cluster_file(tmp_path):
    def write(**changes):
        content = json.loads(json.dumps(EXAMPLE))
        for key, value in changes.items():
            *path, last = key.split("__")
            at = content
            for part in path:
                at = at[int(part) if part.isdigit() else part]
            if value is None:
                at.pop(int(last) if last.isdigit() else last)
            else:
                at[last] = value
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(content))
        return path

    return write


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


def test_a_flip_is_where_the_decision_changes(cluster_file):
    plan = make_plan(read_cluster(cluster_file()), draws=20)
    assert plan.train
    said = next(s for s in plan.flips if s.startswith("draft.length_after below"))
    value = float(said.split()[-1])
    changed = make_plan(
        read_cluster(cluster_file(draft__length_after=0.999 * value)), draws=1
    )
    assert not changed.train


def test_the_command_says_train(cluster_file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(["plan", "--cluster", str(cluster_file()), "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Train: TIDE" in said
    assert "given" in said
    plan = json.loads(out.read_text())
    assert plan["train"] is True
    assert [row["name"] for row in plan["rows"]][:2] == [
        "all serve, no speculation",
        "all serve, static draft",
    ]


def test_the_command_says_do_not(cluster_file, capsys):
    path = cluster_file(draft__length_after=1.9)
    assert main(["plan", "--cluster", str(path)]) == 3
    assert "Do not train: all serve, static draft" in capsys.readouterr().out


def test_the_example_is_a_cluster_file(tmp_path, capsys):
    assert main(["plan", "--example"]) == 0
    path = tmp_path / "example.json"
    path.write_text(capsys.readouterr().out)
    assert read_cluster(path).inputs["H100.step_cost"].source == "given"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"classes__0__cuont": 3},
            "classes.0.cuont: unknown key; did you mean 'count'",
        ),
        (
            {"draft__length_after": [3, 2]},
            "draft.length_after: Value error, tokens per verify step: a number from 1 "
            "to 32, or a range [low, high], got [3, 2].",
        ),
        ({"draft__length_after": None}, "draft.length_after: is missing; give it, or"),
        ({"draft__step_cost": None}, "H100.step_cost: is missing; give it, or"),
        ({"classes__1__name": "H100"}, "classes: 'H100' is there twice"),
        ({"classes__0__count": -1}, "classes.0.count: Input should be greater"),
        ({"classes__0__count": 6}, "classes.0: Value error, count is 6, no multiple"),
        (
            {"workload__prefill_share": 1},
            "workload.prefill_share: Value error, a share",
        ),
        ({"workload__shift_every_hours": 0}, "shift_every_hours: Value error, hours"),
        (
            {"draft__passes": 0.5},
            "draft.passes: Value error, passes over a captured row",
        ),
        (
            {"draft__step_cost": [1, 2, 3]},
            "draft.step_cost: Value error, a verify step",
        ),
        ({"draft__tokens_to_63_percent": 1}, "trained tokens: a number from 100 to"),
        ({"deploy_seconds": float("nan")}, "deploy_seconds: Value error, seconds"),
        ({"classes__1__usd_per_hour": 1e9}, "usd_per_hour: Value error, US dollars"),
        ({"draft__length_before": "two"}, "draft.length_before"),
        ({"classes__0__serve_tokens_per_s": 10**400}, "classes.0.serve_tokens_per_s"),
        ({"classes__0__name": "a\nb\x1b[2J"}, "classes.0: Value error, name has"),
        ({"classes__1": None, "classes__0__count": 0}, "classes: none serves; one"),
        (
            {"classes__1": None, "classes__0__serve_tokens_per_s": 0},
            "classes: none serves; one",
        ),
        ({"classes__0__count": 0, "classes__1__count": 0}, "classes: none serves"),
    ],
)
def test_a_wrong_file_is_one_sentence(cluster_file, capsys, change, sentence):
    path = cluster_file(**change)
    assert main(["plan", "--cluster", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: ")
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("[]", "Input should be"), ("[" * 100_000, "cannot be read as JSON")],
)
def test_what_is_no_cluster_is_one_sentence(tmp_path, capsys, content, sentence):
    path = tmp_path / "cluster.json"
    path.write_text(content)
    assert main(["plan", "--cluster", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: {sentence}")
    assert said.count("\n") == 1


def test_files_that_are_not_there(cluster_file, tmp_path, capsys):
    missing = str(tmp_path / "none.json")
    cluster = str(cluster_file())
    for arguments in (
        ["--cluster", missing],
        ["--cluster", cluster, "--profile", f"H100={missing}"],
        ["--cluster", cluster, "--profile", f"H200={missing}"],
        ["--cluster", cluster, "--profile", "H100"],
        ["--cluster", cluster, "--speedup", missing],
        ["--cluster", cluster, "--run-dir", str(tmp_path)],
        ["--cluster", cluster, "--json", str(tmp_path / "no" / "out.json")],
    ):
        assert main(["plan", *arguments]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_a_trainer_s_events_say_how_the_draft_learns(cluster_file, tmp_path):
    lines = [{"event": "cycle", "steps": 9, "seconds": 9, "holdout_new": 9}]
    lines.append({"event": "shift", "reason": "acceptance fell"})
    tokens, live = 0, 1.6
    for _ in range(12):
        tokens += 10 * 2048
        new = 2.4 - 0.8 * math.exp(-tokens / 60_000)
        lines.append(
            {
                "event": "cycle",
                "steps": 10,
                "seconds": 5.0,
                "holdout_live": live,
                "holdout_new": new,
            }
        )
        live = new
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "events-e.jsonl").write_text(text)
    found = learnt(tmp_path, 2048)
    assert found["draft.length_before"].low == pytest.approx(1.6)
    assert found["draft.length_after"].low == pytest.approx(2.4, abs=0.01)
    assert found["draft.tokens_to_63_percent"].low == pytest.approx(60_000, rel=0.03)
    assert found["train_tokens_per_s"].low == pytest.approx(2048 * 10 / 5)
    inputs = read_cluster(cluster_file(), tmp_path).inputs
    assert inputs["draft.length_after"].source == "measured"
    assert inputs["H100.train_tokens_per_s"].source == "given"


def cycle(number, **changes):
    measured = {"holdout_live": 2.0, "holdout_new": 2.0 + 0.2 * number}
    return {"event": "cycle", "steps": 12, "seconds": 10, **measured, **changes}


def write_events(folder, *lines):
    encoded = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    (folder / "events-e.jsonl").write_bytes(b"\n".join(encoded) + b"\n")


def test_a_line_that_goes_on_is_a_range_and_not_measured(cluster_file, tmp_path):
    write_events(tmp_path, *[cycle(number) for number in range(4)])
    found = learnt(tmp_path, 2048)
    after, tau = found["draft.length_after"], found["draft.tokens_to_63_percent"]
    assert after.low == 2.6
    assert 4 < after.high < 32
    assert after.source == tau.source == "extrapolated"
    assert found["draft.length_before"].source == "measured"
    # What is known to the operator goes before it; if it is not, it is all there is.
    inputs = read_cluster(cluster_file(), tmp_path).inputs
    assert inputs["draft.length_after"].source == "given"
    left_out = cluster_file(draft__length_after=None)
    assert read_cluster(left_out, tmp_path).inputs["draft.length_after"] == after


def test_no_draft_gets_longer_than_an_engine_drafts(tmp_path):
    write_events(tmp_path, *[cycle(number) for number in range(4)])
    names = ("ring", "weights", "target_path", "draft_path", "target_dtype")
    sizes = ("hidden_size", "vocab_size", "draft_vocab_size", "teacher_topk")
    manifest = EngineManifest(
        engine_id="e",
        pid=2**22 + 1,
        pid_start=1,
        **dict.fromkeys(names, "none"),
        **dict.fromkeys(sizes, 8),
        aux_layer_ids=(1,),
        teacher="hidden",
        feature_dtype="float32",
        num_speculative_tokens=3,
        tide={},
        created_unix=1.0,
    )
    (tmp_path / "engine-e.json").write_text(json.dumps(asdict(manifest)))
    after = learnt(tmp_path, 2048)["draft.length_after"]
    assert (after.low, after.high) == (2.6, 4.0)


@pytest.mark.parametrize(
    "line",
    [
        b"5",
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        cycle(9, steps=0),
        {k: v for k, v in cycle(9).items() if k != "steps"},
        cycle(9, holdout_live=None),
        cycle(9, holdout_live="two"),
        cycle(9, holdout_new=float("nan")),
        cycle(9, holdout_new=1e300),
        cycle(9, seconds=10**400),
    ],
    ids=lambda line: str(line)[:60],
)
def test_an_unusable_line_is_left_out_and_counted(tmp_path, line):
    good = [cycle(number) for number in range(4)]
    write_events(tmp_path, *good)
    expected = learnt(tmp_path, 2048)
    write_events(tmp_path, line, *good)
    for name, found in learnt(tmp_path, 2048).items():
        source = f"{expected[name].source}, 1 unusable left out"
        assert found == replace(expected[name], source=source)
    write_events(tmp_path, line, line)
    with pytest.raises(ConfigError, match="0 cycles since .*, 2 unusable left out; th"):
        learnt(tmp_path, 2048)


def test_a_run_directory_that_cannot_be_read_is_named(cluster_file, tmp_path, capsys):
    folder = tmp_path / "run"
    command = ["plan", "--cluster", str(cluster_file()), "--run-dir", str(folder)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said == f"error: --run-dir {folder}: there is no such folder.\n"
    events = folder / "events-e.jsonl"
    events.mkdir(parents=True)
    assert main(command) == 2
    assert capsys.readouterr().err == f"error: --run-dir: {events}: Is a directory.\n"


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0, float("inf"), 10**400])
@pytest.mark.parametrize("key", ["length", "speedup"])
def test_a_simulated_speed_up_is_a_number(cluster_file, tmp_path, key, value):
    table = {"length": [1.0, 2.0], "speedup": [1.0, 1.5]}
    table[key][1 if value == math.inf else 0] = value
    path = tmp_path / "speedup.json"
    path.write_text(json.dumps({"classes": {"H100": table}}))
    with pytest.raises(ConfigError, match="--speedup: "):
        read_cluster(cluster_file(), speedup=path)


def test_a_curve_without_a_rise_is_flat():
    after, _ = fit_curve([0.0, 1e4, 2e4, 3e4], [2.0, 1.9, 1.95, 1.9])
    assert after == 2.0


def test_a_profile_says_what_a_verify_step_costs(cluster_file, tmp_path):
    forward = ForwardModel(knots=(1, 256), seconds=(0.01, 0.02), alpha=0.0)
    draft = ForwardModel(knots=(1, 256), seconds=(0.001, 0.002), alpha=0.0)
    model = TimeModel(forward, draft, draft, host=0.001)
    path = tmp_path / "profile.json"
    save(path, model, {"num_speculative_tokens": 3}, {})
    cluster = read_cluster(cluster_file(), profiles={"MI250": path})
    plain = 0.001 + forward.forward(64, 0.0)
    verify = 0.001 + forward.forward(256, 0.0)
    verify += draft.forward(256, 0.0) + 2 * draft.forward(64, 0.0)
    found = cluster.inputs["MI250.step_cost"]
    assert found.source == "measured"
    assert found.low == pytest.approx(verify / plain)


def test_simulated_speed_ups_take_the_place_of_a_step_cost(cluster_file, tmp_path):
    table = {"length": [1.0, 2.0, 3.0], "speedup": [1.0, 1.2, 1.7]}
    path = tmp_path / "speedup.json"
    path.write_text(json.dumps({"classes": {"H100": table}}))
    cluster = read_cluster(cluster_file(), speedup=path)
    assert "H100.step_cost" not in cluster.inputs
    values = {name: x.at(0.5) for name, x in cluster.inputs.items()}
    h100, mi250 = cluster.case(values).classes
    assert h100.speed(2.5) == pytest.approx(1.45)
    assert mi250.speed(1.0) == 1.0
    path.write_text(json.dumps({"classes": {"H100": {"length": [2, 1]}}}))
    with pytest.raises(ConfigError, match="--speedup"):
        read_cluster(cluster_file(), speedup=path)
