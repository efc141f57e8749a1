"""The fault suite in small: every kind of fault that starts no other server, once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.suite import FAULTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
STARTS_A_SERVER = ("kill_server", "full_run_dir")


@pytest.mark.timeout(900)
def test_every_fault_is_recovered_from(tmp_path):
    kinds = [fault.kind for fault in FAULTS]
    apart = [kind for kind in kinds if kind in STARTS_A_SERVER]
    kinds = [kind for kind in kinds if kind not in apart]
    path = tmp_path / "faults.json"
    command = [sys.executable, "-m", "tests.faults", "--json", str(path)]
    command += ["--count", str(len(kinds)), "--without", ",".join(apart)]
    done = subprocess.run(
        [*command, "--work", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads(path.read_text())
    assert sorted(row["kind"] for row in result["rows"]) == sorted(kinds)
    assert {row["outcome"] for row in result["rows"]} == {"ok"}
    assert result["right_answers"] > 50
    assert not result["unanswered"]
