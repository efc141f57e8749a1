"""Records into a spool: shards closed by size or age, and the spool kept in bounds.

Runs in the relay. A shard that cannot be written is kept and tried again; the caller
takes no more records meanwhile, so the ring fills and the engine drops and counts.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from vllm_tide.config import MIB, SpoolConfig
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import MADE, EngineFolder, Freshness, engine_ids
from vllm_tide.transport.spool_shard import (
    MAX_SHARD_BYTES,
    RECORDS,
    SHARD_FILE,
    ShardBuilder,
    manifest_name,
    shard_number,
)
from vllm_tide.transport.spool_store import NotOurs, Store

ENFORCE_S = 60.0
GRACE_S = 5.0
"""A shard's manifest follows its body within this (s), where the writer lives."""
# The bound is enforced down to this share of it, so that it takes no look at the whole
# spool for every shard.
_KEEP_SHARE = 0.95

SHARD_MIB = 16  # size at which a shard is closed: few requests to the storage
SHARD_SECONDS = 5.0  # age at which it is: the trainer may be waiting for it


class SpoolWriter:
    """Writes one engine's shards.

    Attributes:
        first, last: Numbers of the oldest and the newest shard; 0: none was written.
    """

    def __init__(self, folder: EngineFolder, config: SpoolConfig) -> None:
        self._folder = folder
        self._open = ShardBuilder()
        self._closed: _Closed | None = None
        # Manifests of shards that changed meanwhile: what they may have left.
        self._remains: list[dict[str, Any]] = []
        self.rows = 0
        numbers = self._numbers()
        # A body without a manifest counts too: its number is not used again.
        self.last = max(numbers, default=0)
        self.first = min(numbers, default=1)
        self._bounds = Bounds(folder.store, config)

    @property
    def blocked(self) -> bool:
        """True if the storage has something to make up for: add nothing now."""
        return self._closed is not None or bool(self._remains)

    def add(self, body: np.ndarray) -> None:
        """Take a record's bytes, as `RingReader.take` gives them."""
        self._open.add(body)

    def due(self) -> bool:
        held = self._open
        large = held.num_bytes >= SHARD_MIB * MIB
        old = time.monotonic() - held.began >= SHARD_SECONDS
        return self.blocked or (held.num_records > 0 and (large or old))

    def flush(self) -> int:
        """Close a shard of the usual size and write it; its number, 0 if there is none.

        Raises:
            TransportError: It is kept: call again. If another relay has used its number
                it has the next free one then.
        """
        self._remove_remains()
        if self._closed is None:
            if not self._open.num_records:
                return 0
            first = self._open.split(SHARD_MIB * MIB)
            self._closed = _Closed(first, self.last + 1, steady_unix())
        closed, folder = self._closed, self._folder
        # Another relay may have come while the storage held this one up: before the
        # body, whose name may be the same, and before the manifest, which is.
        self._refuse_used(closed)
        folder.store.write(folder.path(RECORDS, closed.manifest["file"]), closed.body)
        self._refuse_used(closed)
        # From here on the shard exists.
        folder.write_json(manifest_name(closed.number), closed.manifest, durable=True)
        self._closed = None
        self.last = closed.number
        self.rows += int(closed.manifest["rows"])
        self._bounds.note(int(closed.manifest["bytes"]))
        return closed.number

    def purge(self, tenant: int | None) -> int:
        """Forget a tenant's records (None: all) not in the spool yet; how many.

        Raises:
            TransportError: They are out of memory, but a shard may lie half written in
                the spool: call again.
        """
        removed = self._open.drop(tenant)
        closed = self._closed
        if closed is not None and (dropped := closed.builder.drop(tenant)):
            removed += dropped
            self._remains.append(closed.manifest)
            self._closed = None
            if closed.builder.num_records:
                self._closed = _Closed(closed.builder, closed.number, closed.created)
        self._remove_remains()
        return removed

    def _refuse_used(self, closed: _Closed) -> None:
        found = self._folder.read_json(manifest_name(closed.number))
        if found is None or found == closed.manifest:
            return  # nobody's, or ours: the storage said that it failed, and it had not
        self.last = max([self.last, closed.number, *self._numbers()])
        self._remains.append(closed.manifest)
        self._closed = _Closed(closed.builder, self.last + 1, closed.created)
        raise TransportError(
            f"shard {closed.number} in {self._folder.store.url} is another relay's: "
            f"its records wait for number {self.last + 1}"
        )

    def _remove_remains(self) -> None:
        while self._remains:
            ours, folder = self._remains[0], self._folder
            manifest = manifest_name(ours["shard"])
            found = folder.read_json(manifest)
            if found == ours:
                folder.store.remove(folder.path(manifest))
            elif found is not None and found.get("file") == ours["file"]:
                del self._remains[0]  # the body is another relay's by now
                continue
            folder.store.remove(folder.path(RECORDS, ours["file"]))
            del self._remains[0]

    def _numbers(self) -> list[int]:
        names = self._folder.store.sizes(self._folder.path(RECORDS))
        return [number for name in names if (number := shard_number(name)) > 0]

    def keep_bounds(self, *, now: bool = False) -> None:
        if now or self._bounds.due():
            oldest = self._bounds.enforce(self._folder.engine_id)
            self.first = self.last + 1 if oldest == 0 else oldest


class _Closed:
    """A shard as it is to be written; `created` is Unix time (s)."""

    def __init__(self, builder: ShardBuilder, number: int, created: float) -> None:
        self.builder, self.number, self.created = builder, number, created
        self.manifest, self.body = builder.build(number, created)


