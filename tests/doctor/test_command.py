"""The command: exit codes, JSON, and no side effects."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doctor.samples import TARGET, write_draft, write_model
from vllm_tide.cli.main import main

ROOT = Path(__file__).parents[2]


def test_a_bad_knob_exits_2_and_is_in_the_json(tmp_path, capsys):
    file = tmp_path / "tide.json"
    file.write_text('{"tide": {"captur": {}}}')
    args = ["--config", str(file), "--run-dir", str(tmp_path / "run"), "--json"]
    assert main(["doctor", *args]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["exit_code"]) == ("failed", 2)
    by_name = {check["name"]: check for check in report["checks"]}
    assert "did you mean 'capture'?" in by_name["configuration"]["sentence"]
    assert by_name["draft fit"]["status"] == "skipped"


@pytest.mark.vllm
def test_a_valid_setting_has_no_failure_and_leaves_nothing(tmp_path, capsys):
    target = write_model(tmp_path / "target", TARGET)
    draft = write_draft(tmp_path / "draft")
    file = tmp_path / "tide.json"
    section = {"capture": {"ring_mib": 1}, "train": {"state_dir": str(tmp_path / "s")}}
    whole = {"model": str(draft), "num_speculative_tokens": 3, "tide": section}
    file.write_text(json.dumps(whole))
    before = sorted(tmp_path.rglob("*"))
    args = ["doctor", "--config", str(file), "--model", str(target)]
    args += ["--run-dir", str(tmp_path / "run")]
    assert main([*args, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    failed = [check for check in report["checks"] if check["status"] == "failed"]
    assert failed == []
    assert main([*args, "--strict"]) == (report["status"] == "warning")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_it_imports_neither_torch_nor_vllm(tmp_path):
    code = (
        "import sys; from vllm_tide.cli.main import main;"
        f"main(['doctor', '--run-dir', {str(tmp_path / 'run')!r}]);"
        "sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
