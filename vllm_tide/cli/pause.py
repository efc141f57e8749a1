"""`vllm-tide pause`: stop training; serving and the served head stay as they are."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_tide.cli.orders import add_order, give_order


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = add_order(
        subparsers,
        "pause",
        "stop training and capture until `resume`",
        "Nothing leaves the engine, token ids neither. The trainer stays; a head on "
        "trial is judged after `resume`. The pause outlives a restart of the trainer.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; see `give_order`."""
    return give_order(args, "pause", _words)


def _words(answer: dict[str, Any]) -> str:
    note = f"; {answer['note']}" if answer.get("note") else ""
    return ("was paused" if answer["was_paused"] else "paused") + note
