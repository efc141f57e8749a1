"""Run the steps of a session one after the other, each in a process with a limit."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

# The first fifteen minutes on a GPU, in this order. By step: maximum seconds, and
# module.function of a `Place`. What is right comes first, then what it costs, then what
# it gains. Starting the machine and installing takes the rest.
STEPS: dict[str, tuple[int, str]] = {
    "smoke": (100, "serving.smoke"),
    "lengths": (80, "serving.lengths"),
    "rows": (50, "checks.rows"),
    "restart": (60, "steps.restart"),
    "price_upstream": (65, "steps.price"),
    "price_control": (65, "steps.price"),
    "price_default": (65, "steps.price"),
    "curves": (80, "steps.curves"),
    "shares": (75, "learn.shares"),
    "static3": (40, "arms.arm"),
    "vllm_adaptive": (40, "arms.arm"),
    "adaspec_adaptive": (40, "arms.arm"),
}
# Run only if named.
MORE: dict[str, tuple[int, str]] = {
    "kernel_tests": (150, "checks.tests"),
    "attention_tests": (90, "checks.tests"),
    "seams": (330, "steps.seams"),
    "kernels": (120, "kernels.kernels"),
    "shift": (330, "learn.shift"),
    "gain_none": (150, "learn.gain"),  # each step compiles a large target
    "gain_frozen": (150, "learn.gain"),
    "gain_tide": (300, "learn.gain"),
}
ALL = STEPS | MORE
MINUTES = 13.0
DRY_FACTOR = 5  # engines on the null GPU start on a few slow cores
LATE = 3  # exit status of a step after its time limit


def main() -> int:
    """Run the steps, or one step in this process."""
    parser = argparse.ArgumentParser(prog="scripts/gpu/session.sh", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, help=f"time limit of all steps (default: {MINUTES:g})"
    )
    parser.add_argument("--only", help="comma-separated names of steps; see --list")
    parser.add_argument("--again", action="store_true", help="also run passed steps")
    parser.add_argument("--dry-run", action="store_true", help="run on the null GPU")
    parser.add_argument("--list", action="store_true", help="list the steps")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(STEPS)
    if unknown := set(names) - set(ALL):
        parser.error(f"--only: there is no step {min(unknown)}; see --list")
    if args.list:
        for name in names if args.only else ALL:
            only = "; only if named" * (name in MORE)
            print(f"{name}: at most {ALL[name][0]} s{only}")
        return 0
    if args.dry_run:
        os.environ["TIDE_DRY"] = "1"
    work = Path(os.environ["TIDE_GPU_WORK"]).resolve() / "session"
    if args.step:
        return _step(*ALL[args.step][1].split("."), work, args)
    minutes = args.minutes or (90.0 if args.dry_run else MINUTES)
    deadline = time.monotonic() + 60 * minutes
    work.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        began = time.monotonic()
        limit = min(
            ALL[name][0] * (DRY_FACTOR if args.dry_run else 1), deadline - began
        )
        detail, good = _run(name, work, limit, args)
        failed += [] if good else [name]
        took = time.monotonic() - began
        print("PASS" if good else "FAIL", name, f"{took:.1f}", detail, flush=True)
        _pack(work)
    print(f"{len(names) - len(failed)} of {len(names)} steps passed")
    return int(bool(failed))


def _run(name: str, work: Path, limit: float, args: Any) -> tuple[str, bool]:
    """Run a step in a separate process; return a message and whether it passed."""
    file, log = work / f"{name}.json", work / f"{name}.log"
    before = _read(file).get("passed")
    if before and not args.again:
        return "passed before", True
    if before is not None or args.again:  # otherwise continue after a time limit
        file.unlink(missing_ok=True)
    if limit < 1:
        return "no time left: run the same command again", False
    command = [sys.executable, sys.argv[0], "--step", name]
    command += ["--minutes", str(limit / 60)] + ["--dry-run"] * args.dry_run
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(limit)
        with contextlib.suppress(ProcessLookupError):  # including its children
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if status is None:
        return f"ended after {limit:.0f} s", False
    result = _read(file)
    good = status == 0 and bool(result.get("complete"))
    if result and status != LATE:
        text = json.dumps(result | {"passed": good}, indent=1)
        file.write_text(text, encoding="utf-8")
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if not good:  # engines print warnings when they end
        lines = [line for line in lines if "Error: " in line] or lines
    return " ".join(lines[-1:])[:300], good


def _step(module: str, function: str, work: Path, args: Any) -> int:
    from place import CannotRun, Place, TimeIsOver

    file = work / f"{args.step}.json"
    try:
        place = Place(args.step, function, file, args.minutes)
        getattr(importlib.import_module(module), function)(place)
    except (AssertionError, CannotRun, TimeIsOver) as error:
        print(f"{type(error).__name__}: {error}"[:500])
        compared = isinstance(error, AssertionError) and module == "serving"
        if not (compared and args.dry_run):  # outputs of the null GPU have no meaning
            return LATE if isinstance(error, TimeIsOver) else 1
    return place.finish()


def _pack(work: Path) -> None:
    """Write all results to one JSON, and all logs and traces to one archive."""
    results = {path.stem: _read(path) for path in sorted(work.glob("*.json"))}
    work.with_suffix(".json").write_text(json.dumps(results), encoding="utf-8")
    with tarfile.open(f"{work}.tar.gz", "w:gz") as archive:
        for path in sorted(p for p in work.rglob("*.*") if p.suffix in (".log", ".gz")):
            archive.add(path, str(path.relative_to(work)))
    if out := os.environ.get("OUT"):
        Path(out).mkdir(parents=True, exist_ok=True)
        for file in (work.with_suffix(".json"), Path(f"{work}.tar.gz")):
            shutil.copy(file, out)


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        data = json.loads(path.read_text(encoding="utf-8"))
        return data if isinstance(data, dict) else {}
    return {}


if __name__ == "__main__":
    sys.exit(main())
