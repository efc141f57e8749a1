import uuid

import pytest

from tests.transport.spool_toys import ToyEngine, small_shards
from vllm_tide.transport import RingReader, RingWriter, WeightsSegment, WeightsWriter
from vllm_tide.transport.spool import Store

__all__ = ["small_shards"]


@pytest.fixture
def ring_pair():
    """Return a factory of (writer, reader) pairs that are closed after the test."""
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
    """Return a factory of (segment, writer) pairs that are closed after the test."""
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


@pytest.fixture
def disk(tmp_path):
    return Store(str(tmp_path / "spool"))


@pytest.fixture(params=["directory", "memory"])
def store(request, disk):
    memory = f"memory://{uuid.uuid4().hex}"
    return disk if request.param == "directory" else Store(memory)


@pytest.fixture
def engines(tmp_path):
    """Return a factory of engines, each with a separate run directory."""
    made = []

    def make(name="e1", folder=None, **changes):
        made.append(ToyEngine(folder or tmp_path / name, name, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(engines):
    return engines()
