#!/usr/bin/env python
"""How right the loop's judges are, on simulated traffic whose truth is known.

    scripts/bench/judge.py --json FILE [--seed N] [--only canary,gate,calibration]

Drives the classes that serve: the canary behind a simulated server under `static` and
`adaspec`, the gate before publication, and the calibration of confidence. No server and
no model; under five minutes on two cores. `rows` of each part documents its figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

PARTS = {
    "canary": ("policy", "batch", "true_throughput_change"),
    "gate": ("true_gain", "cycles", "runs"),
    "calibration": ("confidence", "acceptance"),
}
"""Parts of the report, and what names a row of each."""


def rows_of(part: str, seed: int) -> tuple[list[dict[str, Any]], float]:
    """Rows of one part, and the seconds that they took."""
    began = time.monotonic()
    rows = import_module(f"judge_{part}").rows(seed)
    return rows, time.monotonic() - began


def _print(part: str, rows: list[dict[str, Any]], seconds: float) -> None:
    print(f"{part} [{seconds:.0f}s]")
    for row in rows:
        name = " ".join(f"{row[key]!s:>9}" for key in PARTS[part])
        rest = {k: v for k, v in row.items() if k not in PARTS[part]}
        print(f"  {name}  " + "  ".join(f"{k} {v}" for k, v in rest.items()))


def _commit() -> str | None:
    """The checkout's commit, if it is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def main() -> int:
    """Run the parts beside each other, print and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(PARTS)
    )
    args = parser.parse_args()
    if unknown := set(args.only) - PARTS.keys():
        parser.error(f"--only: unknown part {min(unknown)!r}; known: {list(PARTS)}")
    report: dict[str, Any] = {"commit": _commit(), "seed": args.seed}
    with ProcessPoolExecutor(2) as pool:
        jobs = {part: pool.submit(rows_of, part, args.seed) for part in args.only}
        for part, job in jobs.items():
            rows, seconds = job.result()
            report[part] = rows
            _print(part, rows, seconds)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
