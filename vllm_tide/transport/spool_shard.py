"""A shard of a spool: encoded records in one safetensors file.

Two tensors: ``records``, the bytes of all records one after another, and ``offsets``
(int64 [n + 1]), where each begins. Any safetensors reader opens it. A record's bytes
are those of the ring (``record.encode``), so nothing is converted on the way.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from vllm_tide import _shm
from vllm_tide.transport.header import said
from vllm_tide.transport.record import (
    FORMAT_VERSION,
    Record,
    RecordError,
    decode,
    encode,
)
from vllm_tide.transport.ring_format import RingSpec
from vllm_tide.transport.spool import MALFORMED
from vllm_tide.transport.tenant import NOBODY

_ALIGN = 8


class ShardDamaged(ValueError):  # noqa: N818 - says what it is
    """A shard's bytes are not what its manifest says; one sentence says how."""


class ShardBuilder:
    """Collects records for one shard."""

    def __init__(self, spec: RingSpec) -> None:
        self._spec = spec
        self._bodies: list[np.ndarray] = []
        self._rows: list[int] = []
        self._tenants: list[int] = []
        self.num_bytes = 0
        self.num_rows = 0
        self.began = time.monotonic()

    @property
    def num_records(self) -> int:
        """Records collected."""
        return len(self._bodies)

    def add(self, record: Record) -> None:
        """Copy a record; RecordError if it contradicts itself or the spec."""
        self._spec.check(record)
        parts, size = encode(record, self._spec.feature_dtype)
        body = np.empty(size, np.uint8)
        _shm.gather(body, 0, parts)
        if not self._bodies:
            self.began = time.monotonic()
        self._bodies.append(body)
        self._rows.append(record.num_rows)
        self._tenants.append(record.tenant)
        self.num_bytes += size
        self.num_rows += record.num_rows

    def drop(self, tenant: int | None) -> int:
        """Forget the records of a tenant, or with None all of them; how many."""
        before = self.num_records
        kept = [
            index
            for index, owner in enumerate(self._tenants)
            if tenant is not None and owner != tenant
        ]
        self._bodies = [self._bodies[index] for index in kept]
        self._rows = [self._rows[index] for index in kept]
        self._tenants = [self._tenants[index] for index in kept]
        self.num_bytes = sum(len(body) for body in self._bodies)
        self.num_rows = sum(self._rows)
        return before - len(kept)

    def build(
        self, number: int, created_unix: float
    ) -> tuple[dict[str, Any], list[bytes | np.ndarray]]:
        """The shard's manifest, and the parts of its file.

        The manifest names the tenants (as the numbers records carry) so that one can
        be purged without reading the shards.
        """
        offsets = np.zeros(len(self._bodies) + 1, np.int64)
        np.cumsum([len(body) for body in self._bodies], out=offsets[1:])
        total = int(offsets[-1])
        header = json.dumps(
            {
                "__metadata__": {"format": "vllm_tide records"},
                "offsets": {
                    "dtype": "I64",
                    "shape": [len(offsets)],
                    "data_offsets": [0, offsets.nbytes],
                },
                "records": {
                    "dtype": "U8",
                    "shape": [total],
                    "data_offsets": [offsets.nbytes, offsets.nbytes + total],
                },
            },
            separators=(",", ":"),
        ).encode()
        header = header.ljust(-(-len(header) // _ALIGN) * _ALIGN)
        prefix = len(header).to_bytes(8, "little") + header
        parts: list[bytes | np.ndarray] = [prefix, offsets.view(np.uint8)]
        parts += self._bodies
        crc = 0
        for part in parts:
            crc = _shm.crc32c(part, crc)
        manifest = {
            "shard": number,
            "file": f"{number:012d}-{int(created_unix)}.safetensors",
            "record_format": FORMAT_VERSION,
            "bytes": sum(len(part) for part in parts),
            "crc32c": crc,
            "records": len(self._bodies),
            "rows": self.num_rows,
            "created_unix": created_unix,
            "tenants": sorted(set(self._tenants) - {NOBODY}),
        }
        return manifest, parts


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
        if len(body) != manifest["bytes"]:
            raise ShardDamaged(
                f"it has {len(body)} bytes, its manifest says {said(manifest['bytes'])}"
            )
        if _shm.crc32c(body) != manifest["crc32c"]:
            raise ShardDamaged("its checksum is wrong")
        offsets, data = _tensors(body)
        if len(offsets) != manifest["records"] + 1 or np.any(
            offsets[1:] < offsets[:-1]  # a difference could overflow
        ):
            raise ShardDamaged("its offsets do not rise")
    except ShardDamaged:
        raise
    except MALFORMED as error:
        raise ShardDamaged(f"it cannot be read ({said(error)})") from error
    records: list[Record] = []
    unfit = 0
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        try:
            record = decode(data[begin:end].copy().data)
            spec.check(record)
        except RecordError:
            unfit += 1
        else:
            records.append(record)
    return records, unfit


def _tensors(body: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (int64) and records (uint8) as views of a safetensors file."""
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    data = np.frombuffer(body, np.uint8)[8 + length :]
    begin, end = header["offsets"]["data_offsets"]
    offsets = data[begin:end].copy().view(np.int64)
    begin, end = header["records"]["data_offsets"]
    records = data[begin:end]
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(records):
        raise ShardDamaged("its offsets do not cover its records")
    return offsets, records
