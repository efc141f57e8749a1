"""A shard of a spool: encoded records in one safetensors file, and its reader.

Two tensors: ``records``, the concatenated bytes of all records, and ``offsets`` (int64
[n + 1]), where each record starts. Any safetensors reader can open it. The bytes of a
record are those of the ring: they are neither converted nor decoded by the relay.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, serialize

from vllm_tide import _shm
from vllm_tide.transport.publication import tensor_spec
from vllm_tide.transport.record import (
    FORMAT_VERSION,
    META,
    Record,
    RecordError,
    RingSpec,
    decode,
)
from vllm_tide.transport.shm import MALFORMED, sanitize_for_log
from vllm_tide.transport.spool import EngineFolder, EngineState
from vllm_tide.transport.tenant import NO_TENANT

logger = logging.getLogger("vllm_tide.spool")

RECORDS = "records"
MAX_SHARD_BYTES = 1 << 28
"""Maximum size of a shard; normally 16 MiB and one record (`ring.MAX_RECORD_BYTES`)."""
# Names in manifests and listings are not validated otherwise.
SHARD_FILE = re.compile(r"([0-9]{12})(?:-([0-9]{1,20}))?\.(json|safetensors)")
# A shared file system may show the state before the shard: retry a few times.
_ATTEMPTS = 3


class ShardDamaged(ValueError):
    """A shard does not match its manifest; the message describes the difference."""


class ShardBuilder:
    """Collects records for one shard."""

    def __init__(self) -> None:
        self._records: list[tuple[np.ndarray, int, int]] = []  # bytes, rows, tenant
        self.num_bytes = 0
        self.started = time.monotonic()

    @property
    def num_records(self) -> int:
        return len(self._records)

    def add(self, body: np.ndarray) -> None:
        """Add the bytes of a record, as returned by `RingReader.take`."""
        if not self._records:
            self.started = time.monotonic()
        about = np.frombuffer(body, META, 1)[0]
        self._records.append((body, int(about["rows"]), int(about["tenant"])))
        self.num_bytes += len(body)

    def drop(self, tenant: int | None) -> int:
        """Drop the records of a tenant (None: all records); return how many."""
        before = self.num_records
        self._replace([r for r in self._records if tenant not in (None, r[2])])
        return before - self.num_records

    def split(self, num_bytes: int) -> ShardBuilder:
        """Remove and return the first records, until they have `num_bytes`."""
        ends = np.cumsum([len(body) for body, *_ in self._records])
        first, count = ShardBuilder(), int(np.searchsorted(ends, num_bytes)) + 1
        first._replace(self._records[:count])
        self._replace(self._records[count:])
        return first

    def _replace(self, records: list[tuple[np.ndarray, int, int]]) -> None:
        self._records = records
        self.num_bytes = sum(len(body) for body, *_ in records)

    def build(self, number: int, created_unix: float) -> tuple[dict[str, Any], bytes]:
        """Return the shard's manifest and its file.

        The manifest lists the tenant ids, so that a purge need not read the shards.
        """
        bodies = [body for body, *_ in self._records]
        offsets = np.cumsum([0, *map(len, bodies)], dtype=np.int64)
        records = np.concatenate(bodies)
        tensors = {
            "offsets": tensor_spec("int64", [len(offsets)], offsets),
            "records": tensor_spec("uint8", [len(records)], records),
        }
        file = bytes(serialize(tensors, {"format": "vllm_tide records"}))
        manifest = {
            "shard": number,
            "file": f"{number:012d}-{int(created_unix)}.safetensors",
            "record_format": FORMAT_VERSION,
            "bytes": len(file),
            "crc32c": _shm.crc32c(file),
            "records": len(bodies),
            "rows": sum(rows for _, rows, _ in self._records),
            "created_unix": created_unix,
            "tenants": sorted({tenant for *_, tenant in self._records} - {NO_TENANT}),
        }
        return manifest, file


def read_shard(
    manifest: dict[str, Any], body: bytes, spec: RingSpec
) -> tuple[list[Record], int]:
    """Verify and decode a shard; return records and the number of invalid ones.

    Each record is a separate copy, so that it does not keep the shard in memory.

    Raises:
        ShardDamaged: The shard does not match its manifest.
    """
    try:
        if manifest["record_format"] != FORMAT_VERSION:
            raise ShardDamaged(
                f"record format {sanitize_for_log(manifest['record_format'])}, not "
                f"{FORMAT_VERSION}: run the same vllm_tide on both sides"
            )
        if (len(body), _shm.crc32c(body)) != (manifest["bytes"], manifest["crc32c"]):
            raise ShardDamaged("size or checksum differ from the manifest")
        tensors = dict(deserialize(body))  # type: ignore[no-untyped-call]
        offsets = np.frombuffer(tensors["offsets"]["data"], np.int64)
        data = np.frombuffer(tensors["records"]["data"], np.uint8)
        # Overlapping records could multiply the memory of a small file.
        ascending = len(offsets) > 1 and (offsets[1:] > offsets[:-1]).all()
        if not ascending or (offsets[0], offsets[-1]) != (0, len(data)):
            raise ShardDamaged("offsets do not ascend from start to end")
    except (SafetensorError, *MALFORMED) as error:
        if isinstance(error, ShardDamaged):
            raise
        raise ShardDamaged(f"unreadable ({sanitize_for_log(error)})") from error
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


@dataclass(frozen=True)
class Shard:
    """Number and records of a shard."""

    number: int
    records: list[Record]


class SpoolReader:
    """Reads one engine's shards.

    Attributes:
        next_shard: Number of the shard that :meth:`fetch` returns next.
        skipped: Counts of "removed" and "damaged" shards, and of "unfit" records.
    """

    def __init__(
        self, folder: EngineFolder, spec: RingSpec, next_shard: int = 1
    ) -> None:
        self._folder, self._spec = folder, spec
        self.next_shard = next_shard
        self.skipped: Counter[str] = Counter()
        self._failed = 0

    def fetch(self, state: EngineState) -> Shard | None:
        """Read the next shard; None if `state` has none or it is unreadable."""
        if self.next_shard < state.first_shard:
            self._skip_to(min(state.first_shard, state.last_shard + 1))
        if self.next_shard > state.last_shard:
            return None
        number = self.next_shard
        manifest = self._folder.read_json(manifest_name(number)) or {}
        file, body, damage = str(manifest.get("file")), None, ""
        size = manifest.get("bytes")
        if type(size) is int and size > MAX_SHARD_BYTES:
            damage = f"size {sanitize_for_log(size)} exceeds {MAX_SHARD_BYTES} bytes"
        elif shard_number(file) == number:
            body = self._folder.read_sized(f"{RECORDS}/{file}", size)
        if body is None:
            self._failure(damage, state)
            return None
        try:
            records, invalid = read_shard(manifest, body, self._spec)
        except ShardDamaged as error:
            self._failure(str(error), state)
            return None
        self._failed = 0
        self.skipped["unfit"] += invalid
        self.next_shard = number + 1
        return Shard(number, records)

    def _failure(self, damage: str, state: EngineState) -> None:
        self._failed += 1
        if self._failed < _ATTEMPTS:
            return
        self._failed = 0
        if damage:
            logger.warning(
                "engine %s: shard %d is skipped: %s",
                self._folder.engine_id,
                self.next_shard,
                damage,
            )
            self.skipped["damaged"] += 1
            self.next_shard += 1
            return
        # It was removed, possibly with many others: list the remaining shards.
        names = self._folder.store.sizes(self._folder.path(RECORDS))
        remaining = [
            number
            for name in names
            if name.endswith(".json")
            and (number := shard_number(name)) > self.next_shard
        ]
        self._skip_to(min(remaining, default=state.last_shard + 1))

    def _skip_to(self, number: int) -> None:
        self.skipped["removed"] += max(number - self.next_shard, 0)
        self.next_shard = max(number, self.next_shard)


def manifest_name(number: int) -> str:
    return f"{RECORDS}/{number:012d}.json"


def shard_number(name: str) -> int:
    """Return the shard number in a file name; 0 for other files."""
    match = SHARD_FILE.fullmatch(name)
    return int(match[1]) if match else 0
