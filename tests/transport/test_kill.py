"""Two real processes, one of them killed with SIGKILL at a random moment."""

import os
import random
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from tests.transport import peer
from tests.transport.samples import identity, write_record
from vllm_tide.transport import RingReader, RingWriter
from vllm_tide.transport.rendezvous import reclaim_orphans
from vllm_tide.transport.shm import SHM_DIR

pytestmark = pytest.mark.slow


def start(*argv):
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.peer", *argv],
        stdout=subprocess.PIPE,
        text=True,
        cwd=os.getcwd(),
    )
    return child, child.stdout.readline().strip()


def kill(child):
    assert child.poll() is None, "it ended by itself"
    child.kill()
    child.wait()
    child.stdout.close()


def random_delay(seed):
    return random.Random(seed).uniform(0.0, 0.15)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_producer_leaves_only_whole_records(seed, tmp_path):
    child, name = start("produce")
    reader = RingReader.attach(name)
    end = time.monotonic() + random_delay(seed)
    numbers = []

    def take():
        while (record := reader.read()) is not None:
            assert identity(record) == identity(peer.record_of(record.draft_version))
            numbers.append(record.draft_version)

    while time.monotonic() < end or not numbers:
        take()
    assert reader.producer_alive()
    kill(child)
    take()
    assert not reader.producer_alive()
    steps = {(b - a) % peer.NUM_RECORDS for a, b in pairwise(numbers)}
    assert steps <= {1}, "a record is missing or came twice"
    assert reader.stats().corrupt_records == 0
    reclaim_orphans(tmp_path)
    assert not os.path.exists(f"{SHM_DIR}/{name}")
    reader.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_consumer_never_stops_the_producer(seed):
    writer = RingWriter.create(peer.SPEC, peer.CAPACITY_BYTES)
    child, _ = start("consume", writer.name)
    end = time.monotonic() + random_delay(seed)
    number = 0
    while time.monotonic() < end or not number:
        number += write_record(writer, peer.record_of(number % peer.NUM_RECORDS))
    assert writer.stats().consumer_alive
    kill(child)
    assert not writer.stats().consumer_alive
    for _ in range(200):
        number += write_record(writer, peer.record_of(number % peer.NUM_RECORDS))
    assert set(writer.drops) <= {"full"}
    reader = RingReader.attach(writer.name)  # goes on where the dead one stopped
    numbers = []
    while (record := reader.read()) is not None:
        assert identity(record) in peer.known_identities()
        numbers.append(record.draft_version)
    assert {(b - a) % peer.NUM_RECORDS for a, b in pairwise(numbers)} <= {1}
    assert numbers[-1] == (number - 1) % peer.NUM_RECORDS
    assert writer.stats().corrupt_records == 0
    assert write_record(writer, peer.record_of(1))
    reader.close()
    writer.close()
