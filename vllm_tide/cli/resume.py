"""`vllm-tide resume`: train again after `vllm-tide pause`."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_tide.cli.orders import add_order, give_order


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = add_order(subparsers, "resume", "train and capture again after `pause`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; see `give_order`."""
    return give_order(args, "resume", _words)


def _words(answer: dict[str, Any]) -> str:
    note = f"; {answer['note']}" if answer.get("note") else ""
    return ("resumed" if answer["was_paused"] else "was not paused") + note
