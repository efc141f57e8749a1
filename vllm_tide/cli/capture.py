"""`vllm-tide capture on|off`: whether the engines of a run directory capture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_tide.cli.orders import EXIT_ERROR


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "capture",
        help="switch capture on or off in every engine of a run directory",
        epilog="They follow within a second, with or without a trainer, and those "
        "that start later too.",
    )
    parser.add_argument("wanted", choices=("on", "off"))
    parser.add_argument("--run-dir", type=Path, help="run directory of the engines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, or 2 if the run directory cannot be used."""
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
