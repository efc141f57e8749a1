"""Programs from elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from place import Place


def ops(place: Place) -> None:
    """Kernels of vLLM against plain PyTorch: `run_smoke.py` of its kit."""

    def errors() -> Any:
        said = _given(place, "KIT_ROOT", "run_smoke.py", "ops")
        return json.loads(said.split("RESULT ")[1].splitlines()[0].split(" wall_s")[0])

    worst = max(place.part("ops", errors)["relative_errors"].values())
    place.judge(worst < 0.03, f"a kernel of vLLM is off by {worst}")


def copies(place: Place) -> None:
    """Copies to the host: do small ones wait for large ones; may they go to shm."""

    def found() -> Any:
        said = _given(place, "TIDE_PROBES", "probe_copies.py")
        return json.loads(said[said.index("{\n") :])

    place.part("copies", found)


def tests(place: Place) -> None:
    """Kernels, attention or the trainer against references: the tests for a GPU."""
    attention = ["tests/draft/test_attention.py"]
    others = ["tests/kernels/test_on_gpu.py", "tests/train/test_gpu.py"]
    # Without the options of pyproject.toml: a lent machine lacks plugins they name.
    command = ["-m", "pytest", "-q", "-m", "gpu", "--durations=5"]
    command += ["-o", "addopts=--import-mode=importlib"]
    command += attention if place.data["stage"] == "attention_tests" else others
    command += ["--collect-only"] * place.dry
    place.part("tests", lambda: place.command(command, "tests"))


def _given(place: Place, variable: str, name: str, *arguments: str) -> str:
    program = Path(os.environ.get(variable, "")) / name
    assert program.is_file(), f"{variable}: no {name} in '{program.parent}'"
    place.command([str(program), *arguments], name)
    return (place.work / f"{name}.log").read_text(encoding="utf-8")
