"""Captures a stream with a real server: rows come out of the ring as documents.

The suite is the ring's consumer itself, in place of a trainer. An inflated target
computes the same function as its original, so streams are captured with the original,
which is many times faster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_tide.speculative import merged
from vllm_tide.train.assemble import Assembler
from vllm_tide.train.feed_ring import RingFeed
from vllm_tide.train.sample import Sample
from vllm_tide.transport.record import Record
from vllm_tide.transport.rendezvous import EngineManifest, read_manifests
from vllm_tide.transport.ring_format import Collect

from .arm import Hooks
from .learning_options import SuiteOptions
from .learning_server import draft_config, private_run_dir
from .learning_session import Session
from .scrape import Scraper
from .server import ServerError, VllmServer
from .stream import StreamRequest
from .summary import ArmRun, SegmentRun

MAX_BRANCHES = 256
_POLL_S, _BATCH = 0.02, 512
_OPEN_ROWS = 1 << 20


@dataclass
class Captured:
    """What was captured.

    Attributes:
        parts: Documents by segment of the stream.
        run: The arm that served it.
        manifest: Of its engine.
        lost: Rows that were not captured or not usable, by reason.
    """

    parts: dict[str, list[Sample]]
    run: ArmRun
    manifest: EngineManifest
    lost: dict[str, int]


@dataclass
class _Sink:
    """Reads the ring while the stream runs; builds documents between segments.

    Documents are built while nothing runs, so that the ring is never left waiting.
    """

    run_dir: Path
    parts: dict[str, list[Sample]] = field(default_factory=dict)
    manifest: EngineManifest | None = None
    lost: dict[str, int] = field(default_factory=dict)
    _feed: RingFeed | None = None
    _dropped_before: int = 0
    _records: list[Record] = field(default_factory=list)
    _assembler: Assembler | None = None

    async def read(self, _server: VllmServer, _scraper: Scraper) -> None:
        """Attach, and read until cancelled."""
        self.attach()
        while True:
            if not self._take():
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(0)

    def attach(self) -> None:
        """Become the ring's consumer.

        Raises:
            ServerError: The engine has not announced itself.
        """
        if self._feed is not None:
            return
        found = read_manifests(self.run_dir)
        if not found:
            raise ServerError(f"no engine announced itself in {self.run_dir}")
        self.manifest = found[-1]
        self._feed = RingFeed(self.manifest)
        self._feed.set_collect(Collect.FULL)
        while self._feed.read(_BATCH):  # of the warm-up
            pass
        self._dropped_before = self._feed.stats()["dropped_rows"]
        size = self.manifest.hidden_size * len(self.manifest.aux_layer_ids)
        self._assembler = Assembler(
            size,
            self.manifest.feature_dtype,
            max_open_rows=_OPEN_ROWS,
            max_request_rows=_OPEN_ROWS,
            max_branches=MAX_BRANCHES,
        )

    def close_segment(self, segment: SegmentRun) -> None:
        """Turn what came into the documents of a segment."""
        while self._take():
            pass
        assert self._assembler is not None  # noqa: S101 - attached before a segment
        out: list[Sample] = []
        for record in self._records:
            out += self._assembler.add(record, time.monotonic())
        self._records = []
        self.parts[segment.name] = out + self._assembler.flush()

    def finish(self, _server: VllmServer | None = None) -> None:
        """Note what is missing, and let the engine go."""
        if self._feed is None or self._assembler is None:
            return
        told = self._feed.stats() | dict(self._assembler.skipped)
        told["dropped_rows"] -= self._dropped_before
        told["holes"] = self._assembler.num_holes
        told.pop("waiting_bytes", None)
        self.lost = {name: count for name, count in told.items() if count}
        self._feed.close()
        self._feed = None

    def _take(self) -> bool:
        if self._feed is None:
            return False
        self._feed.heartbeat()
        found = self._feed.read(_BATCH)
        self._records += found
        return bool(found)


def capture(
    session: Session,
    stream: Sequence[StreamRequest],
    name: str,
    model: str,
    *,
    target: Path | None = None,
    tide: Mapping[str, Any] | None = None,
) -> Captured | None:
    """Serve a stream and return its documents; None if that failed, which is noted.

    Args:
        session: Of the suite.
        stream: What is sent; documents come by its segments.
        name: Of the arm.
        model: Draft folder, or `fresh`.
        target: Served model; the suite's own, not inflated, when None.
        tide: Put into the `tide` section.

    Raises:
        OutOfTimeError: `--max-minutes` is over.
    """
    # What a cached prefix leaves out, and what control does, are no part of documents
    # that losses and draft shapes are compared on.
    alone = ("--no-enable-prefix-caching", *session.options.serve_args)
    options = replace(session.options, serve_args=alone)
    session = replace(session, options=options)
    with private_run_dir(options.work / "run" / name) as run_dir:
        sink = _Sink(run_dir)
        config = draft_config(options, model, _section(options, run_dir, tide or {}))
        hooks = Hooks(
            beside=sink.read,
            between=sink.close_segment,
            before_stop=sink.finish,
        )
        try:
            run = session.arm(
                name,
                config,
                stream,
                run_dir=run_dir,
                hooks=hooks,
                target=target or options.target,
            )
        finally:
            sink.finish()
    if run is None or sink.manifest is None:
        return None
    for problem in run.problems:
        session.document.problem(f"{name}: {problem}")
    return Captured(sink.parts, run, sink.manifest, sink.lost)


def _section(
    options: SuiteOptions, run_dir: Path, changes: Mapping[str, Any]
) -> dict[str, Any]:
    section = {
        "run_dir": str(run_dir),
        "capture": {"teacher": "hidden", "feature_dtype": "bfloat16"},
        "control": {"policy": "static"},
    }
    return merged(merged(section, changes), {"train": {"autostart": False}})
