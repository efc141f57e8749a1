"""What a wrong command line, file or machine is answered: one sentence, one status.

`python -m tests.cli.test_bad_inputs` prints the table.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import bench.report
import bench.run
import sim.run
from vllm_tide.cli.main import main as vllm_tide

ROOT = Path(__file__).parents[2]
GOOD = {"method": "eagle3", "model": "fresh", "num_speculative_tokens": 3, "tide": {}}


def inline(**change) -> str:
    return json.dumps(GOOD | change)


FILES = {
    "empty.json": b"",
    "array.json": b"[]",
    "binary.json": b"\xff\xfe\x00",
    "broken.json": b'{"tide": {}',
    "broken.yaml": b"tide: [",
    "text.yaml": b"tide",
    "no-tide.json": b'{"model": "fresh"}',
    "twice.json": b'{"tide": {"capture": {"enabled": true},\n"capture": {}}}',
    "twice.yaml": b"tide:\n  capture: {enabled: true}\n  capture: {}\n",
    "number-key.yaml": b"model: fresh\ntide: {1: 2}\n",
    "on-key.yaml": b"model: fresh\ntide: {}\non: true\n",
    "off.yaml": b"model: fresh\nnum_speculative_tokens: 3\ntide:\n"
    b"  capture: {consent: off}\n  test_time: {memory: off, adapt: off}\n",
    "foreign.json": b"DIR",
    "tide.json": json.dumps(GOOD).encode(),
    "section.json": b'{"captur": {}}',
}

# Command line, status, what the answer has. DIR is a folder with FILES.
HELP = "Say what the running trainers do"
RUN = ["bench", "run", "--json", "DIR/x.json"]
# Scripts that read a command line too.
SCRIPTS = {"bench run": bench.run, "bench report": bench.report, "sim run": sim.run}


def main(words: list[str]) -> int:
    script = SCRIPTS.get(" ".join(words[:2]))
    return script.main(words[2:]) if script else vllm_tide(words)


CASES = [
    ([], 2, HELP),
    (["frobnicate"], 2, "invalid choice: 'frobnicate'"),
    (["bench", "list"], 2, "no command 'bench'; run scripts/bench/run.py"),
    (["sim", "suite"], 2, "no command 'sim'; run scripts/sim/run.py of the"),
    (["doctr"], 2, "no command 'doctr'; did you mean 'doctor'?"),
    (["--verbose", "status", "--run-dir", "DIR/r"], 2, "unrecognized arguments"),
    (["config"], 2, "required: ACTION"),
    (["config", "example", "adpt"], 2, "no example 'adpt'; known: adapt, "),
    (
        ["config", "check", "DIR/nope.json"],
        2,
        "'DIR/nope.json' cannot be read (No",
    ),
    (["config", "check", "DIR"], 2, "'DIR' cannot be read (Is a directory)"),
    (["config", "check", "DIR/empty.json"], 2, "empty.json' is not valid JSON: "),
    (["config", "check", "DIR/array.json"], 2, "array.json' must hold a JSON object"),
    (["config", "check", "DIR/binary.json"], 2, "binary.json' cannot be read (is not"),
    (["config", "check", "DIR/broken.json"], 2, "is not valid JSON: Expecting ','"),
    (["config", "check", "DIR/broken.yaml"], 2, "is not valid YAML: while parsing"),
    (["config", "check", "DIR/text.yaml"], 2, "must hold a JSON object, not 'tide'"),
    (["config", "check", "DIR/no-tide.json"], 2, "no-tide.json' has no tide section"),
    (["config", "check", "DIR/twice.json"], 2, "tide.capture: given twice; leave one"),
    (["config", "check", "DIR/twice.yaml"], 2, "tide.capture: given twice; leave one"),
    (
        ["config", "check", "DIR/number-key.yaml"],
        2,
        "number-key.yaml' is not valid YAML: the key 1 in line 2 is no text; put it in",
    ),
    (["config", "check", "DIR/on-key.yaml"], 2, "the key True in line 3 is no text;"),
    (["config", "check", "DIR/off.yaml"], 0, "off.yaml: fine. The draft is"),
    (["config", "check", "~nosuchuser/x"], 2, "'~nosuchuser/x' cannot be read (No "),
    (["config", "check", inline(model="~nosuchuser/x")], 2, "model: no draft at '~no"),
    (["config", "check", '{"tide"}'], 2, "the inline JSON is not valid JSON: "),
    (["config", "check", inline() + "x"], 2, "the inline JSON is not valid JSON: "),
    (["config", "check", inline()[:-1] + ",} // ok"], 0, ": fine. The draft is"),
    (
        ["config", "check", inline(tide={"captur": {}})],
        2,
        "error: tide.captur: unknown key; did you mean 'capture'?",
    ),
    (
        ["config", "check", inline(tide={"train": {"loss": {"forwardkl": 1}}})],
        2,
        "tide.train.loss.forwardkl: unknown key; did you mean 'forward_kl'?",
    ),
    (["config", "check", inline(tide=[])], 2, "tide: must be an object like {}"),
    (["config", "check", inline(model="path/to/draft")], 2, "model: no draft at 'path"),
    (["config", "check", inline(model="DIR/nope")], 2, "model: no draft at 'DIR/nope'"),
    (["config", "check", inline(model="")], 2, "model: missing; give the directory"),
    (["config", "check", inline(method="ngram")], 2, "method: tide trains EAGLE-3 d"),
    (
        ["config", "check", inline(rejection_sample_method="synthetic")],
        2,
        "rejection_sample_method: 'synthetic' makes up acceptance",
    ),
    (
        ["config", "check", inline(num_speculative_tokens=None)],
        2,
        "num_speculative_tokens: missing",
    ),
    (["doctor", "--port", "abc"], 2, "argument --port: abc is no port (1 to 65535)"),
    (["doctor", "--port", "70000"], 2, "argument --port: 70000 is no port (1 to "),
    (["top", "--interval", "abc"], 2, "--interval: abc is no time of at least 0.05 s"),
    (["top", "--url", "notaurl:::"], 2, "--url: 'notaurl:::' is no http address"),
    (["top", "--url", "ftp://host"], 2, "--url: 'ftp://host' is no http address"),
    (
        ["top", "--url", "http://localhost:9", "--once", "--run-dir", "DIR/r"],
        1,
        "SERVER http://localhost:9  does not answer (",
    ),
    (
        ["top", "--url", "http://a..b:80", "--once", "--run-dir", "DIR/r"],
        1,
        "SERVER http://a..b:80  does not answer (UnicodeError)",
    ),
    (
        ["capture", "off", "--run-dir", "DIR/r"],
        1,
        "error: no engine is in DIR/r now; give the server's --run-dir",
    ),
    (["status", "--run-dir", "DIR/r"], 2, "no trainer is running in DIR/r: start "),
    (["pause", "--run-dir", "DIR/r"], 2, "no trainer is running in DIR/r: start "),
    (["resume", "--run-dir", "DIR/r"], 2, "no trainer is running in DIR/r: start "),
    (["rollback", "--run-dir", "DIR/r"], 2, "no trainer is running in DIR/r: start "),
    (["status", "--timeout", "0"], 2, "--timeout: '0' is no time to wait; give sec"),
    (["purge", "--all", "--timeout", "nan"], 2, "--timeout: 'nan' is no time to wait"),
    (["relay", "--run-dir", "DIR/r"], 2, "no live engine in DIR/r: start the server"),
    (["train", "--run-dir", "DIR/r"], 2, "no live engine in DIR/r: start the server"),
    (["train", "--config", "DIR/nope.json"], 2, "error: --config: 'DIR/nope.json' can"),
    (["train", "--config", "DIR/section.json"], 2, "error: --config: tide.captur: "),
    (
        ["export", "DIR/o", "--run-dir", "DIR/r"],
        2,
        "no live engine in DIR/r: give --",
    ),
    (
        ["export", "DIR/o", "--from", "/nonexist"],
        2,
        "error: /nonexist/config.json: cannot be read as JSON (No such file or dir",
    ),
    (["export", "DIR/o", "--num-speculative-tokens", "x"], 2, "invalid int value: 'x'"),
    (
        ["purge", "--tenant-id", "zz", "--run-dir", "DIR/r"],
        2,
        "'zz' is no id of 64 ",
    ),
    (["dashboards", "export", "/proc/x"], 2, "'/proc/x' cannot be written (No such"),
    (
        ["dashboards", "export", "DIR/b", "--runbooks", "a b"],
        2,
        "--runbooks 'a b' is no address without an anchor.",
    ),
    (["bench", "report", "DIR/no", "--out", "DIR/h"], 2, "DIR/no cannot be read (No"),
    (
        ["bench", "report", "DIR/foreign.json", "--out", "DIR/h"],
        2,
        "foreign.json is ",
    ),
    ([*RUN, "--suite", "foo"], 2, "--suite is one of control, "),
    (
        [*RUN, "--suite", "control", "--target", "/no"],
        2,
        "--target: there is no ",
    ),
    ([*RUN, "--suite", "control", "--plants", "x"], 2, "--plants is no option of "),
    ([*RUN, "--suite", "control", "--blocks", "x"], 2, "invalid int value: 'x'"),
    ([*RUN, "--suite", "control"], 2, "--target: none given; --yes runs this on the"),
    ([*RUN, "--suite", "learning"], 2, "--target: none given; --yes runs this on the"),
    (
        ["profile", "--model", "/nonexistent", "--draft", "fresh"],
        2,
        "error: --model: no model at '/nonexistent': neither a directory with config",
    ),
    (
        ["profile", "--model", "DIR", "--draft", "fresh"],
        2,
        "error: --model: no model at 'DIR': neither a directory with config.json nor",
    ),
    (["patch", "apply", "--target", "/nonexistent"], 5, "There is no vllm package in "),
    (["patch", "status", "--target", "DIR"], 5, "There is no vllm package in DIR"),
    (["patch", "rebase", "--to", "1"], 2, "invalid choice: 'rebase'"),
    (["sim", "run", "--arm", "bogus"], 2, "bogus"),
    (["sim", "run", "--suite", "bogus"], 2, "bogus"),
    (["sim", "run", "--trace", "DIR/no"], 2, "DIR/no"),
    (
        ["sim", "run", "--profile", "DIR/no"],
        2,
        "cannot read profile DIR/no: No such file",
    ),
    (["sim", "run", "--seconds", "-1"], 2, "--seconds: -1 is not a positive number"),
    (["sim", "run", "--seconds", "abc"], 2, "--seconds: abc is not a positive number"),
    (
        ["sim", "run", "--processes", "0"],
        2,
        "--processes: 0 is not a positive whole number",
    ),
]
BY_VLLM = [
    (
        ["config", "check", inline(num_speculative_tokens=-3)],
        2,
        "num_speculative_tokens: Input should be greater than 0, got -3.",
    ),
    (
        ["config", "check", inline(methd="eagle3")],
        2,
        "error: methd: unknown key; did you mean 'method'?",
    ),
    (
        ["config", "check", inline(draft_sample_method="best")],
        2,
        "draft_sample_method: Input should be 'greedy' or 'probabilistic', got 'best'.",
    ),
]


def make_files(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def answered(words: list[str], folder: Path) -> tuple[int, list[str]]:
    """Status and answer of a command, as lines: what it said was wrong, else all."""
    out, err = io.StringIO(), io.StringIO()
    words = [word.replace("DIR", str(folder)) for word in words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
    # argparse says how the command is used, indented, before what was wrong.
    said = re.sub(r"^usage: .*\n(?: +.*\n)*", "", err.getvalue())
    return status, (said or out.getvalue()).splitlines()


def check(case, folder: Path) -> None:
    words, status, part = case
    make_files(folder)
    code, lines = answered(words, folder)
    assert (code, words) == (status, words), lines
    assert part.replace("DIR", str(folder)) in "\n".join(lines)
    assert "Traceback" not in "".join(lines)
    assert len(lines) == 1 or not words or words[0] == "top"


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[0])[:60])
def test_a_bad_input_gets_one_sentence(case, tmp_path):
    check(case, tmp_path)


@pytest.mark.vllm
@pytest.mark.parametrize("case", BY_VLLM, ids=lambda case: case[2][:30])
def test_what_vllm_would_refuse_gets_one_sentence(case, tmp_path):
    check(case, tmp_path)


def test_several_mistakes_are_all_listed(tmp_path):
    bad = inline(method="ngram", model="a/b/c", tide={"captur": {}, "zzz": 1})
    status, lines = answered(["config", "check", bad], tmp_path)
    keys = [line.split(": ")[1] for line in lines]
    assert status == 2
    assert sorted(keys) == ["method", "model", "tide.captur", "tide.zzz"]


def test_files_that_are_there_are_kept(tmp_path):
    assert answered(["dashboards", "export", str(tmp_path)], tmp_path)[0] == 0
    status, (line,) = answered(["dashboards", "export", str(tmp_path)], tmp_path)
    assert status == 2 and "exists; give --force to overwrite it." in line


# Each in a process of its own: what is imported cannot be taken back.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from vllm_tide.cli.main import main
sys.exit(main({words!r}))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        (["top", "--once", "--interval", "0.05"], 1, "TRAINER none seen"),
        (["status"], 2, "no trainer is running"),
        (["pause"], 2, "no trainer is running"),
        (["train"], 2, "error: this command needs torch, which is not installed here"),
    ],
)
def test_a_laptop_has_neither_torch_nor_vllm(words, status, part, tmp_path):
    missing = ["torch", "vllm", "prometheus_client"]
    words = [*words, "--run-dir", str(tmp_path / "run")]
    done = run(WITHOUT.format(missing=missing, words=words))
    assert done.returncode == status
    assert part in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.vllm
def test_a_model_that_the_hub_does_not_have_gets_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = ["profile", "--model", "nobody/nothing", "--draft", str(tmp_path)]
    offline = "import os; os.environ['HF_HUB_OFFLINE'] = '1'"
    done = run(offline + WITHOUT.format(missing=[], words=words))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    *_, said = done.stderr.splitlines()
    wanted = f"vLLM cannot serve target 'nobody/nothing' with draft '{tmp_path}': "
    assert said.startswith(f"error: {wanted}")


@pytest.mark.parametrize("words", [["config", "reference"], ["config", "schema"]])
def test_a_pipe_may_close(words):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tide", *words],
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        timeout=120,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_plan_of_a_benchmark_is_said_before_it_is_refused(tmp_path, capsys):
    words = [*RUN[:3], str(tmp_path / "x.json"), "--suite", "control"]
    words += ["--arms", "none,static1", "--batches", "1,2", "--blocks", "3"]
    assert main([*words, "--minutes", "30"]) == 2
    told = capsys.readouterr().out
    # Two batch sizes, two domains and both in one batch; none is visited twice.
    assert "servers none, static1; 6 cells x 3 blocks x 3 visits of " in told
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    print("| input | answer | exit |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        make_files(Path(scratch))
        for given, _, _ in CASES + BY_VLLM:
            code, lines = answered(given, Path(scratch))
            shown = " ".join(given).replace("DIR", ".").replace("|", "\\|")
            said = (lines[-1] if given else "its help").replace(scratch, ".")
            print(f"| `{shown}` | {said} | {code} |")
