"""`vllm-tide plan`: whether and on which accelerators to train."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_tide.cli import EXIT_NO, add_output, emit, fail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares serving without speculation, with a static draft, and with a draft "
        "trained on dedicated accelerators, on a time share of a serving one, or on "
        "accelerators that return to serving after training."
    )
    parser.epilog = "Exit status: 0 train, 1 do not train, 2 invalid input."
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cluster", type=Path, metavar="FILE", help="see --example")
    what.add_argument("--example", action="store_true", help="print a cluster file")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    from vllm_tide.config import ConfigError
    from vllm_tide.plan.cluster import EXAMPLE, read_cluster
    from vllm_tide.plan.report import Plan, text

    if args.example:
        print(json.dumps(EXAMPLE, indent=2))
        return 0
    try:
        plan = Plan(read_cluster(args.cluster))
    except ConfigError as error:
        return fail(error)
    status = emit(args, "\n".join(text(plan)), plan.to_json())
    return status if status or plan.train else EXIT_NO
