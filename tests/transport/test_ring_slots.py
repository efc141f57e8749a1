"""Room in the ring that is promised first and filled later, as a GPU's copies are."""

import os
import subprocess
import sys
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.samples import identity, make_record, make_spec
from tests.transport.test_ring_properties import SPEC as SMALL
from tests.transport.test_ring_properties import Pair, normal
from vllm_tide.transport import Phase, RingReader
from vllm_tide.transport.rendezvous import reclaim_orphans
from vllm_tide.transport.ring_format import Word
from vllm_tide.transport.shm import SHM_DIR

SPEC = make_spec("both")


def promise(writer, record):
    ids = record.teacher_topk_ids
    return writer.reserve(
        len(record.token_ids), len(record.draft_probs), record.teacher_start,
        ids is not None,
    )  # fmt: skip


def land(writer, slot, record):
    """What the copies of a GPU do."""
    for place, rows in (
        (slot.places.features, record.features),
        (slot.places.hidden, record.teacher_hidden),
    ):
        writer.memory[place] = b"" if rows is None else rows.tobytes()


def shape_of(record):
    """The record as the writer gets it: rows of the right shape that say nothing."""
    hidden = record.teacher_hidden
    return replace(
        record,
        features=record.features * 0,
        teacher_hidden=None if hidden is None else hidden * 0,
    )


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("teacher", ["hidden", "topk", "both"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float32"])
def test_rows_that_landed_come_back_to_the_bit(
    ring_pair, teacher, feature_dtype, phase
):
    spec = make_spec(teacher, feature_dtype, hidden_size=7, topk=5)
    writer, reader = ring_pair(spec, 1 << 16)
    for n in (1, 2, 3, 17):
        for teacher_start in {0, n - 1, n}:
            record = make_record(spec, n, n, phase, teacher_start)
            slot = promise(writer, record)
            land(writer, slot, record)
            assert reader.read() is None
            assert writer.try_write(shape_of(record), slot), writer.drops
            assert identity(reader.read()) == identity(record)
    assert writer.stats().corrupt_records == 0


def test_nothing_is_seen_before_the_slots_before_it_are_closed(ring_pair):
    writer, reader = ring_pair(SPEC)
    records = [make_record(SPEC, seed) for seed in range(4)]
    first, second = (promise(writer, record) for record in records[:2])
    assert writer.try_write(records[2])
    for slot, record in ((second, records[1]), (first, records[0])):
        assert reader.read() is None and writer.stats().used_bytes == 0
        land(writer, slot, record)
        assert writer.try_write(record, slot)
    assert writer.try_write(records[3])
    assert [identity(reader.read()) for _ in records] == list(map(identity, records))
    assert writer.stats() == reader.stats() and reader.stats().corrupt_records == 0


def test_a_cancelled_slot_is_skipped_and_its_rows_are_blanked(ring_pair):
    writer, reader = ring_pair(SPEC)
    record = make_record(SPEC)
    slot = promise(writer, record)
    land(writer, slot, record)
    writer.cancel(slot)
    writer.cancel(slot)
    assert writer.try_write(record)
    assert identity(reader.read()) == identity(record)
    assert not any(writer.memory[slot.places.features])
    assert writer.stats().dropped_records == reader.stats().corrupt_records == 0


def test_a_full_ring_promises_nothing_and_counts_only_what_is_written(ring_pair):
    writer, reader = ring_pair(SPEC, 2048)
    record, slots = make_record(SPEC), []
    while (slot := promise(writer, record)) is not None:
        slots.append(slot)
    assert slots and not writer.drops
    assert not writer.try_write(record) and dict(writer.drops) == {"full": 1}
    assert writer.reserve(1000, 0, 0, True) is None  # larger than the ring
    for slot in slots:
        land(writer, slot, record)
        assert writer.try_write(record, slot)
    assert [identity(reader.read()) for _ in slots] == [identity(record)] * len(slots)
    assert promise(writer, record) is not None


@pytest.mark.parametrize("change", ["rows", "teacher_start", "phase"])
def test_another_record_than_the_promised_is_dropped_and_counted(ring_pair, change):
    writer, reader = ring_pair(SPEC)
    slot = promise(writer, make_record(SPEC, num_rows=4))
    other = {"rows": (5,), "teacher_start": (4, Phase.VERIFY, 1)}
    record = make_record(SPEC, 1, *other.get(change, (4, Phase.PREFILL)))
    assert not writer.try_write(record, slot)
    assert writer.dropped_rows == {"invalid": len(record.token_ids)}
    assert writer.try_write(record)
    assert identity(reader.read()) == identity(record)
    assert reader.stats().corrupt_records == 0


def test_a_slot_of_a_ring_that_was_replaced_is_counted_as_lost(ring_pair):
    (old, _), (new, reader) = ring_pair(SPEC), ring_pair(SPEC)
    record = make_record(SPEC)
    slot, own = promise(old, record), promise(new, record)
    assert own.places == slot.places
    assert not new.try_write(record, slot) and new.drops == {"truncated": 1}
    land(new, own, record)
    assert new.try_write(record, own) and reader.read() is not None


@pytest.mark.parametrize("end", ["close", "truncate"])
def test_slots_of_a_ring_that_is_gone_raise_nothing(ring_pair, end):
    writer, _ = ring_pair(SPEC)
    record = make_record(SPEC)
    first, second = promise(writer, record), promise(writer, record)
    if end == "close":
        writer.close()
    else:
        os.truncate(f"{SHM_DIR}/{writer.name}", 0)
    assert promise(writer, record) is None
    assert not writer.try_write(record, first)
    writer.cancel(second)
    assert sum(writer.drops.values()) == 1


def test_a_slot_that_the_consumer_passed_is_dropped(ring_pair):
    """A damaged head leads it there; it blanks what it passes."""
    writer, reader = ring_pair(SPEC)
    record = make_record(SPEC)
    slot = promise(writer, record)
    land(writer, slot, record)
    reader._segment.store(Word.HEAD, 128)
    assert reader.read() is None
    assert not writer.try_write(record, slot) and writer.drops == {"cursor": 1}
    for _ in range(2):
        writer.heartbeat()
        reader.heartbeat()
        assert reader.read() is None
    assert writer.try_write(record)
    assert identity(reader.read()) == identity(record)


CRASH = """
import os, signal, sys
from tests.transport.samples import make_record
from tests.transport.test_ring_slots import SPEC, land, promise
from vllm_tide.transport import RingWriter
writer = RingWriter.create(SPEC, 1 << 16)
for seed in range(2):
    writer.try_write(make_record(SPEC, seed))
slots = [promise(writer, make_record(SPEC, seed)) for seed in (2, 3)]
land(writer, slots[0], make_record(SPEC, 2))
land(writer, slots[1], make_record(SPEC, 3))
writer.try_write(make_record(SPEC, 3), slots[1])
writer.try_write(make_record(SPEC, 4))
print(writer.name, flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_producer_killed_with_a_slot_open_leaves_only_whole_records(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CRASH], stdout=subprocess.PIPE, stdin=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    reader = RingReader.attach(child.stdout.readline().strip())
    child.communicate("x")
    assert not reader.producer_alive()
    got = [reader.read() for _ in range(3)]
    assert [identity(record) for record in got[:2]] == [
        identity(make_record(SPEC, seed)) for seed in range(2)
    ]
    assert got[2] is None and reader.stats().corrupt_records == 0
    assert reader.name in reclaim_orphans(tmp_path)
    reader.close()


RECORDS = [
    make_record(SMALL, seed, 1 + seed % 8, Phase(seed % 2)) for seed in range(16)
]
act = st.tuples(
    st.sampled_from(["write", "promise", "promise", "fill", "cancel", "read", "beat"]),
    st.integers(0, 15),
)


@settings(normal, max_examples=100)
@given(capacity=st.integers(700, 4000), steps=st.lists(act, max_size=60))
def test_with_slots_any_interleaving_behaves_as_a_bounded_queue(capacity, steps):
    """Laps, pads, slots closed in any order: what is read is what was completed."""
    queue, waiting = deque(), []  # entries [identity or None, whether complete]
    with Pair(capacity) as pair:
        writer, refused = pair.writer, 0
        for action, value in steps:
            record = RECORDS[value]
            if action == "write":
                if writer.try_write(record):
                    queue.append([identity(record), True])
                else:
                    refused += 1
            elif action == "promise":
                if (slot := promise(writer, record)) is not None:
                    queue.append([identity(record), False])
                    waiting.append((slot, record, queue[-1]))
            elif action in ("fill", "cancel") and waiting:
                slot, record, entry = waiting.pop(value % len(waiting))
                land(writer, slot, record)
                if action == "fill":
                    assert writer.try_write(shape_of(record), slot)
                else:
                    writer.cancel(slot)
                    entry[0] = None
                entry[1] = True
            elif action == "read":
                while queue and queue[0] == [None, True]:
                    queue.popleft()
                want = queue.popleft()[0] if queue and queue[0][1] else None
                got = pair.reader.read()
                assert (identity(got) if got else None) == want
            elif action == "beat":
                writer.heartbeat()
                pair.reader.heartbeat()
            assert writer.stats().used_bytes <= writer.stats().capacity_bytes
        assert sum(writer.drops.values()) == refused
        assert pair.reader.stats().corrupt_records == 0
