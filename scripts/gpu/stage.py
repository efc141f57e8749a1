"""The command: which stages there are, where they run, what goes into the JSON."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

from place import CannotRun, Place, TimeIsOver

# name: (module, its function, what it answers)
STAGES = {
    "smoke": ("serving", "smoke", "the patched vLLM serves; greedy text is plain text"),
    "kernels": (
        "kernels",
        "kernels",
        "each kernel against bandwidth and its reference",
    ),
    "capture": ("serving", "capture", "tokens/s with capture on and off, by batch"),
    "swap": ("swap", "swap", "time to stage and to install heads of 0.1 to 1 GB"),
    "sweep": ("serving", "sweep", "control against static and upstream, by batch"),
    "shift": ("serving", "shift", "a draft that learns while domains shift"),
    "profile": ("serving", "profile", "how far off the cost model's times are"),
    "trace": ("trace", "trace", "waits of the host for the GPU, ours and upstream's"),
}


def main() -> int:
    """Run one stage; the exit statuses are in run.sh."""
    parser = argparse.ArgumentParser(prog="scripts/gpu/run.sh", description=__doc__)
    parser.add_argument("stage", nargs="?", metavar="STAGE", choices=STAGES)
    parser.add_argument("--list", action="store_true", help="name the stages")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; resumed")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes, no GPU")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="begin nothing later"
    )
    parser.add_argument("--only", help="parts whose name begins so")
    args = parser.parse_args()
    if args.list:
        for name, (_, _, answers) in STAGES.items():
            print(f"{name:8} {answers}")
        return 0
    if args.stage is None or args.json is None:
        parser.error("give a STAGE and --json FILE; --list names the stages")
    # Triton decides when it is first imported whether kernels are interpreted.
    if args.cpu and args.stage == "kernels":
        os.environ["TRITON_INTERPRET"] = "1"
    module, function, answers = STAGES[args.stage]
    try:
        place = Place(args.stage, answers, args.json, args.cpu, args.minutes, args.only)
        getattr(importlib.import_module(module), function)(place)
    except CannotRun as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TimeIsOver:
        print(f"{args.minutes:g} minutes are over: run the same command again")
        return 3
    except (AssertionError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"error: {args.stage}: {error}", file=sys.stderr)
        return 1
    return place.finish()


if __name__ == "__main__":
    sys.exit(main())
