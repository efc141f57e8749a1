"""Content of shared memory: records, rings and weights segments."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.fuzz.attempt import Parser
from tests.fuzz.damage import damaged, damaged_json, edges
from tests.transport.samples import body_of, make_metadata_only, make_record, make_spec
from vllm_tide import _shm
from vllm_tide.transport import (
    RingReader,
    RingWriter,
    TransportError,
    WeightsRefused,
    WeightsSegment,
    WeightsWriter,
    draft_weights,
    shm,
)
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.record import FORMAT_VERSION, META, Frames, RecordError, decode
from vllm_tide.transport.ring import FRAME_BYTES, MAGIC, RECORD, pack_frame, peek_ring
from vllm_tide.transport.shm import DATA_AT, LINE_BYTES, PAGE_BYTES, is_orphaned
from vllm_tide.transport.weights import MAGIC as WEIGHTS_MAGIC
from vllm_tide.transport.weights import peek_weights

SPEC = make_spec("topk", hidden_size=3, topk=2, layers=(1, 2))
FIELDS = {**SPEC.__dict__, "aux_layer_ids": [1, 2]}
TENSORS = {
    "fc.weight": ("float32", (2, 3), np.arange(6, dtype=np.float32)),
    "norm": ("bfloat16", (4,), np.arange(4, dtype=np.uint16)),
    "d2t": ("int64", (0,), np.empty(0, np.int64)),
}


def body(seed: int) -> bytes:
    """Return the bytes of a record."""
    make = make_metadata_only if seed % 3 == 2 else make_record
    return body_of(make(SPEC, seed, num_rows=seed % 5), SPEC).tobytes()


BODIES = [body(seed) for seed in range(9)]


def write(ring: RingWriter, data: bytes) -> None:
    """Append the bytes of a record to a ring."""
    arrays = np.frombuffer(data, np.uint8)[META.itemsize :]
    frames = Frames(
        np.frombuffer(data[: META.itemsize], META),
        np.array([[(0, len(arrays))]], np.int64),
        np.zeros(1, np.bool_),
        (arrays,),
        np.zeros(1, np.uint8),
    )
    ring.write(frames)
    ring.count(frames)


@st.composite
def meta_bodies(draw: st.DrawFn) -> bytes:
    """A record with a fixed part of any sizes, before bytes of any kind."""
    meta = np.frombuffer(
        bytearray(draw(st.sampled_from(BODIES))[: META.itemsize]), META
    )
    whole = [name for name in META.names if META[name].kind in "iu"]
    for name in draw(st.lists(st.sampled_from(whole), max_size=6)):
        meta[name] = np.uint64(draw(edges)).astype(META[name])
    return meta.tobytes() + draw(st.binary(max_size=200))


def sealed(magic: bytes, version: int, size: int, spec: bytes) -> bytes:
    """Return page 0 with a right checksum and any content."""
    spec = spec[: shm._SPEC_BYTES]
    version |= shm.LAYOUT
    head = shm._HEADER.pack(magic, version, len(spec), size, os.getpid())
    crc = shm._CRC.pack(_shm.crc32c(spec, _shm.crc32c(head)))
    return ((head + crc).ljust(shm._SPEC_AT, b"\0") + spec).ljust(PAGE_BYTES, b"\0")


def pages(
    magic: bytes, version: int, spec: dict[str, Any], size: int
) -> st.SearchStrategy[bytes | None]:
    """Return page 0: unchanged, damaged, or valid with unusual values."""
    good = sealed(magic, version, size, json.dumps(spec).encode())
    sizes = st.one_of(st.just(size), edges, st.integers(DATA_AT - 1, size))
    versions = st.sampled_from((version, version, version, 1, version + 1))
    odd = st.builds(sealed, st.just(magic), versions, sizes, damaged_json([spec]))
    return st.one_of(st.none(), st.none(), damaged([good]), odd)


def read_record(data: bytes) -> None:
    record = decode(memoryview(data))
    num_bytes = sum(v.nbytes for v in (record.token_ids, record.features))
    assert num_bytes <= len(data) and record.num_rows == len(record.features)


@st.composite
def wounds(draw: st.DrawFn, size: int, frames: bool) -> list[tuple[int, bytes]]:
    """Return writes over a whole segment."""
    made = []
    for _ in range(draw(st.integers(0, 4))):
        what = draw(st.sampled_from(("word", "bytes", "frame" if frames else "bytes")))
        if what == "word":  # of page 1
            at = PAGE_BYTES + draw(st.integers(0, 15)) * LINE_BYTES
            line = draw(edges) // draw(st.sampled_from((1, 64))) * 64 % 2**64
            made.append((at, line.to_bytes(8, "little")))
        elif what == "bytes":
            made.append((draw(st.integers(0, size - 1)), draw(st.binary(max_size=64))))
        else:
            offset = draw(st.integers(0, size - DATA_AT - 1)) // 64 * 64
            content = draw(st.one_of(meta_bodies(), damaged(BODIES)))
            content += bytes(-len(content) % 8)
            whole = -(-(FRAME_BYTES + len(content)) // LINE_BYTES) * LINE_BYTES
            length = draw(st.sampled_from((whole, 64, 128)))
            crc = _shm.crc32c(content)
            frame = pack_frame(RECORD, offset, length, len(content), crc)
            made.append((DATA_AT + offset, frame + content))
    return made


class Memory:
    """A segment that is restored before each input."""

    def __init__(self, segment: Any) -> None:
        self.buf = segment.buf
        self.whole = bytes(self.buf)

    def harm(self, page: bytes | None, places: list[tuple[int, bytes]]) -> None:
        self.buf[:] = self.whole
        if page is not None:
            self.buf[:PAGE_BYTES] = page[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
        for at, data in places:
            data = data[: len(self.buf) - at]
            self.buf[at : at + len(data)] = data


@functools.cache
def ring_scene() -> tuple[RingWriter, Memory]:
    writer = RingWriter.create(SPEC, 4096)
    for seed in range(6):
        write(writer, BODIES[seed])
    return writer, Memory(writer._segment)


def read_ring(given: tuple[bytes | None, list[tuple[int, bytes]]]) -> None:
    writer, memory = ring_scene()
    memory.harm(*given)
    peek_ring(writer.name)
    is_orphaned(writer.name)
    reader = RingReader.attach(writer.name)
    try:
        count = 0
        while reader.read() is not None:
            count += 1
            assert count <= 64
        reader.heartbeat()
        reader.set_collect(False)
        reader.producer_alive()
        stats = reader.stats()
        assert 0 <= stats.used_bytes <= stats.capacity_bytes
        write(writer, BODIES[2])
        writer.stats()
        reader.read()
    finally:
        reader.close()


@functools.cache
def weights_scene() -> tuple[WeightsSegment, Memory]:
    segment = WeightsSegment.create(8192)
    writer = WeightsWriter.attach(segment.name)
    for version in (1, 2):
        writer.publish(DraftWeights.encode(TENSORS, version))
    writer.close()
    segment.report(1, 2, "sha256", 1.5)
    return segment, Memory(segment._segment)


def read_weights(given: tuple[bytes | None, list[tuple[int, bytes]]]) -> None:
    owner, memory = weights_scene()
    memory.harm(*given)
    peek_weights(owner.name)
    owner._last_read = 0
    engine = WeightsSegment.attach(owner.name)
    try:
        engine.latest_version()
        engine.read_version(1)
        trainer = WeightsWriter.attach(owner.name)
        try:
            for _ in range(12):
                assert len(trainer.feedback().refused_reason) <= 64
            version = trainer.latest_version + 1
            trainer.publish(DraftWeights.encode(TENSORS, version))
        finally:
            trainer.close()
        memory.harm(*given)
        engine.read()
    finally:
        engine.close()


@st.composite
def publications(draw: st.DrawFn) -> DraftWeights:
    """Return version 3, often with an arbitrary header and a right digest."""
    data = DraftWeights.encode(TENSORS, 3, {"loss": 1.0}).data
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["vllm_tide"])
    if draw(st.booleans()):
        text = draw(damaged_json([about])).decode("utf-8", "replace")
        header["__metadata__"] = {"vllm_tide": text}
        text = json.dumps(header).encode()
    else:
        text = draw(damaged_json([header]))
    whole = len(text).to_bytes(8, "little") + text + data[8 + length :]
    data = draw(st.one_of(st.just(whole), damaged([data])))
    return DraftWeights(3, hashlib.sha256(data).digest(), data)


def read_publication(blob: DraftWeights) -> None:
    result = blob.verify()
    sizes = [len(item.data) for item in result.tensors.values()]
    assert max(sizes, default=0) <= len(blob.data)


def parsers() -> list[Parser]:
    """Return the parsers of shared memory."""
    ring_size = DATA_AT + 4096
    weights_size = DATA_AT + 2 * 8192
    ring = st.tuples(
        pages(MAGIC, FORMAT_VERSION, FIELDS, ring_size),
        wounds(ring_size, frames=True),
    )
    weights = st.tuples(
        pages(WEIGHTS_MAGIC, draft_weights.FORMAT_VERSION, {}, weights_size),
        wounds(weights_size, frames=False),
    )
    records = st.one_of(damaged(BODIES), meta_bodies())
    return [
        Parser("record", records, read_record, (RecordError,)),
        Parser("ring", ring, read_ring, (TransportError,)),
        Parser("weights", weights, read_weights, (TransportError,)),
        Parser("publication", publications(), read_publication, (WeightsRefused,)),
    ]
