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

from vllm_tide.config import ConfigError, SpoolConfig, TrainConfig, parse_tide

if TYPE_CHECKING:
    from vllm_tide.transport.rendezvous import EngineManifest
    from vllm_tide.transport.spool_relay import Relay

POLL_S = 0.5
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
"""A spool that cannot be reached is tried again after this long, twice that, ..."""


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
    from vllm_tide.transport.process import become_sidecar
    from vllm_tide.transport.purge import announce_relay, retract_relay
    from vllm_tide.transport.rendezvous import default_run_dir
    from vllm_tide.transport.spool_relay import logger

    become_sidecar()
    run_dir = args.run_dir or default_run_dir()
    prepared = False
    while True:
        manifest = _find(run_dir, args.engine, wait=args.wait)
        config = parse_tide(manifest.tide, manifest.version)
        url = args.spool or config.spool.url
        if url is None:
            raise ConfigError(
                "tide.spool.url: is not set for engine "
                f"{manifest.engine_id}; give --spool URL."
            )
        if not prepared:
            _prepare(config.train)
            prepared = True
        # The ring may hold rows that a purge asks for while the spool is out of reach.
        announce_relay(run_dir, manifest.engine_id)
        try:
            relay = _connect(manifest, run_dir, url, config.spool)
            state = "engine_gone" if relay is None else _relay(relay)
        finally:
            retract_relay(run_dir, manifest.engine_id)
        logger.info("engine %s: %s", manifest.engine_id, state)
        if not (args.wait and state == "engine_gone"):
            return 0


def _connect(
    manifest: EngineManifest, run_dir: Path, url: str, config: SpoolConfig
) -> Relay | None:
    """A relay, as soon as the spool can be reached; None if the engine goes first.

    Raises:
        TransportError: If it never will be, or the engine has a relay or a trainer.
    """
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.purge import announce_relay
    from vllm_tide.transport.spool_relay import Relay, logger
    from vllm_tide.transport.spool_store import StoreError, open_store

    pause = FIRST_PAUSE_S
    said: set[str] = set()
    while True:
        try:
            store = open_store(url)
            relay = Relay(manifest, run_dir, store, config)
            logger.info("engine %s: relay to %s", manifest.engine_id, store.url)
            return relay
        except StoreError as error:
            sentence = str(error)
            if sentence not in said:
                logger.error(
                    "engine %s: %s; it is tried again while the engine lives",
                    manifest.engine_id,
                    sentence,
                )
            said.add(sentence)
        except TransportError:
            if _lives(manifest, run_dir):
                raise
        if not _lives(manifest, run_dir):
            return None
        announce_relay(run_dir, manifest.engine_id)
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_S)


def _lives(manifest: EngineManifest, run_dir: Path) -> bool:
    from vllm_tide.transport.rendezvous import read_manifests

    return any(other.ring == manifest.ring for other in read_manifests(run_dir))


def _relay(relay: Relay) -> str:
    """Run it; SIGTERM and SIGINT end it after the current round."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        relay.stop()

    before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        return relay.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare(config: TrainConfig) -> None:
    """Off the engine's cores and behind its work, like the trainer it stands for."""
    if config.cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, config.cpus)
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
