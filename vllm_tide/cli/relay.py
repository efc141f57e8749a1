"""`vllm-tide relay`: an engine's records into a spool, a trainer's drafts out of it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from vllm_tide.cli import LOG_FORMAT, add_run_dir, fail
from vllm_tide.config import ConfigError, SpoolConfig, TrainConfig, parse_tide
from vllm_tide.transport import process
from vllm_tide.transport.purge import announce_relay, retract_relay
from vllm_tide.transport.rendezvous import (
    SPOOL_VARIABLE,
    EngineManifest,
    default_run_dir,
    newest_engine,
    read_manifests,
)
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool_relay import Relay, logger
from vllm_tide.transport.spool_store import StoreError, open_store

POLL_S = 0.5
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
"""A spool that cannot be reached is tried again after this long, twice that, ..."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"directory or fsspec URL; else ${SPOOL_VARIABLE}, else the engine's "
    text += "tide.spool.url, which is announced without credentials"
    add("--spool", metavar="URL", help=text)
    add("--engine", metavar="ID", help="(default: the newest engine)")
    add_run_dir(parser)
    text = "wait for an engine, again when it dies"
    add("--wait", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        with process.stopped_by_signals(sys.exit):  # also while it waits for an engine
            return _run(args)
    except (ConfigError, TransportError) as error:
        return fail(error)


def _run(args: argparse.Namespace) -> int:
    process.prepare_sidecar_process()
    run_dir = args.run_dir or default_run_dir()
    prepared = False
    while True:
        manifest = _find(run_dir, args.engine, wait=args.wait)
        config = parse_tide(manifest.tide)
        url = args.spool or os.environ.get(SPOOL_VARIABLE) or config.spool.url
        if url is None:
            said = f"is not set for engine {manifest.engine_id}; give --spool URL."
            raise ConfigError(f"tide.spool.url: {said}")
        if not prepared:
            _prepare(config.train)
            prepared = True
        # The ring may hold rows that a purge asks for while the spool is out of reach.
        announce_relay(run_dir, manifest.engine_id)
        try:
            state = "engine_gone"
            if relay := _connect(manifest, run_dir, url, config.spool):
                with process.stopped_by_signals(relay.stop):  # after the current turn
                    state = relay.run()
        finally:
            retract_relay(run_dir, manifest.engine_id)
        logger.info("engine %s: %s", manifest.engine_id, state)
        if not (args.wait and state == "engine_gone"):
            return 0


def _connect(
    manifest: EngineManifest, run_dir: Path, url: str, config: SpoolConfig
) -> Relay | None:
    """A relay, as soon as the spool can be reached; None if the engine goes first."""

    def lives() -> bool:
        return any(other.ring == manifest.ring for other in read_manifests(run_dir))

    pause, said = FIRST_PAUSE_S, set[str]()
    while True:
        try:
            store = open_store(url)
            relay = Relay(manifest, run_dir, store, config)
            logger.info("engine %s: relay to %s", manifest.engine_id, store.url)
            return relay
        except StoreError as error:
            if str(error) not in said:
                again = "engine %s: %s; it is tried again while the engine lives"
                logger.error(again, manifest.engine_id, error)
            said.add(str(error))
        except TransportError:
            if lives():
                raise
        if not lives():
            return None
        announce_relay(run_dir, manifest.engine_id)
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_S)


def _prepare(config: TrainConfig) -> None:
    """Off the engine's cores and behind its work, like the trainer it stands for."""
    if config.cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, config.cpus)
    process.renice(config.nice)  # adds up: once per process


def _find(run_dir: Path, engine_id: str | None, *, wait: bool) -> EngineManifest:
    hint = "start the server with a tide section, or give --run-dir, or --wait"
    found = newest_engine(run_dir, engine_id, "" if wait else hint)
    if found is None:
        logger.info("waiting for an engine in %s", run_dir)
    while found is None:
        time.sleep(POLL_S)
        found = newest_engine(run_dir, engine_id)
    return found
