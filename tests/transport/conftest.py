import uuid

import pytest

from tests.transport.spool_toys import ToyEngine, small_shards
from vllm_tide.transport import RingReader, RingWriter, WeightsSegment, WeightsWriter
from vllm_tide.transport.spool_store import open_store

__all__ = ["small_shards"]


@pytest.fixture
def ring_pair():
    """A factory of (writer, reader) pairs that are closed after the test."""
    made = []

    def make(spec, capacity_bytes=1 << 16):
        writer = RingWriter.create(spec, capacity_bytes)
        made.append(writer)
        reader = RingReader.attach(writer.name)
        made.append(reader)
        return writer, reader

    yield make
    for end in reversed(made):
        end.close()


@pytest.fixture
def weights_pair():
    """A factory of (segment, writer) pairs that are closed after the test."""
    made = []

    def make(slot_bytes=1 << 16):
        segment = WeightsSegment.create(slot_bytes)
        made.append(segment)
        writer = WeightsWriter.attach(segment.name)
        made.append(writer)
        return segment, writer

    yield make
    for end in reversed(made):
        end.close()


@pytest.fixture(params=["directory", "memory"])
def store(request, tmp_path):
    if request.param == "directory":
        return open_store(str(tmp_path / "spool"))
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def engines(tmp_path):
    made = []

    def make(name="e1", **changes):
        made.append(ToyEngine(tmp_path / name, name, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
