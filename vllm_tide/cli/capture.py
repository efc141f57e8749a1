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
        help="switch capture on or off in running engines",
        epilog="It holds for every engine of the run directory within a second, with "
        "or without a trainer, until it is switched again.",
    )
    parser.add_argument("wanted", choices=("on", "off"))
    parser.add_argument("--run-dir", type=Path, help="run directory of the engines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, or 2 if the run directory cannot be used."""
    from vllm_tide.capture.switch import switch, why_off
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.rendezvous import default_run_dir

    run_dir = args.run_dir or default_run_dir()
    try:
        switch(run_dir, args.wanted == "on")
    except (TransportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    still = ", but training is paused: `vllm-tide resume`"
    paused = args.wanted == "on" and why_off(run_dir)
    print(f"capture is {args.wanted} in {run_dir}{still if paused else ''}")
    return 0
