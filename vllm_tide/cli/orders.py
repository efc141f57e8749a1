"""`vllm-tide rollback`, `pause`, `resume` and `capture`; how trainers are asked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Say = Callable[[dict[str, Any]], str]
"""An answer in words."""

EXIT_REFUSED, EXIT_ERROR = 1, 2
MOST_SECONDS = 86400
# Name: text and epilog of the help.
_ORDERS = {
    "rollback": (
        "serve the head before the newest one again",
        "The canary does this by itself when served acceptance falls. Training goes on "
        "from the older head after tide.deploy.backoff_cycles cycles; `pause` keeps it "
        "from publishing another.",
    ),
    "pause": (
        "stop training and capture until `resume`",
        "Nothing leaves the engine then, token ids neither, so a head on trial is "
        "judged after `resume`. The pause outlives a restart.",
    ),
    "resume": ("train and capture again after `pause`", ""),
    "capture": (
        "switch capture on or off in every engine of a run directory",
        "They follow within a second, with or without a trainer, and so do those that "
        "start later.",
    ),
}


def add_parser(subparsers: argparse._SubParsersAction, name: str) -> None:
    """Add one of the commands to the command line."""
    parser = add_order(subparsers, name, *_ORDERS[name])
    if name == "capture":
        parser.add_argument("wanted", choices=("on", "off"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; see `give_order`."""
    if args.command == "capture":
        return _switch_capture(args)
    return give_order(args, args.command, _words)


def _switch_capture(args: argparse.Namespace) -> int:
    from vllm_tide.capture.switch import OFF, Switch, why_off
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.rendezvous import default_run_dir, prepare_run_dir

    run_dir = args.run_dir or default_run_dir()
    try:
        why = Switch(prepare_run_dir(run_dir), OFF).set(args.wanted == "off")
    except TransportError as error:
        why = str(error)
    if why:
        print(f"error: {why}", file=sys.stderr)
        return EXIT_ERROR
    paused = args.wanted == "on" and why_off(run_dir)
    note = ", but paused: `vllm-tide resume`" if paused else ""
    print(f"capture is {args.wanted} in {run_dir}{note}")
    return 0


def _words(answer: dict[str, Any]) -> str:
    if "served_as" in answer:
        return (
            f"from version {answer['version']} back to {answer['to']}, which is served "
            f"as version {answer['served_as']} as soon as the engines have it"
        )
    was, note = answer["was_paused"], f"; {answer['note']}" if "note" in answer else ""
    if answer["paused"]:
        return ("was paused" if was else "paused") + note
    return ("resumed" if was else "was not paused") + note


def add_order(
    subparsers: argparse._SubParsersAction, name: str, text: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """Add a command that asks every trainer of a run directory.

    Args:
        subparsers: Of the command line.
        name: Of the command, and what the trainers are told.
        text: Of the help.
        epilog: Of the help.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", epilog=epilog
    )
    parser.add_argument("--run-dir", type=Path, help="run directory of the engines")
    parser.add_argument(
        "--timeout", type=_seconds, default=30.0, help="seconds to wait for an answer"
    )
    return parser


def _seconds(text: str) -> float:
    """A time to wait (s).

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time to wait; give seconds, more than 0 and at most "
            f"{MOST_SECONDS}"
        )
    return seconds


def give_order(args: argparse.Namespace, what: str, say: Say) -> int:
    """Ask all, and print what each says.

    Returns:
        0 when all did it, 1 when one refused or was silent, 2 when nobody is there.
    """
    from vllm_tide.transport.admin import ask_all
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.rendezvous import default_run_dir

    try:
        answers = ask_all(args.run_dir or default_run_dir(), {"do": what}, args.timeout)
    except TransportError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    for name, answer in sorted(answers.items()):
        if answer.get("ok"):
            print(f"{name}: {say(answer)}")
        else:
            print(f"{name}: error: {answer.get('error')}", file=sys.stderr)
    return 0 if all(a.get("ok") for a in answers.values()) else EXIT_REFUSED
