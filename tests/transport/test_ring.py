"""The ring: whole records or none, and each check of damage."""

import os
import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.transport.samples import (
    body_of,
    frames_of,
    identity,
    make_metadata_only,
    make_record,
    make_spec,
    without_teacher,
    write_record,
)
from vllm_tide import _shm
from vllm_tide.transport import Phase, RingReader, RingSpec, RingWriter, TransportError
from vllm_tide.transport.process import HEARTBEAT_TIMEOUT_NS
from vllm_tide.transport.record import META_BYTES, RecordError, Status, decode
from vllm_tide.transport.ring import FRAME_BYTES, RECORD, Atomic, Collect, pack_frame
from vllm_tide.transport.shm import DATA_AT, SHM_DIR

SPEC = make_spec()


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float32"])
def test_every_kind_of_record_is_read_back_to_the_bit(
    ring_pair, teacher, feature_dtype
):
    spec = make_spec(teacher, feature_dtype, hidden_size=7, topk=5)
    writer, reader = ring_pair(spec, 1 << 18)
    assert reader.spec == writer.spec == spec
    assert isinstance(reader.spec.aux_layer_ids, tuple)
    for n, phase in product((0, 1, 2, 3, 17), Phase):
        sent = [
            make_record(spec, n, n, phase, teacher_start)
            for teacher_start in {0, max(n - 1, 0), n}
        ]
        light = make_metadata_only(spec, n, n, phase)
        bare = without_teacher(make_record(spec, n, n, phase))
        for record in (*sent, light, bare):
            assert write_record(writer, record), writer.drops
            got = reader.read()
            assert identity(got) == identity(record)
            assert got.metadata_only is (record is light)
            assert got.tenant != 0
        assert write_record(writer, light)
        assert writer.stats().used_bytes <= 256  # it takes no space for features
        assert identity(reader.read()) == identity(light)
    assert reader.read() is None


def test_an_impossible_spec_is_refused():
    for change in ({"teacher": "x"}, {"feature_dtype": "int8"}, {"hidden_size": 0}):
        with pytest.raises(ValueError):
            replace(make_spec(), **change)
    with pytest.raises((KeyError, TypeError, ValueError)):
        RingSpec.from_fields({"engine_id": "x"})
    with pytest.raises(TransportError, match="engine_id"):  # too large for its page
        RingWriter.create(replace(make_spec(), engine_id="x" * 5000), 4096)


def test_what_was_read_is_private_to_the_caller(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec, 1024)
    write_record(writer, make_record(spec, 1))
    first = reader.read()
    before = identity(first)
    for seed in range(50):
        write_record(writer, make_record(spec, seed))
        reader.read()
    assert identity(first) == before


def test_a_full_ring_drops_the_newest_and_counts_it(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec, 4096)
    sent = [make_record(spec, seed) for seed in range(20)]
    taken = [record for record in sent if write_record(writer, record)]
    assert 0 < len(taken) < len(sent)
    assert taken == sent[: len(taken)]
    stats = writer.stats()
    assert stats.written_records == len(taken)
    assert stats.dropped_records == len(sent) - len(taken)
    assert stats.dropped_rows == 4 * stats.dropped_records
    assert dict(writer.drops) == {"full": stats.dropped_records}
    assert stats.used_bytes <= stats.capacity_bytes == 4096
    assert reader.stats() == stats
    got = [identity(reader.read()) for _ in taken]
    assert got == [identity(record) for record in taken]
    assert reader.read() is None
    assert writer.stats().used_bytes == 0
    assert write_record(writer, sent[0])


