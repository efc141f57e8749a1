"""`vllm-tide rollback`: serve the head before the newest one again."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_tide.cli.orders import add_order, give_order


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = add_order(
        subparsers,
        "rollback",
        "serve the head before the newest one again",
        "The canary does this by itself when served acceptance falls. Training goes on "
        "from the older head after tide.deploy.backoff_cycles cycles; `pause` keeps it "
        "from publishing another.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; see `give_order`."""
    return give_order(args, "rollback", _words)


def _words(answer: dict[str, Any]) -> str:
    return (
        f"from version {answer['version']} back to {answer['to']}, which is served as "
        f"version {answer['served_as']} as soon as the engines have it"
    )
