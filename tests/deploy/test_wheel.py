"""`scripts/wheel.sh` and `install.sh --wheel`, as far as no package index is needed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEEL, INSTALL = ROOT / "scripts" / "wheel.sh", ROOT / "scripts" / "install.sh"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *map(str, words)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("script", [WHEEL, INSTALL], ids=lambda path: path.name)
def test_it_says_how_it_is_used(script: Path) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    assert "Environment:" in done.stdout and "PYTHON " in done.stdout
    assert "set -euo" not in done.stdout
    assert run(script, "--nonsense").returncode == 2


def test_a_wheel_needs_a_folder_and_only_one(tmp_path: Path) -> None:
    assert run(WHEEL).returncode == run(WHEEL, "--try").returncode == 2
    assert run(WHEEL, tmp_path / "a", tmp_path / "b").returncode == 2
    assert not list(tmp_path.iterdir())


def test_a_wheel_that_is_not_there_is_named_before_anything_is_made(
    tmp_path: Path,
) -> None:
    missing = tmp_path / "no" / "vllm_tide.whl"
    done = run(INSTALL, "--venv", tmp_path / "venv", "--wheel", missing)
    assert done.returncode == 1
    assert f"--wheel {missing}: no such file" in done.stderr
    assert not list(tmp_path.iterdir())


def test_everything_that_a_build_needs_is_copied() -> None:
    (names,) = re.findall(r"&& cp -r ([^\"]+) \"\$scratch/src\"", WHEEL.read_text())
    copied = set(names.split())
    assert all((ROOT / name).exists() for name in copied)
    config = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r'readme = "(.+)"|license-files = \["(.+)"\]', config))
    assert {name for pair in named for name in pair if name} <= copied
    assert {"setup.py", "pyproject.toml", "csrc", "patches", "vllm_tide"} <= copied
