"""What lies in shared memory: headers, rings, weights segments, and the extension."""

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
from tests.transport.samples import make_metadata_only, make_record, make_spec
from vllm_tide import _shm
from vllm_tide.transport import (
    RingReader,
    RingWriter,
    TransportError,
    WeightsRefused,
    WeightsSegment,
    WeightsWriter,
    publication,
    shm,
)
from vllm_tide.transport.process import Holder
from vllm_tide.transport.record import (
    _META,
    FORMAT_VERSION,
    RecordError,
    RingSpec,
    decode,
    encode,
)
from vllm_tide.transport.ring import (
    FRAME_BYTES,
    MAGIC,
    RECORD,
    frame_at,
    pack_frame,
    peek_ring,
)
from vllm_tide.transport.shm import DATA_AT, LINE_BYTES, PAGE_BYTES, Header, orphaned
from vllm_tide.transport.weights import MAGIC as WEIGHTS_MAGIC
from vllm_tide.transport.weights import peek_weights

SPEC = make_spec("topk", hidden_size=3, topk=2, layers=(1, 2))
FIELDS = {**SPEC.__dict__, "aux_layer_ids": [1, 2]}
ODD_NAMES = (
    "", "x", "vllm_tide_", "vllm_tide_a/b", "vllm_tide_\0", "vllm_tide_\ud800",
    "vllm_tide_" + "x" * 300, "../vllm_tide_x", "vllm_tide_ring_0",
)  # fmt: skip
FUNCTIONS = (
    "load", "store", "fetch_add", "compare_exchange", "crc32c", "fd_size",
    "crc32c_table", "gather", "write_frames", "shm_create", "shm_open", "shm_unlink",
)  # fmt: skip
DESCRIPTORS: list[int] = []  # of the call that is made
TENSORS = {
    "fc.weight": ("float32", (2, 3), np.arange(6, dtype=np.float32)),
    "norm": ("bfloat16", (4,), np.arange(4, dtype=np.uint16)),
    "d2t": ("int64", (0,), np.empty(0, np.int64)),
}


def body(seed: int) -> bytes:
    """Bytes of a record."""
    make = make_metadata_only if seed % 3 == 2 else make_record
    parts, size = encode(make(SPEC, seed, num_rows=seed % 5), SPEC.feature_dtype)
    data = bytearray(size)
    _shm.gather(data, 0, parts)
    return bytes(data)


BODIES = [body(seed) for seed in range(9)]


