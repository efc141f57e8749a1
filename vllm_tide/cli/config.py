"""`vllm-tide config`: example configurations, a check, a reference of all knobs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vllm_tide.cli import EXIT_ERROR, add_output, emit, fail
from vllm_tide.config import TideConfig
from vllm_tide.doctor.run import make_subject
from vllm_tide.speculative import is_inline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    example = actions.add_parser("example", help="print a commented example")
    example.add_argument("name", nargs="?", help="without it: list the names")
    check = actions.add_parser("check", help="check a file without starting a server")
    check.add_argument("file", help="JSON, YAML (vLLM's --config too), or inline JSON")
    add_output(check)
    actions.add_parser("reference", help="print every knob, as Markdown")


def run(args: argparse.Namespace) -> int:
    if args.action == "example":
        return _example(args.name)
    if args.action == "check":
        return _check(args)
    print(*reference(), sep="\n")
    return 0


def example_names() -> list[str]:
    names = (item.name for item in files("vllm_tide.examples").iterdir())
    return sorted(name[:-5] for name in names if name.endswith(".json"))


def _example(name: str | None) -> int:
    names = example_names()
    if name is None:
        print(*names, sep="\n")
        return 0
    if name not in names:
        return fail(f"no example {name!r}; known: {', '.join(names)}.")
    text = files("vllm_tide.examples").joinpath(f"{name}.json").read_text("utf-8")
    print(text, end="")
    return 0


def _check(args: argparse.Namespace) -> int:
    subject = make_subject(args.file, None, Path())
    errors = subject.error.splitlines()
    notes = list(subject.notes)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if not args.json:
        for error in errors:
            fail(error)
    name = "the inline JSON" if is_inline(args.file) else args.file
    text = f"{name}: valid. Not checked here: the draft's files, target and "
    text += "machine (`vllm-tide doctor` does), most keys of vLLM (vllm serve does)."
    report = {"errors": errors, "notes": notes}
    if errors and not args.json:
        return EXIT_ERROR
    return emit(args, text, report) or EXIT_ERROR * bool(errors)


def reference() -> Iterator[str]:
    """Yield a Markdown table of all knobs, from the schema."""
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
