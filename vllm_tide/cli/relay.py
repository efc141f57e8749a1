"""`vllm-tide relay`: move records from an engine to a spool, and drafts back."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from vllm_tide.cli import LOG_FORMAT, add_run_dir, fail
from vllm_tide.config import ConfigError, TrainConfig, parse_tide
from vllm_tide.transport import process
from vllm_tide.transport.rendezvous import (
    SPOOL_VARIABLE,
    EngineManifest,
    default_run_dir,
    newest_engine,
)
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import Store
from vllm_tide.transport.spool_relay import Relay, logger

POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"directory or fsspec URL (default: ${SPOOL_VARIABLE}, else the engine's "
    text += "tide.spool.url, which is announced without credentials)"
    add("--spool", metavar="URL", help=text)
    add("--engine", metavar="ID", help="(default: the newest engine)")
    add_run_dir(parser)
    text = "wait for an engine, and again after it exits"
    add("--wait", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        with process.stopped_by_signals(sys.exit):  # also while waiting for an engine
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
            problem = f"not set for engine {manifest.engine_id}; give --spool URL."
            raise ConfigError(f"tide.spool.url: {problem}")
        if not prepared:
            _prepare(config.train)
            prepared = True
        store, state = Store(url), "engine_gone"
        try:
            relay = Relay(manifest, run_dir, store, config.spool)
        except TransportError:
            if newest_engine(run_dir, manifest.engine_id) is not None:
                raise
        else:
            logger.info("engine %s: relay to %s", manifest.engine_id, store.url)
            with process.stopped_by_signals(relay.stop):  # after the current turn
                state = relay.run()
        logger.info("engine %s: %s", manifest.engine_id, state)
        if not (args.wait and state == "engine_gone"):
            return 0


def _prepare(config: TrainConfig) -> None:
    """Set CPU affinity and niceness, as for a trainer."""
    if config.cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, config.cpus)
    process.renice(config.nice)  # adds up: once per process


def _find(run_dir: Path, engine_id: str | None, *, wait: bool) -> EngineManifest:
    hint = "start the server with a tide section, or give --run-dir, or --wait"
    manifest = newest_engine(run_dir, engine_id, "" if wait else hint)
    if manifest is None:
        logger.info("waiting for an engine in %s", run_dir)
    while manifest is None:
        time.sleep(POLL_S)
        manifest = newest_engine(run_dir, engine_id)
    return manifest
