"""The answer to a wrong command line, file or machine: one line, one status."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tide.cli.main import main

ROOT = Path(__file__).parents[2]
GOOD = {"method": "eagle3", "model": "fresh", "num_speculative_tokens": 3, "tide": {}}


def inline(**change) -> str:
    return json.dumps(GOOD | change)


FILES = {
    "array.json": b"[]",
    "binary.json": b"\xff\xfe\x00",
    "broken.json": b'{"tide": {}',
    "broken.yaml": b"tide: [",
    "empty.json": b"\n",
    "empty.yaml": b"",
    "no-tide.json": b'{"model": "fresh"}',
    "number-key.yaml": b"model: fresh\ntide: {1: 2}\n",
    "off.yaml": b"model: fresh\nnum_speculative_tokens: 3\ntide:\n"
    b"  capture: {consent: off}\n  test_time: {memory: off, adapt: off}\n",
    "section.json": b'{"captur": {}}',
}
CHECK = ["config", "check"]

# Command line, status, part of the answer. DIR is a folder with FILES.
CASES = [
    ([], 2, "Show the state of running trainers"),
    (["doctr"], 2, "no command 'doctr'; did you mean 'doctor'?"),
    (["config"], 2, "print a commented example"),
    (["config", "example", "adpt"], 2, "no example 'adpt'; known: adapt, "),
    ([*CHECK, "DIR"], 2, "'DIR' cannot be read (Is a directory)"),
    ([*CHECK, "DIR/array.json"], 2, "array.json' must contain a JSON object"),
    ([*CHECK, "DIR/binary.json"], 2, "binary.json' cannot be read (is not"),
    ([*CHECK, "DIR/broken.json"], 2, "is not valid JSON: Expecting ','"),
    ([*CHECK, "DIR/broken.yaml"], 2, "is not valid YAML: while parsing"),
    ([*CHECK, "DIR/empty.json"], 2, "empty.json' is empty; give a JSON object"),
    ([*CHECK, "DIR/empty.yaml"], 2, "empty.yaml' is empty; give a JSON object"),
    ([*CHECK, "DIR/no-tide.json"], 2, "no-tide.json has no tide section, so"),
    ([*CHECK, "DIR/number-key.yaml"], 2, "the key 1 in line 2 is not a string; put "),
    ([*CHECK, "DIR/off.yaml"], 0, "off.yaml: valid. Not checked here"),
    ([*CHECK, "~nosuchuser/x"], 2, "'~nosuchuser/x' cannot be read (No "),
    ([*CHECK, '{"tide"}'], 2, "the inline JSON is not valid JSON: "),
    ([*CHECK, inline()[:-1] + ",} // ok"], 0, ": valid. Not checked here"),
    ([*CHECK, inline(model="Fresh")], 2, "model: 'Fresh'; did you mean 'fresh'?"),
    ([*CHECK, inline(model="DIR/nope")], 2, "model: no draft at 'DIR/nope'"),
    ([*CHECK, inline(model=7)], 2, "model: must be a string, got 7; give the direct"),
    ([*CHECK, inline(num_speculative_tokens=0)], 2, "must be an integer of at least 1"),
    ([*CHECK, inline(num_speculative_tokens="x")], 2, 'at least 1, got "x"; set the'),
    ([*CHECK, inline(tide=None)], 2, "tide: the inline JSON has no tide section, so"),
    ([*CHECK, inline(preset="observe")], 2, "preset: is a knob of the tide section; m"),
    (
        [*CHECK, inline(tide={"swap": True})],
        2,
        "tide.swap: must be an object like {}, ",
    ),
    (
        [*CHECK, inline(tide={"train": {"learning_rate": float("nan")}})],
        2,
        "tide.train.learning_rate: must be a finite number, got NaN.",
    ),
    (
        [*CHECK, inline(tide={"train": {"cpus": [0, "a"]}})],
        2,
        'tide.train.cpus.1: must be an integer, got "a".',
    ),
    (
        [*CHECK, inline(rejection_sample_method="synthetic")],
        2,
        "rejection_sample_method: 'synthetic' does not compare drafts",
    ),
    (["top", "--interval", "nan"], 2, "--interval: nan is not a time of at"),
    (["top", "--url", "notaurl:::"], 2, "--url: 'notaurl:::' is not an http address"),
    (
        ["top", "--url", "http://a..b:80", "--once", "--interval", "0.05"],
        1,
        "SERVER http://a..b:80  does not answer (UnicodeError)",
    ),
    (["help"], 0, "vllm-tide top --url"),
    (["help", "top"], 0, "seconds between two samples; default: 2, with --once 10"),
    (["nonsense"], 2, "error: no command 'nonsense'; see vllm-tide --help."),
    (["compare", "a"], 2, "error: the following arguments are required: B; see 'vllm"),
    (["capture", "on", "--run-dir", "DIR/r"], 1, "capture is on in DIR/r; 0 engines f"),
    (["capture", "off", "--run-dir", "DIR/r"], 1, "error: no run directory DIR/r: not"),
    (["status", "--run-dir", "DIR/r"], 1, "no trainer is running in DIR/r, and no "),
    (["status", "--timeout", "0"], 2, "--timeout: '0' is not a time; give sec"),
    (["purge", "--all", "--timeout", "nan"], 2, "--timeout: 'nan' is not a time"),
    (["purge", "--tenant-id", "zz", "--run-dir", "DIR/r"], 2, "'zz' is not a hexade"),
    (["train", "--run-dir", "DIR/r"], 1, "no live engine in DIR/r: start the server"),
    (["train", "--spool", "DIR/open"], 2, "DIR/open is accessible to all users and"),
    (["train", "--spool", "DIR/typo"], 2, "--spool: there is no spool at DIR/typo;"),
    (["train", "--spool", ""], 2, "--spool: is empty; give the server's tide.spool"),
    (["train", "--config", "DIR/nope.json"], 2, "error: --config: 'DIR/nope.json' can"),
    (["train", "--config", "DIR/section.json"], 2, "error: --config: tide.captur: "),
    (["train", "--model", "DIR/x"], 2, "error: --model: applies only to engines of a"),
    (["export", "DIR/o", "--run-dir", "DIR/r"], 1, "no live engine in DIR/r: give --"),
    (
        ["export", "DIR/o", "--from", "/nonexist"],
        2,
        "error: /nonexist/config.json: cannot be read as JSON (No such file or dir",
    ),
    (["dashboards", "export", "/proc/x"], 2, "'/proc/x' cannot be written (No such"),
    (
        ["patch", "apply", "--target", "/nonexistent"],
        2,
        "error: There is no vllm package in ",
    ),
]


def answered(argv: list[str], folder: Path) -> tuple[int, list[str]]:
    """Return status and lines of a command's answer: its errors, else its output."""
    out, err = io.StringIO(), io.StringIO()
    argv = [arg.replace("DIR", str(folder)) for arg in argv]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as ended:
            status = int(ended.code or 0)
    # argparse prints the usage, indented, before the error.
    text = re.sub(r"^usage: .*\n(?: +.*\n)*", "", err.getvalue())
    return status, (text or out.getvalue()).splitlines()


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[0])[:60])
def test_a_bad_input_gives_one_line(case, tmp_path):
    argv, status, part = case
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "open").mkdir(mode=0o755)
    code, lines = answered(argv, tmp_path)
    assert (code, argv) == (status, argv), lines
    assert part.replace("DIR", str(tmp_path)) in "\n".join(lines)
    assert "Traceback" not in "".join(lines)
    assert len(lines) == 1 or argv in ([], ["config"]) or argv[0] in ("top", "help")


