"""scripts/gpu/session.sh where there is no GPU: what works in seconds, what it says."""

import gzip
import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from bench.harness import identity

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "scripts" / "gpu"
# Steps in place of those of a GPU; the driver is run for each step, as session.py is.
DRIVER = f"""
import sys
sys.path[:0] = [{str(GPU)!r}, {str(ROOT)!r}]
import session
session.CALLS[1] = {{
    "wrong": (100, "fake.wrong"), "hangs": (3, "fake.hangs"),
    "breaks": (100, "fake.breaks"), "good": (100, "fake.good"),
}}
session.CALLS[2] = {{"late": (100, "fake.late")}}
if "--step" in sys.argv:
    import torch
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda: "toy"
sys.exit(session.main())
"""
STEPS = """
import time
from pathlib import Path
from place import TimeIsOver

here = Path(__file__).parent

def measured(name):
    with (here / "measured").open("a") as file:
        file.write(name + " ")
    return name

def good(place):
    place.part("a", lambda: measured("good"))

def wrong(place):
    place.part("a", lambda: measured("wrong"))
    place.judge(False, "it is 7, not 6")

def breaks(place):
    raise RuntimeError("a step that breaks")

def hangs(place):
    time.sleep(1000)

def late(place):
    place.part("a", lambda: measured("a"))
    if not (here / "time").exists():
        raise TimeIsOver
    place.part("b", lambda: measured("b"))
"""


def environment(tmp_path):
    env = {**os.environ, "TIDE_PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    env.pop("TIDE_DRY", None)
    return {**env, "OMP_NUM_THREADS": "1"}


def run(tmp_path, *arguments):
    command = ["bash", str(GPU / "session.sh"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(tmp_path), timeout=250
    )


@pytest.fixture
def fake(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "fake.py").write_text(STEPS)

    def call(*arguments):
        command = [sys.executable, str(tmp_path / "driver.py"), *arguments]
        env = environment(tmp_path)
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines()

    return call


@pytest.fixture
def scripts(monkeypatch):
    """Imports a module of scripts/gpu, which no other test finds afterwards."""
    monkeypatch.syspath_prepend(GPU)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == GPU:
            del sys.modules[name]


def words(lines):
    """PASS or FAIL and the step of each line, without the seconds."""
    return [line.split()[:2] for line in lines[:-1]]


@pytest.mark.nightly  # eight processes that import torch
def test_a_step_that_fails_ends_neither_the_call_nor_what_passed(fake, tmp_path):
    status, lines = fake("1")
    assert status == 1
    assert words(lines) == [
        ["FAIL", "wrong"], ["FAIL", "hangs"], ["FAIL", "breaks"], ["PASS", "good"],
    ]  # fmt: skip
    assert lines[0].endswith("AssertionError: it is 7, not 6")
    assert lines[1].endswith("ended after 3 s")
    assert lines[2].endswith("RuntimeError: a step that breaks")
    assert lines[-1] == "call 1: 1 of 4 passed"
    results = json.loads((tmp_path / "out" / "call1.json").read_text())
    assert results["good"]["parts"] == {"a": "good"}
    assert results["wrong"]["parts"] == {"a": "wrong"}  # kept, to be looked at
    with tarfile.open(tmp_path / "out" / "call1.tar.gz") as archive:
        assert {"good.log", "hangs.log"} <= set(archive.getnames())
    # Again: what passed is kept, what was wrong is measured anew.
    status, lines = fake("1", "--only", "wrong,good")
    assert status == 1 and lines[1].endswith("has passed before")
    assert (tmp_path / "measured").read_text() == "wrong good wrong "
    status, lines = fake("1", "--only", "good", "--again")
    assert status == 0 and lines[-1] == "call 1: 1 of 1 passed"
    assert (tmp_path / "measured").read_text() == "wrong good wrong good "


@pytest.mark.slow
def test_a_step_whose_time_was_over_goes_on_where_it_was(fake, tmp_path):
    status, lines = fake("2", "--minutes", "0.01")
    assert status == 1 and "no time was left" in lines[0]
    status, lines = fake("2")
    assert status == 1 and lines[0].startswith("FAIL late")
    (tmp_path / "time").touch()
    status, lines = fake("2")
    assert status == 0 and lines[0].startswith("PASS late")
    assert (tmp_path / "measured").read_text() == "a b "


def test_each_step_has_a_function_and_all_fit_into_ten_minutes(scripts):
    for steps in scripts("session").CALLS.values():
        for most, function in steps.values():
            module, _, name = function.partition(".")
            assert f"\ndef {name}(place: Place)" in (GPU / f"{module}.py").read_text()
            assert most <= 540
        assert sum(most for most, _ in steps.values()) <= 690  # of which few need all


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_line(tmp_path):
    done = run(tmp_path, "6", "--command", "--kit", ".kit/folder")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) < 2000 and ".kit/folder/part*" in done.stdout
    parsed = subprocess.run(["bash", "-n", "-c", done.stdout], capture_output=True)
    assert parsed.returncode == 0 and not parsed.stderr
    assert "scripts/gpu/session.sh 6 " in done.stdout
    assert not (tmp_path / "out").exists()
    done = run(tmp_path, "1", "--only", "nothing")
    assert done.returncode == 2
    assert done.stderr.endswith("--only: call 1 has no step nothing; --list\n")
    done = run(tmp_path, "1", "--dry-run")
    assert done.returncode == 2 or os.environ.get("NULL_GPU")
    assert done.stderr.count("\n") <= 1
    done = run(tmp_path, "1", "--only", "rows")
    assert done.returncode == 1
    line, summary = done.stdout.splitlines()
    assert line.startswith("FAIL rows ")
    assert "rows needs a GPU and there is none" in line
    assert summary == "call 1: 0 of 1 passed"


@pytest.mark.nightly  # loads the demo's target twice
def test_a_widened_target_is_the_same_function(scripts, tmp_path):
    from transformers import AutoModelForCausalLM

    demo = ROOT / "scripts" / "demo"
    scripts("arms").widen(demo / "target", tmp_path / "wide", 1024)
    ids = torch.arange(5, 69)[None]
    narrow, wide = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
        for path in (demo / "target", tmp_path / "wide")
    )
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["hidden_size"] == 1024
    torch.testing.assert_close(wide, narrow, rtol=1e-3, atol=1e-3)


