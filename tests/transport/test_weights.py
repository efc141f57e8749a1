import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tide import _shm
from vllm_tide.transport import (
    TransportError,
    WeightsRefused,
    WeightsSegment,
    WeightsWriter,
    publication,
)
from vllm_tide.transport.publication import DraftBlob
from vllm_tide.transport.shm import DATA_AT, SHM_DIR
from vllm_tide.transport.weights import BLOB_AT

META = {"steps": 12, "holdout": [1.5, 2.0], "note": "x"}


def make_tensors(seed=0):
    rng = np.random.default_rng(seed)
    bits = rng.integers(2**16, size=(3, 5), dtype=np.uint16)
    return {
        "fc.weight": ("bfloat16", (3, 5), bits),
        "norm.weight": ("float32", (7,), rng.random(7, dtype=np.float32)),
        "t2d": ("bool", (9,), rng.integers(2, size=9, dtype=np.uint8)),
        "d2t": ("int64", (4,), memoryview(rng.integers(9, size=4))),
        "empty": ("float16", (0, 4), b""),
        "scalar": ("float32", (), np.float32(seed).tobytes()),
    }


def as_bytes(tensors):
    return {
        name: (dtype, tuple(shape), np.asarray(data).tobytes() if len(data) else b"")
        for name, (dtype, shape, data) in tensors.items()
    }


def delivered(got):
    return {name: (t.dtype, t.shape, t.data.tobytes()) for name, t in got.items()}


def publish(writer, version, seed=None, parent=0):
    tensors = make_tensors(version if seed is None else seed)
    writer.publish(tensors, version=version, parent_version=parent, meta=META)
    want = as_bytes({k: v for k, v in tensors.items() if k != "scalar"})
    want["scalar"] = ("float32", (), tensors["scalar"][2])
    return want


def refused(segment):
    with pytest.raises(WeightsRefused) as caught:
        segment.read()
    assert caught.value.sentence
    return caught.value.reason


def test_a_publication_comes_back_to_the_bit(weights_pair):
    segment, writer = weights_pair()
    assert segment.latest_version() == 0
    assert refused(segment) == "empty"
    want = publish(writer, 3, parent=1)
    assert segment.latest_version() == 3 == writer.latest_version
    got = segment.read()
    assert delivered(got.tensors) == want
    assert (got.version, got.parent_version, got.meta) == (3, 1, META)
    assert abs(got.created_unix_ns - os.stat("/proc/self").st_mtime_ns) < 3600e9


def test_both_slots_are_used_and_every_version_arrives(weights_pair):
    segment, writer = weights_pair()
    for version in range(1, 8):
        want = publish(writer, version)
        assert delivered(segment.read().tensors) == want
        assert delivered(segment.read().tensors) == want  # reading takes nothing away


def test_two_readers_see_the_same(weights_pair):
    segment, writer = weights_pair()
    other = WeightsSegment.attach(segment.name)
    want = publish(writer, 1)
    assert delivered(segment.read().tensors) == delivered(other.read().tensors) == want
    other.close()
    assert segment.latest_version() == 1
    assert os.path.exists(f"{SHM_DIR}/{segment.name}")


def test_decoding_agrees_with_the_safetensors_library():
    tensors = make_tensors()
    blob = publication.encode(tensors, 1, 0, {})
    ours = publication.decode(blob).tensors
    theirs = dict(safetensors.deserialize(blob.data))
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in ours.items():
        assert tensor.data.tobytes() == bytes(theirs[name]["data"])
        assert list(tensor.shape) == theirs[name]["shape"]
        assert publication._DTYPES[tensor.dtype][0] == theirs[name]["dtype"]


@pytest.mark.parametrize("version", [0, 4, 5])
def test_versions_never_go_back(weights_pair, version):
    segment, writer = weights_pair()
    publish(writer, 5)
    with pytest.raises(TransportError, match="not newer than 5"):
        publish(writer, version)
    writer.close()
    again = WeightsWriter.attach(segment.name)
    with pytest.raises(TransportError, match="not newer than 5"):
        publish(again, version)
    publish(again, 6)
    assert segment.read().version == 6
    again.close()


def test_a_version_set_back_in_memory_is_stale(weights_pair):
    segment, writer = weights_pair()
    publish(writer, 1)
    publish(writer, 2)
    assert segment.read().version == 2
    writer._segment.store(0, 1)
    assert refused(segment) == "stale"


def test_a_draft_larger_than_its_slot_is_refused_before_anything_is_written(
    weights_pair,
):
    segment, writer = weights_pair(4096)
    publish(writer, 1)
    with pytest.raises(TransportError, match="larger slots"):
        big = ("uint8", (5000,), np.zeros(5000, np.uint8))
        writer.publish({"x": big}, version=2, parent_version=1, meta={})
    assert segment.read().version == 1


