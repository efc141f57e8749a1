"""Measures speculation, and learning, on real servers.

scripts/bench/run.py --suite NAME --json FILE [--yes]
scripts/bench/run.py control --model DIR --draft DIR --json FILE [--minutes N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench import suites
from bench.harness.common import BenchError
from bench.harness.options import add_options
from bench.harness.server import end_on_signals

EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite; returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        if given[:1] == ["control"]:  # engines that take turns
            from bench.suites import control

            return control.main(given[1:])
        return _run(given)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _run(argv: list[str]) -> int:
    # A suite has options of its own: which one is asked for is read first.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--suite")
    suite = first.parse_known_args(argv)[0].suite
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Measures speculation policies on real servers. "
        "--suite NAME --help lists the options of a suite, `control --help` those of "
        "the comparison of policies turn by turn.",
        allow_abbrev=False,
    )
    parser.add_argument("--suite", required=True, help=", ".join(suites.SUITES))
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--work", type=Path, help="logs and models (FILE.work)")
    parser.add_argument("--yes", action="store_true", help="start, without --target")
    if suite is not None:
        add_options(parser, suites.kind_of(suite))
    args, foreign = parser.parse_known_args(argv)
    if foreign:
        raise BenchError(
            f"{foreign[0].partition('=')[0]} is no option of --suite {suite}"
        )
    given = dict(vars(args))
    sure = given.pop("yes") or "target" in given
    work = given["work"] or args.json.with_name(args.json.name + ".work")
    given["work"] = work.resolve()
    options = suites.options_of(given.pop("suite"), given)
    options.check()
    limit = options.max_minutes and f"; ends after {options.max_minutes:g} minutes"
    servers = ", ".join(options.arm_names) or "one by one"
    said = f"{options.target.name}: servers {servers}; {options.size}{limit or ''}"
    print(said, flush=True)
    if not sure:
        raise BenchError("--target: none given; --yes runs this on the demo model")
    return suites.run(options)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
