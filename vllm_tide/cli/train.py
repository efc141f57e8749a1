"""`vllm-tide train`: the sidecar trainer of a running engine."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tide.config import ConfigError, TideConfig, parse_tide, read_json_object

if TYPE_CHECKING:
    from vllm_tide.transport.rendezvous import EngineManifest

POLL_S = 0.5


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "train", help="train the draft beside a running engine"
    )
    parser.add_argument("--config", help="JSON file or text: overrides the engine's")
    parser.add_argument("--engine", help="engine id; the newest engine by default")
    parser.add_argument(
        "--run-dir", type=Path, help="where the engine announced itself"
    )
    parser.add_argument("--once", action="store_true", help="end after one cycle")
    parser.add_argument(
        "--wait", action="store_true", help="wait for an engine, again when it dies"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from vllm_tide.draft.config import DraftError
    from vllm_tide.transport.header import TransportError

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    try:
        return _run(args)
    except (ConfigError, DraftError, TransportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from vllm_tide.train.sidecar import (
        Sidecar,
        describe,
        install_signal_handlers,
        logger,
        prepare_process,
    )
    from vllm_tide.transport.rendezvous import default_run_dir

    override = _override(args.config)
    asked = override.run_dir if override is not None else None
    run_dir = args.run_dir or (Path(asked) if asked else default_run_dir())
    prepared = False
    while True:
        manifest = _find(run_dir, args.engine, wait=args.wait)
        config = override or parse_tide(manifest.tide)
        if not prepared:  # niceness adds up: once per process
            prepare_process(config.train, manifest.engine_id)
            prepared = True
        sidecar = Sidecar(manifest, run_dir, config)
        install_signal_handlers(sidecar)
        logger.info("engine %s: %s", manifest.engine_id, describe(sidecar))
        state = sidecar.run(once=args.once)
        logger.info("engine %s: %s", manifest.engine_id, state)
        if not (args.wait and state == "engine_gone"):
            return 0


def _override(text: str | None) -> TideConfig | None:
    if text is None:
        return None
    value = read_json_object(text)
    return parse_tide(value.get("tide", value))


def _find(run_dir: Path, engine_id: str | None, *, wait: bool) -> EngineManifest:
    from vllm_tide.transport.header import TransportError
    from vllm_tide.transport.rendezvous import read_manifests

    while True:
        found = [
            m
            for m in read_manifests(run_dir)
            if engine_id is None or m.engine_id == engine_id
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
