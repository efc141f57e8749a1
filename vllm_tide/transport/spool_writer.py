"""Records into a spool: shards closed by size or age, and the spool kept in bounds.

Runs in the relay. A shard that cannot be written is kept and tried again; the caller
takes no more records meanwhile, so the ring fills and the engine drops and counts.
"""

from __future__ import annotations

import re
import time
from typing import Any

from vllm_tide.config import MIB, SpoolConfig
from vllm_tide.transport.header import TransportError
from vllm_tide.transport.record import Record, RecordError
from vllm_tide.transport.ring_format import RingSpec
from vllm_tide.transport.spool import EngineFolder, engine_ids
from vllm_tide.transport.spool_shard import ShardBuilder
from vllm_tide.transport.spool_store import Store

RECORDS = "records"
ENFORCE_S = 60.0
GRACE_S = 5.0
"""A shard's manifest follows its body within this (s), where the writer lives."""
# The bound is enforced down to this share of it, so that it takes no look at the whole
# spool for every shard.
_KEEP_SHARE = 0.95

# Names are read from manifests and listings: they may say anything.
_SHARD_FILE = re.compile(r"([0-9]{12})(?:-[0-9]{1,20})?\.(?:json|safetensors)")
_SECONDS = re.compile(r"[0-9]{1,20}")


class SpoolWriter:
    """Writes one engine's shards.

    Args:
        folder: The engine's part of the spool.
        spec: What its records have in common.
        config: `tide.spool`.

    Attributes:
        first, last: Numbers of the oldest and the newest shard; `last` is 0 when
            nothing has been written.
        rows: Rows in shards written by this object.
        invalid: Records that could not be encoded.

    Raises:
        TransportError: If the spool cannot be read.
    """

    def __init__(
        self, folder: EngineFolder, spec: RingSpec, config: SpoolConfig
    ) -> None:
        self._folder, self._spec, self._config = folder, spec, config
        self._open = ShardBuilder(spec)
        self._closed: _Closed | None = None
        # Manifests of shards that changed meanwhile: what they may have left.
        self._remains: list[dict[str, Any]] = []
        self.rows = self.invalid = 0
        numbers = self._numbers()
        # A body without a manifest counts too: its number is not used again.
        self.last = max(numbers, default=0)
        self.first = min(numbers, default=1)
        self._bounds = Bounds(folder.store, config)

    @property
    def blocked(self) -> bool:
        """Whether the storage has something to make up for: add nothing now."""
        return self._closed is not None or bool(self._remains)

    def add(self, record: Record) -> None:
        """Put a record into the open shard; one that is malformed is counted."""
        try:
            self._open.add(record)
        except (RecordError, TypeError, ValueError, AttributeError):
            self.invalid += 1

    def due(self) -> bool:
        """Whether the open shard is large or old enough, or one waits."""
        held = self._open
        if self.blocked:
            return True
        if not held.num_records:
            return False
        return (
            held.num_bytes >= self._config.shard_mib * MIB
            or time.monotonic() - held.began >= self._config.shard_seconds
        )

    def flush(self) -> int:
        """Close the open shard and write it; its number, 0 if there was nothing.

        Raises:
            TransportError: If it could not be written: it is kept, call again. Also if
                another relay has used its number; it has the next free one then.
        """
        self._remove_remains()
        if self._closed is None:
            if not self._open.num_records:
                return 0
            self._closed = _Closed(self._open, self.last + 1, time.time())
            self._open = ShardBuilder(self._spec)
        closed, folder = self._closed, self._folder
        # Another relay may have come while the storage held this one up: before the
        # body, whose name may be the same, and before the manifest, which is.
        self._refuse_used(closed)
        body = folder.path(RECORDS, closed.manifest["file"])
        folder.store.write(body, *closed.parts)
        self._refuse_used(closed)
        # From here on the shard exists.
        folder.write_json(manifest_name(closed.number), closed.manifest, durable=True)
        self._closed = None
        self.last = closed.number
        self.rows += int(closed.manifest["rows"])
        self._bounds.note(int(closed.manifest["bytes"]))
        return closed.number

    def purge(self, tenant: int | None) -> int:
        """Forget the records of a tenant (None: all) that are not in the spool yet.

        Returns:
            Records removed from memory.

        Raises:
            TransportError: They are out of memory, but a shard that could not be
                written may lie half written in the spool: call again.
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
        """Remove the oldest shards of all engines where the bounds say so.

        Args:
            now: Look at once; else only when it may be needed.

        Raises:
            TransportError: If the spool cannot be read.
        """
        if now or self._bounds.due():
            oldest = self._bounds.enforce(self._folder.engine_id)
            self.first = self.last + 1 if oldest == 0 else oldest


class _Closed:
    """A shard as it is to be written.

    Args:
        builder: Its records.
        number: Its number.
        created: When it was closed (Unix time, s).
    """

    def __init__(self, builder: ShardBuilder, number: int, created: float) -> None:
        self.builder, self.number, self.created = builder, number, created
        self.manifest, self.parts = builder.build(number, created)


class Bounds:
    """Size and age of all records of a spool, whoever wrote them.

    Args:
        store: The spool.
        config: `tide.spool`: `max_gib` and `max_age_s`.
    """

    def __init__(self, store: Store, config: SpoolConfig) -> None:
        self._store = store
        self._max_bytes = int(config.max_gib * (1 << 30))
        self._max_age_s = config.max_age_s
        self._held = self._max_bytes  # unknown: look first
        self._next = 0.0

    def note(self, num_bytes: int) -> None:
        """A shard of so many bytes was added."""
        self._held += num_bytes

    def due(self) -> bool:
        """Whether a bound may be exceeded."""
        return self._held > self._max_bytes or time.monotonic() >= self._next

    def enforce(self, engine_id: str) -> int:
        """Remove what is too old, then the oldest until the size fits.

        Returns:
            Number of the oldest shard left of `engine_id`, 0 if there is none.
        """
        self._next = time.monotonic() + ENFORCE_S
        shards = [
            (created, engine, number, name, size)
            for engine in engine_ids(self._store)
            for name, size in self._store.sizes(
                EngineFolder(self._store, engine).path(RECORDS)
            ).items()
            if (created := _created(name)) is not None
            and (number := shard_number(name)) > 0
        ]
        shards.sort()
        held = sum(size for *_, size in shards)
        limit = self._max_bytes
        if held > limit:
            limit = int(limit * _KEEP_SHARE)
        oldest = time.time() - self._max_age_s
        left: list[int] = []
        for created, engine, number, name, size in shards:
            if held > limit or created < oldest:
                folder = EngineFolder(self._store, engine)
                self._store.remove(folder.path(manifest_name(number)))
                self._store.remove(folder.path(RECORDS, name))
                held -= size
            elif engine == engine_id:
                left.append(number)
        self._held = held
        self._drop_dead_engines(oldest, keep=engine_id)
        return min(left, default=0)

    def _drop_dead_engines(self, oldest: float, keep: str) -> None:
        """Remove the folder of an engine that has said nothing for the longest age."""
        for engine in engine_ids(self._store):
            if engine == keep:
                continue
            state = EngineFolder(self._store, engine).read_state()
            if state is not None and state.unix < oldest:
                self._store.remove_folder(EngineFolder(self._store, engine).path())


def purge_records(
    store: Store,
    *,
    tenant: int | None = None,
    before_unix: float | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Remove every shard that holds rows of a tenant, or is older than a time.

    A shard is removed whole: what else is in it goes too. Readers pass it over. So is a
    body that no manifest names: nobody can say what is in it. One whose writer lives
    gets its manifest in a moment, so it is looked at again before it goes.

    Args:
        store: The spool.
        tenant: As records carry it (``tenant.tenant_id``).
        before_unix: Unix time (s).
        grace_s: How long a writer has for the manifest.

    Returns:
        The number of shards removed.

    Raises:
        TransportError: If the spool cannot be used.
    """
    removed = 0
    nameless: list[tuple[EngineFolder, str]] = []
    for engine in engine_ids(store):
        folder = EngineFolder(store, engine)
        for name in store.sizes(folder.path(RECORDS)):
            if shard_number(name) <= 0 or _created(name) is None:
                continue
            doomed = _doomed(folder, name, tenant, before_unix)
            if doomed is None:
                nameless.append((folder, name))
            elif doomed:
                _remove(folder, name)
                removed += 1
    if nameless:
        time.sleep(grace_s)
    for folder, name in nameless:
        if _doomed(folder, name, tenant, before_unix) is not False:
            _remove(folder, name)
            removed += 1
    return removed