@pytest.mark.parametrize(
    "tensor",
    [
        ("float8", (1,), b"x"),
        ("float32", (2,), b"1234"),
        ("float32", (-1, -1), b"1234"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused(weights_pair, tensor):
    segment, writer = weights_pair()
    with pytest.raises((ValueError, OverflowError)):
        writer.publish({"x": tensor}, version=1, parent_version=0, meta={})
    assert segment.latest_version() == 0


def test_every_damaged_byte_is_refused_with_a_reason_or_harmless(weights_pair):
    segment, writer = weights_pair()
    want = publish(writer, 1)
    size = BLOB_AT + len(publication.encode(make_tensors(1), 1, 0, META).data)
    buf = writer._segment.buf
    reasons = set()
    for at in range(DATA_AT, DATA_AT + size, 3):
        buf[at] ^= 0x5A
        try:
            assert delivered(segment.read().tensors) == want
        except WeightsRefused as error:
            reasons.add(error.reason)
        buf[at] ^= 0x5A
    assert {"torn", "truncated", "sha256"} <= reasons
    assert delivered(segment.read().tensors) == want


def test_a_slot_overwritten_while_it_is_read_is_read_again(weights_pair, monkeypatch):
    segment, writer = weights_pair()
    publish(writer, 1)
    wants = []
    copy = _shm.gather

    def overtaken(*args):
        crc = copy(*args)
        if not wants:
            wants.extend(publish(writer, version) for version in (2, 3))
        return crc

    monkeypatch.setattr(_shm, "gather", overtaken)
    got = segment.read()
    assert got.version == 3
    assert delivered(got.tensors) == wants[-1]


def test_a_slot_that_is_being_written_is_torn(weights_pair):
    segment, writer = weights_pair()
    publish(writer, 1)
    for slot in (0, 1):
        segment._segment.store(1 + slot, 1)
    assert refused(segment) == "torn"


def sealed(header, data=bytes(4)):
    """A draft of version 1 with any header and a right digest."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + data
    return DraftBlob(1, hashlib.sha256(body).digest(), body)


ABOUT = {
    "format": 2, "version": 1, "parent_version": 0, "created_unix_ns": 0, "meta": {},
}  # fmt: skip
X = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def described(about, **tensors):
    return {"__metadata__": {"vllm_tide": json.dumps(about)}, **tensors}


def test_damage_is_refused_even_if_it_reads_well():
    blob = publication.encode(make_tensors(), 1, 0, {"a": 1})
    assert publication.decode(blob).meta == {"a": 1}
    damaged = blob._replace(data=blob.data.replace(b'"a\\": 1', b'"a\\": 2'))
    assert damaged != blob
    with pytest.raises(WeightsRefused) as caught:
        publication.decode(damaged)
    assert caught.value.reason == "sha256"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b"\xff",
        {"x": X},
        described([], x=X),
        described({"version": 1}, x=X),
        described({**ABOUT, "format": 1}, x=X),
        described({**ABOUT, "version": 2}, x=X),
        described(ABOUT, x=1),
        described(ABOUT, x={**X, "shape": [2]}),
        described(ABOUT, x={**X, "data_offsets": [4, 8]}),
        described(ABOUT, x={**X, "shape": [-1], "data_offsets": [4, 0]}),
        described(ABOUT, x={**X, "dtype": "F99"}),
        described(ABOUT, x={**X, "shape": "a"}),
        described(ABOUT, x={**X, "data_offsets": [0]}),
        described(ABOUT, x={**X, "shape": [float("inf")]}),
    ],
)
def test_what_is_no_draft_behind_a_right_digest_is_a_format_error(header):
    assert publication.decode(sealed(described(ABOUT, x=X))).tensors["x"].shape == (1,)
    bodies = (sealed(header).data, b"", bytes(7), bytes(8))
    for body in bodies:
        blob = DraftBlob(1, hashlib.sha256(body).digest(), body)
        with pytest.raises(WeightsRefused) as caught:
            publication.decode(blob)
        assert caught.value.reason == "format"


@pytest.mark.parametrize("size", [0, 100, DATA_AT, DATA_AT + 50])
def test_a_truncated_segment_is_refused_and_not_touched(weights_pair, size):
    segment, writer = weights_pair()
    publish(writer, 1)
    os.truncate(f"{SHM_DIR}/{segment.name}", size)
    assert refused(segment) == "truncated"
    assert segment.latest_version() == 0
    segment.report(1)
    segment.heartbeat()
    assert not segment.writer_alive()
    with pytest.raises(TransportError, match="truncated"):
        publish(writer, 2)
    with pytest.raises(TransportError, match="truncated"):
        writer.feedback()


def test_a_closed_segment_is_refused(weights_pair):
    segment, writer = weights_pair()
    publish(writer, 1)
    segment.close()
    segment.close()
    assert refused(segment) == "truncated"
    segment.report(1)
    assert writer.feedback().installed_version == 0


def test_a_segment_closed_by_another_thread_raises_nothing_else(
    weights_pair, monkeypatch
):
    segment, writer = weights_pair()
    publish(writer, 1)
    segment.close()
    monkeypatch.setattr(segment._segment, "intact", lambda: True)
    assert segment.latest_version() == 0
    monkeypatch.setattr(segment, "latest_version", lambda: 1)
    assert refused(segment) == "truncated"
    segment.report(1)
    assert not segment.writer_alive()


def test_the_engine_answers(weights_pair):
    segment, writer = weights_pair()
    first = writer.feedback()
    assert (first.installed_version, first.refused_version) == (0, 0)
    assert first.engine_alive
    segment.report(4, 5, "norm", swap_pause_ms=1.5)
    got = writer.feedback()
    assert (got.installed_version, got.refused_version) == (4, 5)
    assert (got.refused_reason, got.swap_pause_ms_last) == ("norm", 1.5)
    segment.report(6, 5, "x" * 100 + "\u20ac")
    assert writer.feedback().refused_reason == "x" * 64


def test_a_torn_answer_is_the_answer_before(weights_pair):
    segment, writer = weights_pair()
    segment.report(4, 5, "norm")
    want = replace(writer.feedback())
    writer._segment.buf[4096 + 8 * 64] ^= 255
    assert writer.feedback() == want


def test_one_trainer_at_a_time(weights_pair):
    segment, writer = weights_pair()
    assert segment.writer_alive()
    with pytest.raises(TransportError, match=str(os.getpid())):
        WeightsWriter.attach(segment.name)
    writer.close()
    assert not segment.writer_alive()
    WeightsWriter.attach(segment.name).close()


DIES_WHILE_PUBLISHING = """
import os, signal, sys
from vllm_tide import _shm
from vllm_tide.transport import WeightsWriter
from tests.transport.test_weights import publish
writer = WeightsWriter.attach(sys.argv[1])
publish(writer, 1)
publish(writer, 2)
buf, step = writer._segment.buf, int(sys.argv[2])
class Dying:  # dies at the step-th write of the third publication
    count = 0
    def __setitem__(self, at, value):
        if self.count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        buf[at] = value
    def __getitem__(self, at):
        return buf[at]
dying = Dying()
real = writer._segment
class Seg:
    buf = dying
    def __getattr__(self, name):
        return getattr(real, name)
add = _shm.fetch_add
def fetch_add(target, *rest):
    if step == 2 and dying.count == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    add(buf, *rest)
_shm.fetch_add = fetch_add
writer._segment = Seg()
publish(writer, 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_trainer_killed_while_publishing_leaves_the_last_publication(step):
    segment = WeightsSegment.create(1 << 16)
    argv = [sys.executable, "-c", DIES_WHILE_PUBLISHING, segment.name, str(step)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=os.getcwd())
    assert done.returncode == -9, done.stderr
    assert segment.read().version == 2
    writer = WeightsWriter.attach(segment.name)  # the claim of the dead
    want = publish(writer, 3)
    assert delivered(segment.read().tensors) == want
    writer.close()
    segment.close()


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.just(("publish", 0, b"")),
            st.just(("read", 0, b"")),
            st.tuples(
                st.just("damage"),
                st.one_of(st.integers(0, 30_000), st.integers(4096, 4096 + 1024)),
                st.binary(min_size=1, max_size=40),
            ),
        ),
        max_size=25,
    )
)
def test_damage_anywhere_is_delivered_exactly_or_refused(steps):
    segment = WeightsSegment.create(8192)
    writer = WeightsWriter.attach(segment.name)
    buf = writer._segment.buf
    version, last, published = 0, 0, {}
    for action, at, data in steps:
        if action == "publish":
            version += 1
            try:
                published[version] = publish(writer, version)
            except TransportError:  # the claim was hit
                continue
        elif action == "damage":
            at %= len(buf) - len(data)
            buf[at : at + len(data)] = data
        try:
            got = segment.read()
            assert got.version >= last
            last = got.version
            assert delivered(got.tensors) == published[got.version]
        except WeightsRefused as error:
            assert error.reason and error.sentence
        segment.report(version, 0, "x")
        assert isinstance(writer.feedback().installed_version, int)
    writer.close()
    segment.close()
