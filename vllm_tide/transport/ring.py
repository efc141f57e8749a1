"""The signal ring: records of live traffic from one engine to one trainer.

Written by the worker's capture thread (``RingWriter``: one producer, one thread), read
by the sidecar (``RingReader``, in ``ring_reader``: one consumer). When it is full the
newest record is dropped and counted. The writer keeps its own head and believes of the
memory only the tail, and that only within bounds: out of bounds it drops until the
consumer stores a sane one; a truncated ring is left alone for good. What lies in
the memory is in ``ring_format``.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import Counter
from dataclasses import asdict

from vllm_tide import _shm
from vllm_tide.transport.header import DATA_AT, LINE_BYTES
from vllm_tide.transport.process import pid_namespace
from vllm_tide.transport.record import (
    FORMAT_VERSION,
    Record,
    encode,
)
from vllm_tide.transport.ring_format import (
    FRAME_BYTES,
    MAGIC,
    PAD,
    RECORD,
    Collect,
    RingSpec,
    RingStats,
    Word,
    consumer_alive,
    frame_length,
    pack_frame,
)
from vllm_tide.transport.ring_reader import RingReader
from vllm_tide.transport.shm import Segment

__all__ = ["RingReader", "RingSpec", "RingStats", "RingWriter"]

# What a record of wrong kinds can raise while it is encoded.
_INVALID = (TypeError, ValueError, AttributeError, BufferError, struct.error)


class RingWriter:
    """The engine's end. Nothing here blocks or raises after :meth:`create`."""

    def __init__(self, segment: Segment, spec: RingSpec) -> None:
        """Take over a fresh segment; use :meth:`create`."""
        self.spec = spec
        self.name = segment.name
        self.drops: Counter[str] = Counter()
        """Dropped records by reason: full, too_large, invalid, cursor, truncated,
        closed."""
        self.dropped_rows: Counter[str] = Counter()
        """Rows of dropped records, by the same reasons."""
        self._segment = segment
        self._capacity = segment.header.size_bytes - DATA_AT
        self._head = 0
        self._tail = 0
        self._disabled = ""
        self._written_records = self._written_rows = 0
        # Both pids usually live here; the first consumer corrects it.
        segment.store(Word.CONSUMER_NAMESPACE, pid_namespace())
        # What comes before the first consumer is worth training on.
        segment.store(Word.COLLECT, Collect.FULL)
        self.heartbeat()

    @classmethod
    def create(cls, spec: RingSpec, capacity_bytes: int) -> RingWriter:
        """Create a ring; it is unlinked by :meth:`close`, at the latest at exit.

        Args:
            spec: Written to the header.
            capacity_bytes: Room for frames, rounded up to 64 bytes.

        Raises:
            TransportError: If the memory is not to be had.
        """
        capacity = max(-(-capacity_bytes // LINE_BYTES), 1) * LINE_BYTES
        fields = asdict(spec)
        segment = Segment.create("ring", MAGIC, FORMAT_VERSION, fields, capacity)
        return cls(segment, spec)

    def try_write(self, record: Record) -> bool:
        """Append a record, or drop and count it. Never blocks, never raises.

        Returns:
            Whether it was written.
        """
        num_rows = 0
        try:
            num_rows = len(record.token_ids)
            reason = self._write(record)
        except _INVALID:
            reason = "closed" if self._segment.closed else "invalid"
        if not reason:
            self._written_records += 1
            self._written_rows += num_rows
            self._mirror(
                Word.WRITTEN_RECORDS, self._written_records, self._written_rows
            )
            return True
        self.drops[reason] += 1
        self.dropped_rows[reason] += num_rows
        rows = self.dropped_rows.total()
        self._mirror(Word.DROPPED_RECORDS, self.drops.total(), rows)
        return False

    def heartbeat(self) -> None:
        """Say that the engine lives; also repairs what was damaged in memory."""
        # ValueError: another thread closed the ring between the check and the store.
        with contextlib.suppress(ValueError):
            if not self._unusable():
                self._segment.store(Word.PRODUCER_BEAT, time.monotonic_ns())
                self._segment.store(Word.HEAD, self._head)
                # Both otherwise stand until the next record, or the next drop.
                written, rows = self._written_records, self._written_rows
                self._mirror(Word.WRITTEN_RECORDS, written, rows)
                dropped, rows = self.drops.total(), self.dropped_rows.total()
                self._mirror(Word.DROPPED_RECORDS, dropped, rows)

    def beat(self) -> None:
        """Say only that the engine lives; for any thread, while it idles."""
        with contextlib.suppress(ValueError):  # as in heartbeat
            if self._segment.intact():
                self._segment.store(Word.PRODUCER_BEAT, time.monotonic_ns())

    def level(self) -> tuple[int, int]:
        """Bytes written, and bytes that the consumer has passed, since the start."""
        with contextlib.suppress(ValueError):  # as in heartbeat
            if not self._unusable():
                self._tail_is_sane()
        return self._head, self._tail

    @property
    def capacity(self) -> int:
        """Room for frames (bytes)."""
        return self._capacity

    @property
    def max_rows(self) -> int:
        """Rows from which on a record is split: many of them must fit at once."""
        return max(self._capacity // 16 // self.spec.row_bytes, 1)

    @property
    def lost(self) -> bool:
        """True if the ring was cut short or nobody can join it: it needs another."""
        return self._unusable() == "truncated" or self._segment.lost()

    @property
    def wish(self) -> Collect:
        """What the consumer wants now; of an unusable ring, which drops it, LIGHT."""
        try:
            if self._unusable():
                return Collect.LIGHT
            word = self._segment.load(Word.COLLECT)
        except ValueError:  # as in heartbeat
            return Collect.LIGHT
        return Collect(word) if word in (1, 2) else Collect.NOTHING

    def ask_nothing(self) -> None:
        """Be as the consumer left the ring before: it says otherwise once it joins."""
        self._segment.store(Word.COLLECT, Collect.NOTHING)

    @property
    def collect(self) -> bool:
        """True if the consumer wants full rows now."""
        return self.wish is Collect.FULL

    def stats(self) -> RingStats:
        """Counters as of now. Looks the consumer up in /proc: not for every step."""
        used = corrupt = 0
        alive = False
        with contextlib.suppress(ValueError):  # as in heartbeat
            if not self._unusable():
                used = self._head - self._segment.load(Word.TAIL)
                corrupt = self._segment.load(Word.CORRUPT)
                alive = consumer_alive(self._segment)
        return RingStats(
            capacity_bytes=self._capacity,
            used_bytes=min(max(used, 0), self._capacity),
            written_records=self._written_records,
            written_rows=self._written_rows,
            dropped_records=self.drops.total(),
            dropped_rows=self.dropped_rows.total(),
            corrupt_records=corrupt,
            consumer_alive=alive,
        )

    def close(self) -> None:
        """Unmap and unlink. Idempotent; later writes are dropped and counted."""
        self._segment.close()

    def _unusable(self) -> str:
        """Why the memory must not be touched; empty if it may."""
        if not self._disabled and not self._segment.intact():
            self._disabled = "closed" if self._segment.closed else "truncated"
        return self._disabled

    def _mirror(self, word: int, records: int, rows: int) -> None:
        # _write found the memory mapped a moment ago, or disabled the ring.
        try:
            if not self._disabled and not self._segment.closed:
                self._segment.store(word, records)
                self._segment.store(word + 1, rows)
        except ValueError:  # as in heartbeat; suppress() would cost half a microsecond
            self._disabled = "closed"

    def _write(self, record: Record) -> str:
        """Append; the reason if it was dropped, else empty."""
        if reason := self._unusable():
            return reason
        parts, body = encode(record, self.spec.feature_dtype)
        self.spec.check(record)
        length = frame_length(body)
        if reason := self._make_room(length):
            return reason
        begin = self._head
        at = DATA_AT + begin % self._capacity + FRAME_BYTES
        crc = _shm.gather(self._segment.buf, at, parts)
        self._put(begin, pack_frame(RECORD, begin, length, body, crc))
        self._publish(begin + length)
        return ""

    def _make_room(self, length: int) -> str:
        """See that a frame fits at the end; why it does not, else empty."""
        capacity = self._capacity
        if length > capacity:
            return "too_large"
        if not self._tail_is_sane():
            return "cursor"
        used = self._head - self._tail
        if length > (room := capacity - self._head % capacity):
            if room > capacity - used:
                return "full"
            # Published on its own, so that a record larger than what is free now has
            # the whole ring once the consumer has passed the pad.
            self._put(self._head, pack_frame(PAD, self._head, room))
            self._publish(self._head + room)
            used += room
        return "full" if length > capacity - used else ""

    def _tail_is_sane(self) -> bool:
        """Look where the consumer is, and believe it within bounds."""
        tail = self._segment.load(Word.TAIL)
        if not self._tail <= tail <= self._head or tail % LINE_BYTES:
            self._segment.store(Word.HEAD, self._head)
            return False
        self._tail = tail
        return True

    def _put(self, position: int, frame: bytes) -> None:
        start = DATA_AT + position % self._capacity
        self._segment.buf[start : start + FRAME_BYTES] = frame

    def _publish(self, head: int) -> None:
        self._head = head
        self._segment.store(Word.HEAD, self._head)
