"""The committed series keeps the law, and the commands work without heavy imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tide import patching
from vllm_tide.cli import main as cli

ROOT = Path(__file__).parents[2]


def test_every_patch_keeps_the_law() -> None:
    patches = patching.load_series(ROOT / "patches")
    assert patches
    assert list(patching.lint(ROOT / "patches", patches)) == []


def test_manifest_is_of_this_series() -> None:
    manifest = patching.load_manifest(ROOT / "patches")
    patches = patching.load_series(ROOT / "patches")
    assert manifest["patches"] == {patch.name: patch.sha256 for patch in patches}
    assert manifest["files"].keys() == {path for p in patches for path in p.hunks}


@pytest.mark.vllm
def test_series_applies_cleanly_to_the_installed_vllm() -> None:
    assert cli.main(["patch", "check"]) == 0


@pytest.mark.slow
def test_patch_command_imports_neither_torch_nor_vllm_nor_numpy() -> None:
    code = (
        "import sys; from vllm_tide.cli.main import main; main(['patch', 'check']);"
        "print(sorted({'torch', 'vllm', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_ledger_names_every_patch_and_no_other() -> None:
    rows = (ROOT / "patches" / "README.md").read_text().splitlines()
    start = rows.index("## Ledger")
    names = [row.split("`")[1] for row in rows[start:] if row.startswith("| `")]
    names = [name for name in names if not name.startswith("vllm-tide")]
    assert names == patching.series_names(ROOT / "patches")
