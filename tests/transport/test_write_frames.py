"""Many records in one call, and a ring that several threads of its process look at."""

import os

import numpy as np
import pytest

from tests.transport.samples import (
    frames_of,
    identity,
    make_record,
    make_spec,
)
from vllm_tide import _shm
from vllm_tide.transport.record import META_BYTES, Status
from vllm_tide.transport.shm import DATA_AT, SHM_DIR

SPEC = make_spec(hidden_size=8)


def drain(reader):
    found = []
    while (record := reader.read()) is not None:
        found.append(identity(record))
    assert reader.stats().corrupt_records == 0
    return found


def test_what_follows_a_record_that_was_not_written_is_skipped(ring_pair):
    writer, reader = ring_pair(SPEC, 2048)
    records = [
        make_record(SPEC, seed, num_rows=n) for seed, n in enumerate((2, 90, 2, 2, 2))
    ]
    records.insert(1, make_record(SPEC, 9))
    frames = frames_of(records, follows=[False, False, False, True, True, False])
    frames.status[1] = Status.INVALID  # one that has a status is left alone
    writer.write(frames)
    assert [Status(code).name for code in frames.status] == [
        "WRITTEN", "INVALID", "TOO_LARGE", "SKIPPED", "SKIPPED", "WRITTEN",
    ]  # fmt: skip
    frames.status[1] = Status.SKIPPED
    writer.count(frames)
    assert writer.drops == {"too_large": 1} and writer.dropped_rows == {"too_large": 90}
    assert drain(reader) == [identity(records[0]), identity(records[5])]


def test_a_record_that_does_not_fit_before_the_end_has_the_whole_ring_next(ring_pair):
    writer, reader = ring_pair(SPEC, 2048)
    records = [make_record(SPEC, seed, num_rows=n) for seed, n in enumerate((9, 22, 1))]
    frames = frames_of(records)
    writer.write(frames)
    assert frames.status.tolist() == [0, Status.FULL, Status.FULL]
    writer.count(frames)
    assert writer.dropped_rows == {"full": 23}
    assert writer.level() == (2048, 0)  # a pad
    assert drain(reader) == [identity(records[0])]
    again = frames_of(records[1:])
    writer.write(again)
    assert again.status.tolist() == [0, 0] and writer.level()[1] == 2048
    assert drain(reader) == [identity(record) for record in records[1:]]


def test_memory_that_is_cut_short_meanwhile_is_seen_before_each_record(ring_pair):
    """The writer's own check was before: what the call itself finds counts as well."""
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
    """Those of a call that writes one record without parts; some replaced."""
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
