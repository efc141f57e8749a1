"""Two real processes, one of them killed with SIGKILL at a random moment.

TIDE_TEST_KILLS sets how many kills each test makes (default 7).
"""

import os
import random
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from tests.transport import peer
from tests.transport.samples import identity, write_record
from vllm_tide.transport import RingReader, RingWriter, WeightsRefused, WeightsSegment
from vllm_tide.transport.rendezvous import reclaim_orphans
from vllm_tide.transport.shm import SHM_DIR

KILLS = int(os.environ.get("TIDE_TEST_KILLS", "7"))
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


@pytest.mark.parametrize("seed", range(KILLS))
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


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_consumer_never_stops_the_producer(seed):
    writer = RingWriter.create(peer.SPEC, peer.CAPACITY_BYTES)
    child, _ = start("consume", writer.name)
    end = time.monotonic() + random_delay(seed)
    number = 0
    slowest = 0.0
    while time.monotonic() < end or not number:
        number += write_record(writer, peer.record_of(number % peer.NUM_RECORDS))
    assert writer.stats().consumer_alive
    kill(child)
    assert not writer.stats().consumer_alive
    for _ in range(200):
        begin = time.perf_counter()
        number += write_record(writer, peer.record_of(number % peer.NUM_RECORDS))
        slowest = max(slowest, time.perf_counter() - begin)
    assert slowest < 1.0
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


def test_a_trainer_killed_at_any_moment_never_leaves_the_engine_without_weights():
    segment = WeightsSegment.create(2 * 4 * peer.TENSOR_FLOATS)
    other = WeightsSegment.attach(segment.name)
    seen = 0
    for seed in range(KILLS):
        child, _ = start("publish", segment.name)
        end = time.monotonic() + random_delay(seed)
        first = segment.latest_version()
        while time.monotonic() < end or segment.latest_version() == first:
            for engine in (segment, other):
                try:
                    got = engine.read()
                except WeightsRefused as refusal:  # overtaken thrice while reading
                    assert refusal.reason in ("torn", "empty"), refusal
                    continue
                assert got.version >= seen
                seen = got.version
                data = got.tensors["x"].data
                assert data.tobytes() == peer.tensor_of(got.version).tobytes()
        kill(child)
        assert not segment.writer_alive()
        for engine in (segment, other):
            got = engine.read()  # no writer now: it must be there
            assert got.version == segment.latest_version() >= seen
            seen = got.version
    other.close()
    segment.close()
