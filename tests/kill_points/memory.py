"""Protocols of the ring, the weights segment and a feed that reads and publishes."""

from __future__ import annotations

import itertools
import os
import secrets
from contextlib import closing, suppress

import numpy as np
import pytest

from tests.kill_points.points import Protocol
from tests.transport.samples import (
    frames_of,
    identity,
    make_record,
    make_spec,
    write_record,
)
from tests.transport.spool_toys import ToyEngine, head_tensors
from vllm_tide.transport import RingReader, RingWriter, WeightsSegment, WeightsWriter
from vllm_tide.transport import shm as shm_module
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.feeds import open_feeds
from vllm_tide.transport.rendezvous import reclaim_orphans
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import SHM_DIR, TransportError
from vllm_tide.transport.versions import first_version, number_of
from vllm_tide.transport.weights import WeightsRefused

SPEC = make_spec("topk", hidden_size=4, topk=2)
CAPACITY = 2048  # three records and a bit: a fourth one wraps


def record_of(number: int):
    return make_record(SPEC, number, num_rows=2 + number % 3)


def seeds_of(reader: RingReader) -> list[int]:
    """Return the numbers of the remaining records, each equal to the bit as written."""
    numbers = []
    while (record := reader.read()) is not None:
        assert identity(record) == identity(record_of(record.draft_version))
        numbers.append(record.draft_version)
    return numbers


def seeds_left(name: str) -> list[int]:
    """Return the numbers of the records of a ring, which may have no damage."""
    with closing(RingReader.attach(name)) as reader:
        numbers = seeds_of(reader)
        assert reader.stats().corrupt_records == 0
    return numbers


class Producer(Protocol):
    """An engine makes its segments, writes records, and dies."""

    def begin(self) -> None:
        self._name, self._numbers = secrets.token_hex(8), itertools.count()

    def act(self) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                shm_module.secrets,
                "token_hex",
                lambda _: f"{self._name}_{os.getpid()}_{next(self._numbers)}",
            )
            ring = RingWriter.create(SPEC, CAPACITY)
            weights = WeightsSegment.create(4096)
        assert write_record(ring, record_of(0))
        ring.write(frames_of([record_of(3), record_of(3)], follows=[False, True]))
        weights.report(0)
        ring.close()  # a killed one leaves them
        weights.close()
        return True

    def check(self, done: bool) -> None:
        names = [n for n in os.listdir(SHM_DIR) if self._name in n]
        for name in names:
            with suppress(TransportError):  # it has no header yet
                if "_ring_" in name:
                    assert seeds_left(name) in ([], [0], [0, 3], [0, 3, 3])
            os.utime(f"{SHM_DIR}/{name}", (0, 0))
        reclaim_orphans(self.folder)
        assert not any(self._name in n for n in os.listdir(SHM_DIR))


class Consumer(Protocol):
    """A trainer reads a ring that has wrapped, and another one continues."""

    def begin(self) -> None:
        self._ring = RingWriter.create(SPEC, CAPACITY)
        assert all(write_record(self._ring, record_of(n)) for n in range(3))
        assert seeds_left(self._ring.name) == [0, 1, 2]
        assert all(write_record(self._ring, record_of(n)) for n in range(3, 6))

    def act(self) -> bool:
        with closing(RingReader.attach(self._ring.name)) as reader:
            reader.heartbeat()
            reader.set_collect(Collect.METADATA)
            for _ in range(2):
                if (record := reader.read()) is not None:
                    assert identity(record) == identity(record_of(record.draft_version))
                    with open(self.notes, "a") as file:
                        file.write(f"{record.draft_version}\n")
            self._require_no_damage(reader)
        return True

    def _require_no_damage(self, reader: RingReader) -> None:
        # Half a line of 64 bytes is damage: what follows is skipped and counted.
        assert reader.stats().corrupt_records == 0 or self.fault == "torn"

    def check(self, done: bool) -> None:
        numbers = self._taken()
        assert numbers == sorted(set(numbers)), "one came twice"
        assert not self._ring.drops
        assert self._ring.collect_mode in (Collect.FULL, Collect.METADATA)

    def _taken(self) -> list[int]:
        text = self.notes.read_text() if self.notes.exists() else ""
        return [*map(int, text.split())]

    def tidy(self) -> None:
        """Every record is read but those that a stopped reader took."""
        taken = set(self._taken())
        with closing(RingReader.attach(self._ring.name)) as reader:
            left = set(seeds_of(reader))
            self._require_no_damage(reader)
            assert not left & taken
            assert len(left | taken) >= (0 if self.fault == "torn" else 2)
            assert write_record(self._ring, record_of(6))
            assert seeds_of(reader) == [6]

    def close(self) -> None:
        self._ring.close()


