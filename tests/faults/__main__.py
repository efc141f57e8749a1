"""`python -m tests.faults`: see scripts/faults.sh."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.harness.common import BenchError, environment

from .command import add_places, run_command, say_since
from .fault import Fault
from .reference import Known
from .report import by_kind, markdown, write
from .scene import Places
from .suite import FAULTS, OK, Row, Suite, plan


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="scripts/faults.sh",
        description="Injects faults into a real server and trainer under load.",
        epilog="Exit status: 0 when all was well, 1 when a fault did harm, 2 when the "
        "suite could not run.",
    )
    p.add_argument("--count", type=int, default=500, help="faults (500)")
    p.add_argument(
        "--kinds", help="only these, comma-separated; " + ", ".join(_kinds())
    )
    add_places(p)
    return p


def _kinds() -> list[str]:
    return [fault.kind for fault in FAULTS]


def _chosen(args: argparse.Namespace) -> list[Fault]:
    """Return the requested kinds of faults.

    Raises:
        BenchError: One of them does not exist.
    """
    kinds = args.kinds.split(",") if args.kinds else _kinds()
    for name in kinds:
        if name not in _kinds():
            known = ", ".join(_kinds())
            raise BenchError(f"--kinds: {name!r} is no fault; give one of {known}")
    return [fault for fault in FAULTS if fault.kind in kinds]


def _run(args: argparse.Namespace, places: Places, known: Sequence[Known]) -> int:
    faults = plan(args.count, args.seed, _chosen(args))
    rows: list[Row] = []
    say = say_since(time.monotonic())
    suite = Suite(places, known, args.seed)

    def on_row(row: Row) -> None:
        rows.append(row)
        place = f"{len(rows)}/{len(faults)}"
        say(f"{place} {row.kind}: {row.outcome}, {row.recovery_s:.1f} s")
        if args.json is not None:
            write(args.json, _document(args, suite, rows), "rows", [*map(asdict, rows)])

    asyncio.run(suite.run(faults, on_row))
    document = _document(args, suite, rows)
    if args.json is not None:
        write(args.json, document, "rows", [*map(asdict, rows)])
    print("\n".join(markdown(document["kinds"])))
    for problem in document["problems"]:
        print(f"problem: {problem}")
    print(
        f"{len(rows)} faults, {document['harm']} with harm; "
        f"{document['right_answers']} right answers, "
        f"{sum(document['unanswered'].values())} unanswered by stopped servers"
    )
    return int(bool(document["harm"] or document["problems"]))


def _document(
    args: argparse.Namespace, suite: Suite, rows: list[Row]
) -> dict[str, Any]:
    load = suite.load
    return {
        "what": "faults injected into a real server and trainer under load",
        "count": len(rows),
        "seed": args.seed,
        "harm": sum(row.outcome != OK for row in rows),
        "right_answers": load.right if load else 0,
        "unanswered": dict(load.excused) if load else {},
        "problems": suite.problems,
        "kinds": by_kind(rows),
        "environment": environment({}),
    }


def main() -> int:
    """Run the command."""
    return run_command(_parser().parse_args(), _run)


if __name__ == "__main__":
    sys.exit(main())
