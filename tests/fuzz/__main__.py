"""Fuzz every parser that reads what another process wrote: scripts/fuzz.sh.

Each parser has a process of its own, so that a crash is a finding like any other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hypothesis

from json_text import json_text
from tests.fuzz.every import ALL, parser_named
from tests.fuzz.explore import explore

STARTING_S = 120.0
"""How long a parser's process may take beside its examples (s)."""
_RESULT = "result "


def main() -> int:
    """Run the command; 1 if anything was found."""
    args = _arguments()
    if args.alone:
        _alone(args.alone, args.seconds, args.seed)
        return 0
    names = args.parser or ALL
    rows, began = [], time.monotonic()
    for name in names:
        rows.append(_row(name, args.seconds / len(names), args.seed))
        shown = {key: rows[-1][key] for key in ("examples", "distinct_outcomes")}
        print(f"{name:16} {shown} findings {len(rows[-1]['findings'])}", flush=True)
    findings = sum(len(row["findings"]) for row in rows)
    document = {
        "what": "parsers of other processes' bytes, given damaged ones",
        "command": f"scripts/fuzz.sh --seconds {args.seconds:g} --seed {args.seed}",
        "environment": {
            "python": platform.python_version(),
            "hypothesis": hypothesis.__version__,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
        "seconds": round(time.monotonic() - began, 1),
        "examples": sum(row["examples"] for row in rows),
        "findings": findings,
        "parsers": rows,
    }
    if args.json:
        Path(args.json).write_text(json_text(document), encoding="utf-8")
    print(f"{document['examples']} examples, {findings} findings")
    return 1 if findings else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz.sh", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="for all of them, starts not counted",
    )
    parser.add_argument("--json", help="file for the results, a row a parser")
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed, other inputs"
    )
    parser.add_argument(
        "--parser", action="append", choices=ALL, help="only this one; may be repeated"
    )
    parser.add_argument("--alone", choices=ALL, help=argparse.SUPPRESS)
    return parser.parse_args()


def _alone(name: str, seconds: float, seed: int) -> None:
    parser = parser_named(name)
    found = explore(parser, seconds, seed)
    row = {
        "module": parser.module,
        "examples": found.examples,
        "distinct_outcomes": len(found.outcomes),
        "most_seen": dict(found.outcomes.most_common(4)),
        "findings": list(found.findings.values()),
    }
    print(_RESULT + json.dumps(row), flush=True)


def _row(name: str, seconds: float, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz"]
    command += ["--alone", name, "--seconds", str(seconds), "--seed", str(seed)]
    ended = ""
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, timeout=seconds + STARTING_S
        )
        said = done.stdout
        if done.returncode:
            ended = f"the process ended with {done.returncode}"
            print(done.stderr[-4000:], file=sys.stderr)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode()
        ended = "the process hung"
    lines = said.splitlines() or [""]
    if not ended and lines[-1].startswith(_RESULT):
        return {"parser": name, **json.loads(lines[-1].removeprefix(_RESULT))}
    finding = {"finding": ended or "no result", "sentence": lines[-1]}
    return {"parser": name, "module": "", "examples": 0, "distinct_outcomes": 0,
            "most_seen": {}, "findings": [finding]}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
