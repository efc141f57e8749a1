"""Where engines are found: a run directory of this host, or a spool."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Protocol

from vllm_tide.train.feed import Feed
from vllm_tide.train.feed_ring import RingFeed
from vllm_tide.train.feed_spool import SpoolFeed
from vllm_tide.transport.header import TransportError
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    group_of,
    read_manifests,
    reclaim_orphans,
)
from vllm_tide.transport.spool import DEAD_S, EngineFolder, Freshness, engine_ids
from vllm_tide.transport.spool_identity import identity_of
from vllm_tide.transport.spool_store import open_store

logger = logging.getLogger("vllm_tide.train")

SCAN_S = 2.0
"""How often a spool is searched for engines (s)."""


class Source(Protocol):
    """Finds live engines and opens feeds to them. Never waits, but in `open`."""

    def find(self) -> list[str]:
        """Ids of the live engines, the one to train for first at the end."""

    def identity(self, engine_id: str) -> dict[str, str]:
        """An engine's identity, without attaching to it.

        Raises:
            TransportError: If it cannot be had.
        """

    def open(self, engine_id: str) -> Feed:
        """Attach to an engine.

        Raises:
            TransportError: One sentence.
        """

    def gone(self, engine_id: str) -> None:
        """An engine was found dead: clean up after it."""

    def close(self) -> None:
        """Stop looking. Idempotent."""


class RunDirSource:
    """Engines that announced themselves in a run directory.

    Args:
        run_dir: The directory.
        engine_id: Only this engine, or this group; all of them when None.
    """

    def __init__(self, run_dir: Path, engine_id: str | None = None) -> None:
        self._run_dir, self._engine_id = run_dir, engine_id
        self._manifests: dict[str, EngineManifest] = {}
        self._identities: dict[str, dict[str, str]] = {}

    def find(self) -> list[str]:
        """See :class:`Source`: oldest first.

        Raises:
            TransportError: If the run directory is another user's.
        """
        self._manifests = {
            manifest.engine_id: manifest
            for manifest in read_manifests(self._run_dir)
            if self._engine_id in (None, manifest.engine_id, group_of(manifest))
        }
        return list(self._manifests)

    def identity(self, engine_id: str) -> dict[str, str]:
        """See :class:`Source`."""
        if engine_id not in self._identities:
            self._identities[engine_id] = identity_of(self._manifests[engine_id])
        return self._identities[engine_id]

    def open(self, engine_id: str) -> Feed:
        """See :class:`Source`."""

        def announced() -> EngineManifest | None:
            found = read_manifests(self._run_dir)
            return next((m for m in found if m.engine_id == engine_id), None)

        return RingFeed(self._manifests[engine_id], announced)

    def gone(self, engine_id: str) -> None:
        """An engine killed outright could not unlink its segments."""
        self._identities.pop(engine_id, None)
        reclaim_orphans(self._run_dir)

    def close(self) -> None:
        """See :class:`Source`."""


class SpoolSource:
    """Engines whose relays write to a spool.

    Args:
        url: The spool.
        engine_id: Only this engine; all of them when None.
        reader: Name of this trainer, see ``SpoolFeed``.
        cache: See ``SpoolFeed``.
        threaded: False searches in :meth:`find`, for tests.

    Raises:
        TransportError: If the spool cannot be opened.
    """

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
        self._found: list[str] = []
        self._failing = ""
        self._closing = threading.Event()
        self._scan()  # so that the first `find` finds
        if threaded:
            threading.Thread(
                target=self._work, name="vllm-tide-spool-scan", daemon=True
            ).start()

    def find(self) -> list[str]:
        """See :class:`Source`: as of the last search, by name."""
        if not self._threaded:
            self._scan()
        return list(self._found)

    def identity(self, engine_id: str) -> dict[str, str]:
        """See :class:`Source`."""
        entry = EngineFolder(self._store, engine_id).read_engine()
        if entry is None:
            raise TransportError(
                f"engine {engine_id} has not announced itself in {self._store.url} yet"
            )
        return entry.identity

    def open(self, engine_id: str) -> Feed:
        """See :class:`Source`."""
        return SpoolFeed(
            self._store,
            engine_id,
            reader=self._reader,
            cache=self._cache,
            threaded=self._threaded,
        )

    def gone(self, engine_id: str) -> None:
        """Nothing: the bounds remove what a dead engine left."""

    def close(self) -> None:
        """See :class:`Source`."""
        self._closing.set()

    def _work(self) -> None:
        while not self._closing.wait(SCAN_S):
            self._scan()

    def _scan(self) -> None:
        try:
            ids = engine_ids(self._store)
            live = [name for name in ids if self._wanted(name) and self._lives(name)]
        except TransportError as error:
            if str(error) != self._failing:  # once per cause, not per try
                logger.error("%s", error)
            self._failing = str(error)
        else:
            self._found, self._failing = live, ""

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
