"""Feed of an engine through a spool: trainer and engine share only storage.

A separate thread accesses the storage: it prefetches shards, sends drafts and writes
the trainer's heartbeat. Slow or hanging storage therefore never blocks a training step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_tide.transport import publication
from vllm_tide.transport.feed import RingFeed, RunDirSource
from vllm_tide.transport.publication import (
    MAX_VERSION,
    DraftBlob,
    Publication,
    TensorInput,
)
from vllm_tide.transport.record import Record
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import (
    BEAT_S,
    DEAD_S,
    DraftConflict,
    EngineFolder,
    EngineState,
    HeartbeatMonitor,
    ReaderState,
    checked_name,
    engine_ids,
    failure_message,
    instance_gone,
    this_instance,
)
from vllm_tide.transport.spool_models import local_models
from vllm_tide.transport.spool_shard import SpoolReader
from vllm_tide.transport.spool_store import Store, open_store
from vllm_tide.transport.weights import WeightsFeedback, WeightsRefused

logger = logging.getLogger("vllm_tide.train")

SCAN_S = 2.0
"""Interval between scans of a spool for engines (s)."""
FIRST_SCAN_S = 10.0
"""Maximum wait of a starting trainer for the first scan (s)."""
POLL_S = 0.25
"""Interval between accesses to the storage (s)."""
PREFETCHED_SHARDS = 2
CURSOR_S = 1.0
"""Interval between cursor writes (s): records since the last are read again."""
_CLOSE_S, _CLOSE_WITH_DRAFT_S = 5.0, 60.0


@dataclass
class _Fetched:
    """A shard; `taken` of its records were read; None replaces a purged record."""

    number: int
    records: deque[Record | None]
    taken: int


class SpoolFeed:
    """Reads records of an engine from a spool and sends drafts; see `RingFeed`.

    A trainer continues where the previous one with the same `reader` name stopped.
    Trainers of different names each read all records, and only one of them `publishes`.
    `cache`: see ``local_models``. If not `threaded`, :meth:`heartbeat` accesses the
    storage, for tests.

    Raises:
        TransportError: The engine is not in the spool, has another format, or already
            has such a trainer.
    """

    def __init__(
        self,
        store: Store | str,
        engine_id: str,
        *,
        reader: str = "trainer",
        publishes: bool = True,
        cache: Path | None = None,
        threaded: bool = True,
    ) -> None:
        store = open_store(store) if isinstance(store, str) else store
        self._folder = EngineFolder(store, engine_id)
        entry = self._folder.read_engine()
        if entry is None:
            raise TransportError(
                f"engine {engine_id} is not in {store.url}: is its relay running?"
            )
        self._entry, self._cache = entry, cache
        self.id = engine_id
        self.manifest, self.spec = entry.manifest, entry.spec
        self.identity = entry.identity
        self._name = checked_name(reader, "reader")
        before = self._claim(publishes)
        self._written = replace(before, instance=this_instance(), publishes=publishes)
        self._reader = SpoolReader(self._folder, self.spec, before.shard)
        self._state = self._folder.read_state() or EngineState()
        self._heartbeat, self._reached = HeartbeatMonitor(), time.monotonic()
        self._heartbeat.observe(self._state.unix)
        self._latest = self._folder.latest_draft(self._state.published_version)
        self._lock = threading.Lock()
        self._queue: deque[_Fetched] = deque()
        # Purges since the last fetch started: its shard may be older than the purges.
        self._purges: list[int | None] = []
        self._cursor = (before.shard, before.index)
        self._collect = Collect.NOTHING if before.paused else Collect.FULL
        self._pending: DraftBlob | None = None
        self._lost = ""
        self._failing = ""
        self._beat = time.monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._write_state(force=True)
        if threaded:
            self._thread = threading.Thread(
                target=self._run, name=f"vllm-tide-spool-{engine_id}", daemon=True
            )
            self._thread.start()

    @property
    def latest_version(self) -> int:
        return max(self._latest, self._state.published_version)

    def models(self) -> tuple[Path, Path]:
        """Return the model directories; download those that are not on this host."""
        return local_models(self._folder, self._entry, self._cache)

    def read(self, limit: int, max_rows: int | None = None) -> list[Record]:
        records: list[Record] = []
        rows = 0
        with self._lock:
            while len(records) < limit and (max_rows is None or rows < max_rows):
                while self._queue and not self._queue[0].records:
                    self._cursor = (self._queue.popleft().number + 1, 0)
                if not self._queue:
                    break
                shard = self._queue[0]
                record = shard.records.popleft()
                shard.taken += 1
                self._cursor = (shard.number, shard.taken)
                if record is not None:
                    records.append(record)
                    rows += max(record.num_rows, 1)
        return records

    def purge(self, tenant: int | None = None) -> int:
        """Drop prefetched records and those of a fetch in progress; never waits.

        Shards in the spool remain: `vllm-tide purge --spool` removes them.
        """
        with self._lock:
            self._purges.append(tenant)
            return sum(_drop(shard.records, tenant) for shard in self._queue)

    def heartbeat(self) -> None:
        if self._lost:
            raise TransportError(self._lost)
        self._beat = time.monotonic()
        if self._thread is None and not self._closing.is_set():
            self.poll()

    def alive(self) -> bool:
        if self._queue:
            return True
        if self._state.running and self._heartbeat.fresh:
            return True
        unread = self._reader.next_shard <= self._state.last_shard
        return unread and time.monotonic() - self._reached < DEAD_S

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

    def publish(
        self,
        tensors: Mapping[str, TensorInput],
        *,
        version: int,
        parent_version: int,
        meta: dict[str, Any],
    ) -> None:
        """Send a draft in the background; a newer draft replaces a pending one."""
        if version <= self.latest_version:
            raise TransportError(
                f"version {version} is not newer than {self.latest_version}"
            )
        if version > MAX_VERSION:
            raise TransportError(
                f"version {version} exceeds the maximum: restart the engine"
            )
        blob = publication.encode(tensors, version, parent_version, meta)
        with self._lock:
            self._pending = blob
            self._latest = version

    def latest(self) -> Publication | None:
        version = self.latest_version
        if self._folder.latest_draft(version) == 0:
            return None
        try:
            return publication.decode(self._folder.read_draft(version))
        except (MemoryError, WeightsRefused) as refusal:
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
            "waiting_shards": len(self._queue)
            + max(state.last_shard + 1 - self._reader.next_shard, 0),
        }

    def close(self) -> None:
        """Stop the thread; wait up to a minute for a pending draft."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is None:
            self.poll()
            return
        if time.monotonic() - self._reached > _CLOSE_S:
            return  # the storage hangs: the thread exits when it responds
        timeout = _CLOSE_S if self._pending is None else _CLOSE_WITH_DRAFT_S
        self._thread.join(timeout=timeout)

    def poll(self) -> None:
        """Access the storage once; a failure is logged and retried."""
        try:
            self._exchange()
        except DraftConflict as error:
            self._lost = str(error)
            self._pending = None
        except TransportError as error:
            message = str(error)
            if message != self._failing:  # log once per cause, not per attempt
                logger.error("engine %s: %s", self.id, message)
            self._failing = message
        except Exception as error:  # otherwise the thread would exit silently
            logger.exception("engine %s: its spool cannot be used", self.id)
            self._lost = failure_message(error)
        else:
            self._failing = ""
            self._reached = time.monotonic()

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            self.poll()
        self.poll()

    def _exchange(self) -> None:
        closing = self._closing.is_set()
        state = self._folder.read_state()
        if state is not None:
            self._heartbeat.observe(state.unix)
            self._state = state
        while not closing and len(self._queue) < PREFETCHED_SHARDS:
            if not self._fetch():
                break
        blob = self._pending
        if blob is not None:
            self._folder.write_draft(blob)
            with self._lock:
                if self._pending is blob:  # not replaced by a newer one meanwhile
                    self._pending = None
        # No heartbeat for a trainer that hangs while this thread runs.
        if closing or time.monotonic() - self._beat < DEAD_S:
            self._write_state(running=not closing, force=closing)

    def _fetch(self) -> bool:
        with self._lock:
            self._purges.clear()
        shard = self._reader.fetch(self._state)
        if shard is None:
            return False
        records: deque[Record | None] = deque(shard.records)
        with self._lock:
            for tenant in self._purges:
                _drop(records, tenant)
            number, index = self._cursor
            taken = index if number == shard.number and not self._queue else 0
            for _ in range(min(taken, len(records))):
                records.popleft()  # read before a restart
            self._queue.append(_Fetched(shard.number, records, taken))
        return True

    def _write_state(self, *, running: bool = True, force: bool = False) -> None:
        with self._lock:
            shard, index = self._cursor
        last, now = self._written, time.time()
        # abs: a clock step in either direction must not suppress the heartbeat.
        age = abs(now - last.unix)
        full, nothing = (self._collect is c for c in (Collect.FULL, Collect.NOTHING))
        changed = (last.collect, last.paused) != (full, nothing) or (
            age >= CURSOR_S and (last.shard, last.index) != (shard, index)
        )
        if not (force or changed or age >= BEAT_S):
            return
        state = replace(
            last,
            unix=now,
            running=running,
            collect=full,
            paused=nothing,
            shard=shard,
            index=index,
        )
        self._folder.write_reader(self._name, state)
        self._written = state

    def _claim(self, publishes: bool) -> ReaderState:
        """Return this reader's last state; raise if another trainer is using it."""
        instance, readers = this_instance(), self._folder.read_readers()
        for name, state in readers.items():
            same = name == self._name
            conflict = same or (publishes and state.publishes)
            if conflict and state.instance != instance and _is_alive(state):
                verb = "reads" if same else "publishes"
                raise TransportError(
                    f"a trainer named {name!r} already {verb} engine {self.id} in "
                    f"{self._folder.store.url}: stop it, or wait {DEAD_S:.0f} s if it "
                    "died"
                )
        return readers.get(self._name, ReaderState(instance))


