"""Damage made by hand: what each check of the ring is there for."""

import numpy as np
import pytest

from tests.transport.samples import (
    body_of,
    identity,
    make_record,
    make_spec,
    write_record,
)
from vllm_tide.transport.record import RecordError, decode
from vllm_tide.transport.ring import FRAME_BYTES, RECORD, Word, pack_frame
from vllm_tide.transport.shm import DATA_AT

SPEC = make_spec()


def write(writer, *seeds):
    """Write records; the length of a frame (all are alike)."""
    before = writer.stats().used_bytes
    for seed in seeds:
        assert write_record(writer, make_record(SPEC, seed))
    return (writer.stats().used_bytes - before) // len(seeds)


def drain(reader):
    versions = []
    while (record := reader.read()) is not None:
        assert identity(record) == identity(make_record(SPEC, record.draft_version))
        versions.append(record.draft_version)
    return versions


def test_a_record_of_an_earlier_lap_is_not_taken_for_a_new_one(ring_pair):
    length = write(ring_pair(SPEC)[0], 0)
    writer, reader = ring_pair(SPEC, 2 * length)
    write(writer, 1, 2)
    assert drain(reader) == [1, 2]
    # The head points past what was written: there lies record 1, sound, one lap old.
    reader._segment.store(Word.HEAD, 3 * length)
    assert drain(reader) == []
    assert reader.stats().corrupt_records == 1


def test_every_damaged_byte_of_a_frame_is_noticed(ring_pair):
    writer, reader = ring_pair(SPEC)
    for count, at in enumerate(range(FRAME_BYTES), 1):
        start = DATA_AT + reader._tail % writer.capacity
        write(writer, 1, 2)
        reader._segment.buf[start + at] ^= 0x10
        assert drain(reader) == []  # nor is what came after it looked for
        assert reader.stats().corrupt_records == count
        write(writer, 3)
        assert drain(reader) == [3]


@pytest.mark.parametrize("laps", [1, 64, 1 << 40])
def test_a_frame_that_claims_to_reach_past_the_head_is_none(ring_pair, laps):
    writer, reader = ring_pair(SPEC)
    length = write(writer, 1, 2)
    forged = pack_frame(RECORD, 0, 2 * length + laps * 64, 8)
    reader._segment.buf[DATA_AT : DATA_AT + FRAME_BYTES] = forged
    assert drain(reader) == []
    write(writer, 3)
    assert drain(reader) == [3]


@pytest.mark.parametrize("tail", [0, 64, 63, 2**64 - 64, 1 << 40])
def test_a_damaged_tail_stops_writing_until_the_consumer_stores_its_own(
    ring_pair, tail
):
    writer, reader = ring_pair(SPEC)
    write(writer, 1, 2, 3)
    assert drain(reader) == [1, 2, 3]
    write(writer, 4)  # the writer has seen the tail behind record 3
    reader._segment.store(Word.TAIL, tail)
    assert not write_record(writer, make_record(SPEC, 5))
    assert writer.drops["cursor"] == 1
    assert drain(reader) == [4]
    write(writer, 6)
    assert drain(reader) == [6]


@pytest.mark.parametrize("head", [1 << 40, 65, 64, 0, 2**64 - 64])
def test_both_ends_agree_again_after_a_damaged_head(ring_pair, head):
    writer, reader = ring_pair(SPEC)
    write(writer, 1, 2, 3)
    assert reader.read().draft_version == 1
    reader._segment.store(Word.HEAD, head)
    assert drain(reader) == []
    assert reader.stats().corrupt_records == 1
    write_record(writer, make_record(SPEC, 4))  # stores the head
    assert drain(reader) in ([], [4], [2, 3, 4])  # none comes twice
    write(writer, 5)
    assert drain(reader) == [5]


def test_a_body_of_another_format_or_length_is_refused_with_a_sentence():
    body = body_of(make_record(SPEC))
    assert identity(decode(body.data)) == identity(make_record(SPEC))
    with pytest.raises(RecordError, match="left over"):
        decode(np.append(body, np.zeros(8, np.uint8)).data)
    # Format 1 had 72 bytes before the arrays, the last of them 0, and no tenant.
    older = np.delete(body, np.s_[72:80])
    older[71] = 0
    with pytest.raises(RecordError, match="record of format 1, .*speaks 5"):
        decode(older.data)
