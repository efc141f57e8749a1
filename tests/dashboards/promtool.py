"""Prometheus' own checker, where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROMTOOL = shutil.which("promtool")
_INSTALLED = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)"
)


def needs_promtool(test: Any) -> Any:
    """Mark a test as a slow one that runs promtool."""
    return pytest.mark.slow(_INSTALLED(test))


def promtool(folder: Path, action: str, document: dict[str, Any]) -> str:
    """Return promtool's output about a document; JSON is YAML to it.

    Raises:
        AssertionError: It finds fault with it.
    """
    file = folder / "promtool.yml"
    file.write_text(json.dumps(document), encoding="utf-8")
    command = [str(PROMTOOL), action, "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output
