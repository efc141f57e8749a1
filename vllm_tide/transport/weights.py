"""The weights segment: drafts from a trainer to the engine, and the engine's feedback.

It has two slots. The trainer writes the slot without the latest version, with an odd
sequence number during the write, and stores the version last: if the trainer is killed,
the latest publication stays readable. The engine reads in the worker's staging thread
(``WeightsSegment``): it copies a slot and verifies the copy.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from vllm_tide import _shm
from vllm_tide.transport.draft_weights import (
    FORMAT_VERSION,
    DraftWeights,
    WeightsRefused,
)
from vllm_tide.transport.shm import (
    ATOMICS_AT,
    DATA_AT,
    LINE_BYTES,
    PAGE_BYTES,
    Segment,
    TransportError,
    peek,
)
from vllm_tide.transport.versions import MAX_VERSION, version_name

MAGIC = b"VTIDEWTS"
_READ_ATTEMPTS = 3
SLOT_MAGIC = b"VTIDEPUB"
# magic, version, bytes of the draft, their SHA-256
SLOT_HEAD = struct.Struct("<8sQQ32s")
BLOB_AT = 64  # of a slot


class _Atomic(IntEnum):
    LATEST = 0
    SEQUENCE = 1  # of slot 0; slot 1 follows
    WRITER = 3  # its pid, for messages: a lock decides whether there is one
    FEEDBACK = 8  # 1.5 cache lines; the CRC detects torn reads


# installed version, refused version, last pause (ms), reason, CRC of these
_FEEDBACK = struct.Struct("<QQd64sI")
_FEEDBACK_AT = ATOMICS_AT + _Atomic.FEEDBACK * LINE_BYTES


@dataclass(frozen=True)
class WeightsFeedback:
    """The engine's report on the publications.

    Args:
        refused_version: Last refused version, 0 if none.
        refused_reason: Reason of the refusal, empty if none.
        engine_alive: Whether the engine that created the segment is alive.
        swap_pause_ms_last: Pause of serving in the last installation (ms).
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
        feedback: The engine's report; None while it is being written.
    """

    latest_version: int
    feedback: WeightsFeedback | None


def _slot_bytes(segment: Segment) -> int:
    return (segment.header.size_bytes - DATA_AT) // 2


def _attach(name: str) -> Segment:
    segment = Segment.attach(name, MAGIC, FORMAT_VERSION)
    if _slot_bytes(segment) < PAGE_BYTES:
        segment.close()
        raise TransportError(f"segment {name} is too small: restart its engine")
    return segment


class WeightsSegment:
    """The engine's side; never blocks, and raises only :class:`WeightsRefused`.

    Several ranks may read: rank 0 creates the segment, the others attach.
    """

    def __init__(self, segment: Segment) -> None:
        self.name = segment.name
        self._segment = segment
        self._slot_bytes = _slot_bytes(segment)
        self._last_read = 0

    @property
    def lost(self) -> bool:
        """True if it was truncated or unlinked, so that no process can attach."""
        return self._segment.lost()

    @classmethod
    def create(cls, slot_bytes: int) -> WeightsSegment:
        """Create a segment, unlinked by :meth:`close` or at exit.

        Args:
            slot_bytes: Size of a publication; twice the draft's bytes plus 1 MiB is
                sufficient.

        Raises:
            TransportError: The memory cannot be allocated.
        """
        slot_bytes = max(-(-slot_bytes // PAGE_BYTES), 1) * PAGE_BYTES
        segment = Segment.create("weights", MAGIC, FORMAT_VERSION, {}, 2 * slot_bytes)
        weights = cls(segment)
        weights.report(0)
        return weights

    @classmethod
    def attach(cls, name: str) -> WeightsSegment:
        """Attach to a segment that another rank created.

        Raises:
            TransportError: It is missing, damaged, of another user or version.
        """
        return cls(_attach(name))

    def latest_version(self) -> int:
        """Return the version of the latest publication; 0 if none or unreadable."""
        # ValueError: another thread closed the segment between the check and the load.
        with contextlib.suppress(ValueError):
            if self._segment.intact():
                return self._segment.load(_Atomic.LATEST)
        return 0

    def read(self) -> DraftWeights:
        """Copy and verify the latest publication.

        Raises:
            WeightsRefused: With reason empty, torn, truncated, format, sha256 or stale.
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
                    "stale",
                    f"version {version_name(version)} is older than "
                    f"{version_name(self._last_read)}",
                )
            latest = self.read_version(version)
            if latest is not None:
                self._last_read = version
                return latest
        raise WeightsRefused(
            "torn", f"no slot contains version {version_name(version)}"
        )

    def read_version(self, version: int) -> DraftWeights | None:
        """Copy and verify a version; None if no slot contains it.

        Raises:
            WeightsRefused: With reason truncated, format or sha256.
        """
        try:
            for slot in (0, 1):
                weights = self._read_slot(slot, version)
                if weights is not None:
                    return weights.verify()
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
        """Store the feedback: the version being served, and the last refusal."""
        label = reason.encode("ascii", "replace")[:64]
        pack = _FEEDBACK.pack
        body = pack(installed_version, refused_version, swap_pause_ms, label, 0)[:-4]
        crc = _shm.crc32c(body).to_bytes(4, "little")
        with contextlib.suppress(ValueError):  # as in latest_version
            if self._segment.intact():
                at = _FEEDBACK_AT
                self._segment.buf[at : at + _FEEDBACK.size] = body + crc

    def unlink(self) -> None:
        """Unlink the segment; see :meth:`Segment.unlink`."""
        self._segment.unlink()

    def close(self) -> None:
        self._segment.close()

    def _read_slot(self, slot: int, version: int) -> DraftWeights | None:
        """Copy a slot; None if it has another version or changed during the copy."""
        segment = self._segment
        before = segment.load(_Atomic.SEQUENCE + slot)
        start = DATA_AT + slot * self._slot_bytes
        magic, slot_version, size, digest = SLOT_HEAD.unpack(
            bytes(segment.buf[start : start + SLOT_HEAD.size])
        )
        if before % 2 or magic != SLOT_MAGIC or slot_version != version:
            return None
        if size > self._slot_bytes - BLOB_AT:
            raise WeightsRefused(
                "truncated", f"version {version_name(version)} is larger than its slot"
            )
        # One pass without the GIL; the copy is verified.
        copy = np.empty(-(-size // 8) * 8, np.uint8)
        at = start + BLOB_AT
        _shm.gather(copy, 0, (segment.buf[at : at + size],))
        if segment.load(_Atomic.SEQUENCE + slot) != before:
            return None
        return DraftWeights(version, digest, copy[:size])


class WeightsWriter:
    """The trainer's side; raises :class:`TransportError`."""

    def __init__(self, segment: Segment) -> None:
        self.name = segment.name
        self._segment = segment
        self._slot_bytes = _slot_bytes(segment)
        self._feedback = WeightsFeedback(0, 0, "", True, 0.0)
        self._last_published = segment.load(_Atomic.LATEST)

    @property
    def intact(self) -> bool:
        """True if the segment still has its full size."""
        return self._segment.intact()

    @classmethod
    def attach(cls, name: str) -> WeightsWriter:
        """Become the writer of a segment.

        Raises:
            TransportError: It is missing, damaged, of another user or version, or has
                a live trainer.
        """
        segment = _attach(name)
        try:
            segment.claim(_Atomic.WRITER, "writer")
        except TransportError:
            segment.close()
            raise
        return cls(segment)

    @property
    def max_bytes(self) -> int:
        """Maximum size of a draft (bytes)."""
        return self._slot_bytes - BLOB_AT

    @property
    def latest_version(self) -> int:
        """The highest version published by this or an earlier trainer."""
        return self._last_published

    def publish(self, weights: DraftWeights) -> None:
        """Write a draft to the free slot and make it the latest version.

        Its version must be greater than every earlier one.

        Raises:
            TransportError: The segment is lost, too small, or has a newer version.
        """
        self._require_intact()
        segment, version, latest = self._segment, weights.version, self._last_published
        name = version_name(version)
        if version <= latest:
            raise TransportError(
                f"version {name} is not newer than {version_name(latest)}"
            )
        if version > MAX_VERSION:
            raise TransportError(
                f"version {name} exceeds the maximum: restart the engine"
            )
        size = len(weights.data)
        if size > self.max_bytes:
            raise TransportError(
                f"version {name} has {size} bytes, a slot has {self.max_bytes}: "
                "enlarge the slots of the engine's weights segment"
            )
        slot = 1 if latest and self._version_in(0) == latest else 0
        start = DATA_AT + slot * self._slot_bytes
        sequence = ATOMICS_AT + (_Atomic.SEQUENCE + slot) * LINE_BYTES
        # Odd while writing; already odd if a previous writer was killed here.
        odd = segment.load(_Atomic.SEQUENCE + slot) % 2
        _shm.fetch_add(segment.buf, sequence, 2 if odd else 1)
        slot_header = SLOT_HEAD.pack(SLOT_MAGIC, version, size, weights.sha256)
        segment.buf[start : start + len(slot_header)] = slot_header
        at = start + BLOB_AT
        segment.buf[at : at + size] = memoryview(weights.data)
        _shm.fetch_add(segment.buf, sequence, 1)
        segment.store(_Atomic.LATEST, version)
        self._last_published = version

    def feedback(self) -> WeightsFeedback:
        """Return the engine's last feedback, the previous one during a write.

        Raises:
            TransportError: The segment was truncated or closed.
        """
        self._require_intact()
        segment = self._segment
        alive = segment.owner_alive()
        raw = bytes(segment.buf[_FEEDBACK_AT : _FEEDBACK_AT + _FEEDBACK.size])
        last = replace(self._feedback, engine_alive=alive)
        self._feedback = _parse_feedback(raw, alive) or last
        return self._feedback

    def close(self) -> None:
        """Release the claim and unmap. Idempotent."""
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
    """Return the state of a segment; None if missing, damaged or of another user."""
    segment = peek(name, MAGIC)
    if segment is None:
        return None
    raw = segment.atomics[_FEEDBACK_AT - ATOMICS_AT :][: _FEEDBACK.size]
    feedback = _parse_feedback(raw, segment.owner_alive)
    return WeightsPeek(segment.load(_Atomic.LATEST), feedback)


def _parse_feedback(raw: bytes, alive: bool) -> WeightsFeedback | None:
    """Decode the engine's feedback; None while it is being written."""
    installed, refused, pause, label, crc = _FEEDBACK.unpack(raw)
    if crc != _shm.crc32c(raw[:-4]):
        return None
    reason = label.rstrip(b"\0").decode("ascii", "replace")
    return WeightsFeedback(installed, refused, reason, alive, pause)
