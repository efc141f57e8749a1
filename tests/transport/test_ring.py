import os
import time
from dataclasses import replace
from itertools import product

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


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float32"])
def test_every_kind_of_record_comes_back_to_the_bit(ring_pair, teacher, feature_dtype):
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
        bare = replace(
            make_record(spec, n, n, phase),
            teacher_hidden=None,
            teacher_topk_ids=None,
            teacher_topk_logprobs=None,
            teacher_tail_logprob=None,
        )
        for record in (*sent, light, bare):
            assert write_record(writer, record), writer.drops
            got = reader.read()
            assert identity(got) == identity(record)
            assert got.metadata_only is (record is light)
            assert got.tenant != 0
        assert write_record(writer, light)
        assert writer.stats().used_bytes <= 256  # it takes no room for features
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


def test_one_consumer_at_a_time_which_lives_while_its_heart_beats(ring_pair):
    writer, reader = ring_pair(make_spec())
    with pytest.raises(TransportError, match=str(os.getpid())):
        RingReader.attach(writer.name)
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
    for wanted in Collect:  # in doubt nothing leaves
        reader._segment.store(Word.COLLECT, 2**64 - 1)
        assert writer.wish is Collect.NOTHING
        reader.set_collect(wanted)
        assert writer.wish is wanted
    reader.close()


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


def test_a_closed_ring_drops_and_counts(ring_pair, monkeypatch):
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
    # What a writer sees that passed the checks just before another thread closed it.
    monkeypatch.setattr(writer._segment, "closed", False)
    monkeypatch.setattr(writer._segment, "intact", lambda: True)
    assert not writer.collect
    writer.heartbeat()
    writer.stats()
    assert not write_record(writer, make_record(spec))
    assert writer.stats().dropped_records == 2


def test_an_unlinked_ring_keeps_working_for_those_attached(ring_pair):
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
