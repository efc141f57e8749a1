"""The signal ring: records of live traffic from one engine to one trainer.

Written by the worker (``RingWriter``: one producer, one thread that writes at a time),
read by the sidecar (``RingReader``: one consumer). When it is full the newest record is
dropped and counted. Each end keeps its own cursor and takes the other's only within
bounds: out of them the writer drops, the reader goes on from the head, and both count.

Frames start at multiples of 64 bytes and never wrap: what does not fit before the end
is preceded by a pad frame. A frame carries its own absolute position, so stale bytes
of an earlier lap are never taken for a record. What is stored is in ``csrc/ring.cpp``.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import numpy as np

from vllm_tide import _shm
from vllm_tide.transport.process import Holder, heartbeat_is_fresh, pid_namespace
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
    peek_words,
    word_of,
)

MAGIC = b"VTIDERNG"


class Word(IntEnum):
    """Words of page 1. The producer stores those before TAIL, the consumer the rest."""

    HEAD = 0
    PRODUCER_BEAT = 1
    WRITTEN_RECORDS = 2
    WRITTEN_ROWS = 3
    DROPPED_RECORDS = 4
    DROPPED_ROWS = 5
    TAIL = 6
    CORRUPT = 7
    CONSUMER = 8
    CONSUMER_NAMESPACE = 9
    CONSUMER_BEAT = 10
    COLLECT = 11
    """A `Collect`; anything else is NOTHING."""


class Collect(IntEnum):
    """Kinds of rows that the consumer wants of live traffic."""

    NOTHING = 0
    FULL = 1
    METADATA = 2
    """Records of token ids and counts, without rows."""


@dataclass(frozen=True)
class RingStats:
    """Counters of one ring since it was created.

    ``corrupt_records`` counts damaged spots the consumer skipped; ``consumer_alive``
    means a live process with a heartbeat younger than 10 s.
    """

    capacity_bytes: int
    used_bytes: int
    written_records: int
    written_rows: int
    dropped_records: int
    dropped_rows: int
    corrupt_records: int
    consumer_alive: bool


def consumer_alive(load: Callable[[int], int]) -> bool:
    """True if a process with a fresh heartbeat holds a ring, by a look at its words."""
    holder = Holder.from_word(load(Word.CONSUMER), load(Word.CONSUMER_NAMESPACE))
    fresh = heartbeat_is_fresh(load(Word.CONSUMER_BEAT))
    return holder.pid > 0 and holder.alive() is not False and fresh


def ring_stats(load: Callable[[int], int], capacity: int) -> RingStats:
    """Counters of a ring, of the words in memory."""
    return RingStats(
        capacity,
        min(max(load(Word.HEAD) - load(Word.TAIL), 0), capacity),
        load(Word.WRITTEN_RECORDS),
        load(Word.WRITTEN_ROWS),
        load(Word.DROPPED_RECORDS),
        load(Word.DROPPED_ROWS),
        load(Word.CORRUPT),
        consumer_alive(load),
    )


MAX_RECORD_BYTES = 1 << 26
"""A longer record is split: a shard of a spool has room for one (`spool_shard`)."""
# magic, kind, position (bytes since the ring began), length of the frame, length of
# the body, CRC of the body, CRC of the 60 bytes before
_FRAME = struct.Struct("<IHxxQQQI24xI")
_FRAME_MAGIC = 0x45444954  # "TIDE"
FRAME_BYTES = _FRAME.size
RECORD, PAD = 1, 2


class Frame(NamedTuple):
    """A sound frame: its kind, its length and its body's length (bytes) and CRC."""

    kind: int
    length: int
    body: int
    crc: int


def pack_frame(
    kind: int, position: int, length: int, body: int = 0, crc: int = 0
) -> bytes:
    """The 64 bytes before a body."""
    head = _FRAME.pack(_FRAME_MAGIC, kind, position, length, body, crc, 0)[:-4]
    return head + _shm.crc32c(head).to_bytes(4, "little")


def frame_at(buf: memoryview, capacity: int, position: int, head: int) -> Frame | None:
    """The frame at `position`, if it is sound and ends by `head` and the ring's end."""
    offset = position % capacity
    start = DATA_AT + offset
    raw = bytes(buf[start : start + FRAME_BYTES])
    magic, kind, at, length, body, crc, check = _FRAME.unpack(raw)
    sound = (
        magic == _FRAME_MAGIC
        and check == _shm.crc32c(raw[:-4])
        and at == position
        and kind in (RECORD, PAD)
        and length % LINE_BYTES == 0
        and FRAME_BYTES <= length <= min(head - position, capacity - offset)
        and body <= length - FRAME_BYTES
        and body % 8 == 0
    )
    return Frame(kind, length, body, crc) if sound else None


# What arrays of wrong kinds can raise while they are written.
_INVALID = (TypeError, ValueError, AttributeError, BufferError)


