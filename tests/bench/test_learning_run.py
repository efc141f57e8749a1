import json

import pytest

from bench.harness import session as learning_session
from bench.harness.common import BenchError, ServerError
from bench.suites.learning import ARMS, LearningOptions, arms_of, config_of, run
from tests.bench.learning_toys import arm_run, options_for
from vllm_tide.config import parse_tide

SECONDS = {"none": 4.0, "frozen": 2.5, "always": 1.6, "tide": 2.0, "gated": 1.6}


@pytest.fixture
def served(monkeypatch):
    """Arms that are made up; the names of those that ran."""
    ran = []

    def fake(options, stream, hooks):
        ran.append(options)
        name = options.name.partition("-")[2]
        run = arm_run(options.name, stream, SECONDS[name])
        if options.run_dir is not None:
            status = {"training_seconds": {"always": 10.0}.get(name, 4.0)}
            run.trainers = [status]
        for sample in run.samples:
            hooks.on_sample(sample)
        return run

    monkeypatch.setattr(learning_session, "run_arm", fake)
    return ran


def options(tmp_path, **changes):
    given = {"requests": (4, 6), "domains": ("python", "c"), "output_tokens": 8}
    return options_for(LearningOptions, "learning", tmp_path, **(given | changes))


def read(tmp_path):
    return json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arms_configuration_is_valid(arm, tmp_path):
    knobs = {
        "schedule": {"mode": "always"},
        "train": {"max_passes": 7},
        "deploy": {"canary": False},
    }
    config = config_of(arm, options(tmp_path, tide=knobs), tmp_path)
    if arm.mode is None:
        assert config is None or "tide" not in config
        return
    tide = parse_tide(config["tide"])
    assert tide.schedule.mode == arm.mode and tide.train.autostart
    assert tide.train.max_passes == 7 and not tide.deploy.canary


def test_arms_come_in_the_order_given_and_once():
    assert [a.name for a in arms_of(["gated", "none", "gated"])] == ["gated", "none"]


def test_an_arm_may_say_how_lazily_heads_are_published(tmp_path):
    (lazy,) = arms_of(["gated@32"])
    deploy = parse_tide(config_of(lazy, options(tmp_path), tmp_path)["tide"]).deploy
    assert (lazy.mode, deploy.min_requests, deploy.min_seconds) == ("gated", 32, 0.0)


@pytest.mark.parametrize(
    ("name", "says"), [("frozen@8", "trained"), ("always@auto", "number of requests")]
)
def test_a_spacing_that_makes_no_sense_is_refused(name, says):
    with pytest.raises(BenchError, match=says):
        arms_of([name])


def test_both_kinds_of_traffic_are_served_and_compared(tmp_path, served):
    assert run(options(tmp_path, traffic="both")) == 0
    report = read(tmp_path)
    assert report["complete"] and report["problems"] == []
    results = report["results"]
    assert list(results["shift"]) == ["none", "frozen", "always", "tide", "gated"]
    gated = results["comparison"]["mixed"]["against_always"]["gated"]
    assert gated["training_s_ratio"] == 0.4
    assert results["goals"]["shift"]["1.25_times_frozen"]
    assert results["identity"]["shift"]["arms"]["gated"]["identical"]
    assert report["environment"]["target"]["parameters"] > 0
    assert len(served) == 10
    trained = [o for o in served if o.expect_trainer]
    assert {o.name.partition("-")[2] for o in trained} == {"always", "tide", "gated"}


def test_a_resumed_run_measures_only_what_is_missing(tmp_path, served):
    run(options(tmp_path, arms=("none", "frozen")))
    assert run(options(tmp_path, arms=("frozen", "gated"), resume=True)) == 0
    assert [o.name for o in served] == ["shift-none", "shift-frozen", "shift-gated"]
    results = read(tmp_path)["results"]
    assert list(results["shift"]) == ["none", "frozen", "gated"]
    assert set(results["identity"]["shift"]["arms"]) == {"frozen", "gated"}


def test_another_measurement_is_not_resumed(tmp_path, served):
    run(options(tmp_path, arms=("none",)))
    run(options(tmp_path, arms=("none",), output_tokens=9, resume=True))
    assert len(served) == 2


def test_an_arm_that_fails_is_a_problem_and_the_others_go_on(
    tmp_path, served, monkeypatch
):
    fake = learning_session.run_arm

    def sometimes(arm, stream, hooks):
        if arm.name == "shift-frozen":
            raise ServerError("the server ended")
        return fake(arm, stream, hooks)

    monkeypatch.setattr(learning_session, "run_arm", sometimes)
    assert run(options(tmp_path, arms=("none", "frozen", "gated"))) == 1
    report = read(tmp_path)
    assert list(report["results"]["shift"]) == ["none", "gated"]
    assert report["problems"] == ["shift-frozen: ServerError: the server ended"]


def test_what_was_measured_is_compared_when_the_time_is_over(
    tmp_path, served, monkeypatch
):
    fake = learning_session.run_arm

    def slow(arm, stream, hooks):
        session.append(arm)
        monkeypatch.setattr(
            learning_session.Session, "time_left_s", lambda _: -1.0
        ) if len(session) == 2 else None
        return fake(arm, stream, hooks)

    session = []
    monkeypatch.setattr(learning_session, "run_arm", slow)
    assert run(options(tmp_path, max_minutes=9.0)) == 1
    report = read(tmp_path)
    assert not report["complete"] and "--max-minutes 9" in report["stopped"]
    assert report["results"]["comparison"]["shift"]["over_none"]["frozen"] == 1.6


def test_wrong_outputs_are_a_problem(tmp_path, served, monkeypatch):
    real = learning_session.identity_of

    def spoilt(arms, target, dtype):
        arms["gated"][0].token_ids = [3] * 8
        return real(arms, target, dtype, lambda ds, *_: [_wrong(d) for d in ds])

    monkeypatch.setattr(learning_session, "identity_of", spoilt)
    assert run(options(tmp_path, arms=("none", "gated"))) == 1
    assert "gated: outputs differ" in read(tmp_path)["problems"][0]


def _wrong(difference):
    from bench.harness.identity import Rescored

    return Rescored(difference, 1.0, 1.0, 0.0, False)
