"""A feed through a spool: nothing is shared with the engine but storage.

A thread of its own talks to the storage: it fetches shards ahead, sends drafts and says
that the trainer lives. So storage that is slow, or hangs, never stops a training step.
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
    Freshness,
    ReaderState,
    checked_name,
    engine_ids,
    instance_gone,
    this_instance,
    why_failed,
)
from vllm_tide.transport.spool_models import local_models
from vllm_tide.transport.spool_shard import SpoolReader
from vllm_tide.transport.spool_store import Store, open_store
from vllm_tide.transport.weights import WeightsFeedback, WeightsRefused

logger = logging.getLogger("vllm_tide.train")

SCAN_S = 2.0
"""How often a spool is searched for engines (s)."""
FIRST_SCAN_S = 10.0
"""How long a trainer that starts waits for a spool (s)."""
POLL_S = 0.25
"""How often the storage is looked at (s)."""
PREFETCHED_SHARDS = 2
CURSOR_S = 1.0
"""How often the cursor is written (s): what a killed trainer reads twice, at most."""
_CLOSE_S, _CLOSE_WITH_DRAFT_S = 5.0, 60.0


@dataclass
class _Fetched:
    """A shard whose first `taken` records were handed out; None was purged."""

    number: int
    records: deque[Record | None]
    taken: int


class SpoolFeed:
    """Attaches to an engine through a spool; methods as those of `RingFeed`.

    A trainer of the same `reader` name goes on where the one before stopped; two names
    read everything each, and one of them `publishes`. `cache`: see ``local_models``.
    Not `threaded` leaves the storage to :meth:`heartbeat`, for tests.

    Raises:
        TransportError: The engine is not in the spool, speaks another format, or has
            such a trainer already.
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
        self._said = replace(before, instance=this_instance(), publishes=publishes)
        self._reader = SpoolReader(self._folder, self.spec, before.shard)
        self._state = self._folder.read_state() or EngineState()
        self._fresh, self._reached = Freshness(), time.monotonic()
        self._fresh.look(self._state.unix)
        self._latest = self._folder.latest_draft(self._state.published_version)
        self._lock = threading.Lock()
        self._queue: deque[_Fetched] = deque()
        # Purges since the last fetch began: its shard may come from before them.
        self._purges: list[int | None] = []
        self._cursor = (before.shard, before.index)
        self._collect = Collect.NOTHING if before.paused else Collect.FULL
        self._pending: DraftBlob | None = None
        self._lost = ""
        self._failing = ""
        self._beat = time.monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._say(force=True)
        if threaded:
            self._thread = threading.Thread(
                target=self._work, name=f"vllm-tide-spool-{engine_id}", daemon=True
            )
            self._thread.start()

    @property
    def latest_version(self) -> int:
        return max(self._latest, self._state.published_version)

    def models(self) -> tuple[Path, Path]:
        """Copied out of the spool where this host lacks them."""
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
        """Forget what was fetched ahead, or is being fetched; never waits.

        What the spool still holds will be read: `vllm-tide purge --spool` removes it.
        """
        with self._lock:
            self._purges.append(tenant)
            return sum(_forget(shard.records, tenant) for shard in self._queue)

    def heartbeat(self) -> None:
        if self._lost:
            raise TransportError(self._lost)
        self._beat = time.monotonic()
        if self._thread is None and not self._closing.is_set():
            self.poll()

    def alive(self) -> bool:
        if self._queue:
            return True
        if self._state.running and self._fresh.fresh:
            return True
        unread = self._reader.next_shard <= self._state.last_shard
        return unread and time.monotonic() - self._reached < DEAD_S

    def feedback(self) -> WeightsFeedback:
        """As the relay last said."""
        state = self._state
        return WeightsFeedback(
            installed_version=state.installed_version,
            refused_version=state.refused_version,
            refused_reason=state.refused_reason,
            engine_alive=state.running and self._fresh.fresh,
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
        """Sent in the background; a newer draft replaces it."""
        if version <= self.latest_version:
            raise TransportError(
                f"version {version} is not newer than {self.latest_version}"
            )
        if version > MAX_VERSION:
            raise TransportError(
                f"version {version} is past the last one there is: restart the engine"
            )
        blob = publication.encode(tensors, version, parent_version, meta)
        with self._lock:
            self._pending = blob
            self._latest = version

    def latest(self) -> Publication | None:
        known = self.latest_version
        if self._folder.latest_draft(known) == 0:
            return None
        try:
            return publication.decode(self._folder.read_draft(known))
        except (MemoryError, WeightsRefused) as refusal:
            logger.warning("engine %s: its latest draft is lost: %s", self.id, refusal)
            return None

    def set_collect(self, wanted: Collect) -> None:
        """The relay heeds it at its next look."""
        self._collect = wanted

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
        """Waits for a draft under way, a minute at most."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is None:
            self.poll()
            return
        if time.monotonic() - self._reached > _CLOSE_S:
            return  # the storage hangs: the thread ends whenever it comes back
        patience = _CLOSE_S if self._pending is None else _CLOSE_WITH_DRAFT_S
        self._thread.join(timeout=patience)

    def poll(self) -> None:
        """One round with the storage; a failure is logged and tried again."""
        try:
            self._exchange()
        except DraftConflict as error:
            self._lost = str(error)
            self._pending = None
        except TransportError as error:
            sentence = str(error)
            if sentence != self._failing:  # once per cause, not per try
                logger.error("engine %s: %s", self.id, sentence)
            self._failing = sentence
        except Exception as error:  # a thread that ends would leave no word
            logger.exception("engine %s: its spool cannot be used", self.id)
            self._lost = why_failed(error)
        else:
            self._failing = ""
            self._reached = time.monotonic()

    def _work(self) -> None:
        while not self._closing.wait(POLL_S):
            self.poll()
        self.poll()

    def _exchange(self) -> None:
        closing = self._closing.is_set()
        state = self._folder.read_state()
        if state is not None:
            self._fresh.look(state.unix)
            self._state = state
        while not closing and len(self._queue) < PREFETCHED_SHARDS:
            if not self._fetch():
                break
        blob = self._pending
        if blob is not None:
            self._folder.write_draft(blob)
            with self._lock:
                if self._pending is blob:  # no newer one came meanwhile
                    self._pending = None
        # A trainer that hangs must not look alive because this thread is.
        if closing or time.monotonic() - self._beat < DEAD_S:
            self._say(running=not closing, force=closing)

    def _fetch(self) -> bool:
        with self._lock:
            self._purges.clear()
        shard = self._reader.fetch(self._state)
        if shard is None:
            return False
        records: deque[Record | None] = deque(shard.records)
        with self._lock:
            for tenant in self._purges:
                _forget(records, tenant)
            number, index = self._cursor
            taken = index if number == shard.number and not self._queue else 0
            for _ in range(min(taken, len(records))):
                records.popleft()  # taken before a restart
            self._queue.append(_Fetched(shard.number, records, taken))
        return True

    def _say(self, *, running: bool = True, force: bool = False) -> None:
        with self._lock:
            shard, index = self._cursor
        said, now = self._said, time.time()
        # A step of the clock either way must not silence us.
        age = abs(now - said.unix)
        full, nothing = (self._collect is c for c in (Collect.FULL, Collect.NOTHING))
        changed = (said.collect, said.paused) != (full, nothing) or (
            age >= CURSOR_S and (said.shard, said.index) != (shard, index)
        )
        if not (force or changed or age >= BEAT_S):
            return
        told = replace(
            said,
            unix=now,
            running=running,
            collect=full,
            paused=nothing,
            shard=shard,
            index=index,
        )
        self._folder.write_reader(self._name, told)
        self._said = told

    def _claim(self, publishes: bool) -> ReaderState:
        """Where a reader of this name stopped; TransportError if a rival lives."""
        me, found = this_instance(), self._folder.read_readers()
        for name, state in found.items():
            same = name == self._name
            rival = same or (publishes and state.publishes)
            if rival and state.instance != me and _lives(state):
                what = "reads" if same else "publishes"
                raise TransportError(
                    f"a trainer named {name!r} already {what} engine {self.id} in "
                    f"{self._folder.store.url}: stop it, or wait {DEAD_S:.0f} s if it "
                    "died"
                )
        return found.get(self._name, ReaderState(me))


def _forget(records: deque[Record | None], tenant: int | None) -> int:
    """Put None for the records of a tenant, so that the others keep their places."""
    removed = 0
    for _ in range(len(records)):
        record = records.popleft()
        if record is not None and tenant in (None, record.tenant):
            removed += 1
            record = None
        records.append(record)
    return removed


def _lives(state: ReaderState) -> bool:
    """True if a trainer may be alive; clocks of two hosts are trusted to 20 s here."""
    recent = abs(time.time() - state.unix) < DEAD_S
    return state.running and recent and not instance_gone(state.instance)


class SpoolSource:
    """Engines whose relays write to a spool; see ``SpoolFeed``."""

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
        self._words: dict[str, tuple[Freshness, bool]] = {}
        self._found: dict[str, dict[str, str] | TransportError] = {}
        self._listed = self._found  # as of the last `find`
        self._asked: set[str] = set()
        self._opened: dict[str, SpoolFeed | TransportError] = {}
        self._lock = threading.Lock()  # of these two
        self._failing = ""
        self._wake, self._closing = threading.Event(), threading.Event()
        if not threaded:
            return
        scanned = threading.Event()
        threading.Thread(
            target=self._work, args=(scanned,), name="vllm-tide-spool-scan", daemon=True
        ).start()
        scanned.wait(FIRST_SCAN_S)  # so that the first `find` finds

    def find(self) -> list[str]:
        if not self._threaded:
            self._scan()
        self._listed = self._found
        return list(self._listed)

    def identity(self, engine_id: str) -> dict[str, str]:
        found = self._listed[engine_id]
        if isinstance(found, TransportError):
            raise found
        return found

    def open(self, engine_id: str) -> SpoolFeed | None:
        if not self._threaded:
            return self._attach(engine_id)
        with self._lock:
            made = self._opened.pop(engine_id, None)
            if made is None:
                self._asked.add(engine_id)
                self._wake.set()
        if isinstance(made, TransportError):
            raise made
        return made

    def gone(self, engine_id: str) -> None:
        """Nothing: the bounds remove what a dead engine left."""

    def close(self) -> None:
        self._closing.set()
        self._wake.set()

    def _work(self, scanned: threading.Event) -> None:
        while not self._closing.is_set():
            self._scan()
            scanned.set()
            self._wake.wait(SCAN_S)
            self._wake.clear()
            for engine_id in tuple(self._asked):
                made: SpoolFeed | TransportError
                try:
                    made = self._attach(engine_id)
                except Exception as error:  # noqa: BLE001 - as in `_scan`
                    made = TransportError(why_failed(error))
                with self._lock:
                    self._opened[engine_id] = made
                    self._asked.discard(engine_id)
        for made in self._opened.values():
            if not isinstance(made, TransportError):
                made.close()

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
            live = [name for name in ids if self._wanted(name) and self._lives(name)]
            self._found = {name: self._identity(name) for name in live}
        except Exception as error:  # noqa: BLE001 - a thread that ends finds nobody
            if why_failed(error) != self._failing:  # once per cause, not per try
                logger.error("%s", why_failed(error))
            self._failing = why_failed(error)
        else:
            self._failing = ""

    def _identity(self, engine_id: str) -> dict[str, str] | TransportError:
        known = self._found.get(engine_id)
        if isinstance(known, dict):
            return known
        try:
            entry = EngineFolder(self._store, engine_id).read_engine()
        except TransportError as error:
            return error
        if entry is not None:
            return entry.identity
        return TransportError(
            f"engine {engine_id} has not announced itself in {self._store.url} yet"
        )

    def _wanted(self, engine_id: str) -> bool:
        return self._engine_id in (None, engine_id)

    def _lives(self, engine_id: str) -> bool:
        state = EngineFolder(self._store, engine_id).read_state()
        if state is None or not state.running:
            return False
        if engine_id not in self._words:
            # At first sight its clock decides; then only whether its word changes.
            recent = abs(time.time() - state.unix) < DEAD_S
            self._words[engine_id] = (Freshness(), recent)
        word, recent = self._words[engine_id]
        word.look(state.unix)
        return word.fresh and (recent or word.moved)


Feed = RingFeed | SpoolFeed
"""Records of one engine in, drafts for it out."""

Source = RunDirSource | SpoolSource
