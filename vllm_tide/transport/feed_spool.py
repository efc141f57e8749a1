"""Feed of an engine through a spool: trainer and engine share only storage.

A separate thread accesses the storage: it prefetches shards, sends drafts and writes
the trainer's heartbeat. Slow or hanging storage therefore never blocks a training step.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from vllm_tide.transport.draft_weights import DraftWeights, WeightsRefused
from vllm_tide.transport.feed import RingFeed, RunDirSource
from vllm_tide.transport.record import Record, RingSpec
from vllm_tide.transport.rendezvous import EngineManifest
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import TransportError, sanitize_for_log
from vllm_tide.transport.spool import (
    BEAT_S,
    DEAD_S,
    EngineEntry,
    EngineFolder,
    EngineState,
    HeartbeatMonitor,
    Store,
    TrainerState,
    draft_version,
    engine_folders,
)
from vllm_tide.transport.spool_models import find_models
from vllm_tide.transport.spool_shard import ShardReader
from vllm_tide.transport.versions import MAX_VERSION, version_name
from vllm_tide.transport.weights import WeightsFeedback

logger = logging.getLogger("vllm_tide.train")

SCAN_S = 2.0
"""Interval between scans of a spool for engines (s)."""
FIRST_SCAN_S = 10.0
"""Maximum wait of a starting trainer for the first scan (s)."""
POLL_S = 0.25
"""Interval between accesses to the storage (s)."""
PREFETCHED_SHARDS = 2
CURSOR_S = 1.0
"""Interval between cursor writes (s): after a crash, later records are read again."""
TAKEOVER_S = 3 * BEAT_S
"""Time without a heartbeat (s) after which another trainer is considered dead."""
UNREAD_S = 60.0
"""Maximum time to wait for unread shards of a dead engine (s)."""
_CLOSE_S, _CLOSE_WITH_DRAFT_S = 5.0, 60.0


class SpoolFeed:
    """Reads records of an engine from a spool and sends drafts; see `RingFeed`.

    A trainer continues where the previous one stopped. If not `threaded`,
    :meth:`heartbeat` accesses the storage, for tests.

    Attributes:
        lost: Why this cannot be the engine's trainer; empty if it can.
    """

    def __init__(
        self,
        folder: EngineFolder,
        entry: EngineEntry,
        models: Callable[[], tuple[Path, Path]],
        *,
        threaded: bool = True,
    ) -> None:
        self._folder, self._entry = folder, entry
        self.models = cache(models)  # returns the model directories
        self.lost = ""
        instance = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._trainer = TrainerState(instance)  # written last
        self._collect = self._trainer.collect
        self._state = EngineState()
        self._heartbeat = HeartbeatMonitor()
        # Times of the last access to the storage, and to a new shard or heartbeat.
        self._reached = self._progress = time.monotonic()
        self._reader = ShardReader(folder, entry.spec)
        self._cursor = (1, 0)
        self._lock = threading.Lock()
        # Number of its shard, its index there, record.
        self._queue: deque[tuple[int, int, Record]] = deque()
        # Purges since the last fetch started: its shard may be older than the purges.
        self._purges: list[int | None] = []
        self._pending: DraftWeights | None = None
        self._failing = ""
        self._beat = time.monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if threaded:
            name = f"vllm-tide-spool-{self.id}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    @property
    def id(self) -> str:
        return self._folder.engine_id

    @property
    def manifest(self) -> EngineManifest:
        return self._entry.manifest

    @property
    def spec(self) -> RingSpec:
        return self._entry.spec

    @property
    def identity(self) -> dict[str, str]:
        return self._entry.identity

    @property
    def ready(self) -> bool:
        """True if this is the engine's trainer now."""
        return self._trainer.running

    @property
    def latest_version(self) -> int:
        blob, sent = self._pending, draft_version(self._trainer.draft)
        return max(blob.version if blob else sent, self._state.published_version)

    def read(self, limit: int, max_rows: int | None = None) -> list[Record]:
        records: list[Record] = []
        rows = 0
        with self._lock:
            while self._queue and len(records) < limit:
                if max_rows is not None and rows >= max_rows:
                    break
                shard, index, record = self._queue.popleft()
                self._cursor = (shard, index + 1)
                records.append(record)
                rows += max(record.num_rows, 1)
        return records

    def purge(self, tenant: int | None = None) -> int:
        """Drop prefetched records and those of a fetch in progress; never waits.

        The relay removes the stored shards.
        """
        with self._lock:
            self._purges.append(tenant)
            before = self._queue
            self._queue = deque(
                entry for entry in before if tenant not in (None, entry[2].tenant)
            )
            return len(before) - len(self._queue)

    def heartbeat(self) -> None:
        if self.lost:
            raise TransportError(self.lost)
        self._beat = time.monotonic()
        if self._thread is None and not self._closing.is_set():
            self.poll()

    def alive(self) -> bool:
        if self._queue or (self._state.running and self._heartbeat.fresh):
            return True
        unread = self._reader.next_shard <= self._state.last_shard
        return unread and time.monotonic() - self._progress < UNREAD_S

    def feedback(self) -> WeightsFeedback:
        """Return the feedback that the relay wrote last."""
        state = self._state
        return WeightsFeedback(
            installed_version=state.installed_version,
            refused_version=state.refused_version,
            refused_reason=state.refused_reason,
            engine_alive=state.running and self._heartbeat.fresh,
            swap_pause_ms_last=state.swap_pause_ms,
        )

    def publish(self, weights: DraftWeights) -> None:
        """Send a draft in the background; a newer draft replaces a pending one."""
        name, latest = version_name(weights.version), self.latest_version
        if weights.version <= latest:
            raise TransportError(
                f"version {name} is not newer than {version_name(latest)}"
            )
        if weights.version > MAX_VERSION:
            raise TransportError(
                f"version {name} exceeds the maximum: restart the engine"
            )
        with self._lock:
            self._pending = weights

    def latest(self) -> DraftWeights | None:
        name = self._trainer.draft
        if not name:
            return None
        try:
            return self._folder.read_draft(name).verify()
        except WeightsRefused as refusal:
            logger.warning("engine %s: its latest draft is lost: %s", self.id, refusal)
            return None

    def set_collect(self, mode: Collect) -> None:
        """Set the requested rows; the relay reads the request in its next poll."""
        self._collect = mode

    def stats(self) -> dict[str, int]:
        state, skipped = self._state, self._reader.skipped
        return {
            "dropped_rows": state.dropped_rows,
            "shards_removed": skipped["removed"],
            "shards_damaged": skipped["damaged"],
            "corrupt_records": skipped["unfit"],
            "waiting_shards": self._num_prefetched
            + max(state.last_shard + 1 - self._reader.next_shard, 0),
        }

    def close(self) -> None:
        """Stop the thread; wait up to a minute for a pending draft."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is None:
            self.poll()
        elif time.monotonic() - self._reached < _CLOSE_S:  # else the storage hangs
            pending = self._pending is not None
            self._thread.join(_CLOSE_WITH_DRAFT_S if pending else _CLOSE_S)

    def poll(self) -> None:
        """Access the storage once; a failure is logged and retried."""
        try:
            if not self.lost:
                self._exchange()
        except _Replaced as error:
            self.lost = str(error)
        except TransportError as error:
            if str(error) != self._failing:  # log once per cause, not per attempt
                logger.error("engine %s: %s", self.id, error)
            self._failing = str(error)
        except Exception as error:  # otherwise the thread would exit silently
            logger.exception("engine %s: its spool cannot be used", self.id)
            self.lost = _unexpected(error)
        else:
            self._failing = ""
            self._reached = time.monotonic()

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            self.poll()
        self.poll()

    def _exchange(self) -> None:
        closing = self._closing.is_set()
        if not self.ready:
            if not closing:
                self._claim()
            return
        state = self._folder.read_state()
        if state is not None:
            self._heartbeat.observe(state.unix)
            self._state = state
        while not closing and self._num_prefetched < PREFETCHED_SHARDS:
            if not self._fetch():
                break
        if self._state.running and self._heartbeat.fresh:
            self._progress = time.monotonic()
        weights, draft = self._pending, self._trainer.draft
        if weights is not None:
            self._require_ownership()
            draft = self._folder.write_draft(weights)
        # No heartbeat for a trainer that hangs while this thread runs.
        if closing or weights is not None or time.monotonic() - self._beat < DEAD_S:
            self._write_trainer(draft, running=not closing)
        with self._lock:
            if self._pending is weights:  # not replaced by a newer one meanwhile
                self._pending = None

    @property
    def _num_prefetched(self) -> int:
        with self._lock:
            return self._queue[-1][0] - self._queue[0][0] + 1 if self._queue else 0

    def _fetch(self) -> bool:
        with self._lock:
            self._purges.clear()
        fetched = self._reader.fetch(self._state.last_shard)
        if fetched is None:
            return False
        shard, records = fetched
        with self._lock:
            number, index = self._cursor
            first = index if number == shard else 0  # read before a restart
            purged = set(self._purges)
            for index, record in enumerate(records):
                if index >= first and not purged & {None, record.tenant}:
                    self._queue.append((shard, index, record))
        self._progress = time.monotonic()
        return True

    def _write_trainer(self, draft: str, *, running: bool) -> None:
        """Write the trainer's state if it has changed or the heartbeat is due."""
        with self._lock:
            shard, index = self._cursor
        last, now = self._trainer, time.time()
        moved = replace(last, shard=shard, index=index)
        state = replace(moved, running=running, collect=self._collect, draft=draft)
        # abs: a clock step in either direction must not suppress the heartbeat.
        age = abs(now - last.unix)
        if age >= BEAT_S or state != (moved if age < CURSOR_S else last):
            self._require_ownership()
            self._trainer = replace(state, unix=now)
            self._folder.write_trainer(self._trainer)

    def _claim(self) -> None:
        """Become the engine's trainer; raise _Replaced if another one is alive."""
        before = self._folder.read_trainer() or TrainerState()
        until = time.monotonic() + TAKEOVER_S
        while before.running and time.monotonic() < until:
            if self._closing.wait(POLL_S):
                return
            other = self._folder.read_trainer() or before
            if other.running and other.unix != before.unix:
                raise _Replaced(
                    f"the trainer {other.instance} already trains engine {self.id} in "
                    f"{self._folder.store.url}: stop it first"
                )
            before = other
        self._state = self._folder.read_state() or self._state
        self._reader.next_shard = before.shard
        self._cursor = (before.shard, before.index)
        self._collect = before.collect
        plausible = draft_version(before.draft, self._state.published_version)
        trainer = replace(
            before,
            instance=self._trainer.instance,
            unix=time.time(),
            running=True,
            draft=before.draft if plausible else "",
        )
        self._folder.write_trainer(trainer)
        self._trainer = trainer

    def _require_ownership(self) -> None:
        """Raise _Replaced if another trainer has started since the last write."""
        other = self._folder.read_trainer()
        if other is not None and other.instance != self._trainer.instance:
            raise _Replaced(
                f"the trainer {other.instance} has replaced this one for engine "
                f"{self.id} in {self._folder.store.url}: stop one of them"
            )