def _drop(records: deque[Record | None], tenant: int | None) -> int:
    """Replace a tenant's records by None, so that the indices of others stay."""
    removed = 0
    for _ in range(len(records)):
        record = records.popleft()
        if record is not None and tenant in (None, record.tenant):
            removed += 1
            record = None
        records.append(record)
    return removed


def _is_alive(state: ReaderState) -> bool:
    """Return whether a trainer may be alive; assumes clock skew below 20 s."""
    recent = abs(time.time() - state.unix) < DEAD_S
    return state.running and recent and not instance_gone(state.instance)


class SpoolSource:
    """Engines with a relay that writes to a spool; see ``SpoolFeed``."""

    def __init__(
        self,
        url: str,
        engine_id: str | None = None,
        *,
        reader: str = "trainer",
        cache: Path | None = None,
        threaded: bool = True,
    ) -> None:
        self._store = open_store(url)
        self._engine_id, self._reader, self._cache = engine_id, reader, cache
        self._threaded = threaded
        self._heartbeats: dict[str, tuple[HeartbeatMonitor, bool]] = {}
        self._identities: dict[str, dict[str, str] | TransportError] = {}
        self._listed = self._identities  # at the last `find`
        self._requested: set[str] = set()
        self._opened: dict[str, SpoolFeed | TransportError] = {}
        self._lock = threading.Lock()  # guards these two
        self._failing = ""
        self._wake, self._closing = threading.Event(), threading.Event()
        if not threaded:
            return
        scanned = threading.Event()
        threading.Thread(
            target=self._work, args=(scanned,), name="vllm-tide-spool-scan", daemon=True
        ).start()
        scanned.wait(FIRST_SCAN_S)  # so that the first `find` is complete

    def find(self) -> list[str]:
        if not self._threaded:
            self._scan()
        self._listed = self._identities
        return list(self._listed)

    def identity(self, engine_id: str) -> dict[str, str]:
        identity = self._listed[engine_id]
        if isinstance(identity, TransportError):
            raise identity
        return identity

    def open(self, engine_id: str) -> SpoolFeed | None:
        if not self._threaded:
            return self._attach(engine_id)
        with self._lock:
            feed = self._opened.pop(engine_id, None)
            if feed is None:
                self._requested.add(engine_id)
                self._wake.set()
        if isinstance(feed, TransportError):
            raise feed
        return feed

    def gone(self, engine_id: str) -> None:
        """Do nothing: the size and age bounds remove the files of a dead engine."""

    def close(self) -> None:
        self._closing.set()
        self._wake.set()

    def _work(self, scanned: threading.Event) -> None:
        while not self._closing.is_set():
            self._scan()
            scanned.set()
            self._wake.wait(SCAN_S)
            self._wake.clear()
            for engine_id in tuple(self._requested):
                feed: SpoolFeed | TransportError
                try:
                    feed = self._attach(engine_id)
                except Exception as error:  # noqa: BLE001 - as in `_scan`
                    feed = TransportError(failure_message(error))
                with self._lock:
                    self._opened[engine_id] = feed
                    self._requested.discard(engine_id)
        for feed in self._opened.values():
            if not isinstance(feed, TransportError):
                feed.close()

    def _attach(self, engine_id: str) -> SpoolFeed:
        return SpoolFeed(
            self._store,
            engine_id,
            reader=self._reader,
            cache=self._cache,
            threaded=self._threaded,
        )

    def _scan(self) -> None:
        try:
            ids = engine_ids(self._store)
            live = [name for name in ids if self._matches(name) and self._alive(name)]
            self._identities = {name: self._identity(name) for name in live}
        except Exception as error:  # noqa: BLE001 - keep the thread running
            if failure_message(error) != self._failing:  # once per cause
                logger.error("%s", failure_message(error))
            self._failing = failure_message(error)
        else:
            self._failing = ""

    def _identity(self, engine_id: str) -> dict[str, str] | TransportError:
        cached = self._identities.get(engine_id)
        if isinstance(cached, dict):
            return cached
        try:
            entry = EngineFolder(self._store, engine_id).read_engine()
        except TransportError as error:
            return error
        if entry is not None:
            return entry.identity
        return TransportError(
            f"engine {engine_id} is not announced in {self._store.url} yet"
        )

    def _matches(self, engine_id: str) -> bool:
        return self._engine_id in (None, engine_id)

    def _alive(self, engine_id: str) -> bool:
        state = EngineFolder(self._store, engine_id).read_state()
        if state is None or not state.running:
            return False
        if engine_id not in self._heartbeats:
            # The first check compares clocks; later checks only whether `unix` changes.
            recent = abs(time.time() - state.unix) < DEAD_S
            self._heartbeats[engine_id] = (HeartbeatMonitor(), recent)
        heartbeat, recent = self._heartbeats[engine_id]
        heartbeat.observe(state.unix)
        return heartbeat.fresh and (recent or heartbeat.changed)


Feed = RingFeed | SpoolFeed
"""Interface to one engine: its records in, drafts out."""

Source = RunDirSource | SpoolSource
