import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.transport.samples import (
    identity,
    make_metadata_only,
    make_record,
    make_spec,
    write_record,
)
from vllm_tide.transport import Phase, RingReader, RingSpec, RingWriter, TransportError
from vllm_tide.transport.process import (
    HEARTBEAT_TIMEOUT_NS,
    Holder,
    pid_namespace,
    start_time,
)
from vllm_tide.transport.ring import Collect, Word
from vllm_tide.transport.shm import SHM_DIR


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("teacher", ["hidden", "topk"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float32"])
def test_every_kind_of_record_comes_back_to_the_bit(
    ring_pair, teacher, feature_dtype, phase
):
    spec = make_spec(teacher, feature_dtype, hidden_size=7, topk=5)
    writer, reader = ring_pair(spec, 1 << 18)
    for num_rows in (0, 1, 2, 3, 17):
        for teacher_start in {0, max(num_rows - 1, 0), num_rows}:
            record = make_record(spec, num_rows, num_rows, phase, teacher_start)
            assert write_record(writer, record), writer.drops
            assert identity(reader.read()) == identity(record)
    assert reader.read() is None


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("teacher", ["hidden", "topk"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float32"])
def test_metadata_only_records_come_back_to_the_bit_among_others(
    ring_pair, teacher, feature_dtype, phase
):
    spec = make_spec(teacher, feature_dtype, hidden_size=7, topk=5)
    writer, reader = ring_pair(spec, 1 << 16)
    for num_rows in (0, 1, 2, 3, 17):
        light = make_metadata_only(spec, num_rows, num_rows, phase)
        full = make_record(spec, num_rows, num_rows, phase)
        for sent in (light, full):
            assert write_record(writer, sent), writer.drops
            got = reader.read()
            assert identity(got) == identity(sent)
            assert got.metadata_only is (sent is light)
        assert full.tenant == light.tenant != 0


def test_a_metadata_only_record_takes_no_room_for_features(ring_pair):
    spec = make_spec("hidden", hidden_size=4096)
    writer, _ = ring_pair(spec, 1 << 20)
    assert write_record(writer, make_metadata_only(spec, 1, 4))
    assert writer.stats().used_bytes <= 192


def test_a_teacher_may_be_left_out(ring_pair):
    for teacher in ("hidden", "topk"):
        spec = make_spec(teacher)
        writer, reader = ring_pair(spec)
        bare = replace(
            make_record(spec),
            teacher_hidden=None,
            teacher_topk_ids=None,
            teacher_topk_logprobs=None,
            teacher_tail_logprob=None,
        )
        assert write_record(writer, bare)
        assert identity(reader.read()) == identity(bare)


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


def test_full_ring_drops_newest_and_counts_it(ring_pair):
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


def test_a_record_larger_than_the_ring_is_dropped_and_counted(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec, 512)
    assert not write_record(writer, make_record(spec, num_rows=64))
    assert writer.drops["too_large"] == 1
    assert write_record(writer, make_record(spec, num_rows=1))
    assert reader.read() is not None


def test_the_largest_record_fits_wherever_the_cursor_stands(ring_pair):
    spec = make_spec()
    small = make_record(spec, num_rows=1)
    large = make_record(spec, num_rows=20)
    writer, reader = ring_pair(spec, 1 << 16)
    write_record(writer, large)
    capacity = writer.stats().used_bytes
    writer, reader = ring_pair(spec, capacity)
    for _ in range(30):
        assert write_record(writer, small)
        assert reader.read() is not None
        # The first try may find too little room before the end of the ring; it
        # leaves a pad there, and the next has the whole ring.
        for _ in range(2):
            if write_record(writer, large):
                break
            assert reader.read() is None
        else:
            pytest.fail("the largest record never fits")
        assert identity(reader.read()) == identity(large)


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
def test_a_record_that_contradicts_itself_is_skipped_and_counted(ring_pair, change):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    for sent in (replace(make_record(spec), **change), make_record(spec, 1)):
        assert write_record(writer, sent)
    assert identity(reader.read()) == identity(make_record(spec, 1))
    assert reader.stats().corrupt_records == 1


def test_the_spec_travels_in_the_header(ring_pair):
    spec = make_spec("hidden", "float32")
    writer, reader = ring_pair(spec)
    assert reader.spec == writer.spec == spec
    assert isinstance(reader.spec.aux_layer_ids, tuple)


@pytest.mark.parametrize(
    "change", [{"teacher": "x"}, {"feature_dtype": "int8"}, {"hidden_size": 0}]
)
def test_an_impossible_spec_is_refused(change):
    with pytest.raises(ValueError):
        replace(make_spec(), **change)


def test_a_spec_too_large_for_its_page_is_refused():
    with pytest.raises(TransportError, match="engine_id"):
        RingWriter.create(replace(make_spec(), engine_id="x" * 5000), 4096)


def test_a_second_live_consumer_is_refused_by_pid(ring_pair):
    writer, _ = ring_pair(make_spec())
    with pytest.raises(TransportError, match=str(os.getpid())):
        RingReader.attach(writer.name)


@pytest.mark.slow
def test_the_claim_of_a_dead_consumer_is_taken_over_where_it_stopped():
    spec = make_spec()
    writer = RingWriter.create(spec, 1 << 16)
    for seed in range(3):
        assert write_record(writer, make_record(spec, seed))
    code = (
        "import os, signal\n"
        "from vllm_tide.transport import RingReader\n"
        f"assert RingReader.attach({writer.name!r}).read().draft_version == 0\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert not writer.stats().consumer_alive
    reader = RingReader.attach(writer.name)
    assert [reader.read().draft_version for _ in range(2)] == [1, 2]
    assert writer.stats().consumer_alive
    reader.close()
    assert not writer.stats().consumer_alive
    writer.close()


def test_a_consumer_without_heartbeat_for_ten_seconds_is_not_alive(ring_pair):
    writer, reader = ring_pair(make_spec())
    assert writer.stats().consumer_alive
    past = time.monotonic_ns() - HEARTBEAT_TIMEOUT_NS
    reader._segment.store(Word.CONSUMER_BEAT, past)
    assert not writer.stats().consumer_alive
    reader.heartbeat()
    assert writer.stats().consumer_alive


def test_a_consumer_that_lost_its_claim_neither_reads_nor_asks(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    parent = os.getppid()  # alive, and not us
    other = Holder(parent, start_time(parent), pid_namespace())
    reader._segment.store(Word.CONSUMER, other.word)
    reader.heartbeat()
    reader.set_collect(Collect.METADATA)
    write_record(writer, make_record(spec))
    assert writer.collect and reader.read() is None
    reader._segment.store(Word.CONSUMER, 0)
    reader.heartbeat()
    assert not writer.collect and reader.read() is not None


def test_the_consumer_says_whether_it_wants_full_rows(ring_pair):
    writer, reader = ring_pair(make_spec())
    assert writer.collect
    for wanted, again in (
        (Collect.METADATA, Collect.FULL),  # a new consumer wants rows
        (Collect.NOTHING, Collect.NOTHING),  # but a pause outlives who said so
    ):
        reader.set_collect(wanted)
        assert writer.wish is wanted and not writer.collect
        reader.close()
        assert writer.wish is wanted
        reader = RingReader.attach(writer.name)
        reader.heartbeat()
        assert writer.wish is again
    reader.set_collect(Collect.FULL)
    assert writer.collect
    reader.close()


def test_in_doubt_nothing_leaves(ring_pair):
    writer, reader = ring_pair(make_spec())
    for wanted in Collect:
        reader._segment.store(Word.COLLECT, 2**64 - 1)
        assert writer.wish is Collect.NOTHING
        reader.set_collect(wanted)
        assert writer.wish is wanted


def test_a_truncated_ring_is_disabled_and_counted(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    write_record(writer, make_record(spec))
    os.truncate(f"{SHM_DIR}/{writer.name}", 0)
    assert not write_record(writer, make_record(spec))
    writer.heartbeat()
    reader.heartbeat()
    reader.set_collect(Collect.FULL)
    assert not writer.collect
    assert reader.read() is None
    assert writer.drops["truncated"] == writer.stats().dropped_records == 1
    assert not writer.stats().consumer_alive and not reader.stats().consumer_alive
    os.truncate(f"{SHM_DIR}/{writer.name}", 1 << 20)
    assert not write_record(writer, make_record(spec))


def test_a_closed_ring_drops_and_counts(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    writer.close()
    writer.close()
    assert not write_record(writer, make_record(spec))
    writer.heartbeat()
    assert writer.drops["closed"] == writer.stats().dropped_records == 1
    reader.close()
    reader.close()
    assert reader.read() is None
    assert reader.stats().used_bytes == 0


def test_a_ring_closed_by_another_thread_under_our_hands_raises_nothing(
    ring_pair, monkeypatch
):
    spec = make_spec()
    writer, _ = ring_pair(spec)
    writer.close()
    # What a writer sees that passed the checks just before.
    monkeypatch.setattr(writer._segment, "closed", False)
    monkeypatch.setattr(writer._segment, "intact", lambda: True)
    assert not writer.collect
    writer.heartbeat()
    writer.stats()
    assert not write_record(writer, make_record(spec))
    assert writer.stats().dropped_records == 1


def test_an_unlinked_ring_keeps_working_for_those_attached(ring_pair):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    os.unlink(f"{SHM_DIR}/{writer.name}")
    assert write_record(writer, make_record(spec))
    assert reader.read() is not None
    with pytest.raises(TransportError, match="cannot open"):
        RingReader.attach(writer.name)


@pytest.mark.parametrize("tail", [64, 63, 2**64 - 64, 1 << 40])
def test_a_damaged_tail_stops_writing_until_the_consumer_stores_its_own(
    ring_pair, tail
):
    spec = make_spec()
    writer, reader = ring_pair(spec)
    reader._segment.store(Word.TAIL, tail)
    assert not write_record(writer, make_record(spec))
    assert writer.drops["cursor"] == 1
    assert reader.read() is None
    assert write_record(writer, make_record(spec))
    assert reader.read() is not None


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


def test_a_ring_spec_from_foreign_fields_is_an_error():
    with pytest.raises((KeyError, TypeError, ValueError)):
        RingSpec.from_fields({"engine_id": "x"})


def test_a_ring_of_another_format_is_refused_with_a_sentence(monkeypatch):
    with monkeypatch.context() as older:
        older.setattr("vllm_tide.transport.ring.FORMAT_VERSION", 1)
        writer = RingWriter.create(make_spec(), 4096)
    with pytest.raises(TransportError, match="has format 1, this process speaks 5"):
        RingReader.attach(writer.name)
    writer.close()
