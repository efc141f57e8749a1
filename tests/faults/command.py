"""Shared parts of the two commands: folders, known outputs, signals."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness.common import BenchError, ServerError, clock_text

from .reference import Known, known_outputs
from .scene import Places

DOMAINS = ("python", "c", "docs_en")
PROMPTS = 32

Run = Callable[[argparse.Namespace, Places, Sequence[Known]], int]


def add_places(p: argparse.ArgumentParser) -> None:
    """Add the options for paths, with the demo as default."""
    demo = Path(__file__).parents[2] / "scripts" / "demo"
    p.add_argument("--json", type=Path, help="where the result goes")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--venv", type=Path, default=Path(sys.executable).parents[1])
    p.add_argument("--target", type=Path, default=demo / "target")
    p.add_argument("--draft", type=Path, default=demo / "draft")
    p.add_argument("--prompts", type=Path, default=demo / "prompts")
    p.add_argument("--num-prompts", type=int, default=PROMPTS, metavar="N")
    p.add_argument("--domains", default=",".join(DOMAINS), help="prompts' domains")
    p.add_argument(
        "--whole", action="store_true", help="ask whole prompts, not their beginnings"
    )
    p.add_argument("--work", type=Path, help="logs; default: a folder that is removed")


def say_since(began: float) -> Callable[[str], None]:
    """Return a printer of lines with the time since `began` (monotonic clock, s)."""

    def say(text: str) -> None:
        print(f"[{clock_text(time.monotonic() - began)}] {text}", flush=True)

    return say


def run_command(args: argparse.Namespace, run: Run) -> int:
    """Prepare folders and known outputs, run, clean up.

    Args:
        args: With the options of :func:`add_places`.
        run: Returns the exit status.

    Returns:
        2 where it could not run, 130 where it was stopped.
    """
    # Also where a shell started us with SIGINT ignored: stop what we started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    work = args.work or Path(tempfile.mkdtemp(prefix="vllm_tide_faults_"))
    work.mkdir(parents=True, exist_ok=True)
    run_dir = Path(tempfile.mkdtemp(prefix="vllm_tide_run_"))
    os.environ["XDG_STATE_HOME"] = str(run_dir / "state")  # not the user's own
    say, cpus = say_since(time.monotonic()), os.sched_getaffinity(0)
    try:
        say("computing the outputs that are right")
        domains = tuple(args.domains.split(","))
        count, where = args.num_prompts, (args.target, args.prompts, domains)
        known = known_outputs(*where, count, args.seed, whole=args.whole)
        say(f"{len(known)} prompts; starting server and trainer")
        places = Places(args.venv.absolute(), args.target, args.draft, work, run_dir)
        return run(args, places, known)
    except (BenchError, ServerError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    finally:
        os.sched_setaffinity(0, cpus)  # core 0 is the engine's
        shutil.rmtree(run_dir, ignore_errors=True)
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
