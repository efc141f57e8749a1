"""A real server and trainer under the twelve most important faults, once each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
KINDS = (
    "kill_trainer", "kill_server", "hang_engine", "fill_disk",
    "fill_ring", "damage_ring", "shrink_ring", "damage_weights",
    "head_nan", "head_shape", "head_permuted", "malformed_xargs",
)  # fmt: skip


@pytest.mark.timeout(1800)
def test_every_fault_is_recovered_from(tmp_path):
    path = tmp_path / "faults.json"
    command = [sys.executable, "-m", "tests.faults", "--json", str(path)]
    command += ["--count", str(len(KINDS)), "--kinds", ",".join(KINDS)]
    done = subprocess.run(
        [*command, "--work", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads(path.read_text())
    assert sorted(row["kind"] for row in result["rows"]) == sorted(KINDS)
    assert {row["outcome"] for row in result["rows"]} == {"ok"}
    assert result["right_answers"] > 50
