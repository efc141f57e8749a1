"""`vllm-tide compare A B`: does it help my traffic?"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from vllm_tide.cli import fail


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare two results of `vllm bench serve` or GuideLLM",
        description="A and B are files, several with commas between them, or folders "
        "of JSON: what `vllm bench serve --save-result --save-detailed` writes, or "
        "GuideLLM's JSON; two or more of each, or there is no verdict.",
    )
    add = parser.add_argument
    add("a", metavar="A", help="how you serve now")
    add("b", metavar="B", help="how you might serve")
    add("--names", nargs=2, metavar=("A", "B"), help="what to call them")
    text = "limits in ms, such as ttft:500 tpot:50 (as vLLM's own --goodput)"
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help=text)
    add("--html", type=Path, metavar="OUT", help="write a page, too")
    add("--json", type=Path, metavar="OUT", help="write the figures, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_tide.compare import LIMITS, compare, lines, page, read_side
    from vllm_tide.config import ConfigError

    goodput = {}
    for given in args.goodput:
        name, _, value = given.partition(":")
        if name not in LIMITS or not re.fullmatch(r"\d+(\.\d*)?", value, re.A):
            known = ", ".join(f"{limit}:MS" for limit in LIMITS)
            return fail(f"--goodput {given}: is one of {known}.")
        goodput[name] = float(value)
    for path in filter(None, (args.html, args.json)):
        if not path.parent.is_dir():
            return fail(f"{path}: no folder {path.parent}.")
    try:
        sides = read_side(args.a), read_side(args.b)
        names = tuple(args.names or map(_name, (args.a, args.b)))
        if names[0] == names[1]:
            names = "A", "B"
        found = compare(*sides, (names[0], names[1]), goodput)
        if (path := args.html) is not None:
            path.write_text(page(found), encoding="utf-8", errors="backslashreplace")
        if (path := args.json) is not None:
            from vllm_tide.metrics import finite

            text = json.dumps(finite(found.to_json()), indent=1)
            path.write_text(text + "\n", encoding="utf-8")
    except ConfigError as error:
        return fail(error)
    except OSError as error:
        return fail(f"{error.filename or path}: {error.strerror or error}.")
    # Half a character, in a name or a model_id, cannot be written.
    said = "\n".join(lines(found)).encode("utf-8", "backslashreplace")
    print(said.decode("utf-8"))
    return 0


def _name(given: str) -> str:
    return Path(given.split(",")[0]).stem
