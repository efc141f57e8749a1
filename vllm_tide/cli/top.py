"""`vllm-tide top`: engines, trainers and servers, live."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_tide.top.metrics_page import Address
    from vllm_tide.top.picture import Picture
    from vllm_tide.top.samples import Sampler


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "top",
        help="watch engines and trainers live",
        description="Shows what servers, engines and trainers do. Without --url only "
        "what shared memory and the trainers' status files say.",
        epilog="Keys: q quits, arrows scroll. Where the output is no terminal a plain "
        "screen is printed every interval. Exit status of --once: 0, or 1 when nobody "
        "is there.",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="where engines on this host announced themselves"
    )
    parser.add_argument(
        "--url",
        action="append",
        type=_address,
        default=[],
        help="server whose /metrics is read (http://localhost:8000); repeatable",
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="time between two looks (2)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="look twice, an interval apart, print one plain screen and exit",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, an object a line"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from vllm_tide.top.samples import Sampler
    from vllm_tide.transport.rendezvous import default_run_dir

    sampler = Sampler(args.run_dir or default_run_dir(), args.url)
    try:
        if args.once:
            sampler.take()
            picture = _next(sampler, args.interval)
            _print(picture, as_json=args.json)
            return 1 if picture.empty else 0
        if args.json or not _is_terminal():
            _follow(sampler, args.interval, as_json=args.json)
        else:
            from vllm_tide.top.live import watch

            watch(sampler, args.interval, colour=not os.environ.get("NO_COLOR"))
    except KeyboardInterrupt:
        return 0
    return 0


def _follow(sampler: Sampler, interval: float, *, as_json: bool) -> None:
    sampler.take()
    while True:
        _print(_next(sampler, interval), as_json=as_json)


def _next(sampler: Sampler, interval: float) -> Picture:
    from vllm_tide.top.picture import make_picture

    time.sleep(interval)
    sampler.take()
    return make_picture(sampler.history, str(sampler.run_dir))


def _print(picture: Picture, *, as_json: bool) -> None:
    from vllm_tide.top.live import plain

    if as_json:
        print(json.dumps(picture.to_json(), allow_nan=False), flush=True)
    else:
        print(plain(picture, shutil.get_terminal_size().columns), flush=True)


def _is_terminal() -> bool:
    capable = os.environ.get("TERM", "") not in ("", "dumb")
    return capable and sys.stdin.isatty() and sys.stdout.isatty()


def _address(text: str) -> Address:
    from vllm_tide.top.metrics_page import parse_address

    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.05 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is no time of at least 0.05 s")
