"""Shards of a spool: encoded records in one safetensors file each.

A shard has two tensors, ``records``, the bytes of all records, and ``offsets`` (int64
[n + 1]), where each record starts. Its metadata lists the tenants, so that a purge
reads headers only. The bytes of a record are those of the ring: the relay neither
converts nor decodes them. The file name contains number, creation time and CRC-32C.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from safetensors import SafetensorError, deserialize, serialize

from vllm_tide import _shm
from vllm_tide.config import SpoolConfig
from vllm_tide.transport.draft_weights import tensor_spec
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.record import Record, RecordError, RingSpec, decode, tenant_of
from vllm_tide.transport.rendezvous import ABANDONED_S
from vllm_tide.transport.shm import MALFORMED, sanitize_for_log
from vllm_tide.transport.spool import (
    MAX_JSON_BYTES,
    RECORDS,
    SHARD_NAME,
    EngineFolder,
    HeartbeatMonitor,
    StoreError,
    engine_folders,
    shard_number,
)

logger = logging.getLogger("vllm_tide.spool")

MAX_SHARD_BYTES = 1 << 28
"""Maximum size of a shard; normally 16 MiB and one record (`ring.MAX_RECORD_BYTES`)."""
SHARD_BYTES = 16 << 20
"""Size at which a shard is closed (bytes); large, for few requests."""
SHARD_SECONDS = 5.0
"""Age at which a shard is closed (s); short, as the trainer may be waiting."""
ENFORCE_S = 60.0
"""Interval between checks of the bounds (s)."""
# Shards are removed down to this share of the limit, so that not every new shard causes
# a scan of the whole spool.
_KEEP_SHARE = 0.95
_HEADER_BYTES = 1 << 16


class ShardDamaged(ValueError):
    """A shard is damaged; the message describes how."""


def build_shard(
    records: Sequence[np.ndarray], number: int, created_unix: float
) -> tuple[str, bytes]:
    """Return the file name and the bytes of a shard."""
    offsets = np.cumsum([0, *map(len, records)], dtype=np.int64)
    data = np.concatenate(records)
    tensors = {
        "offsets": tensor_spec("int64", [len(offsets)], offsets),
        "records": tensor_spec("uint8", [len(data)], data),
    }
    tenants = sorted({tenant_of(record) for record in records})
    text = ",".join(f"{tenant:x}" for tenant in tenants)
    file = bytes(serialize(tensors, {"tenants": text}))
    crc = _shm.crc32c(file)
    return f"{number:012d}-{int(created_unix)}-{crc:08x}.safetensors", file


def read_shard(name: str, file: bytes, spec: RingSpec) -> tuple[list[Record], int]:
    """Verify and decode a shard; return records and the number of invalid ones.

    Each record is a separate copy, so that it does not keep the shard in memory.

    Raises:
        ShardDamaged: Its checksum or its offsets are wrong.
    """
    match = SHARD_NAME.fullmatch(name)
    if match is None or _shm.crc32c(file) != int(match[3], 16):
        raise ShardDamaged("its checksum differs")
    try:
        tensors = dict(deserialize(file))  # type: ignore[no-untyped-call]
        offsets = np.frombuffer(tensors["offsets"]["data"], np.int64)
        data = np.frombuffer(tensors["records"]["data"], np.uint8)
    except (SafetensorError, *MALFORMED) as error:
        raise ShardDamaged(f"unreadable ({sanitize_for_log(error)})") from error
    # Overlapping records could multiply the memory of a small file.
    ascending = len(offsets) > 1 and (offsets[1:] > offsets[:-1]).all()
    if not ascending or (offsets[0], offsets[-1]) != (0, len(data)):
        raise ShardDamaged("offsets do not ascend from start to end")
    records: list[Record] = []
    invalid = 0
    for begin, end in pairwise(offsets.tolist()):
        try:
            record = decode(data[begin:end].copy().data)
            spec.check(record)
        except RecordError:
            invalid += 1
        else:
            records.append(record)
    return records, invalid


class ShardReader:
    """Reads one engine's shards in order.

    Attributes:
        next_shard: Number of the shard that :meth:`fetch` returns next.
        skipped: Counts of "removed" and "damaged" shards, and of "unfit" records.
    """

    def __init__(
        self, folder: EngineFolder, spec: RingSpec, next_shard: int = 1
    ) -> None:
        self._folder, self._spec = folder, spec
        self._listed: deque[tuple[str, int]] = deque()
        self.next_shard = next_shard
        self.skipped: Counter[str] = Counter()

    def fetch(self, last_shard: int) -> tuple[int, list[Record]] | None:
        """Return number and records of the next shard, None if there is none yet.

        A missing shard is skipped once a later one is listed, up to `last_shard`: the
        folder of a shared file system may be listed as it was a minute ago.
        """
        if self.next_shard > last_shard:
            return None
        if not self._listed:
            self._listed.extend(self._folder.shards().items())
        while self._listed:
            name, size = self._listed[0]
            number = shard_number(name)
            file = None
            if number >= self.next_shard and size <= MAX_SHARD_BYTES:
                path = self._folder.path(RECORDS, name)
                file = self._folder.store.read(path, MAX_SHARD_BYTES)
            self._listed.popleft()
            if number < self.next_shard or (file is None and size <= MAX_SHARD_BYTES):
                continue  # read before, or removed since the listing
            self.skipped["removed"] += number - self.next_shard
            self.next_shard = number + 1
            try:
                if file is None:
                    raise ShardDamaged(f"its size exceeds {MAX_SHARD_BYTES} bytes")
                records, invalid = read_shard(name, file, self._spec)
            except ShardDamaged as error:
                message = "engine %s: shard %d is skipped: %s"
                logger.warning(message, self._folder.engine_id, number, error)
                self.skipped["damaged"] += 1
            else:
                self.skipped["unfit"] += invalid
                return number, records
        return None


class ShardWriter:
    """Collects the records of one engine and writes them as shards.

    A shard that cannot be stored is retried. Meanwhile the relay reads no records: the
    ring fills up, and the engine drops and counts records.

    Attributes:
        last: Number of the newest shard; 0 if there was none.
    """

    def __init__(self, folder: EngineFolder) -> None:
        self._folder = folder
        self._open: list[np.ndarray] = []
        self._open_bytes = 0
        self._opened = self._created = 0.0  # monotonic and Unix time (s)
        self._closed: list[np.ndarray] = []  # the shard that is being stored
        self.last = 0

    @property
    def blocked(self) -> bool:
        """True if a shard waits for the storage; if so, add no records."""
        return bool(self._closed)

    def resume(self) -> None:
        """Continue after the shards of an earlier relay."""
        state = self._folder.read_state()
        numbers = map(shard_number, self._folder.shards())
        self.last = max([self.last, state.last_shard if state else 0, *numbers])

    def add(self, record: np.ndarray) -> None:
        """Add the bytes of a record, as returned by `RingReader.take`."""
        if not self._open:
            self._opened = time.monotonic()
        self._open.append(record)
        self._open_bytes += len(record)

    def due(self) -> bool:
        large = self._open_bytes >= SHARD_BYTES
        old = time.monotonic() - self._opened >= SHARD_SECONDS
        return self.blocked or (bool(self._open) and (large or old))

    def flush(self) -> int:
        """Store a shard of the usual size; return its size, 0 if there is no record.

        Raises:
            StoreError: The shard is retained; the next call stores the same file.
        """
        if not self._closed:
            if not self._open:
                return 0
            ends = np.cumsum([len(record) for record in self._open])
            count = int(np.searchsorted(ends, SHARD_BYTES)) + 1
            self._closed, self._created = self._open[:count], steady_unix()
            self._replace(self._open[count:])
        number = self.last + 1
        name, file = build_shard(self._closed, number, self._created)
        self._folder.store.write(self._folder.path(RECORDS, name), file)
        self._closed, self.last = [], number
        return len(file)

    def purge(self, tenant: int | None) -> int:
        """Drop the records of a tenant (None: all); return how many."""
        before = len(self._closed) + len(self._open)
        self._closed, opened = (
            [each for each in records if tenant not in (None, tenant_of(each))]
            for records in (self._closed, self._open)
        )
        self._replace(opened)
        return before - len(self._closed) - len(self._open)

    def _replace(self, records: list[np.ndarray]) -> None:
        self._open, self._open_bytes = records, sum(map(len, records))


class Bounds:
    """Limits on size and age of a spool, over the shards of all engines."""

    def __init__(self, folder: EngineFolder, config: SpoolConfig) -> None:
        self._folder = folder
        self._max_bytes = int(config.max_gib * (1 << 30))
        self._max_age_s = config.max_age_s
        self._num_bytes = 0
        self._next = 0.0
        self._heartbeats: dict[str, HeartbeatMonitor] = {}

    def note(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def due(self) -> bool:
        return self._num_bytes > self._max_bytes or time.monotonic() >= self._next

    def enforce(self) -> None:
        """Remove shards of this engine that are too old, then the oldest of all.

        Each relay judges the age of the shards it wrote, as clocks may differ by days.
        The folder of an engine without heartbeat for the maximum age is removed.
        """
        self._next = time.monotonic() + ENFORCE_S
        store, now = self._folder.store, steady_unix()
        shards: list[tuple[int, str, int, bool]] = []
        for folder in engine_folders(store):
            own = folder.engine_id == self._folder.engine_id
            if not own and self._is_dead(folder, now):
                folder.remove()
                continue
            folder.remove_unfinished(ABANDONED_S)
            for name, size in folder.shards().items():
                created = int(name.split("-")[1])
                too_old = own and created < now - self._max_age_s
                remove = too_old or size > MAX_SHARD_BYTES
                shards.append((created, folder.path(RECORDS, name), size, remove))
        shards.sort()
        total = sum(size for *_, size, remove in shards if not remove)
        limit = self._max_bytes
        if total > limit:
            limit = int(limit * _KEEP_SHARE)
        for _, path, size, remove in shards:
            if not remove and total > limit:
                remove, total = True, total - size
            if remove:
                store.remove(path)
        self._num_bytes = total

    def _is_dead(self, folder: EngineFolder, now: float) -> bool:
        monitor = self._heartbeats.setdefault(folder.engine_id, HeartbeatMonitor())
        state = folder.read_state()
        unix = state.unix if state is not None else 0.0
        monitor.observe(unix)
        return not monitor.fresh and unix < now - self._max_age_s


def purge_shards(folders: Iterable[EngineFolder], tenant: int | None) -> int:
    """Remove all shards with records of a tenant (None: all shards); return how many.

    A shard is removed with all its records. Temporary files are removed, too; a live
    writer writes them again.

    Raises:
        StoreError: Some shards could not be removed; all others were.
    """
    removed, failed = 0, list[str]()
    for folder in folders:
        folder.store.remove_unfinished(folder.path(RECORDS))
        for name in folder.shards():
            path = folder.path(RECORDS, name)
            tenants = None if tenant is None else _tenants(folder, path)
            if tenants is None or tenant in tenants:
                failed += folder.store.remove(path)
                removed += 1
    if failed:
        raise StoreError(
            f"{len(failed)} of {removed} shards could not be removed, among them "
            f"{failed[0]}: remove them manually and purge again"
        )
    return removed


def _tenants(folder: EngineFolder, path: str) -> set[int] | None:
    """Return the tenants of a shard, from its header; None if it is not readable."""
    start = folder.store.read_start(path, _HEADER_BYTES)
    end = 8 + min(int.from_bytes(start[:8], "little"), MAX_JSON_BYTES)
    if end > _HEADER_BYTES:
        start = folder.store.read_start(path, end)
    try:
        text = json.loads(start[8:end])["__metadata__"]["tenants"]
        return {int(tenant, 16) for tenant in text.split(",")}
    except MALFORMED:
        return None
