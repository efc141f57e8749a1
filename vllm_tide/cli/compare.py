"""`vllm-tide compare A B`: compare two benchmark results."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_tide.cli import add_output, emit, fail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A and B are folders of JSON results from `vllm bench serve --save-result "
        "--save-detailed`, or single files. A verdict needs two files on each side; "
        "three give a usable interval."
    )
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="the current configuration")
    add("b", type=Path, metavar="B", help="the candidate configuration")
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
