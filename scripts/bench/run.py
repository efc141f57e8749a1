"""Benchmarks of speculation and online training on real servers.

scripts/bench/run.py --suite NAME --json FILE [--yes]
scripts/bench/run.py control --model DIR --draft DIR --json FILE [--minutes N]
scripts/bench/run.py learning --model DIR [--draft DIR] [--method dflash] --json FILE
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
    """Run a suite and return the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        if arguments[:1] == ["control"]:  # engines without HTTP
            from bench.suites import control

            return control.main(arguments[1:])
        if arguments[:1] == ["learning"]:  # of one draft on a stream that shifts
            from bench.suites import quickstart

            end_on_signals()
            return quickstart.main(arguments[1:])
        return _run(arguments)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _run(argv: list[str]) -> int:
    # Each suite has different options, so `--suite` is parsed first.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--suite")
    suite = first.parse_known_args(argv)[0].suite
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Measure speculation policies on real servers. "
        "--suite NAME --help lists the options of a suite, `control --help` those of "
        "the interleaved comparison of policies.",
        allow_abbrev=False,
    )
    parser.add_argument("--suite", required=True, help=", ".join(suites.SUITES))
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--work", type=Path, help="folder of logs and models (default: FILE.work)"
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="run on the demo model if --target is not given",
    )
    if suite is not None:
        add_options(parser, suites.kind_of(suite))
    args, foreign = parser.parse_known_args(argv)
    if foreign:
        raise BenchError(
            f"{foreign[0].partition('=')[0]} is not an option of --suite {suite}"
        )
    values = dict(vars(args))
    confirmed = values.pop("yes") or "target" in values
    work = values["work"] or args.json.with_name(args.json.name + ".work")
    values["work"] = work.resolve()
    options = suites.options_of(values.pop("suite"), values)
    options.check()
    limit = options.max_minutes and f"; ends after {options.max_minutes:g} minutes"
    servers = ", ".join(options.arm_names) or "one by one"
    plan = f"{options.target.name}: servers {servers}; {options.size}{limit or ''}"
    print(plan, flush=True)
    if not confirmed:
        raise BenchError("--target: not given; --yes runs this on the demo model")
    return suites.run(options)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
