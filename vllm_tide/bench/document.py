"""The JSON file of a run, complete after every cell."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess  # noqa: S404 - asks git for the commit
import zlib
from pathlib import Path
from typing import Any

from vllm_tide.json_text import json_text

from .control_arms import BenchError
from .control_summary import summarise

SCHEMA = 1
_UNPACK = {".xz": lzma.decompress, ".gz": gzip.decompress}


def commit() -> dict[str, Any]:
    """Return the checkout's commit and whether files differ from it; {} if none."""
    folder = Path(__file__).parents[2]
    found: dict[str, Any] = {}
    for key, command in (
        ("commit", ["rev-parse", "HEAD"]),
        ("uncommitted_changes", ["status", "--porcelain", "--untracked-files=no"]),
    ):
        try:
            done = subprocess.run(  # noqa: S603 - fixed arguments
                ["git", "-C", str(folder), *command],  # noqa: S607 - the user's git
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return {}
        text = done.stdout.strip()
        found[key] = text if key == "commit" else bool(text)
    return found


class Document:
    """The report while it grows; ``write`` replaces the file as a whole."""

    def __init__(self, path: Path, suite: str, options: dict[str, Any]) -> None:
        """Begin a report of ``suite`` that goes to ``path``."""
        self.path = path
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "suite": suite,
            "complete": False,
            "stopped": None,
            "cells": [],
            "summary": {},
            "identity": {},
            "calibration": [],
            "schedules": {},
            "problems": [],
            "options": options,
            "environment": {},
        }

    def add_cell(self, cell: dict[str, Any]) -> None:
        """Add a cell and write the file."""
        self.data["cells"].append(cell)
        self.write()

    def problem(self, text: str) -> None:
        """Note what went wrong; the run goes on."""
        if text not in self.data["problems"]:
            self.data["problems"].append(text)

    def write(self) -> None:
        """Summarise and write, atomically."""
        scales = self.data["options"].get("slo_scales")
        self.data["summary"] = summarise(self.data["cells"], scales)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".part")
        partial.write_text(json_text(self.data), encoding="utf-8")
        os.replace(partial, self.path)


def read_document(path: Path) -> dict[str, Any]:
    """Read a report, also one that was compressed with xz or gzip.

    Raises:
        BenchError: The file is none.
    """
    try:
        raw = path.read_bytes()
        if path.suffix in _UNPACK:
            raw = _UNPACK[path.suffix](raw)
        data = json.loads(raw)
    except OSError as error:
        raise BenchError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, EOFError, RecursionError, lzma.LZMAError, zlib.error) as error:
        raise BenchError(f"{path} is not JSON ({error})") from None
    if not _is_report(data):
        raise BenchError(
            f"{path} is not what `vllm-tide bench run --json` writes; only that can be "
            "shown as HTML"
        )
    report: dict[str, Any] = data
    return report


def _is_report(data: Any) -> bool:
    if not isinstance(data, dict) or not isinstance(data.get("environment"), dict):
        return False
    cells = data.get("cells")
    if isinstance(cells, list):
        return all(isinstance(cell, dict) and "arm" in cell for cell in cells)
    return isinstance(data.get("results"), dict) and "suite" in data
