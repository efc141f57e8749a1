"""Where engines are found: a run directory of this host, or a spool."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from vllm_tide.train.feed import RingFeed
from vllm_tide.train.feed_spool import SpoolFeed
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    group_of,
    read_manifests,
    reclaim_orphans,
)
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import DEAD_S, EngineFolder, Freshness, engine_ids
from vllm_tide.transport.spool_identity import identity_of
from vllm_tide.transport.spool_store import open_store

Feed = RingFeed | SpoolFeed
"""Records of one engine in, drafts for it out."""

logger = logging.getLogger("vllm_tide.train")

SCAN_S = 2.0
"""How often a spool is searched for engines (s)."""
FIRST_SCAN_S = 10.0
"""How long a trainer that starts waits for a spool (s)."""


class RunDirSource:
    """Engines of a run directory: all, or one engine or group (`engine_id`).

    A source finds live engines and opens feeds to them; it never waits for storage.
    """

    def __init__(self, run_dir: Path, engine_id: str | None = None) -> None:
        self._run_dir, self._engine_id = run_dir, engine_id
        self._manifests: dict[str, EngineManifest] = {}
        self._identities: dict[str, dict[str, str]] = {}

    def find(self) -> list[str]:
        self._manifests = {
            manifest.engine_id: manifest
            for manifest in read_manifests(self._run_dir)
            if self._engine_id in (None, manifest.engine_id, group_of(manifest))
        }
        return list(self._manifests)

    def identity(self, engine_id: str) -> dict[str, str]:
        """An engine's identity, without attaching; TransportError if there is none."""
        if engine_id not in self._identities:
            self._identities[engine_id] = identity_of(self._manifests[engine_id])
        return self._identities[engine_id]

    def open(self, engine_id: str) -> Feed | None:
        """Attach to an engine; None while that goes on: ask again."""

        def announced() -> EngineManifest | None:
            found = read_manifests(self._run_dir)
            return next((m for m in found if m.engine_id == engine_id), None)

        return RingFeed(self._manifests[engine_id], announced)

    def gone(self, engine_id: str) -> None:
        """An engine killed outright could not unlink its segments."""
        self._identities.pop(engine_id, None)
        reclaim_orphans(self._run_dir)

    def close(self) -> None: ...


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
        self._opened: dict[str, Feed | TransportError] = {}
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

    def open(self, engine_id: str) -> Feed | None:
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
                made: Feed | TransportError
                try:
                    made = self._attach(engine_id)
                except TransportError as error:
                    made = error
                with self._lock:
                    self._opened[engine_id] = made
                    self._asked.discard(engine_id)
        for made in self._opened.values():
            if not isinstance(made, TransportError):
                made.close()

    def _attach(self, engine_id: str) -> Feed:
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
        except TransportError as error:
            if str(error) != self._failing:  # once per cause, not per try
                logger.error("%s", error)
            self._failing = str(error)
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


Source = RunDirSource | SpoolSource
