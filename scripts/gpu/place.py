"""Where a stage runs and what it has measured so far."""

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
# Of a dry run: what the null GPU leaves in memory is made plausible, then the program.
DRY = f"""import runpy, sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent / "null_gpu")!r}]
from engine import say_that_one_token_was_sampled
say_that_one_token_was_sampled()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")"""


class CannotRun(Exception):  # noqa: N818 - says what it is
    """This stage cannot run here; one sentence says why."""


class TimeIsOver(Exception):  # noqa: N818 - says what it is
    """The rest is for the next call."""


class Place:
    """One stage on one chip, part by part.

    Args:
        stage: Its name.
        what: What it answers.
        file: The results; parts that are in it are not measured again.
        minutes: No part begins later.

    Raises:
        CannotRun: There is no GPU, or the file is of another stage or chip.
    """

    def __init__(self, stage: str, what: str, file: Path, minutes: float) -> None:
        if not torch.cuda.is_available():
            raise CannotRun(f"{stage} needs a GPU and there is none")
        self.file = file.resolve()
        self.dry = bool(os.environ.get("TIDE_DRY"))  # on the null GPU
        self.work = self.file.with_name(self.file.name + ".work")
        self._until = time.monotonic() + 60 * minutes
        chip = "null GPU (--dry-run)" if self.dry else torch.cuda.get_device_name()
        self.data: dict[str, Any] = {
            "stage": stage,
            "what": what,
            "chip": chip,
            "complete": False,
            "parts": {},
        }
        if self.file.exists():
            kept = json.loads(self.file.read_text(encoding="utf-8"))
            if (kept.get("stage"), kept.get("chip")) != (stage, chip):
                raise CannotRun(
                    f"--json {file} holds {kept.get('stage')} on {kept.get('chip')}, "
                    f"this is {stage} on {chip}: give another file"
                )
            self.data["parts"] = kept["parts"]
        self.work.mkdir(parents=True, exist_ok=True)

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """One part's results, measured now unless they are known already.

        Raises:
            TimeIsOver: It would have to begin too late.
        """
        if name in self.data["parts"]:
            return self.data["parts"][name]
        if time.monotonic() > self._until:
            raise TimeIsOver
        began = time.monotonic()
        found = measure()
        self.data["parts"][name] = found
        print(f"{name}: {json.dumps(found)[:300]} ({time.monotonic() - began:.1f} s)")
        sys.stdout.flush()
        self._write()
        return found

    def judge(self, good: bool, sentence: str) -> None:
        """Of a figure; those of a dry run mean nothing.

        Raises:
            AssertionError: It is wrong.
        """
        if not (good or self.dry):
            raise AssertionError(sentence)

    def finish(self) -> int:
        """Write the whole; the exit status."""
        self.data["complete"] = True
        self._write()
        return 0

    def command(self, command: Sequence[str], log: str) -> None:
        """Run a program of the checkout, its words in a file of the work folder.

        Raises:
            RuntimeError: It failed; the message ends with its last words.
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
            words = path.read_text(encoding="utf-8", errors="replace")[-1500:]
            raise RuntimeError(f"{log} ended with {done.returncode}: {words}")

    def child(self, case: dict[str, Any], log: str) -> dict[str, Any]:
        """What `generate.py` reports of a case: an engine in a process of its own."""
        report = self.work / f"{log}.json"
        report.unlink(missing_ok=True)
        case = {"report": str(report), **case}
        program = [*["-c", DRY] * self.dry, str(HERE / "generate.py"), json.dumps(case)]
        self.command(program, log)
        return json.loads(report.read_text(encoding="utf-8"))

    def _write(self) -> None:
        self.data["environment"] = environment({"torch": torch.__version__})
        self.file.write_text(json_text(self.data), encoding="utf-8")