class _Replaced(TransportError):
    """Another process is the engine's trainer."""


def _unexpected(error: Exception) -> str:
    """Return a message for an unexpected error (MemoryError, bugs)."""
    detail = sanitize_for_log(error)
    return f"the spool cannot be used ({type(error).__name__}: {detail})"


class SpoolSource:
    """Engines with a relay that writes to a spool; see ``SpoolFeed``.

    A thread scans the spool, and each feed has a thread. `model`: see `find_models`;
    `create`: see `Store`.

    Attributes:
        failing: Why the last scan failed; empty if it succeeded.
    """

    def __init__(
        self,
        url: str,
        engine_id: str | None = None,
        *,
        model: str | None = None,
        cache: Path | None = None,
        threaded: bool = True,
        create: bool = True,
    ) -> None:
        self._store = Store(url, create=create)
        self._engine_id, self._model, self._cache = engine_id, model, cache
        self._threaded = threaded
        self._heartbeats: dict[str, HeartbeatMonitor] = {}
        self._entries: dict[str, EngineEntry | TransportError | None] = {}
        self._opening: dict[str, SpoolFeed] = {}
        self.failing = ""
        self._closing = threading.Event()
        if not threaded:
            return
        scanned = threading.Event()
        threading.Thread(
            target=self._run, args=(scanned,), name="vllm-tide-spool-scan", daemon=True
        ).start()
        scanned.wait(FIRST_SCAN_S)  # so that the first `find` is complete

    def find(self) -> list[str]:
        if not self._threaded:
            self._scan()
        return list(self._entries)

    def identity(self, engine_id: str) -> dict[str, str]:
        return self._entry(engine_id).identity

    def open(self, engine_id: str) -> SpoolFeed | None:
        """Return a feed; None while it is being opened."""
        feed = self._opening.get(engine_id)
        if feed is None:
            entry = self._entry(engine_id)
            folder = EngineFolder(self._store, engine_id)
            models = partial(find_models, folder, entry, self._model, self._cache)
            feed = SpoolFeed(folder, entry, models, threaded=self._threaded)
            self._opening[engine_id] = feed
        if not self._threaded:
            feed.poll()
        if feed.lost:
            del self._opening[engine_id]
            feed.close()
            raise TransportError(feed.lost)
        return self._opening.pop(engine_id) if feed.ready else None

    def gone(self, engine_id: str) -> None:
        """Do nothing: the size and age bounds remove the files of a dead engine."""

    def close(self) -> None:
        self._closing.set()
        for feed in self._opening.values():
            feed.close()

    def _entry(self, engine_id: str) -> EngineEntry:
        entry = self._entries.get(engine_id) or TransportError(
            f"engine {engine_id} is not announced in {self._store.url} now"
        )
        if isinstance(entry, TransportError):
            raise entry
        return entry

    def _run(self, scanned: threading.Event) -> None:
        while not self._closing.is_set():
            self._scan()
            scanned.set()
            self._closing.wait(SCAN_S)

    def _scan(self) -> None:
        problem = ""
        try:
            self._entries = {
                folder.engine_id: self._read(folder)
                for folder in engine_folders(self._store)
                if self._engine_id in (None, folder.engine_id) and self._alive(folder)
            }
        except TransportError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - keep the thread running
            problem = _unexpected(error)
        if problem and problem != self.failing:  # once per cause
            logger.error("%s", problem)
        self.failing = problem

    def _read(self, folder: EngineFolder) -> EngineEntry | TransportError | None:
        cached = self._entries.get(folder.engine_id)
        if isinstance(cached, EngineEntry):
            return cached
        try:
            return folder.read_engine()
        except TransportError as error:
            return error

    def _alive(self, folder: EngineFolder) -> bool:
        state = folder.read_state()
        if state is None or not state.running:
            return False
        # Until the heartbeat changes, only the clocks show whether it is old.
        monitor = self._heartbeats.setdefault(folder.engine_id, HeartbeatMonitor())
        monitor.observe(state.unix)
        recent = abs(time.time() - state.unix) < DEAD_S
        return monitor.fresh and (recent or monitor.changed)


Feed = RingFeed | SpoolFeed
"""Interface to one engine: its records in, drafts out."""

Source = RunDirSource | SpoolSource
