"""`vllm-tide compare A B`: does it help my traffic?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_tide.cli import fail


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare two results of `vllm bench serve`",
        description="A and B are folders of JSON that `vllm bench serve --save-result "
        "--save-detailed` writes, or single files; with fewer than two files each "
        "there is no verdict.",
    )
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="how you serve now")
    add("b", type=Path, metavar="B", help="how you might serve")
    add("--json", type=Path, metavar="OUT", help="write the figures, too")
    parser.set_defaults(run=run)


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
    # Half a character, in a name or a model_id, cannot be written.
    text = "\n".join(lines(result)).encode("utf-8", "backslashreplace")
    print(text.decode("utf-8"))
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            return fail(f"--json {args.json}: {error.strerror or error}.")
    return 0
