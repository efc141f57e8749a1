"""Layout of a ring: its spec, its words, its frames.

Frames start at multiples of 64 bytes and never wrap: what does not fit before the end
is preceded by a pad frame. A frame carries its own absolute position, so stale bytes
of an earlier lap are never taken for a record.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from vllm_tide import _shm
from vllm_tide.transport.header import DATA_AT, LINE_BYTES
from vllm_tide.transport.process import Holder, heartbeat_is_fresh
from vllm_tide.transport.record import FEATURE_DTYPES, Record, RecordError

Teacher = Literal["hidden", "topk"]

MAGIC = b"VTIDERNG"
_MAX_NUMBER = 2**31 - 1


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
    LIGHT = 2
    """Records of token ids and counts, without rows."""


@dataclass(frozen=True)
class RingSpec:
    """Facts that all records of a ring share; written to its header.

    Args:
        aux_layer_ids: Layers whose input is captured, in feature order.
        feature_dtype: "bfloat16" or "float32".
    """

    engine_id: str
    hidden_size: int
    aux_layer_ids: tuple[int, ...]
    vocab_size: int
    feature_dtype: str
    teacher: Teacher
    teacher_topk: int

    def __post_init__(self) -> None:
        """Refuse what no ring can carry.

        Raises:
            ValueError: On an unknown name or a size that is not positive.
        """
        if self.feature_dtype not in FEATURE_DTYPES:
            raise ValueError(f"feature_dtype: {self.feature_dtype!r} is unknown")
        if self.teacher not in get_args(Teacher):
            raise ValueError(f"teacher: {self.teacher!r} is unknown")
        if min(self.hidden_size, self.vocab_size, len(self.aux_layer_ids)) < 1:
            raise ValueError("hidden_size, vocab_size, aux_layer_ids: must be positive")

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> RingSpec:
        """Read the header's JSON.

        Raises:
            ValueError, TypeError, KeyError: If it is not a spec.
        """
        layers = tuple(fields["aux_layer_ids"])
        sizes = [fields[name] for name in ("hidden_size", "vocab_size", "teacher_topk")]
        for number in (*layers, *sizes):
            if type(number) is not int or abs(number) > _MAX_NUMBER:
                raise ValueError(f"{str(number)[:20]!r} is no layer, width or count")
        if type(fields["engine_id"]) is not str:
            raise ValueError("engine_id: is no text")
        return cls(**{**fields, "aux_layer_ids": layers})

    @property
    def feature_width(self) -> int:
        """Width of a feature row: captured layers times hidden size."""
        return len(self.aux_layer_ids) * self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Most bytes of a row with all that it carries."""
        item = FEATURE_DTYPES[self.feature_dtype].itemsize
        if self.teacher == "topk":
            return self.feature_width * item + 8 * self.teacher_topk + 8
        return (self.feature_width + self.hidden_size) * item + 4

    def check(self, record: Record) -> None:
        """Compare a record's widths and teacher with this spec.

        Raises:
            RecordError: If they differ.
        """
        width = record.features.shape[1]
        if width != self.feature_width and width != 0:
            raise RecordError("features are not of this ring's width")
        if record.features.dtype != FEATURE_DTYPES[self.feature_dtype]:
            raise RecordError("features are not of this ring's dtype")
        hidden, ids = record.teacher_hidden, record.teacher_topk_ids
        if width == 0 and not (hidden is None and ids is None):
            raise RecordError("a light record has a teacher")
        if hidden is not None and (
            self.teacher == "topk" or hidden.shape[1] != self.hidden_size
        ):
            raise RecordError("teacher_hidden is not what this ring carries")
        if ids is not None and (
            self.teacher == "hidden" or ids.shape[1] != self.teacher_topk
        ):
            raise RecordError("the top-k teacher is not what this ring carries")


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


def ring_stats(
    load: Callable[[int], int], capacity: int, own: Mapping[Any, int] | None = None
) -> RingStats:
    """Counters of a ring, of the words in memory but for those in `own`."""
    known = own or {}

    def look(word: Word) -> int:
        return known[word] if word in known else load(word)

    return RingStats(
        capacity,
        min(max(look(Word.HEAD) - look(Word.TAIL), 0), capacity),
        look(Word.WRITTEN_RECORDS),
        look(Word.WRITTEN_ROWS),
        look(Word.DROPPED_RECORDS),
        look(Word.DROPPED_ROWS),
        look(Word.CORRUPT),
        consumer_alive(load),
    )


class Status(IntEnum):
    """Outcome of writing a record (csrc/shm.h has the first six)."""

    WRITTEN = 0
    FULL = 1
    TOO_LARGE = 2
    CURSOR = 3
    TRUNCATED = 4
    SKIPPED = 5
    """It continues one that was not written; it counts as no record."""
    CLOSED = 6
    INVALID = 7


@dataclass(slots=True)
class Frames:
    """Records whose arrays lie somewhere in a few larger ones.

    Attributes:
        metas: `record.META` [n].
        spans: int64 [n, S, 2], where each part begins in its source, and its length
            (bytes).
        follows: bool [n], whether a record continues the one before.
        sources: S C-contiguous arrays, in the order of a body.
        status: uint8 [n], a `Status`; WRITTEN also before it is.
    """

    metas: np.ndarray
    spans: np.ndarray
    follows: np.ndarray
    sources: tuple[np.ndarray, ...]
    status: np.ndarray

    def refuse(self, why: Status) -> None:
        """Set the status of records that are still to be written."""
        self.status[self.status == Status.WRITTEN] = why


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


def next_frame(buf: memoryview, capacity: int, position: int, head: int) -> int:
    """Position of the first sound frame from `position` on; `head` if there is none."""
    for candidate in _marked_lines(buf, capacity, position, head):
        if frame_at(buf, capacity, candidate, head) is not None:
            return candidate
    return head


def _marked_lines(
    buf: memoryview, capacity: int, position: int, head: int
) -> Iterator[int]:
    while position < head:
        offset = position % capacity
        span = min(head - position, capacity - offset)
        words = np.frombuffer(buf, "<u4", span // 4, DATA_AT + offset)
        hits = np.flatnonzero(words[:: LINE_BYTES // 4] == _FRAME_MAGIC)
        del words  # or the segment could not be unmapped while the caller pauses
        for line in hits:
            yield position + int(line) * LINE_BYTES
        position += span
