import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.suites import quickstart as quickstart
from demo.fetch_model import INDEX
from tests.bench.fake_processes import (
    as_a_terminal_starts,
    demo,
    fake_quickstart_venv,
    running,
    until,
    what_ran,
)
from vllm_tide.config import parse_tide

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "quickstart.sh")


def test_the_arm_that_learns_has_the_defaults(tmp_path):
    section = quickstart.tide_section(tmp_path)
    assert parse_tide(section) == parse_tide({"run_dir": str(tmp_path)})
    assert quickstart.mode_of(section) == "full"
    assert quickstart.mode_of({"preset": "control"}) == "changed"


@pytest.fixture
def target(tmp_path):
    return demo(tmp_path / "demo")[0]


@pytest.fixture
def arguments(tmp_path, target):
    folders = {
        "--venv": fake_quickstart_venv(tmp_path / "venv"),
        "--target": target,
        "--draft": target,
        "--work": tmp_path / "work",
        "--prompts": target.parent / "prompts",
        "--json": tmp_path / "report.json",
    }
    command = [part for name, path in folders.items() for part in (name, str(path))]
    cpu = str(min(os.sched_getaffinity(0)))
    command += ["--requests", "4,8", "--probe-requests", "4", "--max-tokens", "10"]
    command += ["--minutes", "0"]
    command += ["--dtype", "float32"]
    return [*command, "--engine-cpus", cpu, "--other-cpus", cpu]


def report_of(arguments, *more):
    assert quickstart.main([*arguments, *more]) == 1  # nothing is captured
    return json.loads(Path(arguments[arguments.index("--json") + 1]).read_text())


@pytest.mark.slow
def test_arms_alternate_and_one_runs_at_a_time(arguments, target, monkeypatch):
    monkeypatch.setattr(quickstart, "available_mib", lambda: 64000.0)
    report = report_of(
        arguments, "--arms", "none", "frozen", "tide", "--static-lengths", "3"
    )
    seen = what_ran(target)
    phases = [4, 4, 4]  # before the shift, and two after it
    arms = ("none", "static3", "tide")
    assert [arm for arm, *_ in seen] == [
        arm for count in phases for arm in arms for _ in range(count)
    ]
    for arm, _, others in seen:
        states = {"none": "T", "static3": "T", "tide": "T", "trainer": "T"}
        if arm == "tide":
            assert others.pop("trainer") != "T"
            states.pop("trainer")
        states.pop(arm)
        assert others == states
    for arm in ("none", "frozen", "tide"):
        assert report["arms"][arm]["requests"]["index"] == list(range(12))
    prompts = [[p for a, p, _ in seen if a == arm] for arm in arms]
    assert [sorted(p) for p in prompts] == [sorted(prompts[0])] * 3
    assert report["environment"]["servers_together"] == 3
    assert report["outputs_identical"] and not running(target)


@pytest.mark.slow
def test_a_server_that_does_not_start_makes_the_run_unsound(arguments, target, capsys):
    (target / "fails").write_text('{"none": "at start"}')
    report = report_of(arguments, "--arms", "none")
    assert report["sound"] is False and report["outputs_identical"] is False
    assert (report["mode"], report["rollbacks"]) == ("full", 0)
    assert report["first_swap_after_shift_s"] is None
    assert "no memory left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "9,4", "--arms", "none"], "'math' has 8 distinct prompts"),
        (
            ["--requests", "5,4", "--static-lengths", "1,3"],
            "fewer than the 9 of the stream",
        ),
        (["--requests", "4,9"], "'sql' has 8 distinct prompts"),
        (["--requests", "4,0"], "--requests: give a number of at least 1"),
        (["--requests", "4"], "--requests: give a number of at least 1 for each"),
        (["--domains", "sql,sql"], "--domains: a domain is repeated in a row"),
    ],
)
def test_too_few_prompts_are_refused_with_a_message(
    arguments, capsys, options, message
):
    with pytest.raises(SystemExit):
        quickstart.main([*arguments, *options])
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["at start", "amid"])
def test_a_static_length_that_cannot_be_served_is_left_out(
    arguments, target, monkeypatch, capsys, fails
):
    def tokens_per_chunk(segments):
        results = [result for part in segments for result in part.results]
        return len(results[0].token_ids) / results[0].num_chunks

    monkeypatch.setattr(quickstart, "throughput", tokens_per_chunk)
    (target / "fails").write_text(json.dumps({"static3": fails}))
    report = report_of(arguments, "--arms", "frozen", "--static-lengths", "1,3,5")
    facts = report["environment"]
    assert facts["static_tokens_per_s_before_shift"] == {"1": 1.0, "5": 5.0}
    assert facts["frozen_length"] == 5
    assert report["arms"]["frozen"]["requests"]["index"] == list(range(12))
    # Other requests of the same domain, each length in order.
    tried = [(a, p) for a, p, _ in what_ran(target) if a != "static3"][:8]
    assert [arm for arm, _ in tried] == ["static1"] * 4 + ["static5"] * 4
    probe = {prompt for _, prompt in tried}
    assert len(probe) == 4 and all(prompt.startswith("math") for prompt in probe)
    assert not probe & {prompt for _, prompt, _ in what_ran(target)[-12:]}
    assert "[static3] left out: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_script_ends_all_of_its_processes(tmp_path, target, number):
    model = tmp_path / "model"
    shutil.copytree(target, model)
    (model / "model.json").write_text(json.dumps({"source": INDEX, "files": {}}))
    (model / "hangs").touch()
    cpu = str(min(os.sched_getaffinity(0)))
    command = [SCRIPT, "--short", "--", "--arms", "tide", "none"]
    command += ["--engine-cpus", cpu, "--other-cpus", cpu]
    env = {
        "TIDE_BUILD": str(tmp_path / "build"),
        "TIDE_MODEL": str(model),
        "TIDE_NO_INSTALL": "1",
        "TIDE_VENV": str(fake_quickstart_venv(tmp_path / "venv")),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }

    log = tmp_path / "said"
    with log.open("wb") as out:
        script = subprocess.Popen(
            as_a_terminal_starts(command),
            env={**os.environ, **env},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        until(lambda: what_ran(model) or script.poll() is not None)
        # With capacity for two servers `none` runs, and these are stopped.
        assert {"tide", "trainer"} <= running(model).keys(), log.read_text()
        (suite,) = psutil.Process(script.pid).children()
        os.killpg(script.pid, number)  # the suite has its process group
        script.wait(60)
    finally:
        os.killpg(script.pid, signal.SIGKILL) if script.poll() is None else None
    assert script.returncode == 128 + number, log.read_text()
    assert not running(model) and not suite.is_running()