class Publisher(Protocol):
    """A trainer publishes two drafts to an engine that reads during publication."""

    def begin(self) -> None:
        self._segment = WeightsSegment.create(8192)
        with closing(WeightsWriter.attach(self._segment.name)) as writer:
            self._publish(writer)

    def _publish(self, writer: WeightsWriter) -> None:
        version = writer.latest_version + 1
        tensors = head_tensors(float(version))
        writer.publish(DraftWeights.encode(tensors, version))

    def act(self) -> bool:
        with closing(WeightsWriter.attach(self._segment.name)) as writer:
            before = writer.latest_version
            self._publish(writer)
            self._publish(writer)
            assert writer.feedback().engine_alive
        return self._segment.latest_version() == before + 2

    def check(self, done: bool) -> None:
        read = self._segment.read()
        assert_whole(read)
        assert read.version >= (3 if done else 1)

    def close(self) -> None:
        self._segment.close()


def assert_whole(draft: DraftWeights) -> None:
    """Assert that it is the draft of its version."""
    values = draft.tensors["fc.weight"].data.view(np.float32)
    assert (values == float(draft.version)).all()


class Feedback(Protocol):
    """An engine reports the served version."""

    def begin(self) -> None:
        self._segment = WeightsSegment.create(8192)
        self._segment.report(1, 2, "old")

    def act(self) -> bool:
        self._segment.report(2, 3, "new", 1.5)
        return True

    def check(self, done: bool) -> None:
        with closing(WeightsWriter.attach(self._segment.name)) as writer:
            feedback = writer.feedback()
        report = feedback.installed_version, feedback.refused_reason
        assert report == (2, "new") or not done and report in ((1, "old"), (0, ""))

    def close(self) -> None:
        self._segment.close()


class RingFeedProtocol(Protocol):
    """A trainer finds an engine, reads it, publishes, and continues from that."""

    def begin(self) -> None:
        self._engine = ToyEngine(self.folder)
        self._engine.serve(range(4))
        with closing(WeightsWriter.attach(self._engine.weights.name)) as writer:
            first = first_version(1)
            writer.publish(DraftWeights.encode(head_tensors(float(first)), first))

    def act(self) -> bool:
        feeds = open_feeds(self._engine.run_dir)
        try:
            if not feeds.poll().joined:
                return False
            feeds.set_collect(Collect.FULL)
            feeds.heartbeat()
            for _, records in feeds.read(2):
                for record in records:
                    want = make_record(self._engine.spec, record.draft_version)
                    assert identity(record) == identity(want)
            newest = feeds.latest()
            if newest is None:
                return False
            assert_whole(newest)
            version = first_version(number_of(newest.version) + 1)
            feeds.publish(head_tensors(float(version)), {})
        finally:
            feeds.close()
        return len(feeds) == 0

    def check(self, done: bool) -> None:
        with suppress(WeightsRefused):
            read = self._engine.weights.read()
            assert_whole(read)
            assert number_of(read.version) >= (2 if done else 1)

    def close(self) -> None:
        self._engine.close()


PROTOCOLS: list[type[Protocol]] = [
    *(Producer, Consumer, Publisher, Feedback, RingFeedProtocol),
]
