"""The trainer's end of the signal ring (``ring`` has the engine's).

It blanks what it has taken: what is in the ring is what nobody has read yet.
"""

from __future__ import annotations

import numpy as np

from vllm_tide import _shm
from vllm_tide.transport.header import DATA_AT, LINE_BYTES, TransportError
from vllm_tide.transport.process import heartbeat_is_fresh
from vllm_tide.transport.record import FORMAT_VERSION, Record, RecordError, decode
from vllm_tide.transport.ring_format import (
    FRAME_BYTES,
    MAGIC,
    PAD,
    Collect,
    RingSpec,
    RingStats,
    Word,
    consumer_alive,
    frame_at,
    next_frame,
    pack_frame,
)
from vllm_tide.transport.shm import Segment

_BLANK = memoryview(bytes(1 << 16))


class RingReader:
    """The trainer's end. After :meth:`attach` nothing here raises."""

    def __init__(self, segment: Segment, spec: RingSpec) -> None:
        """Take over a claimed segment; use :meth:`attach`."""
        self.spec = spec
        self.name = segment.name
        self._segment = segment
        self._capacity = segment.header.size_bytes - DATA_AT
        self._corrupt = segment.load(Word.CORRUPT)
        self._tail = segment.load(Word.TAIL)
        # End of the last sound frame: the true head is never before it.
        self._floor = -1
        self._bad_head: int | None = None
        self._lost = False
        # A pause holds until this consumer knows better.
        nothing = segment.load(Word.COLLECT) == Collect.NOTHING
        self._collect = Collect.NOTHING if nothing else Collect.FULL
        self.heartbeat()

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
        if self._lost or not self._segment.intact():
            return None
        head = self._segment.load(Word.HEAD)
        if not self._plausible(head):
            return None
        record = None
        while record is None and self._tail < head:
            record = self._take(head)
        self._segment.store(Word.TAIL, self._tail)
        return record

    def heartbeat(self) -> None:
        """Say that the trainer lives; also repairs words damaged in memory."""
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
        self._segment.store(Word.TAIL, self._tail)
        self._segment.store(Word.COLLECT, int(self._collect))

    def set_collect(self, wanted: Collect) -> None:
        """Ask the engine for full rows, for light records, or for nothing.

        Holds from the engine's next step on, also when this consumer goes. What was
        written before stays as it is.
        """
        self._collect = wanted
        if not self._lost and self._segment.intact():
            self._segment.store(Word.COLLECT, int(wanted))

    @property
    def lost(self) -> bool:
        """True if the ring was cut short or lost its name."""
        return not self._segment.intact() or self._segment.lost()

    def producer_alive(self) -> bool:
        """Whether the engine that owns the ring lives."""
        alive = self._segment.owner_alive()
        if alive is None:  # another container: only its heartbeat can tell
            return self._segment.intact() and heartbeat_is_fresh(
                self._segment.load(Word.PRODUCER_BEAT)
            )
        return alive

    def stats(self) -> RingStats:
        """Counters as of now; the engine's are as it last stored them."""
        words = [0] * 5
        alive = False
        if self._segment.intact():
            words = [self._segment.load(word) for word in range(Word.HEAD, Word.TAIL)]
            del words[Word.PRODUCER_BEAT]
            alive = consumer_alive(self._segment)
        return RingStats(
            capacity_bytes=self._capacity,
            used_bytes=min(max(words[0] - self._tail, 0), self._capacity),
            written_records=words[1],
            written_rows=words[2],
            dropped_records=words[3],
            dropped_rows=words[4],
            corrupt_records=self._corrupt,
            consumer_alive=alive,
        )

    def close(self) -> None:
        """Give up the claim and unmap. Idempotent."""
        if self._segment.intact() and not self._lost:
            self._segment.release(Word.CONSUMER)
        self._segment.close()

    def _count_corrupt(self) -> None:
        # What an earlier consumer counted came from memory: it may be any number.
        self._corrupt = (self._corrupt + 1) % 2**64
        self._segment.store(Word.CORRUPT, self._corrupt)

    def _plausible(self, head: int) -> bool:
        """Check a head read from memory.

        A tail that stands right behind a sound frame is certain: a head that does not
        fit it is ignored until the engine repairs it. A tail that does not (it came
        from memory, or skipped damage) may itself be what is wrong, and starts over
        at the head.
        """
        fits = 0 <= head - self._tail <= self._capacity
        if fits and not head % LINE_BYTES and not self._tail % LINE_BYTES:
            self._bad_head = None
            return True
        if head != self._bad_head:  # each bad value counts once
            self._bad_head = head
            self._count_corrupt()
        if self._tail != self._floor <= head and not head % LINE_BYTES:
            self._tail = head
        self._segment.store(Word.TAIL, self._tail)
        return False

    def _take(self, head: int) -> Record | None:
        """Move past the frame at the tail; its record if it holds a good one."""
        buf, capacity = self._segment.buf, self._capacity
        frame = frame_at(buf, capacity, self._tail, head)
        if frame is None:
            self._count_corrupt()
            end = next_frame(buf, capacity, self._tail + LINE_BYTES, head)
            self._blank(self._tail, end)
            self._tail = end
            return None
        begin, start = self._tail, DATA_AT + self._tail % capacity + FRAME_BYTES
        self._tail = self._floor = begin + frame.length
        if frame.kind == PAD:
            self._blank(begin + FRAME_BYTES, self._tail)  # one that was a record
            return None
        # Checked and decoded as a private copy: the memory may change at any time.
        copy = np.empty(frame.body, np.uint8)
        crc = _shm.gather(copy, 0, (buf[start : start + frame.body],))
        # A pad first: who goes on here after a kill finds no damage.
        buf[start - FRAME_BYTES : start] = pack_frame(PAD, begin, frame.length)
        self._blank(begin + FRAME_BYTES, self._tail)
        try:
            if crc != frame.crc:
                raise RecordError("checksum")
            record = decode(copy.data)
            self.spec.check(record)
        except RecordError:
            self._count_corrupt()
            return None
        return record

    def _blank(self, begin: int, end: int) -> None:
        """Overwrite from one position to another; both before the producer's room."""
        while begin < end:
            offset = begin % self._capacity
            size = min(end - begin, self._capacity - offset, len(_BLANK))
            start = DATA_AT + offset
            self._segment.buf[start : start + size] = _BLANK[:size]
            begin += size
