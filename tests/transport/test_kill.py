"""A process at one end of a ring, killed with SIGKILL at a random moment.

Records follow from their number alone, so that a reader distinguishes a whole record
from an invalid one.
"""

import os
import random
import signal
import time
from functools import cache
from itertools import pairwise

import pytest

from tests.transport.samples import identity, make_record, make_spec, write_record
from vllm_tide.transport import RingReader, RingWriter
from vllm_tide.transport.rendezvous import reclaim_orphans
from vllm_tide.transport.shm import SHM_DIR

SPEC = make_spec("topk", hidden_size=16, topk=4)
NUM_RECORDS = 64
CAPACITY_BYTES = 40_000
pytestmark = pytest.mark.slow


@cache
def record_of(number):
    return make_record(SPEC, number, num_rows=number % 11)


def produce(tell):
    """Write for ever, into a ring; its name goes to a pipe."""
    writer = RingWriter.create(SPEC, CAPACITY_BYTES)
    os.write(tell, writer.name.encode())
    number = 0
    while True:
        number += write_record(writer, record_of(number % NUM_RECORDS))


def consume(name):
    """Read for ever; exit at an invalid record."""
    known = {identity(record_of(number)) for number in range(NUM_RECORDS)}
    reader = RingReader.attach(name)
    while True:
        record = reader.read()
        assert record is None or identity(record) in known


class Child:
    """Run a function in a fork, for a minute at most."""

    def __init__(self, work, *arguments):
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(60)
            try:
                work(*arguments)
                os._exit(0)
            finally:
                os._exit(1)

    def ended(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL, "it ended by itself"


def child_that_tells(work, *arguments):
    """Return a child, and what it writes to its last argument, a descriptor."""
    reader, tell = os.pipe()
    child = Child(work, *arguments, tell)
    text = os.read(reader, 200).decode()
    os.close(reader)
    os.close(tell)
    return child, text


def soon(seed):
    return time.monotonic() + random.Random(seed).uniform(0.0, 0.15)


def read_on(reader, numbers):
    while (record := reader.read()) is not None:
        assert identity(record) == identity(record_of(record.draft_version))
        numbers.append(record.draft_version)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_producer_leaves_only_whole_records(seed, tmp_path):
    child, name = child_that_tells(produce)
    reader = RingReader.attach(name)
    end, numbers = soon(seed), []
    while time.monotonic() < end or not numbers:
        read_on(reader, numbers)
    assert reader.producer_alive()
    child.kill()
    read_on(reader, numbers)
    assert not reader.producer_alive()
    steps = {(b - a) % NUM_RECORDS for a, b in pairwise(numbers)}
    assert steps <= {1}, "a record is missing or came twice"
    assert reader.stats().corrupt_records == 0
    reclaim_orphans(tmp_path)
    assert not os.path.exists(f"{SHM_DIR}/{name}")
    reader.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_consumer_does_not_stop_the_producer(seed):
    writer = RingWriter.create(SPEC, CAPACITY_BYTES)
    child = Child(consume, writer.name)
    end, number = soon(seed), 0
    while time.monotonic() < end or not writer.stats().consumer_alive:
        number += write_record(writer, record_of(number % NUM_RECORDS))
    child.kill()
    assert not writer.stats().consumer_alive
    for _ in range(200):
        number += write_record(writer, record_of(number % NUM_RECORDS))
    assert set(writer.drops) <= {"full"}
    reader = RingReader.attach(writer.name)  # continues where the dead one stopped
    numbers = []
    read_on(reader, numbers)
    assert {(b - a) % NUM_RECORDS for a, b in pairwise(numbers)} <= {1}
    assert numbers[-1] == (number - 1) % NUM_RECORDS
    assert writer.stats().corrupt_records == 0
    assert write_record(writer, record_of(1))
    reader.close()
    writer.close()