@pytest.mark.parametrize(
    "change",
    [
        {"phase": 2},
        {"phase": Phase.PREFILL, "num_accepted": 0},
        {"num_accepted": 4},
        {"num_accepted": -1},
        {"teacher_start": 1},
        {"teacher_start": 5},
        {"cost": float("nan")},
        {"verify_chance": 1.5},
        {"features": np.zeros((4, 23), np.uint16)},
        {"features": np.zeros((4, 0), np.uint16)},
        {"features": np.zeros((4, 24), np.float32)},
        {"teacher_hidden": np.zeros((4, 9), np.uint16)},
        {"teacher_topk_ids": np.zeros((4, 3), np.int32)},
    ],
)
def test_an_inconsistent_record_is_skipped_and_counted(ring_pair, change):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    for sent in (replace(make_record(spec), **change), make_record(spec, 1)):
        assert write_record(writer, sent)
    assert identity(reader.read()) == identity(make_record(spec, 1))
    assert reader.stats().corrupt_records == 1


def test_one_consumer_at_a_time_which_is_live_while_its_heartbeat_changes(ring_pair):
    writer, reader = ring_pair(make_spec())
    with pytest.raises(TransportError, match=str(os.getpid())):
        RingReader.attach(writer.name)
    assert writer.stats().consumer_alive
    past = time.monotonic_ns() - HEARTBEAT_TIMEOUT_NS
    reader._segment.store(Atomic.CONSUMER_BEAT, past)
    assert not writer.stats().consumer_alive
    reader.heartbeat()
    assert writer.stats().consumer_alive


def test_the_consumer_sets_the_collect_mode(ring_pair):
    writer, reader = ring_pair(make_spec())
    assert writer.collect
    for mode, again in (
        (Collect.METADATA, Collect.FULL),  # a new consumer requests rows
        (Collect.NOTHING, Collect.NOTHING),  # but a pause outlives its consumer
    ):
        reader.set_collect(mode)
        assert writer.collect_mode is mode and not writer.collect
        reader.close()
        assert writer.collect_mode is mode
        reader = RingReader.attach(writer.name)
        reader.heartbeat()
        assert writer.collect_mode is again
    reader.set_collect(Collect.FULL)
    assert writer.collect
    for mode in Collect:  # with an invalid value nothing leaves
        reader._segment.store(Atomic.COLLECT, 2**64 - 1)
        assert writer.collect_mode is Collect.NOTHING
        reader.set_collect(mode)
        assert writer.collect_mode is mode
    reader.close()


