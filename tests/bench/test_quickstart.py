import json
import os
from pathlib import Path

import pytest

from bench.harness.common import ServerError
from bench.suites import quickstart as quickstart
from vllm_tide.config import parse_tide


def test_the_demo_sets_sizes_only():
    section = quickstart.tide_section(Path("/run"))
    config = parse_tide(section)
    assert config.train.autostart and config.control.policy == "adaspec"
    assert set(section) == {"run_dir", "train"}
    # The passes are those of a short, public stream (see there).
    sizes = {"min_new_tokens", "steps_per_cycle", "holdout_share", "max_passes"}
    assert set(section["train"]) == sizes | {"batch_tokens"}
    assert quickstart.mode_of(section) == "full"


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "full"),
        ({"train": {"batch_tokens": 512}}, "full"),
        ({"preset": "learn"}, "changed"),
        ({"control": {"policy": "threshold"}}, "changed"),
        ({"deploy": {"canary": False}}, "changed"),
    ],
)
def test_the_mode_is_full_only_with_every_part(changes, mode):
    assert quickstart.mode_of(changes) == mode


def test_changes_are_merged_section_by_section():
    base = {"train": {"a": 1, "b": 2}, "run_dir": "x"}
    merged = quickstart.merged(base, {"train": {"b": 3}})
    assert merged == {"train": {"a": 1, "b": 3}, "run_dir": "x"}
    assert base["train"]["b"] == 2


@pytest.fixture
def arguments(tmp_path):
    for domain in ("json", "logs"):
        rows = [json.dumps({"prompt": f"{domain} {i}"}) for i in range(8)]
        (tmp_path / f"{domain}.jsonl").write_text("\n".join(rows))
    folders = ("--target", "--draft", "--work", "--prompts")
    command = [part for name in folders for part in (name, str(tmp_path))]
    cpu = str(min(os.sched_getaffinity(0)))
    command += ["--num-before", "4", "--num-after", "4", "--arms", "none"]
    return [*command, "--engine-cpus", cpu, "--other-cpus", cpu]


@pytest.fixture(autouse=True)
def same_cores_afterwards():
    cpus = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cpus)


def test_a_server_that_does_not_start_makes_the_run_unsound(
    arguments, tmp_path, monkeypatch, capsys
):
    def refuse(options, stream):
        raise ServerError("the server ended; tide.train.steps: unknown key")

    monkeypatch.setattr(quickstart, "run_arm", refuse)
    path = tmp_path / "out" / "report.json"
    assert quickstart.main([*arguments, "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["sound"] is False and report["outputs_identical"] is False
    assert (report["mode"], report["rollbacks"]) == ("full", 0)
    assert report["first_swap_after_shift_s"] is None
    assert "unknown key" in capsys.readouterr().out


def test_arms_after_the_time_limit_are_left_out(arguments, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "run_arm", lambda *_: pytest.fail("ran"))
    assert quickstart.main([*arguments, "--total-limit-s", "0"]) == 1
    assert "left out" in capsys.readouterr().out


def test_more_requests_than_prompts_are_refused_in_a_sentence(arguments, capsys):
    with pytest.raises(SystemExit):
        quickstart.main([*arguments, "--num-before", "9"])
    assert "ask for fewer requests" in capsys.readouterr().err


@pytest.mark.parametrize("fails", ["at start", "amid its attempt"])
def test_a_static_length_that_cannot_be_served_is_left_out(
    arguments, monkeypatch, capsys, fails
):
    ended: list[int] = []

    class Server:
        def __init__(self, options) -> None:
            config = json.loads(options.speculative_config)
            self.length = config["num_speculative_tokens"]

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            pass

        def wait_ready(self, _) -> None:
            if self.length == 3 and fails == "at start":
                raise ServerError("no memory")

        def pause(self) -> None:
            pass

        resume = pause

        def stop(self) -> None:
            ended.append(self.length)

    async def drive(server, *_, **__):
        if server.length == 3:
            raise ServerError("no memory")
        return [server.length], []

    monkeypatch.setattr(quickstart, "VllmServer", Server)
    monkeypatch.setattr(quickstart, "drive", drive)
    monkeypatch.setattr(quickstart, "throughput", lambda parts: float(parts[0]))
    monkeypatch.setattr(quickstart, "serve_arm", lambda best, *_: best)
    args = quickstart.parser().parse_args(arguments)
    args.frozen_length, args.static_rates = 1, {}
    options = quickstart._arm_options(args, "frozen")
    assert quickstart.run_frozen(args, options, [], []).length == 5
    assert (args.static_rates, ended) == ({1: 1.0, 5: 5.0}, [3, 1])
    assert "[static3] left out: no memory" in capsys.readouterr().out
