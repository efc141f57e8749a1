"""`vllm-tide plan`: the command, its files, and what a run directory says."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from vllm_tide.cli.main import main
from vllm_tide.config import ConfigError
from vllm_tide.control.profile_store import save
from vllm_tide.control.time_model import ForwardModel, TimeModel
from vllm_tide.plan.cluster import fit_curve, learnt, read_cluster
from vllm_tide.transport.rendezvous import EngineManifest

HOUR = 3600.0


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
    assert inputs["draft.length_after"].source == "measured by events-e.jsonl"
    assert inputs["H100.train_tokens_per_s"].source == "given"


def cycle(number, **changes):
    measured = {"holdout_live": 2.0, "holdout_new": 2.0 + 0.2 * number}
    return {"event": "cycle", "steps": 12, "seconds": 10, **measured, **changes}


def write_events(folder, *lines, name="e"):
    encoded = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    (folder / f"events-{name}.jsonl").write_bytes(b"\n".join(encoded) + b"\n")


def test_a_line_that_goes_on_is_a_range_and_not_measured(cluster_file, tmp_path):
    write_events(tmp_path, *[cycle(number) for number in range(4)])
    found = learnt(tmp_path, 2048)
    after, tau = found["draft.length_after"], found["draft.tokens_to_63_percent"]
    assert after.low == 2.6
    assert 4 < after.high < 32
    assert after.source == "extrapolated by events-e.jsonl"
    assert tau.source == f"{after.source} and draft.batch_tokens 2048"
    assert found["draft.length_before"].source == "measured by events-e.jsonl"
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


@pytest.mark.parametrize(("old", "new"), [("a", "b"), ("b", "a")])
def test_of_several_trainers_the_newest_one_counts(tmp_path, old, new):
    lines = [cycle(number, unix=1e9 + number) for number in range(4)]
    write_events(tmp_path, *lines, name=new)
    alone = learnt(tmp_path, 2048)
    earlier = [cycle(1, holdout_live=1.0, unix=number) for number in range(4)]
    write_events(tmp_path, {"event": "shift", "unix": "x"}, *earlier, name=old)
    assert learnt(tmp_path, 2048) == alone
    assert f"events-{new}.jsonl" in alone["draft.length_after"].source
    write_events(tmp_path, *lines[:2], name=new)
    with pytest.raises(ConfigError, match=f"events-{new}.jsonl: .* evaluated 2 cycles"):
        learnt(tmp_path, 2048)


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
