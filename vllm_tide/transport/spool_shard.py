"""A shard of a spool: encoded records in one safetensors file, and its reader.

Two tensors: ``records``, the bytes of all records one after another, and ``offsets``
(int64 [n + 1]), where each begins. Any safetensors reader opens it. A record's bytes
are those of the ring, so nothing is converted, nor looked at, on the way.
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
from vllm_tide.transport.shm import MALFORMED, said
from vllm_tide.transport.spool import EngineFolder, EngineState
from vllm_tide.transport.tenant import NOBODY

logger = logging.getLogger("vllm_tide.spool")

RECORDS = "records"
MAX_SHARD_BYTES = 1 << 28
"""A larger file is no shard; ours have 16 MiB and one record (`ring.MAX_RECORD_BYTES`).
"""
# Names are read from manifests and listings: they may say anything.
SHARD_FILE = re.compile(r"([0-9]{12})(?:-([0-9]{1,20}))?\.(json|safetensors)")
# A shared file system may show the state before the shard: look again a few times.
_ATTEMPTS = 3


class ShardDamaged(ValueError):  # noqa: N818 - says what it is
    """A shard's bytes are not what its manifest says; one sentence says how."""


class ShardBuilder:
    """Collects records for one shard."""

    def __init__(self) -> None:
        self._held: list[tuple[np.ndarray, int, int]] = []  # bytes, rows, tenant
        self.num_bytes = 0
        self.began = time.monotonic()

    @property
    def num_records(self) -> int:
        return len(self._held)

    def add(self, body: np.ndarray) -> None:
        """Take a record's bytes, as `RingReader.take` gives them."""
        if not self._held:
            self.began = time.monotonic()
        about = np.frombuffer(body, META, 1)[0]
        self._held.append((body, int(about["rows"]), int(about["tenant"])))
        self.num_bytes += len(body)

    def drop(self, tenant: int | None) -> int:
        """Forget the records of a tenant, or with None all of them; how many."""
        before = self.num_records
        self._hold([h for h in self._held if tenant is not None and h[2] != tenant])
        return before - self.num_records

    def split(self, most: int) -> ShardBuilder:
        """Take the first records out, until they have `most` bytes."""
        ends = np.cumsum([len(body) for body, *_ in self._held])
        first, count = ShardBuilder(), int(np.searchsorted(ends, most)) + 1
        first._hold(self._held[:count])
        self._hold(self._held[count:])
        return first

    def _hold(self, held: list[tuple[np.ndarray, int, int]]) -> None:
        self._held = held
        self.num_bytes = sum(len(body) for body, *_ in held)

    def build(self, number: int, created_unix: float) -> tuple[dict[str, Any], bytes]:
        """The shard's manifest, and its file.

        The manifest names the tenants (as the numbers records carry) so that one can
        be purged without reading the shards.
        """
        bodies = [body for body, *_ in self._held]
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
            "rows": sum(rows for _, rows, _ in self._held),
            "created_unix": created_unix,
            "tenants": sorted({tenant for *_, tenant in self._held} - {NOBODY}),
        }
        return manifest, file


def read_shard(
    manifest: dict[str, Any], body: bytes, spec: RingSpec
) -> tuple[list[Record], int]:
    """Verify a shard and decode its records; also how many did not fit the spec.

    Each has bytes of its own, so a record that is kept does not keep the shard.

    Raises:
        ShardDamaged: If it is not what the manifest says.
    """
    try:
        if manifest["record_format"] != FORMAT_VERSION:
            raise ShardDamaged(
                f"its records have format {said(manifest['record_format'])}, this "
                f"process speaks {FORMAT_VERSION}: run the same vllm_tide on both sides"
            )
        if (len(body), _shm.crc32c(body)) != (manifest["bytes"], manifest["crc32c"]):
            raise ShardDamaged("its bytes are not those that its manifest describes")
        found = dict(deserialize(body))  # type: ignore[no-untyped-call]
        offsets = np.frombuffer(found["offsets"]["data"], np.int64)
        data = np.frombuffer(found["records"]["data"], np.uint8)
        # Else a few bytes could be copied out again and again.
        rise = len(offsets) > 1 and (offsets[1:] > offsets[:-1]).all()
        if not rise or (offsets[0], offsets[-1]) != (0, len(data)):
            raise ShardDamaged("its offsets do not rise from its start to its end")
    except (SafetensorError, *MALFORMED) as error:
        if isinstance(error, ShardDamaged):
            raise
        raise ShardDamaged(f"it cannot be read ({said(error)})") from error
    records: list[Record] = []
    unfit = 0
    for begin, end in pairwise(offsets.tolist()):
        try:
            record = decode(data[begin:end].copy().data)
            spec.check(record)
        except RecordError:
            unfit += 1
        else:
            records.append(record)
    return records, unfit


@dataclass(frozen=True)
class Shard:
    """A shard as it was read: its number and its records."""

    number: int
    records: list[Record]


class SpoolReader:
    """Reads one engine's shards.

    Attributes:
        next_shard: Number of the shard that :meth:`fetch` gives next.
        skipped: Shards passed over: "removed" and "damaged"; "unfit" counts records.
    """

    def __init__(
        self, folder: EngineFolder, spec: RingSpec, next_shard: int = 1
    ) -> None:
        self._folder, self._spec = folder, spec
        self.next_shard = next_shard
        self.skipped: Counter[str] = Counter()
        self._failed = 0

    def fetch(self, state: EngineState) -> Shard | None:
        """The next shard by the state read last; None if there is none now."""
        if self.next_shard < state.first_shard:
            self._skip_to(min(state.first_shard, state.last_shard + 1))
        if self.next_shard > state.last_shard:
            return None
        number = self.next_shard
        manifest = self._folder.read_json(manifest_name(number)) or {}
        file, body, damage = str(manifest.get("file")), None, ""
        told = manifest.get("bytes")
        if type(told) is int and told > MAX_SHARD_BYTES:
            damage = f"it has {said(told)} bytes, and {MAX_SHARD_BYTES} are the most"
        elif shard_number(file) == number:
            body = self._folder.read_sized(f"{RECORDS}/{file}", told)
        if body is None:
            self._failure(damage, state)
            return None
        try:
            records, unfit = read_shard(manifest, body, self._spec)
        except ShardDamaged as error:
            self._failure(str(error), state)
            return None
        self._failed = 0
        self.skipped["unfit"] += unfit
        self.next_shard = number + 1
        return Shard(number, records)

    def _failure(self, damage: str, state: EngineState) -> None:
        self._failed += 1
        if self._failed < _ATTEMPTS:
            return
        self._failed = 0
        if damage:
            logger.warning(
                "engine %s: shard %d is passed over: %s",
                self._folder.engine_id,
                self.next_shard,
                damage,
            )
            self.skipped["damaged"] += 1
            self.next_shard += 1
            return
        # Removed meanwhile, and perhaps many more with it: one look at what is left.
        names = self._folder.store.sizes(self._folder.path(RECORDS))
        left = [
            number
            for name in names
            if name.endswith(".json")
            and (number := shard_number(name)) > self.next_shard
        ]
        self._skip_to(min(left, default=state.last_shard + 1))

    def _skip_to(self, number: int) -> None:
        self.skipped["removed"] += max(number - self.next_shard, 0)
        self.next_shard = max(number, self.next_shard)


def manifest_name(number: int) -> str:
    return f"{RECORDS}/{number:012d}.json"


def shard_number(name: str) -> int:
    """Number of the shard a file belongs to; 0 if it is no shard's file."""
    known = SHARD_FILE.fullmatch(name)
    return int(known[1]) if known else 0
