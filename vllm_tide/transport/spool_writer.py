"""Records into a spool: shards closed by size or age, and the spool kept in bounds.

Runs in the relay. A shard that cannot be written is kept and tried again; the caller
takes no more records meanwhile, so the ring fills and the engine drops and counts.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from vllm_tide.config import MIB, SpoolConfig
from vllm_tide.transport.record import Record, RecordError
from vllm_tide.transport.ring_format import RingSpec
from vllm_tide.transport.spool import EngineFolder, engine_ids, parse_json
from vllm_tide.transport.spool_shard import ShardBuilder
from vllm_tide.transport.spool_store import Store

RECORDS = "records"
ENFORCE_S = 60.0
# The bound is enforced down to this share of it, so that it takes no look at the whole
# spool for every shard.
_KEEP_SHARE = 0.95


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
        self._closed: tuple[dict[str, Any], list[bytes | np.ndarray]] | None = None
        self.rows = self.invalid = 0
        numbers = [
            number
            for name in folder.store.sizes(folder.path(RECORDS))
            if (number := shard_number(name)) > 0
        ]
        # A body without a manifest counts too: its number is not used again.
        self.last = max(numbers, default=0)
        self.first = min(numbers, default=1)
        self._bounds = Bounds(folder.store, config)

    @property
    def blocked(self) -> bool:
        """Whether a shard waits to be written: add nothing now."""
        return self._closed is not None

    def add(self, record: Record) -> None:
        """Put a record into the open shard; one that is malformed is counted."""
        try:
            self._open.add(record)
        except (RecordError, TypeError, ValueError, AttributeError):
            self.invalid += 1

    def due(self) -> bool:
        """Whether the open shard is large or old enough, or one waits."""
        held = self._open
        if self._closed is not None:
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
            TransportError: If it could not be written: it is kept, call again.
        """
        if self._closed is None:
            if not self._open.num_records:
                return 0
            self._closed = self._open.build(self.last + 1, time.time())
            self._open = ShardBuilder(self._spec)
        manifest, parts = self._closed
        number = int(manifest["shard"])
        self._folder.store.write(self._folder.path(RECORDS, manifest["file"]), *parts)
        # From here on the shard exists.
        self._folder.write_json(manifest_name(number), manifest, durable=True)
        self._closed = None
        self.last = number
        self.rows += int(manifest["rows"])
        self._bounds.note(int(manifest["bytes"]))
        return number

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
    store: Store, *, tenant: int | None = None, before_unix: float | None = None
) -> int:
    """Remove every shard that holds rows of a tenant, or is older than a time.

    A shard is removed whole: what else is in it goes too. Readers pass it over.

    Args:
        store: The spool.
        tenant: As records carry it (``tenant.tenant_id``).
        before_unix: Unix time (s).

    Returns:
        The number of shards removed.

    Raises:
        TransportError: If the spool cannot be used.
    """
    removed = 0
    for engine in engine_ids(store):
        folder = EngineFolder(store, engine)
        for name in store.sizes(folder.path(RECORDS)):
            number = shard_number(name)
            created = _created(name)
            if number <= 0 or created is None:
                continue
            manifest = parse_json(store.read(folder.path(manifest_name(number))))
            # Without a manifest nobody can say what is in it.
            wanted = manifest is None and _is_old(created)
            if manifest is not None and tenant is not None:
                wanted = tenant in manifest.get("tenants", [tenant])
            if before_unix is not None:
                wanted = wanted or created < before_unix
            if wanted:
                store.remove(folder.path(manifest_name(number)))
                store.remove(folder.path(RECORDS, name))
                removed += 1
    return removed


def manifest_name(number: int) -> str:
    """Name of a shard's manifest in its engine's folder."""
    return f"{RECORDS}/{number:012d}.json"


def shard_number(name: str) -> int:
    """Number of the shard a file belongs to; 0 if it is no shard's file."""
    digits = name[:12]
    known = name.endswith((".json", ".safetensors"))
    return int(digits) if known and len(name) > 12 and digits.isdigit() else 0


def _created(name: str) -> int | None:
    """Unix time (s) in the name of a shard's file; None for other files."""
    if not name.endswith(".safetensors"):
        return None
    _, dash, rest = name.removesuffix(".safetensors").partition("-")
    return int(rest) if dash and rest.isdigit() else None


def _is_old(created: int) -> bool:
    """Whether its writer has had an hour for the manifest."""
    return time.time() - created > 3600
