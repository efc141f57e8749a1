import hashlib
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
from tests.bench.turn_toys import (
    as_a_terminal_starts,
    demo,
    fake_quickstart_venv,
    running,
    until,
    what_ran,
)
from vllm_tide.config import parse_tide

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "quickstart.sh")


def test_the_demo_sets_sizes_only():
    section = quickstart.tide_section(Path("/run"))
    config = parse_tide(section)
    assert config.train.autostart and config.control.policy == "adaspec"
    assert set(section) == {"run_dir", "train"}
    # The passes are those of a short, public stream (see there).
    sizes = {"min_new_tokens", "steps_per_cycle", "holdout_share", "max_passes"}
    assert set(section["train"]) == sizes | {"batch_tokens"}
    assert quickstart.mode_of(section) == "full"


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
    command += ["--num-before", "4", "--num-after", "8", "--max-tokens", "10"]
    return [*command, "--engine-cpus", cpu, "--other-cpus", cpu]


def report_of(arguments, *more):
    assert quickstart.main([*arguments, *more]) == 1  # nothing is captured
    return json.loads(Path(arguments[arguments.index("--json") + 1]).read_text())


@pytest.mark.slow
def test_arms_take_turns_and_one_runs_at_a_time(arguments, target, monkeypatch):
    monkeypatch.setattr(quickstart, "available_mib", lambda: 64000.0)
    report = report_of(arguments, "--arms", "none", "no_learning", "tide")
    seen = what_ran(target)
    turns = [4, 4, 2, 2]  # before the shift, after it, its last quarter
    arms = ("none", "no_learning", "tide")
    assert [arm for arm, *_ in seen] == [
        arm for count in turns for arm in arms for _ in range(count)
    ]
    for arm, _, others in seen:
        states = {"none": "T", "no_learning": "T", "tide": "T", "trainer": "T"}
        if arm == "tide":
            assert others.pop("trainer") != "T"
            states.pop("trainer")
        states.pop(arm)
        assert others == states
    for arm in arms:
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
    ("options", "said"),
    [
        (["--num-before", "9", "--arms", "none"], "--num-before: 9 prompts"),
        (
            ["--num-before", "5"],
            "static-lengths): 10 prompts of domain 'json' are needed",
        ),
        (["--num-after", "9"], "--num-after: 9 prompts of domain 'logs' are needed"),
        (["--num-after", "0"], "must be at least 1"),
    ],
)
def test_too_few_prompts_are_said_in_a_sentence(arguments, capsys, options, said):
    with pytest.raises(SystemExit):
        quickstart.main([*arguments, *options])
    assert said in capsys.readouterr().err


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
    report = report_of(arguments, "--arms", "frozen")
    facts = report["environment"]
    assert facts["static_tokens_per_s_before_shift"] == {"1": 1.0, "5": 5.0}
    assert facts["frozen_length"] == 5
    assert report["arms"]["frozen"]["requests"]["index"] == list(range(12))
    # Other requests of the same domain, each length in its turn.
    tried = [(a, p) for a, p, _ in what_ran(target) if a != "static3"][:8]
    assert [arm for arm, _ in tried] == ["static1"] * 4 + ["static5"] * 4
    probe = {prompt for _, prompt in tried}
    assert len(probe) == 4 and all(prompt.startswith("json") for prompt in probe)
    assert not probe & {prompt for _, prompt, _ in what_ran(target)[-12:]}
    assert "[static3] left out: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_script_ends_all_that_it_started(tmp_path, target, number):
    build, given = tmp_path / "build", tmp_path / "demo"
    content = b"".join(path.read_bytes() for path in sorted(target.iterdir()))
    stamp = hashlib.sha256(content).hexdigest()[:16]
    inflated = build / f"target-{stamp}-8"
    shutil.copytree(target, inflated)
    (inflated / "inflated.json").write_text("{}")
    (inflated / "hangs").touch()
    cpu = str(min(os.sched_getaffinity(0)))
    command = [SCRIPT, "--", "--arms", "tide", "none", "--num-before", "4"]
    command += ["--num-after", "4", "--engine-cpus", cpu, "--other-cpus", cpu]
    env = {
        "TIDE_DEMO": str(given),
        "TIDE_BUILD": str(build),
        "TIDE_INFLATE": "8",
        "TIDE_NO_INSTALL": "1",
        "TIDE_VENV": str(fake_quickstart_venv(tmp_path / "venv")),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }

    said = tmp_path / "said"
    with said.open("wb") as out:
        script = subprocess.Popen(
            as_a_terminal_starts(command),
            env={**os.environ, **env},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        until(lambda: what_ran(inflated) or script.poll() is not None)
        # With room for two servers `none` runs, and these are stopped.
        assert {"tide", "trainer"} <= running(inflated).keys(), said.read_text()
        (suite,) = psutil.Process(script.pid).children()
        os.killpg(script.pid, number)  # the suite is in a group of its own
        script.wait(60)
    finally:
        os.killpg(script.pid, signal.SIGKILL) if script.poll() is None else None
    assert script.returncode == 128 + number, said.read_text()
    assert not running(inflated) and not suite.is_running()
