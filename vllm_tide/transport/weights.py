"""The weights segment: drafts from one trainer to the engine, and its answer back.

Two slots. The trainer writes the one that does not hold the latest version, under a
sequence number that is odd meanwhile, and only then stores the version: a trainer
killed at any moment leaves the latest publication readable. The engine reads in the
worker's staging thread (``WeightsSegment``), copies a slot out, and verifies the copy.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from vllm_tide import _shm
from vllm_tide.transport import publication
from vllm_tide.transport.process import heartbeat_is_fresh, pid_namespace
from vllm_tide.transport.publication import (
    DraftBlob,
    Publication,
    TensorBytes,
    TensorInput,
    WeightsRefused,
)
from vllm_tide.transport.shm import (
    DATA_AT,
    LINE_BYTES,
    PAGE_BYTES,
    WORDS_AT,
    Segment,
    TransportError,
    peek_words,
    word_of,
)

__all__ = [
    "Publication",
    "TensorBytes",
    "WeightsFeedback",
    "WeightsRefused",
    "WeightsSegment",
    "WeightsWriter",
]

MAGIC = b"VTIDEWTS"
_READ_ATTEMPTS = 3
SLOT_MAGIC = b"VTIDEPUB"
# magic, version, bytes of the draft, their SHA-256
SLOT_HEAD = struct.Struct("<8sQQ32s")
BLOB_AT = 64  # of a slot


class _Word(IntEnum):
    LATEST = 0
    SEQUENCE = 1  # of slot 0; slot 1 follows
    WRITER = 3
    WRITER_NAMESPACE = 4
    WRITER_BEAT = 5
    ENGINE_BEAT = 6
    FEEDBACK = 8  # a line and a half; its CRC tells a torn one


# installed version, refused version, last pause (ms), reason, CRC of what is before
_FEEDBACK = struct.Struct("<QQd64sI")
_FEEDBACK_AT = WORDS_AT + _Word.FEEDBACK * LINE_BYTES


@dataclass(frozen=True)
class WeightsFeedback:
    """Counts of what the engine did with the publications.

    Args:
        refused_version: The last one refused, 0 if none.
        refused_reason: Why, empty if none.
        engine_alive: Whether the engine that owns the segment lives.
        swap_pause_ms_last: How long the last installation held serving up.
    """

    installed_version: int
    refused_version: int
    refused_reason: str
    engine_alive: bool
    swap_pause_ms_last: float


@dataclass(frozen=True, slots=True)
class WeightsPeek:
    """State of a weights segment.

    Attributes:
        latest_version: Newest publication; 0 if there is none.
        feedback: What the engine reported, alive by its heartbeat; None while it is
            being written.
    """

    latest_version: int
    feedback: WeightsFeedback | None


def _slot_bytes(segment: Segment) -> int:
    return (segment.header.size_bytes - DATA_AT) // 2


def _attached(name: str) -> Segment:
    segment = Segment.attach(name, MAGIC, publication.FORMAT_VERSION)
    if _slot_bytes(segment) < PAGE_BYTES:
        segment.close()
        raise TransportError(
            f"segment {name} has no room for slots: restart its engine"
        )
    return segment


class WeightsSegment:
    """The engine's end; raises nothing but :class:`WeightsRefused`, and never blocks.

    Several ranks may read: rank 0 creates it, the others attach.
    """

    def __init__(self, segment: Segment) -> None:
        self.name = segment.name
        self._segment = segment
        self._slot_bytes = _slot_bytes(segment)
        self._last_read = 0

    @property
    def lost(self) -> bool:
        """True if it was cut short, or its name is gone: nobody can join it."""
        return self._segment.lost()

    @classmethod
    def create(cls, slot_bytes: int) -> WeightsSegment:
        """Create a segment; unlinked by :meth:`close`, at the latest at exit.

        Args:
            slot_bytes: Room for one publication; twice the draft's bytes and 1 MiB
                is plenty.

        Raises:
            TransportError: If the memory is not to be had.
        """
        slot_bytes = max(-(-slot_bytes // PAGE_BYTES), 1) * PAGE_BYTES
        version = publication.FORMAT_VERSION
        segment = Segment.create("weights", MAGIC, version, {}, 2 * slot_bytes)
        segment.store(_Word.WRITER_NAMESPACE, pid_namespace())
        made = cls(segment)
        made.report(0)
        return made

    @classmethod
    def attach(cls, name: str) -> WeightsSegment:
        """Read a segment that another rank created.

        Raises:
            TransportError: One sentence: absent, foreign, damaged or another version.
        """
        return cls(_attached(name))

    def latest_version(self) -> int:
        """Version of the latest publication; 0 if there is none (or no memory)."""
        # ValueError: another thread closed the segment between the check and the load.
        with contextlib.suppress(ValueError):
            if self._segment.intact():
                return self._segment.load(_Word.LATEST)
        return 0

    def read(self) -> Publication:
        """Copy the latest publication out and verify it.

        Raises:
            WeightsRefused: empty, torn, truncated, format, sha256 or stale.
        """
        for _ in range(_READ_ATTEMPTS):
            version = self.latest_version()
            if not self._segment.intact():
                raise WeightsRefused(
                    "truncated", f"segment {self.name} is closed or was truncated"
                )
            if version == 0:
                raise WeightsRefused("empty", "nothing has been published yet")
            if version < self._last_read:
                raise WeightsRefused(
                    "stale", f"version {version} is older than {self._last_read}"
                )
            found = self.read_version(version)
            if found is not None:
                self._last_read = version
                return found
        raise WeightsRefused("torn", f"version {version} is in no slot")

    def read_version(self, version: int) -> Publication | None:
        """Copy a version out, the latest or not; None if no slot holds it now.

        Raises:
            WeightsRefused: truncated, format or sha256.
        """
        try:
            for slot in (0, 1):
                blob = self._read_slot(slot, version)
                if blob is not None:
                    return publication.decode(blob)
        except ValueError as error:  # closed by another thread meanwhile
            raise WeightsRefused(
                "truncated", f"segment {self.name} was closed: {error}"
            ) from error
        return None

    def report(
        self,
        installed_version: int,
        refused_version: int = 0,
        reason: str = "",
        swap_pause_ms: float = 0.0,
    ) -> None:
        """Tell the trainer what serves now, and what was refused and why."""
        label = reason.encode("ascii", "replace")[:64]
        pack = _FEEDBACK.pack
        body = pack(installed_version, refused_version, swap_pause_ms, label, 0)[:-4]
        crc = _shm.crc32c(body).to_bytes(4, "little")
        with contextlib.suppress(ValueError):  # as in latest_version
            if self._segment.intact():
                at = _FEEDBACK_AT
                self._segment.buf[at : at + _FEEDBACK.size] = body + crc
        self.heartbeat()

    def heartbeat(self) -> None:
        """Say that the engine lives (needed where its pid cannot be looked up)."""
        with contextlib.suppress(ValueError):  # as in latest_version
            if self._segment.intact():
                self._segment.store(_Word.ENGINE_BEAT, time.monotonic_ns())

    def unlink(self) -> None:
        """Take the name away; see :meth:`Segment.unlink`."""
        self._segment.unlink()

    def close(self) -> None:
        self._segment.close()

    def _read_slot(self, slot: int, version: int) -> DraftBlob | None:
        """A private copy of a slot; None if it is another's or changed meanwhile."""
        segment = self._segment
        before = segment.load(_Word.SEQUENCE + slot)
        start = DATA_AT + slot * self._slot_bytes
        magic, held, size, digest = SLOT_HEAD.unpack(
            bytes(segment.buf[start : start + SLOT_HEAD.size])
        )
        if before % 2 or magic != SLOT_MAGIC or held != version:
            return None
        if size > self._slot_bytes - BLOB_AT:
            raise WeightsRefused(
                "truncated", f"version {version} claims to be larger than its slot"
            )
        # One pass without the interpreter lock; what is verified is the copy.
        copy = np.empty(-(-size // 8) * 8, np.uint8)
        at = start + BLOB_AT
        _shm.gather(copy, 0, (segment.buf[at : at + size],))
        if segment.load(_Word.SEQUENCE + slot) != before:
            return None
        return DraftBlob(version, digest, copy[:size])


class WeightsWriter:
    """The trainer's end; raises :class:`TransportError`."""

    def __init__(self, segment: Segment) -> None:
        self.name = segment.name
        self._segment = segment
        self._slot_bytes = _slot_bytes(segment)
        self._feedback = WeightsFeedback(0, 0, "", True, 0.0)
        self._last_published = segment.load(_Word.LATEST)

    @property
    def intact(self) -> bool:
        """False if the segment was cut short."""
        return self._segment.intact()

    @classmethod
    def attach(cls, name: str) -> WeightsWriter:
        """Become the one writer of a segment.

        Raises:
            TransportError: One sentence: absent, foreign, damaged, another version, or
                another live trainer.
        """
        segment = _attached(name)
        try:
            segment.claim(_Word.WRITER, "trainer")
        except TransportError:
            segment.close()
            raise
        return cls(segment)

    @property
    def max_bytes(self) -> int:
        """Most bytes of a draft."""
        return self._slot_bytes - BLOB_AT

    @property
    def latest_version(self) -> int:
        """The highest version published so far, by this or an earlier trainer."""
        return self._last_published

    def publish(
        self,
        tensors: Mapping[str, TensorInput],
        *,
        version: int,
        parent_version: int,
        meta: dict[str, Any],
    ) -> None:
        """Put a draft into the free slot, then make it the latest.

        Args:
            tensors: By name: dtype as torch names it, shape, and its bytes.
            version: Greater than every version before it.

        Raises:
            TransportError: If the segment is gone, too small, or ahead of `version`.
            ValueError: If a tensor contradicts itself.
        """
        self.put(publication.encode(tensors, version, parent_version, meta))

    def put(self, blob: DraftBlob) -> None:
        """Put a draft's bytes into the free slot, then make it the latest.

        Raises:
            TransportError: If the segment is gone, too small, or ahead of its version.
        """
        self._require_intact()
        segment, version, latest = self._segment, blob.version, self._last_published
        if version <= latest:
            raise TransportError(f"version {version} is not newer than {latest}")
        if version > publication.MAX_VERSION:
            raise TransportError(
                f"version {version} is past the last one there is: restart the engine"
            )
        size = len(blob.data)
        if size > self.max_bytes:
            raise TransportError(
                f"version {version} takes {size} bytes and a slot has "
                f"{self.max_bytes}: give the engine's weights segment "
                "larger slots"
            )
        segment.hold(_Word.WRITER, "trainer")
        slot = 1 if latest and self._version_in(0) == latest else 0
        start = DATA_AT + slot * self._slot_bytes
        word = WORDS_AT + (_Word.SEQUENCE + slot) * LINE_BYTES
        # Odd while writing; a writer killed here left it odd already.
        odd = segment.load(_Word.SEQUENCE + slot) % 2
        _shm.fetch_add(segment.buf, word, 2 if odd else 1)
        head = SLOT_HEAD.pack(SLOT_MAGIC, version, size, blob.sha256)
        segment.buf[start : start + len(head)] = head
        at = start + BLOB_AT
        segment.buf[at : at + size] = memoryview(blob.data)
        _shm.fetch_add(segment.buf, word, 1)
        segment.store(_Word.LATEST, version)
        self._last_published = version

    def feedback(self) -> WeightsFeedback:
        """What the engine last reported; the one before while it is writing.

        Raises:
            TransportError: If the segment was truncated or closed.
        """
        self._require_intact()
        segment = self._segment
        alive = segment.owner_alive(_Word.ENGINE_BEAT)
        raw = bytes(segment.buf[_FEEDBACK_AT : _FEEDBACK_AT + _FEEDBACK.size])
        last = replace(self._feedback, engine_alive=alive)
        self._feedback = _told(raw, alive) or last
        return self._feedback

    def heartbeat(self) -> None:
        """Say that the trainer lives.

        Raises:
            TransportError: If another trainer holds the segment now.
        """
        if self._segment.intact():
            self._segment.hold(_Word.WRITER, "trainer")

    def close(self) -> None:
        if self._segment.intact():
            self._segment.release(_Word.WRITER)
        self._segment.close()

    def _version_in(self, slot: int) -> int:
        start = DATA_AT + slot * self._slot_bytes
        raw = bytes(self._segment.buf[start : start + SLOT_HEAD.size])
        magic, version, *_ = SLOT_HEAD.unpack(raw)
        return int(version) if magic == SLOT_MAGIC else 0

    def _require_intact(self) -> None:
        if not self._segment.intact():
            raise TransportError(
                f"segment {self.name} is closed or was truncated: restart its engine"
            )


def peek_weights(name: str) -> WeightsPeek | None:
    """State of a weights segment; None if it is gone, another user's or damaged."""
    found = peek_words(name, MAGIC)
    if found is None:
        return None
    words = found[1]
    raw = words[_FEEDBACK_AT - WORDS_AT :][: _FEEDBACK.size]
    alive = heartbeat_is_fresh(word_of(words, _Word.ENGINE_BEAT))
    return WeightsPeek(word_of(words, _Word.LATEST), _told(raw, alive))


def _told(raw: bytes, alive: bool) -> WeightsFeedback | None:
    """Unpacks what the engine reported; None while it is being written."""
    installed, refused, pause, label, crc = _FEEDBACK.unpack(raw)
    if crc != _shm.crc32c(raw[:-4]):
        return None
    reason = label.rstrip(b"\0").decode("ascii", "replace")
    return WeightsFeedback(installed, refused, reason, alive, pause)
