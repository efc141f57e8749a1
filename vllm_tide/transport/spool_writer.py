"""Writes records to a spool as shards, and limits the size and age of the spool.

Used by the relay. A shard that cannot be written is retried. Meanwhile the relay reads
no more records: the ring fills up, and the engine drops and counts records.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from vllm_tide.config import MIB, SpoolConfig
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import (
    FILE_PATTERNS,
    EngineFolder,
    HeartbeatMonitor,
    engine_ids,
)
from vllm_tide.transport.spool_shard import (
    MAX_SHARD_BYTES,
    RECORDS,
    SHARD_FILE,
    ShardBuilder,
    manifest_name,
    shard_number,
)
from vllm_tide.transport.spool_store import ForeignFileError, Store

ENFORCE_S = 60.0
GRACE_S = 5.0
"""Maximum time (s) between body and manifest of a shard, of a live writer."""
# Shards are removed down to this share of the limit, so that not every new shard causes
# a scan of the whole spool.
_KEEP_SHARE = 0.95

SHARD_MIB = 16  # size at which a shard is closed; large, for few requests
SHARD_SECONDS = 5.0  # age at which it is closed, as the trainer may be waiting


class SpoolWriter:
    """Writes one engine's shards.

    Attributes:
        first, last: Numbers of the oldest and the newest shard; 0: none.
    """

    def __init__(self, folder: EngineFolder, config: SpoolConfig) -> None:
        self._folder = folder
        self._open = ShardBuilder()
        self._closed: _Closed | None = None
        # Manifests of shards that were replaced before a complete write.
        self._leftovers: list[dict[str, Any]] = []
        self.rows = 0
        numbers = self._numbers()
        # Includes bodies without a manifest: their numbers are not reused.
        self.last = max(numbers, default=0)
        self.first = min(numbers, default=1)
        self._bounds = Bounds(folder.store, config)

    @property
    def blocked(self) -> bool:
        """True if a write or removal is pending; if so, add no records."""
        return self._closed is not None or bool(self._leftovers)

    def add(self, body: np.ndarray) -> None:
        """Add the bytes of a record, as returned by `RingReader.take`."""
        self._open.add(body)

    def due(self) -> bool:
        shard = self._open
        large = shard.num_bytes >= SHARD_MIB * MIB
        old = time.monotonic() - shard.started >= SHARD_SECONDS
        return self.blocked or (shard.num_records > 0 and (large or old))

    def flush(self) -> int:
        """Write a shard of the usual size; return its number, 0 if there is none.

        Raises:
            TransportError: The shard is retained for the next call, with a new number
                if another relay has used its number.
        """
        self._remove_leftovers()
        if self._closed is None:
            if not self._open.num_records:
                return 0
            first = self._open.split(SHARD_MIB * MIB)
            self._closed = _Closed(first, self.last + 1, steady_unix())
        closed, folder = self._closed, self._folder
        # If the storage was slow, another relay may have started. Check before writing
        # the body (its name may be equal) and the manifest (its name is equal).
        self._refuse_used(closed)
        folder.store.write(folder.path(RECORDS, closed.manifest["file"]), closed.body)
        self._refuse_used(closed)
        # The manifest makes the shard visible.
        folder.write_json(manifest_name(closed.number), closed.manifest, durable=True)
        self._closed = None
        self.last = closed.number
        self.rows += int(closed.manifest["rows"])
        self._bounds.note(int(closed.manifest["bytes"]))
        return closed.number

    def purge(self, tenant: int | None) -> int:
        """Drop buffered records of a tenant (None: all); return how many.

        Raises:
            TransportError: They were dropped from memory, but an incomplete shard may
                be in the spool: call again.
        """
        removed = self._open.drop(tenant)
        closed = self._closed
        if closed is not None and (dropped := closed.builder.drop(tenant)):
            removed += dropped
            self._leftovers.append(closed.manifest)
            self._closed = None
            if closed.builder.num_records:
                self._closed = _Closed(closed.builder, closed.number, closed.created)
        self._remove_leftovers()
        return removed

    def _refuse_used(self, closed: _Closed) -> None:
        stored = self._folder.read_json(manifest_name(closed.number))
        # An equal manifest: a write that the storage had reported as failed.
        if stored is None or stored == closed.manifest:
            return
        self.last = max([self.last, closed.number, *self._numbers()])
        self._leftovers.append(closed.manifest)
        self._closed = _Closed(closed.builder, self.last + 1, closed.created)
        raise TransportError(
            f"shard {closed.number} in {self._folder.store.url} is of another relay: "
            f"the records will be written as shard {self.last + 1}"
        )

    def _remove_leftovers(self) -> None:
        while self._leftovers:
            old, folder = self._leftovers[0], self._folder
            manifest = manifest_name(old["shard"])
            stored = folder.read_json(manifest)
            if stored == old:
                folder.store.remove(folder.path(manifest))
            elif stored is not None and stored.get("file") == old["file"]:
                del self._leftovers[0]  # the body is of another relay
                continue
            folder.store.remove(folder.path(RECORDS, old["file"]))
            del self._leftovers[0]

    def _numbers(self) -> list[int]:
        names = self._folder.store.sizes(self._folder.path(RECORDS))
        return [number for name in names if (number := shard_number(name)) > 0]

    def enforce_bounds(self, *, now: bool = False) -> None:
        if now or self._bounds.due():
            oldest = self._bounds.enforce(self._folder.engine_id)
            self.first = self.last + 1 if oldest == 0 else oldest


class _Closed:
    """A shard that is ready to be written; `created` is a Unix time (s)."""

    def __init__(self, builder: ShardBuilder, number: int, created: float) -> None:
        self.builder, self.number, self.created = builder, number, created
        self.manifest, self.body = builder.build(number, created)


class Bounds:
    """Limits on size and age of a spool, over the shards of all engines."""

    def __init__(self, store: Store, config: SpoolConfig) -> None:
        self._store = store
        self._max_bytes = int(config.max_gib * (1 << 30))
        self._max_age_s = config.max_age_s
        self._num_bytes = self._max_bytes  # unknown until the first scan
        self._next = 0.0
        self._heartbeats: dict[str, HeartbeatMonitor] = {}

    def note(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def due(self) -> bool:
        return self._num_bytes > self._max_bytes or time.monotonic() >= self._next

    def enforce(self, engine_id: str) -> int:
        """Remove shards that are too old, then the oldest until the size fits.

        Return the number of the oldest remaining shard of `engine_id`, 0 if none.
        """
        self._next = time.monotonic() + ENFORCE_S
        engines = [EngineFolder(self._store, name) for name in engine_ids(self._store)]
        self._heartbeats = {
            folder.engine_id: self._heartbeats.get(folder.engine_id, HeartbeatMonitor())
            for folder in engines
        }
        shards: list[tuple[float, EngineFolder, int, str, int]] = []
        for folder in engines:
            now = self._now(folder, mine=folder.engine_id == engine_id)
            for name, size in self._store.sizes(folder.path(RECORDS)).items():
                created, number = _created(name), shard_number(name)
                if size > MAX_SHARD_BYTES and created is not None:
                    _remove(folder, name)  # too large for any reader
                elif created is not None and number > 0:
                    shards.append((created - now, folder, number, name, size))
        shards.sort(key=lambda shard: (shard[0], shard[1].engine_id, shard[2:]))
        total = sum(size for *_, size in shards)
        limit = self._max_bytes
        if total > limit:
            limit = int(limit * _KEEP_SHARE)
        remaining: list[int] = []
        for since, folder, number, name, size in shards:
            if total > limit or since < -self._max_age_s:
                self._remove(folder, RECORDS, f"{number:012d}.json", name)
                total -= size
            elif folder.engine_id == engine_id:
                remaining.append(number)
        self._num_bytes = total
        return min(remaining, default=0)

    def _now(self, folder: EngineFolder, *, mine: bool) -> float:
        """Return the current time by the clock of an engine's shards.

        Clocks of hosts may differ by days. While an engine's heartbeat changes, its own
        clock is used. The folder of an engine without heartbeat for the maximum age is
        removed.
        """
        if mine:
            return steady_unix()
        state, heartbeat = folder.read_state(), self._heartbeats[folder.engine_id]
        heartbeat.observe(state)
        if heartbeat.fresh and state is not None:
            return state.unix
        now = steady_unix()
        if state is not None and state.unix < now - self._max_age_s:
            for part, pattern in FILE_PATTERNS.items():
                # The state last, as it identifies the engine as dead.
                names = sorted(self._store.sizes(folder.path(part)))
                self._remove(folder, part, *filter(pattern.fullmatch, names))
                self._store.remove_folder(folder.path(part))
        return now

    def _remove(self, folder: EngineFolder, part: str, *names: str) -> None:
        for name in names:
            with contextlib.suppress(ForeignFileError):
                self._store.remove(folder.path(part, name))


def purge_records(
    store: Store,
    *,
    tenant: int | None = None,
    before_unix: float | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Remove all shards with rows of a tenant or older than a time; return how many.

    A shard is removed with all its records, and readers skip it. A body without a
    manifest is also removed, as its tenants are unknown. A live writer stores the
    manifest within `grace_s`, so such bodies are checked again after that time.
    Temporary files are removed, too; a live writer writes them again.

    Raises:
        ForeignFileError: Some files are another user's or not regular files; all others
            were removed.
    """
    removed = 0
    failed: list[str] = []
    without_manifest: list[tuple[EngineFolder, str]] = []
    unfinished: list[tuple[EngineFolder, str]] = []
    for engine in engine_ids(store):
        folder = EngineFolder(store, engine)
        names = store.unfinished(folder.path(RECORDS))
        unfinished += [(folder, name) for name in names]
        for name in store.sizes(folder.path(RECORDS)):
            if shard_number(name) <= 0 or _created(name) is None:
                continue
            purged = _is_purged(folder, name, tenant, before_unix)
            if purged is None:
                without_manifest.append((folder, name))
            elif purged:
                failed += _remove(folder, name)
                removed += 1
    if without_manifest or unfinished:
        time.sleep(grace_s)
    for folder, name in unfinished:
        failed += _remove(folder, name)
    for folder, name in without_manifest:
        if _is_purged(folder, name, tenant, before_unix) is not False:
            failed += _remove(folder, name)
            removed += 1
    if failed:
        raise ForeignFileError(
            f"tide.spool.url: removed {removed} shards in {store.url}, except these "
            f"files of another user or not regular: {', '.join(failed[:9])}; remove "
            "them manually and purge again"
        )
    return removed


def _is_purged(
    folder: EngineFolder, name: str, tenant: int | None, before_unix: float | None
) -> bool | None:
    """Return whether a purge includes a body; None if it has no manifest."""
    if before_unix is not None and (_created(name) or 0) < before_unix:
        return True
    manifest = folder.read_json(manifest_name(shard_number(name)))
    if manifest is None or manifest.get("file") != name:
        return None
    tenants = manifest.get("tenants")
    return tenant is not None and not (
        isinstance(tenants, list) and tenant not in tenants
    )


def _remove(folder: EngineFolder, name: str) -> list[str]:
    """Remove a shard; return its files of other users, which are not removed."""
    manifest, failed = manifest_name(shard_number(name)), []
    stored = folder.read_json(manifest)
    matches = stored is None or stored.get("file") == name
    for file in (*([manifest] if matches else []), f"{RECORDS}/{name}"):
        try:
            folder.store.remove(folder.path(file))
        except ForeignFileError:
            failed.append(folder.path(file))
    return failed


def _created(name: str) -> int | None:
    """Return the Unix time (s) in the name of a shard; None for other files."""
    match = SHARD_FILE.fullmatch(name)
    return int(match[2]) if match and match[2] and match[3] == "safetensors" else None
