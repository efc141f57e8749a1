"""The signal ring: records of live traffic from one engine to one trainer.

Written by the worker (``RingWriter``: one producer, one writing thread at a time), read
by the sidecar (``RingReader``: one consumer). When the ring is full, the newest record
is dropped and counted. Each side stores its own cursor and checks the bounds of the
other's. If the other cursor is out of bounds, the writer drops records and the reader
continues at the write position; both count it.

Frames start at multiples of 64 bytes and never wrap: a pad frame fills the end of the
ring when the next record does not fit there. A frame contains its absolute position, so
stale bytes of an earlier pass are never read as a record. ``csrc/ring.cpp`` writes it.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from vllm_tide import _shm
from vllm_tide.transport.process import heartbeat_is_fresh
from vllm_tide.transport.record import (
    FORMAT_VERSION,
    Frames,
    Record,
    RecordError,
    RingSpec,
    Status,
    decode,
)
from vllm_tide.transport.shm import (
    DATA_AT,
    LINE_BYTES,
    Segment,
    TransportError,
    peek,
)

MAGIC = b"VTIDERNG"


class Atomic(IntEnum):
    """Indices of atomics; the consumer stores TAIL and later, the producer others."""

    HEAD = 0
    WRITTEN_RECORDS = 2
    WRITTEN_ROWS = 3
    DROPPED_RECORDS = 4
    DROPPED_ROWS = 5
    TAIL = 6
    CORRUPT = 7
    CONSUMER = 8
    """Its pid, for messages: a lock decides whether there is one."""
    CONSUMER_BEAT = 9
    COLLECT = 10
    """A `Collect`; any other value means NOTHING."""


class Collect(IntEnum):
    """Rows of live traffic that the consumer requests."""

    NOTHING = 0
    FULL = 1
    METADATA = 2
    """Records of token ids and counts, without rows."""


@dataclass(frozen=True)
class RingStats:
    """Counters of one ring since it was created.

    ``corrupt_records`` counts damaged positions that the consumer skipped.
    ``consumer_alive``: the consumer is alive, with a heartbeat younger than 10 s.
    """

    capacity_bytes: int
    used_bytes: int
    written_records: int
    written_rows: int
    dropped_records: int
    dropped_rows: int
    corrupt_records: int
    consumer_alive: bool


def _stats(load: Callable[[int], int], capacity: int, claimed: bool) -> RingStats:
    """Return the counters of a ring from its atomics."""
    return RingStats(
        capacity,
        min(max(load(Atomic.HEAD) - load(Atomic.TAIL), 0), capacity),
        load(Atomic.WRITTEN_RECORDS),
        load(Atomic.WRITTEN_ROWS),
        load(Atomic.DROPPED_RECORDS),
        load(Atomic.DROPPED_ROWS),
        load(Atomic.CORRUPT),
        claimed and heartbeat_is_fresh(load(Atomic.CONSUMER_BEAT)),
    )


MAX_RECORD_BYTES = 1 << 26
"""A longer record is split; a shard of a spool can hold one (`spool_shard`)."""
# magic, kind, position (bytes since creation), length of the frame, length of the
# body, CRC of the body, CRC of the first 60 bytes
_FRAME = struct.Struct("<IHxxQQQI24xI")
_FRAME_MAGIC = 0x45444954  # "TIDE"
FRAME_BYTES = _FRAME.size
RECORD, PAD = 1, 2


class Frame(NamedTuple):
    """A valid frame: kind, length (bytes), length and CRC of its body."""

    kind: int
    length: int
    body: int
    crc: int


def pack_frame(
    kind: int, position: int, length: int, body: int = 0, crc: int = 0
) -> bytes:
    """Return the 64 bytes that precede a body."""
    fields = _FRAME.pack(_FRAME_MAGIC, kind, position, length, body, crc, 0)[:-4]
    return fields + _shm.crc32c(fields).to_bytes(4, "little")


def frame_at(buf: memoryview, capacity: int, position: int, head: int) -> Frame | None:
    """Return the frame at `position`; None if it is invalid or incomplete."""
    offset = position % capacity
    start = DATA_AT + offset
    raw = bytes(buf[start : start + FRAME_BYTES])
    magic, kind, at, length, body, crc, check = _FRAME.unpack(raw)
    valid = (
        magic == _FRAME_MAGIC
        and check == _shm.crc32c(raw[:-4])
        and at == position
        and kind in (RECORD, PAD)
        and length % LINE_BYTES == 0
        and FRAME_BYTES <= length <= min(head - position, capacity - offset)
        and body <= length - FRAME_BYTES
        and body % 8 == 0
    )
    return Frame(kind, length, body, crc) if valid else None


# Exceptions that writing arrays of unexpected types can raise.
_INVALID = (TypeError, ValueError, AttributeError, BufferError)


class RingWriter:
    """The engine's side. No method blocks or raises after :meth:`create`.

    `write` and `count` are each called by one thread, not necessarily the same. All
    other methods are thread-safe.
    """

    def __init__(self, segment: Segment, spec: RingSpec) -> None:
        self.spec = spec
        self.name = segment.name
        self.drops: Counter[str] = Counter()
        """Dropped records by reason: full, too_large, invalid, cursor, truncated,
        closed."""
        self.dropped_rows: Counter[str] = Counter()
        """Rows of dropped records, by the same reasons."""
        self._segment = segment
        self.capacity = segment.header.size_bytes - DATA_AT
        """Bytes available for frames."""
        most = min(self.capacity // 16, MAX_RECORD_BYTES)
        self.max_rows = max(most // spec.row_bytes, 1)
        """Maximum rows of a record; longer ones are split, so that many fit at once."""
        # Write position and last valid tail; `write_frames` advances them.
        self._end = np.zeros(2, np.uint64)
        self._disabled = ""
        self._written_records = self._written_rows = 0
        # Collect training rows before the first consumer attaches.
        segment.store(Atomic.COLLECT, Collect.FULL)

    @classmethod
    def create(cls, spec: RingSpec, capacity_bytes: int) -> RingWriter:
        """Create a ring, unlinked by :meth:`close` or at exit.

        Raises:
            TransportError: The memory cannot be allocated.
        """
        capacity = max(-(-capacity_bytes // LINE_BYTES), 1) * LINE_BYTES
        fields = asdict(spec)
        segment = Segment.create("ring", MAGIC, FORMAT_VERSION, fields, capacity)
        return cls(segment, spec)

    def write(self, frames: Frames) -> None:
        """Append records and set their status; :meth:`count` updates the counters."""
        if reason := self._unusable():
            frames.refuse(Status[reason.upper()])
            return
        segment, spans, status = self._segment, frames.spans, frames.status
        metas, follows = frames.metas, frames.follows
        try:
            _shm.write_frames(
                segment.buf, segment.fd, self._end,
                metas, spans, follows, status, frames.sources,
            )  # fmt: skip
        except _INVALID:
            frames.refuse(Status.CLOSED if segment.closed else Status.INVALID)
        if (status == Status.TRUNCATED).any():
            self._disabled = "closed" if segment.closed else "truncated"

    def count(self, frames: Frames) -> int:
        """Update the counters by status; return the number of rows written."""
        rows, status, written = frames.metas["rows"], frames.status, 0
        if not status.any():
            written = int(rows.sum())
            self._count("", len(rows), written)
            return written
        for code in np.unique(status).tolist():
            matching = rows[status == code]
            if code == Status.WRITTEN:
                written = int(matching.sum())
            if code != Status.SKIPPED:
                reason = Status(code).name.lower() if code else ""
                self._count(reason, len(matching), int(matching.sum()))
        return written

    def level(self) -> tuple[int, int]:
        """Return the bytes written and the bytes consumed since creation."""
        last = int(self._end[1])  # last valid value, used if the new one is invalid
        # ValueError: another thread closed the ring between the check and the load.
        with contextlib.suppress(ValueError):
            if not self._unusable():
                tail = self._segment.load(Atomic.TAIL)
                if last <= tail <= self._head:
                    last = tail
        return self._head, last

    @property
    def lost(self) -> bool:
        """True if the ring was truncated or unlinked, so that no process can attach."""
        return self._unusable() == "truncated" or self._segment.lost()

    @property
    def intact(self) -> bool:
        """True if the ring can be written."""
        return not self._unusable()

    @property
    def collect_mode(self) -> Collect:
        """Rows that the consumer requests; METADATA if the ring is unusable."""
        try:
            if self._unusable():
                return Collect.METADATA
            value = self._segment.load(Atomic.COLLECT)
        except ValueError:  # as in level
            return Collect.METADATA
        return Collect(value) if value in (1, 2) else Collect.NOTHING

    @property
    def collect(self) -> bool:
        """True if the consumer requests full rows."""
        return self.collect_mode is Collect.FULL

    def stats(self) -> RingStats:
        """Return the current counters. Tests a lock: do not call it in every step."""
        with contextlib.suppress(ValueError):  # as in level
            if not self._unusable():
                segment = self._segment
                return _stats(segment.load, self.capacity, segment.claimed())
        return RingStats(
            self.capacity,
            0,
            self._written_records,
            self._written_rows,
            self.drops.total(),
            self.dropped_rows.total(),
            0,
            False,
        )

    def unlink(self) -> None:
        """Unlink the segment; see :meth:`Segment.unlink`."""
        self._segment.unlink()

    def close(self) -> None:
        """Unmap and unlink. Idempotent; later records are dropped and counted."""
        self._segment.close()

    @property
    def _head(self) -> int:
        return int(self._end[0])

    def _unusable(self) -> str:
        """Return why the memory must not be accessed; empty if it may."""
        if not self._disabled and not self._segment.intact():
            self._disabled = "closed" if self._segment.closed else "truncated"
        return self._disabled

    def _count(self, reason: str, records: int, rows: int) -> None:
        """Count written records, or dropped ones if there is a reason."""
        if reason:
            self.drops[reason] += records
            self.dropped_rows[reason] += rows
            rows = self.dropped_rows.total()
            self._mirror(Atomic.DROPPED_RECORDS, self.drops.total(), rows)
        else:
            self._written_records += records
            self._written_rows += rows
            records, rows = self._written_records, self._written_rows
            self._mirror(Atomic.WRITTEN_RECORDS, records, rows)

    def _mirror(self, index: int, records: int, rows: int) -> None:
        # `_unusable` has just checked the mapping, or the ring is disabled.
        try:
            if not self._disabled and not self._segment.closed:
                self._segment.store(index, records)
                self._segment.store(index + 1, rows)
        except ValueError:  # as in level; suppress() costs 0.5 us more
            self._disabled = "closed"


def _load_zero(_index: int) -> int:
    """Return 0 for each atomic of a ring that cannot be read."""
    return 0


_BLANK = memoryview(bytes(1 << 16))


class RingReader:
    """The trainer's side. No method raises after :meth:`attach`."""

    def __init__(self, segment: Segment, spec: RingSpec) -> None:
        self.spec = spec
        self.name = segment.name
        self._segment = segment
        self.capacity = segment.header.size_bytes - DATA_AT
        self._corrupt = segment.load(Atomic.CORRUPT)
        self._tail = segment.load(Atomic.TAIL)
        self.heartbeat()
        # A pause stays in effect until `set_collect`.
        paused = segment.load(Atomic.COLLECT) == Collect.NOTHING
        self.set_collect(Collect.NOTHING if paused else Collect.FULL)

    @classmethod
    def attach(cls, name: str) -> RingReader:
        """Become the consumer of a ring; continue where the previous one stopped.

        It requests full rows until :meth:`set_collect`, or no rows if the previous
        consumer had paused.

        Raises:
            TransportError: The ring is missing, damaged, of another user or version, or
                has a live consumer.
        """
        segment = Segment.attach(name, MAGIC, FORMAT_VERSION)
        try:
            spec = RingSpec.from_fields(segment.header.spec)
            capacity = segment.header.size_bytes - DATA_AT
            if capacity < LINE_BYTES or capacity % LINE_BYTES:
                raise ValueError(f"{capacity} bytes, no positive multiple of 64")
            segment.claim(Atomic.CONSUMER, "reader")
        except (ValueError, TypeError, KeyError) as error:
            segment.close()
            raise TransportError(f"segment {name} is not a ring: {error}") from error
        except TransportError:
            segment.close()
            raise
        return cls(segment, spec)

    def read(self) -> Record | None:
        """Remove and return the next record; None if the ring is empty.

        Its arrays are private copies. Damaged bytes are skipped and counted.
        """
        while (body := self.take()) is not None:
            try:
                record = decode(body.data)
                self.spec.check(record)
                return record
            except RecordError:
                self._count_corrupt()
        return None

    def take(self) -> np.ndarray | None:
        """Remove and return the bytes of the next record, a private copy.

        Their checksum has been verified, their content has not.
        """
        if not self._segment.intact():
            return None
        head = self._segment.load(Atomic.HEAD) // LINE_BYTES * LINE_BYTES
        if not 0 <= head - self._tail <= self.capacity:
            self._count_corrupt()  # no byte between the two can be trusted
            self._tail = head
        body = None
        while body is None and self._tail < head:
            body = self._take(head)
        self._segment.store(Atomic.TAIL, self._tail)
        return body

    def heartbeat(self) -> None:
        """Store the trainer's heartbeat."""
        if self._segment.intact():
            self._segment.store(Atomic.CONSUMER_BEAT, time.monotonic_ns())

    def set_collect(self, mode: Collect) -> None:
        """Request full rows, metadata-only records, or no records from the engine.

        Takes effect in the engine's next step and stays after this consumer exits.
        Records already in the ring are not changed.
        """
        if self._segment.intact():
            self._segment.store(Atomic.COLLECT, int(mode))

    @property
    def intact(self) -> bool:
        """True if the ring still has its full size."""
        return self._segment.intact()

    def producer_alive(self) -> bool:
        """Return whether the engine that created the ring is alive."""
        return self._segment.owner_alive()

    def stats(self) -> RingStats:
        """Return the current counters; the engine's are those that it stored last."""
        intact = self._segment.intact()
        load = self._segment.load if intact else _load_zero
        return _stats(load, self.capacity, intact)

    def close(self) -> None:
        """Release the claim and unmap. Idempotent."""
        self._segment.close()

    def _count_corrupt(self) -> None:
        # The initial value was read from shared memory and may be any u64.
        self._corrupt = (self._corrupt + 1) % 2**64
        self._segment.store(Atomic.CORRUPT, self._corrupt)

    def _take(self, head: int) -> np.ndarray | None:
        """Advance past the frame at the tail; return its body if it is valid."""
        buf, capacity = self._segment.buf, self.capacity
        frame = frame_at(buf, capacity, self._tail, head)
        if frame is None:
            self._count_corrupt()
            self._blank(self._tail, head)
            self._tail = head
            return None
        begin, start = self._tail, DATA_AT + self._tail % capacity + FRAME_BYTES
        self._tail = begin + frame.length
        if frame.kind == PAD:
            self._blank(begin + FRAME_BYTES, self._tail)  # may have been a record
            return None
        # Verify a private copy: the shared memory may change at any time.
        copy = np.empty(frame.body, np.uint8)
        crc = _shm.gather(copy, 0, (buf[start : start + frame.body],))
        # Store a pad first: after a kill the next consumer finds a valid frame here.
        buf[start - FRAME_BYTES : start] = pack_frame(PAD, begin, frame.length)
        self._blank(begin + FRAME_BYTES, self._tail)
        if crc == frame.crc:
            return copy
        self._count_corrupt()
        return None

    def _blank(self, begin: int, end: int) -> None:
        """Zero the bytes of consumed frames between two positions."""
        while begin < end:
            offset = begin % self.capacity
            size = min(end - begin, self.capacity - offset, len(_BLANK))
            start = DATA_AT + offset
            self._segment.buf[start : start + size] = _BLANK[:size]
            begin += size


def ring_consumer(name: str) -> int | None:
    """Return the pid of the live process that reads a ring; None if there is none.

    The pid is of another pid namespace if the process is in another container.
    """
    ring = peek(name, MAGIC)
    return ring.load(Atomic.CONSUMER) if ring is not None and ring.claimed else None


def peek_ring(name: str) -> RingStats | None:
    """Return a ring's counters; None if it is missing, damaged or of another user."""
    ring = peek(name, MAGIC)
    if ring is None:
        return None
    return _stats(ring.load, ring.header.size_bytes - DATA_AT, ring.claimed)
