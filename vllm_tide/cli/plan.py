"""`vllm-tide plan`: where to train, and whether to."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_tide.cli import fail

NOT_TO_TRAIN = 3


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="say on which accelerators to train, if at all",
        description="Compares serving without speculation, with a draft that is never "
        "trained, and with one that is trained on accelerators of its own, on a share "
        "of one that serves, or on some that serve again once it has learnt.",
        epilog="Exit status: 0 train, 3 do not, 2 an input is wrong.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cluster", type=Path, metavar="FILE", help="see --example")
    text = "print a cluster file; numbers may be ranges [low, high]"
    what.add_argument("--example", action="store_true", help=text)
    text = "compare with the numbers that the TIDE paper prints"
    what.add_argument("--paper-check", action="store_true", help=text)
    add = parser.add_argument
    add("--run-dir", type=Path, help="of a trainer: take how its draft learns from it")
    add(
        "--profile",
        action="append",
        default=[],
        metavar="CLASS=FILE",
        help="of `vllm-tide profile`: what a verify step costs; repeatable",
    )
    text = "of scripts/sim/run.py --speedup: simulated speed-ups"
    add("--speedup", type=Path, metavar="FILE", help=text)
    add("--json", type=Path, metavar="OUT", help="write the plan as JSON, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_tide.config import ConfigError
    from vllm_tide.plan.cluster import EXAMPLE, read_cluster
    from vllm_tide.plan.report import make_plan, text

    if args.example:
        print(json.dumps(EXAMPLE, indent=2))
        return 0
    if args.paper_check:
        return _paper_check()
    profiles = {}
    for given in args.profile:
        name, equals, path = given.partition("=")
        if not (name and equals and path):
            return fail(f"--profile {given}: is CLASS=FILE, such as H100=profile.json.")
        profiles[name] = Path(path)
    if args.json and not args.json.parent.is_dir():
        return fail(f"--json {args.json}: no folder {args.json.parent}.")
    try:
        cluster = read_cluster(args.cluster, args.run_dir, profiles, args.speedup)
    except ConfigError as error:
        return fail(error)
    plan = make_plan(cluster)
    print(*text(plan), sep="\n")
    if args.json:
        from vllm_tide.metrics import finite

        content = json.dumps(finite(plan.to_json()), indent=1)
        try:
            args.json.write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            return fail(f"--json {args.json}: {error.strerror or error}.")
    return 0 if plan.train else NOT_TO_TRAIN


def _paper_check() -> int:
    from vllm_tide.plan.paper import WITHIN, check

    status = 0
    for row, computed, agrees in check():
        said = "agrees" if agrees else f"differs by more than {WITHIN}"
        print(f"figure {row.figure:16} {row.value:.2f}, here {computed:.3f}: {said}")
        status |= not agrees
    return status