class RingWriter:
    """The engine's end. Nothing here blocks or raises after :meth:`create`.

    One thread writes and counts, or one writes and another counts what was written; the
    rest is for any thread.
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
        """Room for frames (bytes)."""
        most = min(self.capacity // 16, MAX_RECORD_BYTES)
        self.max_rows = max(most // spec.row_bytes, 1)
        """Rows from which on a record is split: many of them must fit at once."""
        # Head and tail: `write_frames` moves them, whoever looks sees them move.
        self._end = np.zeros(2, np.uint64)
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

        Raises:
            TransportError: If the memory is not to be had.
        """
        capacity = max(-(-capacity_bytes // LINE_BYTES), 1) * LINE_BYTES
        fields = asdict(spec)
        segment = Segment.create("ring", MAGIC, FORMAT_VERSION, fields, capacity)
        return cls(segment, spec)

    def write(self, frames: Frames) -> None:
        """Append records, or set why not as their status. Nothing is counted."""
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
        """Count records by what became of them; returns the rows that were written."""
        rows, status, written = frames.metas["rows"], frames.status, 0
        if not status.any():
            written = int(rows.sum())
            self._count("", len(rows), written)
            return written
        for code in np.unique(status).tolist():
            these = rows[status == code]
            if code == Status.WRITTEN:
                written = int(these.sum())
            if code != Status.SKIPPED:
                reason = Status(code).name.lower() if code else ""
                self._count(reason, len(these), int(these.sum()))
        return written

    def heartbeat(self) -> None:
        """Say that the engine lives; for any thread."""
        # ValueError: another thread closed the ring between the check and the store.
        with contextlib.suppress(ValueError):
            if not self._unusable():
                self._segment.store(Word.PRODUCER_BEAT, time.monotonic_ns())

    def level(self) -> tuple[int, int]:
        """Bytes written, and bytes that the consumer has passed, since the start."""
        last = int(self._end[1])  # what it was before; damage is not believed
        with contextlib.suppress(ValueError):  # as in heartbeat
            if not self._unusable():
                tail = self._segment.load(Word.TAIL)
                if last <= tail <= self._head:
                    last = tail
        return self._head, last

    @property
    def lost(self) -> bool:
        """True if the ring was cut short, or its name is gone: nobody can join it."""
        return self._unusable() == "truncated" or self._segment.lost()

    @property
    def intact(self) -> bool:
        """True while the ring can be written."""
        return not self._unusable()

    @property
    def wish(self) -> Collect:
        """What the consumer wants now; METADATA of an unusable ring, which drops it."""
        try:
            if self._unusable():
                return Collect.METADATA
            word = self._segment.load(Word.COLLECT)
        except ValueError:  # as in heartbeat
            return Collect.METADATA
        return Collect(word) if word in (1, 2) else Collect.NOTHING

    @property
    def collect(self) -> bool:
        """True if the consumer wants full rows now."""
        return self.wish is Collect.FULL

    def stats(self) -> RingStats:
        """Counters as of now. Looks the consumer up in /proc: not for every step."""
        with contextlib.suppress(ValueError):  # as in heartbeat
            if not self._unusable():
                return ring_stats(self._segment.load, self.capacity)
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
        """Take the name away; see :meth:`Segment.unlink`."""
        self._segment.unlink()

    def close(self) -> None:
        """Unmap and unlink. Idempotent; later writes are dropped and counted."""
        self._segment.close()

    @property
    def _head(self) -> int:
        return int(self._end[0])

    def _unusable(self) -> str:
        """Why the memory must not be touched; empty if it may."""
        if not self._disabled and not self._segment.intact():
            self._disabled = "closed" if self._segment.closed else "truncated"
        return self._disabled

    def _count(self, reason: str, records: int, rows: int) -> None:
        """Count records that were written, or with a reason dropped."""
        if reason:
            self.drops[reason] += records
            self.dropped_rows[reason] += rows
            rows = self.dropped_rows.total()
            self._mirror(Word.DROPPED_RECORDS, self.drops.total(), rows)
        else:
            self._written_records += records
            self._written_rows += rows
            records, rows = self._written_records, self._written_rows
            self._mirror(Word.WRITTEN_RECORDS, records, rows)

    def _mirror(self, word: int, records: int, rows: int) -> None:
        # The memory was found mapped a moment ago, or the ring is disabled.
        try:
            if not self._disabled and not self._segment.closed:
                self._segment.store(word, records)
                self._segment.store(word + 1, rows)
        except ValueError:  # as in heartbeat; suppress() would cost half a microsecond
            self._disabled = "closed"


def _nothing(_word: int) -> int:
    """Load a word of a ring that cannot be read."""
    return 0


_BLANK = memoryview(bytes(1 << 16))


class RingReader:
    """The trainer's end. After :meth:`attach` nothing here raises."""

    def __init__(self, segment: Segment, spec: RingSpec) -> None:
        self.spec = spec
        self.name = segment.name
        self._segment = segment
        self.capacity = segment.header.size_bytes - DATA_AT
        self._corrupt = segment.load(Word.CORRUPT)
        self._tail = segment.load(Word.TAIL)
        self._lost = False
        # A pause holds until this consumer knows better.
        nothing = segment.load(Word.COLLECT) == Collect.NOTHING
        self.set_collect(Collect.NOTHING if nothing else Collect.FULL)

    @classmethod
    def attach(cls, name: str) -> RingReader:
        """Become the consumer of a ring; goes on where a dead one stopped.

        It asks for full rows until :meth:`set_collect` says otherwise, but for nothing
        where the one before did.

        Raises:
            TransportError: One sentence: absent, foreign, damaged, another version, or
                another live consumer.
        """
        segment = Segment.attach(name, MAGIC, FORMAT_VERSION)
        try:
            spec = RingSpec.from_fields(segment.header.spec)
            capacity = segment.header.size_bytes - DATA_AT
            if capacity < LINE_BYTES or capacity % LINE_BYTES:
                raise ValueError(f"{capacity} bytes hold no whole lines")
            segment.claim(Word.CONSUMER, "trainer")
        except (ValueError, TypeError, KeyError) as error:
            segment.close()
            raise TransportError(f"segment {name} is not a ring: {error}") from error
        except TransportError:
            segment.close()
            raise
        return cls(segment, spec)

    def read(self) -> Record | None:
        """Take the next record out; None if there is none now.

        Its arrays are private to the caller. Damaged bytes are skipped and counted.
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
        """Take the next record out as its bytes, which are the caller's own.

        Their checksum was right; nobody looked at what they say.
        """
        if self._lost or not self._segment.intact():
            return None
        head = self._segment.load(Word.HEAD) // LINE_BYTES * LINE_BYTES
        if not 0 <= head - self._tail <= self.capacity:
            self._count_corrupt()  # nothing between the two can be relied on
            self._tail = head
        body = None
        while body is None and self._tail < head:
            body = self._take(head)
        self._segment.store(Word.TAIL, self._tail)
        return body

    def heartbeat(self) -> None:
        """Say that the trainer lives."""
        if not self._segment.intact():
            return
        try:
            self._segment.hold(Word.CONSUMER, "trainer")
        except TransportError:
            self._lost = True  # another process took over: it owns the tail now
            return
        if self._lost:
            self._lost = False
            self._tail = self._segment.load(Word.TAIL)
            self.set_collect(self._collect)

    def set_collect(self, wanted: Collect) -> None:
        """Ask the engine for full rows, for metadata-only records, or for nothing.

        Holds from the engine's next step on, also when this consumer goes. What was
        written before stays as it is.
        """
        self._collect = wanted
        if not self._lost and self._segment.intact():
            self._segment.store(Word.COLLECT, int(wanted))

    @property
    def intact(self) -> bool:
        """False if the ring was cut short."""
        return self._segment.intact()

    def producer_alive(self) -> bool:
        """True if the engine that owns the ring lives."""
        return self._segment.owner_alive(Word.PRODUCER_BEAT)

    def stats(self) -> RingStats:
        """Counters as of now; the engine's are as it last stored them."""
        load = self._segment.load if self._segment.intact() else _nothing
        return ring_stats(load, self.capacity)

    def close(self) -> None:
        """Give up the claim and unmap. Idempotent."""
        if self._segment.intact() and not self._lost:
            self._segment.release(Word.CONSUMER)
        self._segment.close()

    def _count_corrupt(self) -> None:
        # What an earlier consumer counted came from memory: it may be any number.
        self._corrupt = (self._corrupt + 1) % 2**64
        self._segment.store(Word.CORRUPT, self._corrupt)

    def _take(self, head: int) -> np.ndarray | None:
        """Move past the frame at the tail; its body if it holds a good one."""
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
            self._blank(begin + FRAME_BYTES, self._tail)  # one that was a record
            return None
        # Checked as a private copy: the memory may change at any time.
        copy = np.empty(frame.body, np.uint8)
        crc = _shm.gather(copy, 0, (buf[start : start + frame.body],))
        # A pad first: who goes on here after a kill finds no damage.
        buf[start - FRAME_BYTES : start] = pack_frame(PAD, begin, frame.length)
        self._blank(begin + FRAME_BYTES, self._tail)
        if crc == frame.crc:
            return copy
        self._count_corrupt()
        return None

    def _blank(self, begin: int, end: int) -> None:
        """Overwrite from one position to another; both before the producer's room."""
        while begin < end:
            offset = begin % self.capacity
            size = min(end - begin, self.capacity - offset, len(_BLANK))
            start = DATA_AT + offset
            self._segment.buf[start : start + size] = _BLANK[:size]
            begin += size


def ring_consumer(name: str) -> Holder | None:
    """Return the live process that reads a ring; None if there is none."""
    found = peek_words(name, MAGIC)
    if found is None:
        return None
    load = partial(word_of, found[1])
    holder = Holder.from_word(load(Word.CONSUMER), load(Word.CONSUMER_NAMESPACE))
    alive = holder.alive()
    if alive is None:
        alive = heartbeat_is_fresh(load(Word.CONSUMER_BEAT))
    return holder if holder.pid and alive else None


def peek_ring(name: str) -> RingStats | None:
    """Counters of a ring; None if it is gone, another user's or damaged."""
    found = peek_words(name, MAGIC)
    if found is None:
        return None
    return ring_stats(partial(word_of, found[1]), found[0].size_bytes - DATA_AT)