def frame_length(size: int) -> int:
    return -(-(FRAME_BYTES + size) // LINE_BYTES) * LINE_BYTES


@st.composite
def meta_bodies(draw: st.DrawFn) -> bytes:
    """A record whose fixed part has fields of any size, before bytes of any kind."""
    kinds = "QQqqqiIIIIIBBBBQI"
    bits = {"Q": 64, "q": 63, "i": 31, "I": 32, "B": 8}
    small = st.integers(0, 9)
    fields = [
        draw(st.one_of(small, edges.map(lambda v, b=bits[k]: v % 2**b))) for k in kinds
    ]
    fields[14] = FORMAT_VERSION  # the format, or nothing else would be looked at
    floats = draw(st.floats(width=32)), draw(st.floats(width=32))
    return _META.pack(*fields, *floats) + draw(st.binary(max_size=200))


def sealed(magic: bytes, version: int, size: int, spec: bytes) -> bytes:
    """Page 0 with a right checksum, whatever it says."""
    me = Holder.me()
    spec = spec[: shm._SPEC_BYTES]
    head = shm._HEADER.pack(
        magic, version, len(spec), size, me.pid, me.start, me.namespace
    )
    crc = shm._CRC.pack(_shm.crc32c(spec, _shm.crc32c(head)))
    return ((head + crc).ljust(shm._SPEC_AT, b"\0") + spec).ljust(PAGE_BYTES, b"\0")


def pages(magic: bytes, spec: dict[str, Any], size: int) -> st.SearchStrategy[bytes]:
    """Page 0, damaged, or whole and saying odd things."""
    good = sealed(magic, 1, size, json.dumps(spec).encode())
    sizes = st.one_of(st.just(size), edges, st.integers(DATA_AT - 1, size))
    versions = st.sampled_from((1, 1, 1, 2, 2, 2, 7))
    odd = st.builds(sealed, st.just(magic), versions, sizes, damaged_json([spec]))
    return st.one_of(damaged([good]), odd)


def read_header(page: bytes) -> str:
    found = Header.decode(page)
    if found is None:
        return "nothing"
    assert found.size_bytes >= 0
    return "a header"


def read_record(data: bytes) -> str:
    record = decode(memoryview(data))
    held = sum(v.nbytes for v in (record.token_ids, record.features))
    assert held <= len(data) and record.num_rows == len(record.features)
    return "a record"


def read_frames(given: tuple[bytes, int, int]) -> str:
    memory, position, ahead = given
    head = position + ahead
    capacity = len(memory) // LINE_BYTES * LINE_BYTES
    if not capacity:
        return "no room"
    buf = memoryview(bytes(DATA_AT) + memory[:capacity])
    position, head = (n // LINE_BYTES * LINE_BYTES for n in (position, head))
    head = min(head, position + capacity)
    if position >= head:
        return "empty"
    frame = frame_at(buf, capacity, position, head)
    if frame is None:
        return "no frame"
    assert frame.length <= capacity and frame.body < frame.length
    return "a frame"


def read_spec(text: bytes) -> str:
    fields = json.loads(text)
    if not isinstance(fields, dict):  # the header's reader refuses it
        return "no object"
    spec = RingSpec.from_fields(fields)
    assert type(spec.hidden_size) is int
    return "a spec"


@st.composite
def wounds(draw: st.DrawFn, size: int, frames: bool) -> list[tuple[int, bytes]]:
    """What is written where, over a whole segment."""
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
            length = draw(st.sampled_from((frame_length(len(content)), 64, 128)))
            crc = _shm.crc32c(content)
            frame = pack_frame(RECORD, offset, length, len(content), crc)
            made.append((DATA_AT + offset, frame + content))
    return made


class Memory:
    """A segment that is put back as it was before each input."""

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
        writer.try_write(make_record(SPEC, seed, num_rows=seed % 3))
    return writer, Memory(writer._segment)


def read_ring(given: tuple[bytes | None, list[tuple[int, bytes]]]) -> str:
    writer, memory = ring_scene()
    memory.harm(*given)
    peek_ring(writer.name)
    orphaned(writer.name)
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
        writer.try_write(make_metadata_only(SPEC, 2, num_rows=2))
        writer.heartbeat()
        writer.stats()
        reader.read()
    finally:
        reader.close()
    return f"{count} records, damage {stats.corrupt_records > 0}"


@functools.cache
def weights_scene() -> tuple[WeightsSegment, Memory]:
    segment = WeightsSegment.create(8192)
    writer = WeightsWriter.attach(segment.name)
    for version in (1, 2):
        writer.publish(TENSORS, version=version, parent_version=version - 1, meta={})
    writer.close()
    segment.report(1, 2, "sha256", 1.5)
    return segment, Memory(segment._segment)


def read_weights(given: tuple[bytes | None, list[tuple[int, bytes]]]) -> str:
    owner, memory = weights_scene()
    memory.harm(*given)
    peek_weights(owner.name)
    owner._last_read = 0
    engine = WeightsSegment.attach(owner.name)
    try:
        engine.latest_version()
        engine.read_version(1)
        engine.writer_alive()
        trainer = WeightsWriter.attach(owner.name)
        try:
            for _ in range(12):
                assert len(trainer.feedback().refused_reason) <= 64
            trainer.heartbeat()
            version = trainer.latest_version + 1
            trainer.publish(TENSORS, version=version, parent_version=0, meta={})
        finally:
            trainer.close()
        memory.harm(*given)
        return f"version {min(engine.read().version, 3)}"
    finally:
        engine.close()


@st.composite
def publications(draw: st.DrawFn) -> publication.DraftBlob:
    """Version 3, often with a header that says anything and a right digest."""
    data = publication.encode(TENSORS, 3, 2, {"loss": 1.0}).data
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
    return publication.DraftBlob(3, hashlib.sha256(data).digest(), data)


def read_publication(blob: publication.DraftBlob) -> str:
    found = publication.decode(blob)
    sizes = [len(item.data) for item in found.tensors.values()]
    assert max(sizes, default=0) <= len(blob.data)
    return "a publication"


def peek_anything(name: str) -> str:
    assert peek_ring(name) is None and peek_weights(name) is None
    RingReader.attach(name)
    return "a ring"


def _part(draw: st.DrawFn) -> Any:
    data = bytearray(draw(st.binary(max_size=200)))
    array = np.frombuffer(bytes(data), np.uint8)
    odd = (data, bytes(data), memoryview(data)[::2], array[::3], None, 3, "text")
    return odd[draw(st.integers(0, len(odd) - 1))]


@st.composite
def frames_calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arrays that fit each other but for one, if for any, and say anything."""
    count, sources = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    lines = draw(st.integers(1, 16))
    near = st.one_of(st.integers(-9, 40), edges.map(lambda v: v % 2**63))
    spans = [draw(near) for _ in range(count * sources * 2)]
    words = st.sampled_from((0, 0, 0, 64, 128, 1024, 8, 2**63, 2**64 - 64))
    memory = np.zeros(DATA_AT + 64 * lines, np.uint8)
    memory[PAGE_BYTES + 6 * LINE_BYTES :][:8] = np.frombuffer(
        draw(words).to_bytes(8, "little"), np.uint8
    )
    descriptor = os.memfd_create("ring")
    os.truncate(descriptor, len(memory))
    DESCRIPTORS.append(descriptor)
    made: list[Any] = [
        memory, descriptor, np.array([draw(words), draw(words)], np.uint64),
        draw(st.binary(min_size=96 * count, max_size=96 * count)),
        np.array(spans, np.int64), np.zeros(count, np.bool_),
        np.zeros(count, np.uint8),
        tuple(draw(st.binary(max_size=40)) for _ in range(sources)),
    ]  # fmt: skip
    if draw(st.booleans()):
        made[draw(st.integers(0, len(made) - 1))] = _part(draw)
    return tuple(made)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    """A function of the extension and arguments that need not fit it."""
    name = draw(st.sampled_from(FUNCTIONS))
    number = st.one_of(edges, st.integers(-9, 300), st.just(2**70), st.none())
    if name.startswith("shm_"):
        path = draw(st.sampled_from((*ODD_NAMES, "/", "/a/b", None, 3)))
        sizes = st.sampled_from((-1, 0, -(2**63), 2**63, 2**70, None))
        return name, (path, draw(sizes)) if name == "shm_create" else (path,)
    if name == "fd_size":
        return name, (draw(number),)
    if name == "write_frames":
        return name, draw(frames_calls())
    arguments: list[Any] = [_part(draw)]
    if name == "gather":
        arguments.append(draw(number))
        arguments.append(tuple(_part(draw) for _ in range(draw(st.integers(0, 4)))))
    else:
        arguments += [draw(number) for _ in range(draw(st.integers(0, 3)))]
    return name, tuple(arguments[: draw(st.integers(3, 4))])


def call(given: tuple[str, tuple[Any, ...]]) -> str:
    name, arguments = given
    try:
        result = getattr(_shm, name)(*arguments)
    finally:
        while DESCRIPTORS:
            os.close(DESCRIPTORS.pop())
    return f"{name} {type(result).__name__}"


def parsers() -> list[Parser]:
    """Those of shared memory."""
    ring_size = DATA_AT + 4096
    weights_size = DATA_AT + 2 * 8192
    frames = [
        pack_frame(RECORD, 0, frame_length(len(b)), len(b), _shm.crc32c(b)) + b
        for b in BODIES
    ]
    ring = st.tuples(
        st.one_of(st.none(), st.none(), pages(MAGIC, FIELDS, ring_size)),
        wounds(ring_size, frames=True),
    )
    weights = st.tuples(
        st.one_of(st.none(), st.none(), pages(WEIGHTS_MAGIC, {}, weights_size)),
        wounds(weights_size, frames=False),
    )
    spots = st.tuples(
        damaged(frames), st.sampled_from((0, 0, 64, 4096)), st.integers(0, 1024)
    )
    bad_call = (TypeError, ValueError, OverflowError, BufferError, OSError)
    return [
        Parser("header", "transport.shm", pages(MAGIC, FIELDS, ring_size),
               read_header),
        Parser("ring_frames", "transport.ring",
               spots, read_frames),
        Parser("ring_spec", "transport.record", damaged_json([FIELDS]), read_spec,
               (ValueError, TypeError, KeyError, RecursionError)),
        Parser("record", "transport.record", st.one_of(damaged(BODIES), meta_bodies()),
               read_record, (RecordError,)),
        Parser("ring", "transport.ring", ring, read_ring, (TransportError,)),
        Parser("weights", "transport.weights", weights, read_weights,
               (TransportError,)),
        Parser("publication", "transport.publication", publications(),
               read_publication, (WeightsRefused,)),
        Parser("peek", "transport.shm",
               st.one_of(st.sampled_from(ODD_NAMES), st.text(max_size=20)),
               peek_anything, (TransportError,)),
        Parser("extension", "_shm (csrc)", calls(), call, bad_call),
    ]  # fmt: skip
