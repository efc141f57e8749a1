"""`scripts/wheel.sh` and `install.sh --wheel`, the steps without a package index."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
WHEEL, INSTALL = ROOT / "scripts" / "wheel.sh", ROOT / "scripts" / "install.sh"


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *map(str, argv)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("changed", ["", "vllm_tide/config.py", "patches/series"])
def test_a_wheel_of_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """A matching wheel is accepted up to the environment, which cannot be made."""
    wheel = tmp_path / "vllm_tide-0.2.0-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for path in [*ROOT.glob("vllm_tide/**/*.py"), ROOT / "patches" / "series"]:
            name = str(path.relative_to(ROOT))
            text = path.read_bytes() + b"#" * (name == changed)
            packed.writestr(re.sub("^patches", "vllm_tide/_patches", name), text)
        packed.writestr("vllm_tide/_shm.abi3.so", b"compiled")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" != venv ] && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    done = run(INSTALL, "--venv", tmp_path / "venv", "--wheel", wheel)
    assert done.returncode == 1
    message = "was not built of the sources in" if changed else "cannot make a virtual"
    assert message in done.stderr
