"""`vllm-tide compare A B`: does it help my traffic?"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_tide.cli import add_output, emit, fail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A and B are folders of JSON that `vllm bench serve --save-result "
        "--save-detailed` writes, or single files; with fewer than two files each "
        "there is no verdict."
    )
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="how you serve now")
    add("b", type=Path, metavar="B", help="how you might serve")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    from vllm_tide.compare import compare, lines, read_side
    from vllm_tide.config import ConfigError

    names = args.a.stem, args.b.stem
    if names[0] == names[1]:
        names = "A", "B"
    try:
        result = compare(read_side(args.a), read_side(args.b), names)
    except ConfigError as error:
        return fail(error)
    return emit(args, "\n".join(lines(result)), result)