def test_idle_time_is_that_of_the_busiest_stream(scripts, tmp_path):
    def event(stream, begin, took, cat="kernel"):
        args = {"stream": stream}
        return {"cat": cat, "name": "k", "ts": begin, "dur": took, "args": args}

    events = [event(7, 0, 40), event(7, 60, 40), event(8, 30, 50, "gpu_memcpy")]
    events += [{"name": "cudaStreamSynchronize", "ts": 0, "dur": 1}, {"ph": "M"}]
    with gzip.open(tmp_path / "t.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = scripts("steps")._gaps(tmp_path / "t.json.gz")
    assert found["step_us"] == pytest.approx(10)
    assert found["idle_us"] == pytest.approx(2)
    assert found["waits"] == {"cudaStreamSynchronize": 0.1}


@pytest.mark.slow  # loads the demo's target
def test_greedy_text_may_differ_at_near_ties_only(scripts, monkeypatch):
    """The demo's target itself judges: its second choice is a wrong one."""
    serving = scripts("serving")
    prompt = [10, 20, 30, 40]
    scorer = identity.transformers_scorer(serving.DEMO / "target", "float32")
    wide = torch.tensor(scorer(prompt)[1])
    best, second = wide.topk(2).indices.tolist()
    plain = {"prompts": [prompt], "tokens": [[best, 5]]}
    assert serving.judge({"none": plain, "a": plain}, "float32") == []
    other = {"prompts": [prompt], "tokens": [[second, 5]]}
    with pytest.raises(AssertionError, match="no near tie"):
        serving.judge({"none": plain, "a": plain, "b": other}, "float32")
    # Between types that round so much that the two cannot be told apart, it is none.
    monkeypatch.setattr(identity, "TOLERANCE_ERRORS", 1e9)
    (tie,) = serving.judge({"none": plain, "b": other}, "float32")
    assert tie["near_tie"] and tie["arms"] == ["none", "b"] and tie["position"] == 0