class Bounds:
    """Size and age of all records of a spool, whoever wrote them."""

    def __init__(self, store: Store, config: SpoolConfig) -> None:
        self._store = store
        self._max_bytes = int(config.max_gib * (1 << 30))
        self._max_age_s = config.max_age_s
        self._held = self._max_bytes  # unknown: look first
        self._next = 0.0
        self._words: dict[str, Freshness] = {}

    def note(self, num_bytes: int) -> None:
        self._held += num_bytes

    def due(self) -> bool:
        return self._held > self._max_bytes or time.monotonic() >= self._next

    def enforce(self, engine_id: str) -> int:
        """Remove what is too old, then the oldest until the size fits.

        Returns the number of the oldest shard left of `engine_id`, 0 if there is none.
        """
        self._next = time.monotonic() + ENFORCE_S
        engines = [EngineFolder(self._store, name) for name in engine_ids(self._store)]
        self._words = {
            folder.engine_id: self._words.get(folder.engine_id, Freshness())
            for folder in engines
        }
        shards: list[tuple[float, EngineFolder, int, str, int]] = []
        for folder in engines:
            now = self._now(folder, mine=folder.engine_id == engine_id)
            for name, size in self._store.sizes(folder.path(RECORDS)).items():
                created, number = _created(name), shard_number(name)
                if size > MAX_SHARD_BYTES and created is not None:
                    _remove(folder, name)  # nobody reads it, and it would cost others
                elif created is not None and number > 0:
                    shards.append((created - now, folder, number, name, size))
        shards.sort(key=lambda shard: (shard[0], shard[1].engine_id, shard[2:]))
        held = sum(size for *_, size in shards)
        limit = self._max_bytes
        if held > limit:
            limit = int(limit * _KEEP_SHARE)
        left: list[int] = []
        for since, folder, number, name, size in shards:
            if held > limit or since < -self._max_age_s:
                self._remove(folder, RECORDS, f"{number:012d}.json", name)
                held -= size
            elif folder.engine_id == engine_id:
                left.append(number)
        self._held = held
        return min(left, default=0)

    def _now(self, folder: EngineFolder, *, mine: bool) -> float:
        """The time by the clock that an engine's shards are dated by.

        That of another host may be wrong by days, and so may ours: while an engine's
        word changes only its own counts. The folder of one that has said nothing for
        the longest age goes.
        """
        if mine:
            return steady_unix()
        state, word = folder.read_state(), self._words[folder.engine_id]
        word.look(state)
        if word.fresh and state is not None:
            return state.unix
        now = steady_unix()
        if state is not None and state.unix < now - self._max_age_s:
            for part, made in MADE.items():
                # The state last: it says that the engine is dead.
                names = sorted(self._store.sizes(folder.path(part)))
                self._remove(folder, part, *filter(made.fullmatch, names))
                self._store.remove_folder(folder.path(part))
        return now

    def _remove(self, folder: EngineFolder, part: str, *names: str) -> None:
        for name in names:
            with contextlib.suppress(NotOurs):  # nor does it count
                self._store.remove(folder.path(part, name))


def purge_records(
    store: Store,
    *,
    tenant: int | None = None,
    before_unix: float | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Remove every shard with rows of a tenant, or older than a time; how many.

    A shard is removed whole: what else is in it goes too. Readers pass it over. So is a
    body that no manifest names: nobody can say what is in it. One whose writer lives
    gets its manifest within `grace_s`, so it is looked at again before it goes. What a
    killed writer left half written goes as well; a live one writes it again.

    Raises:
        NotOurs: Files are left that are another user's, or no plain files; all else is
            removed.
    """
    removed = 0
    left: list[str] = []
    nameless: list[tuple[EngineFolder, str]] = []
    unfinished: list[tuple[EngineFolder, str]] = []
    for engine in engine_ids(store):
        folder = EngineFolder(store, engine)
        names = store.unfinished(folder.path(RECORDS))
        unfinished += [(folder, name) for name in names]
        for name in store.sizes(folder.path(RECORDS)):
            if shard_number(name) <= 0 or _created(name) is None:
                continue
            doomed = _doomed(folder, name, tenant, before_unix)
            if doomed is None:
                nameless.append((folder, name))
            elif doomed:
                left += _remove(folder, name)
                removed += 1
    if nameless or unfinished:
        time.sleep(grace_s)
    for folder, name in unfinished:
        left += _remove(folder, name)
    for folder, name in nameless:
        if _doomed(folder, name, tenant, before_unix) is not False:
            left += _remove(folder, name)
            removed += 1
    if left:
        raise NotOurs(
            f"tide.spool.url: of {removed} shards in {store.url} all is removed but "
            f"{', '.join(left[:9])}, another user's or no plain file: remove that "
            "yourself and purge again"
        )
    return removed


def _doomed(
    folder: EngineFolder, name: str, tenant: int | None, before_unix: float | None
) -> bool | None:
    """True if a purge takes a body; None if no manifest names it."""
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
    """Remove a shard; those of its files that are left, since they are not ours."""
    manifest, left = manifest_name(shard_number(name)), []
    found = folder.read_json(manifest)
    ours = found is None or found.get("file") == name
    for file in (*([manifest] if ours else []), f"{RECORDS}/{name}"):
        try:
            folder.store.remove(folder.path(file))
        except NotOurs:
            left.append(folder.path(file))
    return left


def _created(name: str) -> int | None:
    """Unix time (s) in the name of a shard's file; None for other files."""
    known = SHARD_FILE.fullmatch(name)
    return int(known[2]) if known and known[2] and known[3] == "safetensors" else None
