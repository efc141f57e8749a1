"""`vllm-tide train`: the trainer process of running engines."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tide.cli import EXIT_NO, LOG_FORMAT, add_run_dir, fail
from vllm_tide.config import ConfigError, TideConfig, parse_tide
from vllm_tide.speculative import read_json_object

if TYPE_CHECKING:
    from vllm_tide.train.ranks import Ranks
    from vllm_tide.transport.feeds import Feeds

POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "JSON file or text that overrides the engines' tide sections"
    add("--config", metavar="FILE", help=text)
    add("--engine", metavar="ID", help="this engine or group (default: all that fit)")
    add_run_dir(parser)
    text = "directory or fsspec URL of `vllm-tide relay`"
    add("--spool", metavar="URL", help=text)
    text = "directory or hub id of the target, with --spool (default: the engine's)"
    add("--model", metavar="MODEL", help=text)
    add("--once", action="store_true", help="end after one cycle")
    text = "wait for an engine, and again after it exits"
    add("--wait", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    from vllm_tide.transport.process import stopped_by_signals

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    with stopped_by_signals(sys.exit):  # also while waiting for an engine
        return _start(args)


def _start(args: argparse.Namespace) -> int:
    from vllm_tide.draft.config import DraftError
    from vllm_tide.transport.shm import TransportError

    try:
        status = _run(args)
    except (ConfigError, DraftError, TransportError) as error:
        status = fail(error)
    if _many_ranks():
        from vllm_tide.train.ranks import exit_rank

        exit_rank(status)
    return status


def _run(args: argparse.Namespace) -> int:
    from vllm_tide.transport.process import prepare_sidecar_process

    prepare_sidecar_process()
    override = _override(args.config)
    ranks = None
    if _many_ranks():
        from vllm_tide.train.distributed import follow
        from vllm_tide.train.ranks import Ranks

        ranks = Ranks(override.train.device if override else "cpu")
        if not ranks.is_leader:
            follow(ranks)
            return 0
    return _lead(args, override, ranks)


def _lead(
    args: argparse.Namespace, override: TideConfig | None, ranks: Ranks | None
) -> int:
    from vllm_tide.sidecar.loop import Sidecar, describe, logger, prepare_process
    from vllm_tide.sidecar.report import TrainerStatus, open_metrics
    from vllm_tide.train.gpu import give_back_memory
    from vllm_tide.transport.process import stopped_by_signals
    from vllm_tide.transport.rendezvous import default_run_dir, prepare_run_dir

    configured = override.run_dir if override is not None else None
    run_dir = args.run_dir or (Path(configured) if configured else default_run_dir())
    if args.spool == "":
        raise ConfigError("--spool: is empty; give the server's tide.spool.url")
    spool = args.spool or (override.spool.url if override is not None else None)
    if spool is not None:
        prepare_run_dir(run_dir)
    elif args.model is not None:
        raise ConfigError("--model: applies only to engines of a spool; give --spool")
    current = [TrainerStatus()]
    prepared = False
    while True:
        feeds = _find(args, run_dir, spool, ranks)
        assert feeds.reference is not None  # noqa: S101 - found by _find
        manifest = feeds.reference.manifest
        config = override or parse_tide(manifest.tide)
        if not prepared:  # once per process, as niceness adds up
            prepare_process(config.train, manifest.engine_id, pin=ranks is None)
            chosen = config.train
            open_metrics(chosen.metrics_port, lambda: current[0], chosen.metrics_host)
            prepared = True
        sidecar = Sidecar(feeds, run_dir, config, ranks)
        current[0] = sidecar.status
        logger.info("engine %s: %s", manifest.engine_id, describe(sidecar))
        with stopped_by_signals(sidecar.stop):
            state = sidecar.run(once=args.once)
        logger.info("engine %s: %s", manifest.engine_id, state)
        if args.once and sidecar.paused:
            fail(
                f"--once: no cycle was run, as training is paused in {run_dir}; run "
                "`vllm-tide resume`"
            )
            return EXIT_NO
        # Other ranks have ended: torchrun restarts all of them.
        wait = args.wait and ranks is None and not sidecar.stopping
        if not (wait and state == "engine_gone"):
            return 0
        # Free draft, rows and GPU memory before the next engine starts.
        del sidecar, feeds
        gc.collect()  # reference cycles
        give_back_memory()


def _many_ranks() -> bool:
    """Return whether torchrun started several ranks; does not import torch."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def _override(text: str | None) -> TideConfig | None:
    if text is None:
        return None
    try:
        value = read_json_object(text)
        return parse_tide(value.get("tide", value))
    except ConfigError as error:
        raise ConfigError(f"--config: {error}") from None


def _find(
    args: argparse.Namespace, run_dir: Path, spool: str | None, ranks: Ranks | None
) -> Feeds:
    """Return feeds with an engine; without --wait raise TransportError if none."""
    from vllm_tide.sidecar.loop import logger
    from vllm_tide.train.distributed import HEARTBEAT_S, send_heartbeat
    from vllm_tide.transport.feed_spool import FIRST_SCAN_S
    from vllm_tide.transport.feeds import open_feeds
    from vllm_tide.transport.rendezvous import NotRunningError
    from vllm_tide.transport.shm import TransportError

    folder = None if spool is not None and args.run_dir is None else run_dir
    place = folder or "the spool"  # its URL may contain a password
    feeds = open_feeds(
        folder, spool, args.engine, model=args.model, create_spool=args.wait
    )
    last_heartbeat = time.monotonic()
    until = last_heartbeat + FIRST_SCAN_S
    feeds.poll()
    if args.wait and not len(feeds):
        logger.info("waiting for an engine in %s", place)
    while not len(feeds):
        if not args.wait and not (feeds.opening and time.monotonic() < until):
            why = "; ".join(feeds.problems)
            feeds.close()
            if why:
                raise TransportError(why)
            which = f"engine {args.engine!r}" if args.engine else "engine"
            section = "tide section" if spool is None else "tide.spool.url"
            raise NotRunningError(
                f"no live {which} in {place}: start the server with a {section}, or "
                "give --run-dir, or --wait"
            )
        if ranks is not None and time.monotonic() - last_heartbeat >= HEARTBEAT_S:
            send_heartbeat(ranks)
            last_heartbeat = time.monotonic()
        time.sleep(POLL_S)
        feeds.poll()
    return feeds
