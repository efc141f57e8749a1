"""Damage made by hand: what each check of the ring is there for."""

import numpy as np
import pytest

from tests.transport.samples import identity, make_record, make_spec
from vllm_tide import _shm
from vllm_tide.transport.header import DATA_AT
from vllm_tide.transport.record import RecordError, decode, encode
from vllm_tide.transport.ring_format import FRAME_BYTES, RECORD, Word, pack_frame

SPEC = make_spec()


def write(writer, *seeds):
    """Write records; the length of a frame (all are alike)."""
    before = writer.stats().used_bytes
    for seed in seeds:
        assert writer.try_write(make_record(SPEC, seed))
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


@pytest.mark.parametrize("at", range(FRAME_BYTES))
def test_every_damaged_byte_of_a_frame_is_noticed(ring_pair, at):
    writer, reader = ring_pair(SPEC)
    write(writer, 1, 2)
    reader._segment.buf[DATA_AT + at] ^= 0x10
    assert drain(reader) == [2]
    assert reader.stats().corrupt_records == 1


@pytest.mark.parametrize("laps", [1, 64, 1 << 40])
def test_a_frame_that_claims_to_reach_past_the_head_is_skipped(ring_pair, laps):
    writer, reader = ring_pair(SPEC, 1 << 16)
    length = write(writer, 1, 2)
    forged = pack_frame(RECORD, 0, 2 * length + laps * 64, 8)
    reader._segment.buf[DATA_AT : DATA_AT + FRAME_BYTES] = forged
    assert drain(reader) == [2]


def test_a_tail_that_goes_back_stops_writing(ring_pair):
    writer, reader = ring_pair(SPEC)
    length = write(writer, 1, 2, 3)
    assert drain(reader) == [1, 2, 3]
    write(writer, 4)  # the writer has seen the tail behind record 3
    reader._segment.store(Word.TAIL, length)
    assert not writer.try_write(make_record(SPEC, 5))
    assert writer.drops["cursor"] == 1
    assert drain(reader) == [4]
    write(writer, 6)
    assert drain(reader) == [6]


def test_both_ends_agree_again_without_any_heartbeat(ring_pair):
    writer, reader = ring_pair(SPEC)
    reader._segment.store(Word.HEAD, 64)
    assert drain(reader) == []
    assert not writer.try_write(make_record(SPEC, 1))  # restores the head
    assert drain(reader) == []  # restores the tail
    write(writer, 2)
    assert drain(reader) == [2]


@pytest.mark.parametrize("head", [1 << 40, 65, 0])
def test_a_bad_head_loses_nothing_that_was_written(ring_pair, head):
    writer, reader = ring_pair(SPEC)
    write(writer, 1, 2, 3)
    assert reader.read().draft_version == 1
    reader._segment.store(Word.HEAD, head)
    assert reader.read() is None
    writer.heartbeat()
    assert drain(reader) == [2, 3]


def test_no_record_comes_twice_after_damage_to_frames_and_head(ring_pair):
    writer, reader = ring_pair(SPEC)
    length = write(writer, 1, 2, 3)
    assert reader.read().draft_version == 1
    for frame in (1, 2):
        reader._segment.buf[DATA_AT + frame * length] ^= 1
    assert drain(reader) == []
    reader._segment.store(Word.HEAD, 0)
    assert drain(reader) == []
    writer.heartbeat()
    assert drain(reader) == []
    write(writer, 4)
    assert drain(reader) == [4]


def test_bytes_after_the_last_array_are_an_error():
    parts, size = encode(make_record(SPEC), SPEC.feature_dtype)
    body = np.zeros(size + 8, np.uint8)
    _shm.gather(body, 0, parts)
    assert identity(decode(body[:size].data)) == identity(make_record(SPEC))
    with pytest.raises(RecordError, match="left over"):
        decode(body.data)


@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_a_record_of_format_1_is_refused_with_a_sentence(num_rows):
    # Format 1 had 72 bytes before the arrays, the last of them 0, and no tenant.
    parts, size = encode(make_record(SPEC, 0, num_rows), SPEC.feature_dtype)
    body = np.zeros(size, np.uint8)
    _shm.gather(body, 0, parts)
    older = np.delete(body, np.s_[72:80])
    older[71] = 0
    with pytest.raises(RecordError, match="record of format 1, .*speaks 5"):
        decode(older.data)


WRITERS = [w for w in Word if w < Word.TAIL]
READERS = [w for w in Word if w > Word.TAIL and w != Word.CORRUPT]


@pytest.mark.parametrize("word", [*WRITERS, Word.TAIL, *READERS])
def test_a_heartbeat_of_its_owner_mends_every_word(ring_pair, word):
    writer, reader = ring_pair(make_spec())
    assert writer.try_write(make_record(make_spec()))
    assert reader.read() is not None
    writer.heartbeat()
    reader.heartbeat()
    segment = writer._segment
    good, junk = segment.load(word), 2**63 + 12345
    segment.store(word, junk)
    (writer if word < Word.TAIL else reader).heartbeat()
    now = segment.load(word)
    beats = (Word.PRODUCER_BEAT, Word.CONSUMER_BEAT)
    assert good <= now < junk if word in beats else now == good
