"""`vllm-tide top`: live view of engines, trainers and servers."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time

from vllm_tide.cli import EXIT_NO, add_run_dir, fail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows whether adaptation helps, then servers, engines and trainers. Without "
        "--url it reads only shared memory and the trainers' status files."
    )
    parser.epilog = (
        "Ctrl-C quits. Without a terminal a plain screen is printed every interval. "
        "Exit status of --once: 0, or 1 without an engine, trainer or server."
    )
    add = parser.add_argument
    add_run_dir(parser)
    text = "server with /metrics to read, like http://localhost:8000; repeatable"
    add("--url", action="append", type=_address, default=[], help=text)
    text = "seconds between two samples; default: 2, with --once 10"
    add("--interval", type=_seconds, metavar="SECONDS", help=text)
    text = "sample twice, an interval apart, print one plain screen and exit"
    add("--once", action="store_true", help=text)
    add("--json", action="store_true", help="print JSON, one object per line")


def run(args: argparse.Namespace) -> int:
    from vllm_tide.top.collect import Sampler
    from vllm_tide.top.figures import is_empty, make_picture
    from vllm_tide.top.view import plain, watch
    from vllm_tide.transport.rendezvous import default_run_dir, require_readable
    from vllm_tide.transport.shm import TransportError

    try:
        run_dir = args.run_dir or default_run_dir()
        require_readable(run_dir)
    except TransportError as error:
        return fail(error)
    interval = args.interval or (10.0 if args.once else 2.0)
    sampler = Sampler(run_dir, args.url)
    with contextlib.suppress(KeyboardInterrupt):
        capable = os.environ.get("TERM", "dumb") != "dumb" and sys.stdout.isatty()
        if capable and not (args.once or args.json):
            watch(sampler, interval)
        sampler.take()
        while True:
            time.sleep(interval)
            sampler.take()
            picture = make_picture(sampler.history, str(sampler.run_dir))
            text = json.dumps(picture) if args.json else plain(picture)
            print(text, flush=True)
            if args.once:
                return EXIT_NO if is_empty(picture) else 0
    return 0


def _address(text: str) -> str:
    from vllm_tide.top.collect import parse_address

    with contextlib.suppress(ValueError):
        return parse_address(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not an http address")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.05 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a time of at least 0.05 s")
