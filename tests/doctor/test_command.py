"""The command as an operator runs it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.doctor.samples import TARGET, free_port, write_draft, write_model

ROOT = Path(__file__).parents[2]


def doctor(*args, **env):
    command = [sys.executable, "-m", "vllm_tide", "doctor", *map(str, args)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | env,
        timeout=120,
    )


def test_a_bad_knob_exits_2_and_is_in_the_json(tmp_path):
    file = tmp_path / "tide.json"
    file.write_text('{"tide": {"captur": {}}}')
    done = doctor("--config", file, "--run-dir", tmp_path / "run", "--json")
    assert done.returncode == 2, done.stderr
    told = json.loads(done.stdout)
    assert (told["status"], told["exit_code"]) == ("failed", 2)
    by_name = {check["name"]: check for check in told["checks"]}
    assert "did you mean 'capture'?" in by_name["configuration"]["sentence"]
    assert by_name["draft fit"]["status"] == "skipped"


@pytest.mark.vllm
def test_a_sound_setting_has_no_failure_and_leaves_nothing(tmp_path):
    target = write_model(tmp_path / "target", TARGET)
    draft = write_draft(tmp_path / "draft")
    file = tmp_path / "tide.json"
    section = {"capture": {"ring_mib": 1}, "train": {"state_dir": str(tmp_path / "s")}}
    whole = {"model": str(draft), "num_speculative_tokens": 3, "tide": section}
    file.write_text(json.dumps(whole))
    before = sorted(tmp_path.rglob("*"))
    args = ["--config", file, "--model", target, "--run-dir", tmp_path / "run"]
    done = doctor(*args, "--port", free_port(), "--json")
    told = json.loads(done.stdout)
    bad = [check for check in told["checks"] if check["status"] == "failed"]
    assert bad == []
    assert done.returncode == 0
    strict = doctor(*args, "--strict")
    assert strict.returncode == (told["status"] == "warning")
    assert sorted(tmp_path.rglob("*")) == before


def test_it_imports_neither_torch_nor_vllm_and_is_quick(tmp_path):
    code = (
        "import sys; from vllm_tide.cli.main import main;"
        f"main(['doctor', '--run-dir', {str(tmp_path / 'run')!r}]);"
        "sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 10  # 0.6 s on a quiet machine


def test_help_says_the_exit_codes():
    text = " ".join(doctor("--help").stdout.split())
    assert "0 nothing failed (1 with --strict, where there are warnings)" in text


def test_a_bad_port_is_refused():
    done = doctor("--port", "70000")
    assert done.returncode == 2
    assert "is no port" in done.stderr
