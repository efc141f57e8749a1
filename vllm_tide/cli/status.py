"""`vllm-tide status`: what the trainers do, in one line each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_tide.cli.orders import EXIT_ERROR, add_order, give_order


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = add_order(
        subparsers,
        "status",
        "say what the running trainers do",
        "The trainer itself answers, so its loop turns. `top` watches engines and "
        "servers too.",
    )
    parser.add_argument("--json", action="store_true", help="all figures, as JSON")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="exit 0 as well while no engine is there: a trainer that waits is healthy",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; see `give_order`."""
    from vllm_tide.capture.switch import why_off
    from vllm_tide.transport.rendezvous import default_run_dir

    done = give_order(args, "status", json_text if args.json else _words)
    if not args.json and (why := why_off(args.run_dir or default_run_dir())):
        print(f"capture is off ({why})")
    if args.probe and done == EXIT_ERROR and _no_engine(args.run_dir):
        print("no engine is there either: a trainer would be waiting for one")
        return 0
    return done


def _no_engine(run_dir: Path | None) -> bool:
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.rendezvous import default_run_dir, read_manifests

    try:
        return not read_manifests(run_dir or default_run_dir())
    except TransportError:  # the directory is another user's: no trainer runs there
        return False


def json_text(answer: dict[str, Any]) -> str:
    """The figures as one line of JSON."""
    return json.dumps(answer["status"], sort_keys=True)


def _words(answer: dict[str, Any]) -> str:
    status = answer["status"]
    waiting = f", waits for {status['waiting_for']}" if status["waiting_for"] else ""
    return (
        f"{status['state']}, {len(status['engines'])} engines, {status['cycles']} "
        f"cycles, {status['publications']} heads published, {status['rollbacks']} "
        f"rolled back, version {status['installed_version']} served{waiting}"
    )
