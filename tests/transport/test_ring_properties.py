"""The ring compared with a model, and with damage anywhere in its memory."""

import os
from collections import deque

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transport.samples import (
    identity,
    make_metadata_only,
    make_record,
    make_spec,
    write_record,
)
from vllm_tide.transport import Phase, RingReader, RingWriter, TransportError
from vllm_tide.transport.ring import Atomic
from vllm_tide.transport.shm import DATA_AT, PAGE_BYTES, SHM_DIR

SPEC = make_spec("topk", hidden_size=3, topk=2, layers=(1, 2))
# A fixed set: comparison by identity needs each made once.
RECORDS = [
    (make_metadata_only if seed % 3 == 2 else make_record)(
        SPEC, seed, num_rows=seed % 9, phase=Phase(seed % 2)
    )
    for seed in range(36)
]
IDENTITIES = [identity(record) for record in RECORDS]
KNOWN = set(IDENTITIES)

write = st.tuples(st.just("write"), st.integers(0, len(RECORDS) - 1))
read = st.tuples(st.just("read"), st.integers(1, 4))
beat = st.tuples(st.sampled_from(["beat", "reattach"]), st.just(0))
damage = st.tuples(
    st.just("damage"),
    st.tuples(
        # Half of all damage hits the atomics, where it does most harm.
        st.one_of(
            st.integers(0, 1 << 16),
            st.builds(
                lambda atomic, byte: PAGE_BYTES + 64 * atomic + byte,
                st.integers(0, max(Atomic)),
                st.integers(0, 7),
            ),
        ),
        st.binary(min_size=1, max_size=80),
    ),
)
cut = st.tuples(st.just("cut"), st.integers(0, DATA_AT + 63))


class Pair:
    """A ring with both ends, and the memory as an attacker sees it."""

    def __init__(self, capacity):
        self.writer = RingWriter.create(SPEC, capacity)
        self.reader = RingReader.attach(self.writer.name)
        self.buf = self.writer._segment.buf
        self.path = f"{SHM_DIR}/{self.writer.name}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.reader.close()
        self.writer.close()

    def reattach(self):
        self.reader.close()
        self.reader = RingReader.attach(self.writer.name)


def as_a_queue(pair, steps):
    queue, dropped = deque(), 0
    for action, value in steps:
        if action == "write":
            if write_record(pair.writer, RECORDS[value]):
                queue.append(IDENTITIES[value])
            else:
                dropped += 1
        elif action == "read":
            for _ in range(value):
                got = pair.reader.read()
                want = queue.popleft() if queue else None
                assert (identity(got) if got else None) == want
        elif action == "reattach":
            pair.reattach()
        else:
            pair.reader.heartbeat()
        stats = pair.writer.stats()
        assert stats.used_bytes <= stats.capacity_bytes
        assert (stats.used_bytes == 0) <= (not queue)
    stats = pair.writer.stats()
    assert (stats.dropped_records, stats.corrupt_records) == (dropped, 0)
    assert stats.consumer_alive
    assert set(pair.writer.drops) <= {"full", "too_large"}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    capacity=st.integers(64, 6000),
    steps=st.lists(st.one_of(write, write, read, beat), max_size=50),
    harmed=st.lists(st.one_of(write, write, read, beat, damage), max_size=40),
    after=st.lists(st.one_of(write, read, cut), max_size=6),
)
def test_no_damage_of_a_bounded_queue_raises_or_invents_a_record(
    capacity, steps, harmed, after
):
    whole = True
    with Pair(capacity) as pair:
        as_a_queue(pair, steps)
        for action, value in harmed + after:
            if action == "write":
                written = write_record(pair.writer, RECORDS[value])
                assert whole or not written
            elif action == "cut":
                os.truncate(pair.path, value)
                whole = False
            elif action == "read":
                for _ in range(value):
                    got = pair.reader.read()
                    assert got is None or identity(got) in KNOWN
            elif action == "damage":
                at, data = value
                at %= len(pair.buf)
                data = data[: len(pair.buf) - at]
                pair.buf[at : at + len(data)] = data
            elif action == "reattach":
                try:
                    pair.reattach()
                except TransportError:  # the header was hit
                    assert pair.reader.read() is None
            else:
                pair.reader.heartbeat()
            pair.writer.stats()
            pair.reader.stats()