def test_a_truncated_ring_is_disabled_and_counted(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    write_record(writer, make_record(spec))
    os.truncate(f"{SHM_DIR}/{writer.name}", 0)
    assert not write_record(writer, make_record(spec))
    reader.heartbeat()
    reader.set_collect(Collect.FULL)
    assert not writer.collect
    assert reader.read() is None
    assert writer.drops["truncated"] == writer.stats().dropped_records == 1
    assert not writer.stats().consumer_alive and not reader.stats().consumer_alive
    os.truncate(f"{SHM_DIR}/{writer.name}", 1 << 20)
    assert not write_record(writer, make_record(spec))


def test_a_closed_ring_drops_and_counts(ring_pair, monkeypatch):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    writer.close()
    writer.close()
    assert not write_record(writer, make_record(spec))
    assert writer.drops["closed"] == writer.stats().dropped_records == 1
    reader.close()
    reader.close()
    assert reader.read() is None
    assert reader.stats().used_bytes == 0
    # A writer that passed the checks just before another thread closed the ring.
    monkeypatch.setattr(writer._segment, "closed", False)
    monkeypatch.setattr(writer._segment, "intact", lambda: True)
    assert not writer.collect
    writer.stats()
    assert not write_record(writer, make_record(spec))
    assert writer.stats().dropped_records == 2


def test_an_unlinked_ring_keeps_working_for_attached_processes(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    os.unlink(f"{SHM_DIR}/{writer.name}")
    assert write_record(writer, make_record(spec))
    assert reader.read() is not None
    with pytest.raises(TransportError, match="cannot open"):
        RingReader.attach(writer.name)


def test_a_damaged_body_is_dropped_and_a_damaged_frame_with_all_after_it(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    for seed in range(4):
        write_record(writer, make_record(spec, seed))
    length = writer.stats().used_bytes // 4
    buf = reader._segment.buf
    buf[8192 + 200] ^= 1  # body of the first
    buf[8192 + 2 * length + 5] ^= 1  # frame of the third
    assert reader.read().draft_version == 1
    assert reader.read() is None
    assert reader.stats().corrupt_records == writer.stats().corrupt_records == 2


# Many records in one call


def identities(reader):
    identities = []
    while (record := reader.read()) is not None:
        identities.append(identity(record))
    assert reader.stats().corrupt_records == 0
    return identities


def test_records_after_one_that_was_not_written_are_skipped(ring_pair):
    writer, reader = ring_pair(SPEC, 2048)
    records = [
        make_record(SPEC, seed, num_rows=n) for seed, n in enumerate((2, 90, 2, 2, 2))
    ]
    records.insert(1, make_record(SPEC, 9))
    frames = frames_of(records, follows=[False, False, False, True, True, False])
    frames.status[1] = Status.INVALID  # a record that has a status is left alone
    writer.write(frames)
    assert [Status(code).name for code in frames.status] == [
        "WRITTEN", "INVALID", "TOO_LARGE", "SKIPPED", "SKIPPED", "WRITTEN",
    ]  # fmt: skip
    frames.status[1] = Status.SKIPPED
    writer.count(frames)
    assert writer.drops == {"too_large": 1} and writer.dropped_rows == {"too_large": 90}
    assert identities(reader) == [identity(records[0]), identity(records[5])]


def test_a_record_too_long_for_the_end_gets_the_whole_ring_next(ring_pair):
    writer, reader = ring_pair(SPEC, 2048)
    records = [make_record(SPEC, seed, num_rows=n) for seed, n in enumerate((9, 22, 1))]
    frames = frames_of(records)
    writer.write(frames)
    assert frames.status.tolist() == [0, Status.FULL, Status.FULL]
    writer.count(frames)
    assert writer.dropped_rows == {"full": 23}
    assert writer.level() == (2048, 0)  # a pad
    assert identities(reader) == [identity(records[0])]
    again = frames_of(records[1:])
    writer.write(again)
    assert again.status.tolist() == [0, 0] and writer.level()[1] == 2048
    assert identities(reader) == [identity(record) for record in records[1:]]


def test_truncated_memory_is_detected_before_each_record(ring_pair):
    """The writer's own check came before: damage that the call detects counts too."""
    writer, _ = ring_pair(SPEC)
    frames = frames_of([make_record(SPEC, 1)])
    os.truncate(f"{SHM_DIR}/{writer.name}", DATA_AT)
    intact, writer._segment.intact = writer._segment.intact, lambda: True
    writer.write(frames)
    writer._segment.intact = intact
    assert frames.status.tolist() == [Status.TRUNCATED] and writer.lost
    os.truncate(f"{SHM_DIR}/{writer.name}", 1 << 20)
    again = frames_of([make_record(SPEC, 1)])
    writer.write(again)
    assert again.status.tolist() == [Status.TRUNCATED]


def arguments(**changed):
    """Return arguments of a call that writes a record without parts; some replaced."""
    fd = os.memfd_create("ring")
    os.truncate(fd, DATA_AT + 1024)
    made = {
        "ring": np.zeros(DATA_AT + 1024, np.uint8), "fd": fd,
        "end": np.zeros(2, np.uint64), "metas": np.zeros(META_BYTES, np.uint8),
        "spans": np.zeros((1, 1, 2), np.int64), "follows": np.zeros(1, np.bool_),
        "status": np.zeros(1, np.uint8), "sources": (np.zeros(8, np.uint8),),
    }  # fmt: skip
    return {**made, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"ring": np.zeros(DATA_AT, np.uint8)},
        {"ring": np.zeros(DATA_AT + 1000, np.uint8)},
        {"ring": np.zeros(DATA_AT + 1025, np.uint8)[1:]},
        {"end": np.zeros(1, np.uint64)},
        {"end": np.array([64, 128], np.uint64)},
        {"end": np.array([8, 0], np.uint64)},
        {"end": np.array([2048, 64], np.uint64)},
        {"metas": np.zeros(META_BYTES - 1, np.uint8)},
        {"spans": np.zeros((1, 2, 2), np.int64)},
        {"spans": np.array([[[0, 9]]])},
        {"spans": np.array([[[9, 0]]])},
        {"spans": np.array([[[-8, 8]]])},
        {"spans": np.array([[[8, -8]]])},
        {"spans": np.array([[[8, 2**63 - 1]]])},
        {"follows": np.zeros(2, np.bool_)},
        {"status": np.zeros(2, np.uint8)},
        {"sources": ()},
        {"sources": (np.zeros(16, np.uint8)[::2],)},
    ],
)
def test_nothing_outside_its_buffers_is_read_or_written(changed):
    given = arguments(**changed)
    with pytest.raises((ValueError, BufferError)):
        _shm.write_frames(*given.values())
    assert not given["ring"].any() and not given["status"].any()
    good = arguments()
    _shm.write_frames(*good.values())
    assert good["end"].tolist() == [192, 0] and good["ring"].any()
    os.close(given["fd"]), os.close(good["fd"])


# Damage


def write(writer, *seeds):
    """Write records and return the length of a frame (all are equal)."""
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


def test_a_record_of_an_earlier_lap_is_not_read_again(ring_pair):
    length = write(ring_pair(SPEC)[0], 0)
    writer, reader = ring_pair(SPEC, 2 * length)
    write(writer, 1, 2)
    assert drain(reader) == [1, 2]
    # The write offset points past the end: record 1 is there, valid, one lap old.
    reader._segment.store(Atomic.HEAD, 3 * length)
    assert drain(reader) == []
    assert reader.stats().corrupt_records == 1


def test_every_damaged_byte_of_a_frame_is_detected(ring_pair):
    writer, reader = ring_pair(SPEC)
    for count, at in enumerate(range(FRAME_BYTES), 1):
        start = DATA_AT + reader._tail % writer.capacity
        write(writer, 1, 2)
        reader._segment.buf[start + at] ^= 0x10
        assert drain(reader) == []  # nor is a later record searched for
        assert reader.stats().corrupt_records == count
        write(writer, 3)
        assert drain(reader) == [3]


@pytest.mark.parametrize("laps", [1, 64, 1 << 40])
def test_a_frame_that_claims_to_end_behind_the_write_offset_is_invalid(ring_pair, laps):
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
    reader._segment.store(Atomic.TAIL, tail)
    assert not write_record(writer, make_record(SPEC, 5))
    assert writer.drops["cursor"] == 1
    assert drain(reader) == [4]
    write(writer, 6)
    assert drain(reader) == [6]


@pytest.mark.parametrize("head", [1 << 40, 65, 64, 0, 2**64 - 64])
def test_both_ends_agree_again_after_a_damaged_write_offset(ring_pair, head):
    writer, reader = ring_pair(SPEC)
    write(writer, 1, 2, 3)
    assert reader.read().draft_version == 1
    reader._segment.store(Atomic.HEAD, head)
    assert drain(reader) == []
    assert reader.stats().corrupt_records == 1
    write_record(writer, make_record(SPEC, 4))  # stores the write offset
    assert drain(reader) in ([], [4], [2, 3, 4])  # no record comes twice
    write(writer, 5)
    assert drain(reader) == [5]


def test_a_body_of_another_format_or_length_is_refused_with_a_message():
    body = body_of(make_record(SPEC))
    assert identity(decode(body.data)) == identity(make_record(SPEC))
    with pytest.raises(RecordError, match="extra bytes"):
        decode(np.append(body, np.zeros(8, np.uint8)).data)
    # Format 1 had 72 bytes before the arrays, the last of them 0, and no tenant.
    older = np.delete(body, np.s_[72:80])
    older[71] = 0
    with pytest.raises(RecordError, match="record format 1, .*supports 5"):
        decode(older.data)
