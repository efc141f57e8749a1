"""The command line, one module per command: see `main`.

Exit status: 0 success, 1 negative result or no process to answer, 2 invalid input. Each
error is one line, `error: SENTENCE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
EXIT_NO, EXIT_ERROR = 1, 2


def fail(error: object) -> int:
    """Print an error and return its exit status."""
    print(f"error: {error}", file=sys.stderr)
    return int(getattr(error, "exit_status", EXIT_ERROR))


class Help(argparse.RawDescriptionHelpFormatter):
    """Help with the defaults of options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:  # already formatted
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, silent = action.help or "", (None, False, argparse.SUPPRESS)
        if not action.option_strings or action.default in (*silent, []):
            return text
        return text if "(default" in text else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line."""

    def __init__(self, **named: Any) -> None:
        super().__init__(formatter_class=Help, **named)

    def error(self, message: str) -> NoReturn:
        self.exit(fail(f"{message}; see '{self.prog} --help'."))


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    text = "run directory of the engines (default: $TIDE_RUN_DIR, else the user's)"
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help=text)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options that `emit` reads."""
    parser.add_argument("--json", action="store_true", help="print JSON, not text")
    text = "write to a file instead of printing"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)


def emit(args: argparse.Namespace, text: str, value: object) -> int:
    """Print or write a command's result as text or JSON; return the exit status."""
    if args.json:
        text = json.dumps(value, indent=1)
    # A name may contain a lone surrogate, which UTF-8 cannot encode.
    data = f"{text}\n".encode("utf-8", "backslashreplace")
    if args.output is None:
        print(data.decode("utf-8"), end="")
        return 0
    try:
        args.output.write_bytes(data)
    except OSError as error:
        return fail(f"--output {args.output}: {error.strerror or error}.")
    return 0