# Each in a separate process: an import cannot be undone.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("torch", "vllm", "prometheus_client")))
from vllm_tide.cli.main import main
sys.exit(main({argv!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "status", "part"),
    [
        (["top", "--once", "--interval", "0.05"], 1, "TRAINER none seen"),
        (["status"], 1, "no trainer is running"),
        (["train"], 2, "error: this command needs torch, which is not installed"),
    ],
)
def test_commands_run_without_torch_and_vllm(argv, status, part, tmp_path):
    code = WITHOUT.format(argv=[*argv, "--run-dir", str(tmp_path / "run")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == status
    assert part in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_relative_run_directory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TIDE_RUN_DIR", "rel")
    for argv in (["status"], ["top", "--once"], ["train"], ["pause"]):
        status, (line,) = answered(argv, tmp_path)
        assert status == 2
        assert line == "error: TIDE_RUN_DIR: 'rel' is relative; use an absolute path"


def test_capture_off_without_an_engine_is_stored(tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    status, (line,) = answered(["capture", "off", "--run-dir", str(run)], tmp_path)
    assert status == 1
    message = f"capture is off in {run}; 0 engines follow; servers that start there do"
    assert line == message
    argv = ["capture", "off", "--json", "--run-dir", str(run)]
    status, lines = answered(argv, tmp_path)
    assert json.loads("\n".join(lines))["engines"] == 0


def test_the_version_names_vllm_and_its_patches(tmp_path):
    status, (line,) = answered(["--version"], tmp_path)
    assert status == 0
    assert re.match(r"vllm-tide \S+, (vLLM \S+ \(\w+\), patches |no vLLM)", line)


@pytest.mark.parametrize(
    "argv", [[*CHECK, inline()], ["patch", "status"]], ids=lambda argv: argv[0]
)
def test_json_is_a_flag_and_output_a_file(argv, tmp_path):
    _, lines = answered([*argv, "--json"], tmp_path)
    out = tmp_path / "out.json"
    assert answered([*argv, "--json", "--output", str(out)], tmp_path)[1] == []
    assert json.loads(out.read_text()) == json.loads("\n".join(lines))
    status, (line,) = answered([*argv, "--output", "/dev/full"], tmp_path)
    assert (status, line) == (2, "error: --output /dev/full: No space left on device.")


@pytest.mark.slow
def test_a_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tide", "config", "reference"],
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        timeout=120,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
