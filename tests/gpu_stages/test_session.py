"""scripts/gpu/session.sh where there is no GPU: what works in seconds, what it says."""

import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

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
if "--step" in sys.argv:
    import torch
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda: "toy"
sys.exit(session.main())
"""
STEPS = """
import time
from pathlib import Path

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
"""


def environment(tmp_path):
    env = {**os.environ, "TIDE_PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    env.pop("TIDE_DRY", None)
    return {**env, "OMP_NUM_THREADS": "1"}


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


def test_each_step_has_a_function_and_all_fit_into_ten_minutes(scripts):
    for steps in scripts("session").CALLS.values():
        for most, function in steps.values():
            module, _, name = function.partition(".")
            assert f"\ndef {name}(place: Place)" in (GPU / f"{module}.py").read_text()
            assert most <= 540
        assert sum(most for most, _ in steps.values()) <= 690  # of which few need all