def _doomed(
    folder: EngineFolder, name: str, tenant: int | None, before_unix: float | None
) -> bool | None:
    """Whether a purge takes a body; None if no manifest names it."""
    if before_unix is not None and (_created(name) or 0) < before_unix:
        return True
    manifest = folder.read_json(manifest_name(shard_number(name)))
    if manifest is None or manifest.get("file") != name:
        return None
    return tenant is not None and tenant in manifest.get("tenants", [tenant])


def _remove(folder: EngineFolder, name: str) -> None:
    """Remove a body, and the manifest that names it."""
    manifest = manifest_name(shard_number(name))
    found = folder.read_json(manifest)
    if found is None or found.get("file") == name:
        folder.store.remove(folder.path(manifest))
    folder.store.remove(folder.path(RECORDS, name))


def manifest_name(number: int) -> str:
    """Name of a shard's manifest in its engine's folder."""
    return f"{RECORDS}/{number:012d}.json"


def shard_number(name: str) -> int:
    """Number of the shard a file belongs to; 0 if it is no shard's file."""
    known = _SHARD_FILE.fullmatch(name)
    return int(known[1]) if known else 0


def _created(name: str) -> int | None:
    """Unix time (s) in the name of a shard's file; None for other files."""
    if not name.endswith(".safetensors"):
        return None
    _, dash, rest = name.removesuffix(".safetensors").partition("-")
    return int(rest) if dash and _SECONDS.fullmatch(rest) else None
