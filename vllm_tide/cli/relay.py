"""`vllm-tide relay`: an engine's records into a spool, a trainer's heads out of it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from vllm_tide.config import ConfigError, TrainConfig, parse_tide

if TYPE_CHECKING:
    from vllm_tide.transport.rendezvous import EngineManifest

POLL_S = 0.5


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "relay", help="carry records and heads between an engine and a spool"
    )
    parser.add_argument(
        "--spool", help="directory or fsspec URL; the engine's tide.spool.url if absent"
    )
    parser.add_argument("--engine", help="engine id; the newest engine by default")
    parser.add_argument(
        "--run-dir", type=Path, help="where the engine announced itself"
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait for an engine, again when it dies"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from vllm_tide.transport.header import TransportError

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    try:
        return _run(args)
    except (ConfigError, TransportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from vllm_tide.transport.rendezvous import default_run_dir
    from vllm_tide.transport.spool_relay import Relay, logger
    from vllm_tide.transport.spool_store import open_store

    run_dir = args.run_dir or default_run_dir()
    prepared = False
    while True:
        manifest = _find(run_dir, args.engine, wait=args.wait)
        config = parse_tide(manifest.tide)
        url = args.spool or config.spool.url
        if url is None:
            raise ConfigError(
                "tide.spool.url: is not set for engine "
                f"{manifest.engine_id}; give --spool URL."
            )
        store = open_store(url)
        if not prepared:
            _prepare(config.train)
            prepared = True
        relay = Relay(manifest, run_dir, store, config.spool)

        def handle(
            _number: int, _frame: FrameType | None, relay: Relay = relay
        ) -> None:
            relay.stop()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)
        logger.info("engine %s: relay to %s", manifest.engine_id, store.url)
        state = relay.run()
        logger.info("engine %s: %s", manifest.engine_id, state)
        if not (args.wait and state == "engine_gone"):
            return 0


def _prepare(config: TrainConfig) -> None:
    """Off the engine's cores and behind its work, like the trainer it stands for."""
    # The server that started us may be pinned, and children inherit that.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, config.cpus or range(os.cpu_count() or 1))
    os.nice(config.nice)  # adds up: once per process


def _find(run_dir: Path, engine_id: str | None, *, wait: bool) -> EngineManifest:
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.rendezvous import read_manifests

    while True:
        found = [
            manifest
            for manifest in read_manifests(run_dir)
            if engine_id is None or manifest.engine_id == engine_id
        ]
        if found:
            return found[-1]
        if not wait:
            which = f"engine {engine_id!r}" if engine_id else "engine"
            raise TransportError(
                f"no live {which} in {run_dir}: start the server with a tide section, "
                "or give --run-dir, or --wait"
            )
        time.sleep(POLL_S)
