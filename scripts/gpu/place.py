"""Device and stored results of a stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.common import environment
from json_text import json_text

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "scripts" / "demo"
HERE = Path(__file__).resolve().parent
# Prologue of a dry run: patch step results, because null kernels write none.
DRY = f"""import runpy, sys
sys.path[:0] = {[str(HERE), str(HERE.parent / "null_gpu"), str(HERE.parent)]!r}
from engine import patch_step_results
patch_step_results()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")"""


class CannotRun(Exception):  # noqa: N818
    """The stage cannot run here; the message is the reason."""


class TimeIsOver(Exception):  # noqa: N818
    """The time limit is over; the next call measures the remaining parts."""


class Place:
    """Results of one stage on one chip, part by part.

    Args:
        stage: Name of the stage.
        what: Description for the results.
        file: File of the results; parts in it are not measured again.
        minutes: Time limit for the start of a part.

    Raises:
        CannotRun: There is no GPU, or the file is from another stage or chip.
    """

    def __init__(self, stage: str, what: str, file: Path, minutes: float) -> None:
        if not torch.cuda.is_available():
            raise CannotRun(f"{stage} needs a GPU, and no GPU is available")
        self.file = file.resolve()
        self.dry = bool(os.environ.get("TIDE_DRY"))  # on the null GPU
        self.work = self.file.with_name(self.file.name + ".work")
        self._deadline = time.monotonic() + 60 * minutes
        chip = "null GPU (--dry-run)" if self.dry else torch.cuda.get_device_name()
        self.data: dict[str, Any] = {
            "stage": stage,
            "what": what,
            "chip": chip,
            "complete": False,
            "parts": {},
        }
        if self.file.exists():
            stored = json.loads(self.file.read_text(encoding="utf-8"))
            before = stored.get("stage"), stored.get("chip")
            if before != (stage, chip):
                raise CannotRun(
                    f"{file} has results of {before[0]} on {before[1]}, not of "
                    f"{stage} on {chip}: give another file"
                )
            self.data["parts"] = stored["parts"]
        self.work.mkdir(parents=True, exist_ok=True)

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return a part's results; measure it unless the file has them.

        Raises:
            TimeIsOver: The time limit is over before the measurement.
        """
        if name in self.data["parts"]:
            return self.data["parts"][name]
        if time.monotonic() > self._deadline:
            raise TimeIsOver
        began = time.monotonic()
        result = measure()
        self.data["parts"][name] = result
        print(f"{name}: {json.dumps(result)[:300]} ({time.monotonic() - began:.1f} s)")
        sys.stdout.flush()
        self._write()
        return result

    def check(self, good: bool, message: str) -> None:
        """Check a figure; skip it in a dry run, where figures have no meaning.

        Raises:
            AssertionError: The check failed.
        """
        if not (good or self.dry):
            raise AssertionError(message)

    def finish(self) -> int:
        """Write the complete results; return the exit status."""
        self.data["complete"] = True
        self._write()
        return 0

    def command(self, command: Sequence[str], log: str) -> None:
        """Run a program of the checkout with its output in the work folder.

        Raises:
            RuntimeError: It failed; the message has the end of the output.
        """
        path = self.work / f"{log}.log"
        folder = Path(sys.executable).parent
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        with path.open("w", encoding="utf-8") as file:
            done = subprocess.run(
                [sys.executable, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=env,
                check=False,
            )
        if done.returncode:
            output = path.read_text(encoding="utf-8", errors="replace")[-1500:]
            raise RuntimeError(f"{log} exited with {done.returncode}: {output}")

    def child(self, case: dict[str, Any], log: str) -> dict[str, Any]:
        """Run `generate.py` on a case in a separate process; return its report."""
        report = self.work / f"{log}.json"
        report.unlink(missing_ok=True)
        case = {"report": str(report), **case}
        program = [*["-c", DRY] * self.dry, str(HERE / "generate.py"), json.dumps(case)]
        self.command(program, log)
        return json.loads(report.read_text(encoding="utf-8"))

    def _write(self) -> None:
        self.data["environment"] = environment({"torch": torch.__version__})
        self.file.write_text(json_text(self.data), encoding="utf-8")
