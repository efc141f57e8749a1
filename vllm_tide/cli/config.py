"""`vllm-tide config`: example configurations, a check, the reference of all knobs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from pydantic import BaseModel

from vllm_tide.config import ConfigError, TideConfig, parse_tide, read_json_object


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser("config", help="example and reference of the knobs")
    actions = parser.add_subparsers(dest="action", required=True)
    example = actions.add_parser("example", help="print a commented example")
    example.add_argument("name", nargs="?", help="leave it out to list the names")
    check = actions.add_parser("check", help="check a file without starting a server")
    check.add_argument("file")
    actions.add_parser("reference", help="print every knob as a Markdown table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if args.action == "example":
        return _example(args.name)
    if args.action == "check":
        return _check(args.file)
    print("\n".join(reference()))
    return 0


def example_names() -> list[str]:
    """Names of the examples that ship with the package."""
    folder = files("vllm_tide.examples")
    names = (item.name for item in folder.iterdir())
    return sorted(name[:-5] for name in names if name.endswith(".json"))


def _example(name: str | None) -> int:
    names = example_names()
    if name is None:
        print("\n".join(names))
        return 0
    if name not in names:
        known = ", ".join(names)
        print(f"error: no example {name!r}; known: {known}.", file=sys.stderr)
        return 2
    text = files("vllm_tide.examples").joinpath(f"{name}.json").read_text("utf-8")
    print(text, end="")
    return 0


def _check(file: str) -> int:
    try:
        config = read_json_object(f"@{file}")
        if "tide" not in config:
            raise ConfigError(f"tide: {file!r} has no tide section.")
        parse_tide(config["tide"])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{file}: fine. The draft is checked against the target by vllm serve.")
    return 0


def reference() -> Iterator[str]:
    """Lines of a Markdown table of every knob, from the schema itself."""
    yield "| knob | default | meaning |"
    yield "| --- | --- | --- |"
    yield from _rows("tide", TideConfig)


def _rows(prefix: str, section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        knob = f"{prefix}.{name}"
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _rows(knob, kind)
            continue
        default = "null" if field.default is None else repr(field.default)
        default = {"True": "true", "False": "false"}.get(default, default)
        yield f"| `{knob}` | `{default}` | {field.description} |"
