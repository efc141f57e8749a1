"""The counters of a segment, read without joining it.

For tools that look on: nothing is claimed and nothing is mapped, so a watched segment
lives no longer than its engine, and one that shrinks cannot hurt the watcher.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from vllm_tide.transport.header import (
    DATA_AT,
    LINE_BYTES,
    PAGE_BYTES,
    WORDS_AT,
    Header,
)
from vllm_tide.transport.process import Holder, heartbeat_is_fresh
from vllm_tide.transport.ring_format import MAGIC, RingStats, Word
from vllm_tide.transport.shm import SHM_DIR, is_segment_name
from vllm_tide.transport.weights import MAGIC as WEIGHTS_MAGIC
from vllm_tide.transport.weights import WeightsFeedback, onlooker


@dataclass(frozen=True, slots=True)
class WeightsPeek:
    """State of a weights segment.

    Attributes:
        latest_version: Newest publication; 0 if there is none.
        feedback: What the engine reported; None while it is being written.
    """

    latest_version: int
    feedback: WeightsFeedback | None


def peek_ring(name: str) -> RingStats | None:
    """Counters of a ring; None if it is gone, another user's or damaged."""
    found = _read(name, MAGIC)
    if found is None:
        return None
    header, words = found
    capacity = header.size_bytes - DATA_AT
    used = _word(words, Word.HEAD) - _word(words, Word.TAIL)
    return RingStats(
        capacity_bytes=capacity,
        used_bytes=min(max(used, 0), capacity),
        written_records=_word(words, Word.WRITTEN_RECORDS),
        written_rows=_word(words, Word.WRITTEN_ROWS),
        dropped_records=_word(words, Word.DROPPED_RECORDS),
        dropped_rows=_word(words, Word.DROPPED_ROWS),
        corrupt_records=_word(words, Word.CORRUPT),
        consumer_alive=_consumer_alive(words),
    )


def peek_weights(name: str) -> WeightsPeek | None:
    """State of a weights segment; None if it is gone, another user's or damaged."""
    found = _read(name, WEIGHTS_MAGIC)
    return None if found is None else WeightsPeek(*onlooker(found[1]))


def peek_header(name: str) -> Header | None:
    """What a segment is and who owns it; None if that is not to be read."""
    found = _pages(name)
    return None if found is None else found[0]


def _read(name: str, magic: bytes) -> tuple[Header, bytes] | None:
    """Header and page of words of a segment of one kind."""
    found = _pages(name)
    if found is None or found[0].magic != magic or len(found[1]) < PAGE_BYTES:
        return None
    return found if found[0].size_bytes >= DATA_AT else None


def _pages(name: str) -> tuple[Header, bytes] | None:
    """Header and page of words."""
    if not is_segment_name(name):
        return None
    # A pipe under that name would be waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(f"{SHM_DIR}/{name}", flags)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return None
        header = Header.decode(os.pread(fd, PAGE_BYTES, 0))
        words = os.pread(fd, PAGE_BYTES, WORDS_AT)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None if header is None else (header, words)


def _word(words: bytes, word: int) -> int:
    return int.from_bytes(words[word * LINE_BYTES :][:8], "little")


def _consumer_alive(words: bytes) -> bool:
    holder = Holder.from_word(
        _word(words, Word.CONSUMER), _word(words, Word.CONSUMER_NAMESPACE)
    )
    fresh = heartbeat_is_fresh(_word(words, Word.CONSUMER_BEAT))
    return holder.pid > 0 and holder.alive() is not False and fresh
