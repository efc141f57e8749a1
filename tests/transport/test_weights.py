import hashlib
import json
import os

import numpy as np
import pytest
import safetensors

from vllm_tide import _shm
from vllm_tide.transport import (
    TransportError,
    WeightsRefused,
    WeightsSegment,
    WeightsWriter,
)
from vllm_tide.transport.draft_weights import _DTYPES, DraftWeights
from vllm_tide.transport.shm import ATOMICS_AT, DATA_AT, SHM_DIR
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


def delivered(got):
    return {name: (t.dtype, t.shape, t.data.tobytes()) for name, t in got.items()}


def publish(writer, version):
    tensors = make_tensors(version)
    writer.publish(DraftWeights.encode(tensors, version, META))
    return {
        name: (dtype, shape, memoryview(data).tobytes())
        for name, (dtype, shape, data) in tensors.items()
    }


def refused(segment):
    with pytest.raises(WeightsRefused) as caught:
        segment.read()
    assert caught.value.sentence
    return caught.value.reason


def test_a_publication_is_read_back_to_the_bit(weights_pair):
    segment, writer = weights_pair()
    assert segment.latest_version() == 0
    assert refused(segment) == "empty"
    want = publish(writer, 3)
    assert segment.latest_version() == 3 == writer.latest_version
    got = segment.read()
    assert delivered(got.tensors) == want
    assert (got.version, got.meta) == (3, META)
    other = WeightsSegment.attach(segment.name)
    for version in range(4, 8):  # in both slots
        want = publish(writer, version)
        for reader in (segment, other, segment):  # reading removes nothing
            assert delivered(reader.read().tensors) == want
    other.close()
    assert os.path.exists(f"{SHM_DIR}/{segment.name}")
    # As the safetensors library has it.
    blob = DraftWeights.encode(make_tensors(), 1)
    theirs = dict(safetensors.deserialize(blob.data))
    ours = blob.verify().tensors
    assert ours.keys() == theirs.keys() == make_tensors().keys()
    for name, tensor in ours.items():
        assert tensor.data.tobytes() == bytes(theirs[name]["data"])
        assert list(tensor.shape) == theirs[name]["shape"]
        assert _DTYPES[tensor.dtype][0] == theirs[name]["dtype"]


def test_versions_never_decrease(weights_pair):
    segment, writer = weights_pair()
    publish(writer, 5)
    writer.close()
    again = WeightsWriter.attach(segment.name)
    for version in (0, 4, 5):
        with pytest.raises(TransportError, match="not newer than 0.5"):
            publish(again, version)
    publish(again, 6)
    assert segment.read().version == 6
    again._segment.store(0, 5)  # set back in memory
    assert refused(segment) == "stale"
    again.close()


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (("uint8", (5000,), np.zeros(5000, np.uint8)), TransportError),  # too large
        (("float8", (1,), b"x"), ValueError),
        (("float32", (2,), b"1234"), ValueError),
        (("float32", (-1, -1), b"1234"), (ValueError, OverflowError)),
    ],
)
def test_an_unfit_draft_is_refused_before_anything_is_written(
    weights_pair, tensor, error
):
    segment, writer = weights_pair(4096)
    publish(writer, 1)
    for version in (2, 3):  # whichever slot
        with pytest.raises(error):
            writer.publish(DraftWeights.encode({"x": tensor}, version))
    assert segment.read().version == 1


def test_every_damaged_byte_is_refused_with_a_reason_or_harmless(weights_pair):
    segment, writer = weights_pair()
    publish(writer, 1)
    publish(writer, 2)
    want = publish(writer, 3)
    size = BLOB_AT + len(DraftWeights.encode(make_tensors(3), 3, META).data)
    buf = writer._segment.buf
    reasons = set()
    assert delivered(segment.read().tensors) == want
    for at in (
        *range(ATOMICS_AT, ATOMICS_AT + 1024),
        *range(DATA_AT, DATA_AT + size, 3),
    ):
        for flip in (0x5A, 0x02):
            buf[at] ^= flip
            try:
                assert delivered(segment.read().tensors) == want
            except WeightsRefused as error:
                assert error.sentence
                reasons.add(error.reason)
            assert isinstance(writer.feedback().installed_version, int)
            buf[at] ^= flip
    assert {"torn", "truncated", "sha256", "stale"} <= reasons
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
    for slot in (0, 1):  # both are being written
        segment._segment.store(1 + slot, 1)
    assert refused(segment) == "torn"


def sealed(header, data=bytes(4)):
    """Return a draft of version 1 with any header and a right digest."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + data
    return DraftWeights(1, hashlib.sha256(body).digest(), body)


ABOUT = {
    "format": 3, "version": 1, "meta": {},
}  # fmt: skip
X = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def described(about, **tensors):
    return {"__metadata__": {"vllm_tide": json.dumps(about)}, **tensors}


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
        described({**ABOUT, "format": 2}, x=X),
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
def test_an_invalid_draft_with_a_right_digest_is_a_format_error(header):
    assert sealed(described(ABOUT, x=X)).verify().tensors["x"].shape == (1,)
    for body in (sealed(header).data, b"", bytes(7), bytes(8)):
        blob = DraftWeights(1, hashlib.sha256(body).digest(), body)
        with pytest.raises(WeightsRefused) as caught:
            blob.verify()
        assert caught.value.reason == "format"


@pytest.mark.parametrize("size", [0, 100, DATA_AT, DATA_AT + 50])
def test_a_truncated_segment_is_refused_and_not_modified(weights_pair, size):
    segment, writer = weights_pair()
    publish(writer, 1)
    os.truncate(f"{SHM_DIR}/{segment.name}", size)
    assert refused(segment) == "truncated"
    assert segment.latest_version() == 0
    segment.report(1)
    with pytest.raises(TransportError, match="truncated"):
        publish(writer, 2)
    with pytest.raises(TransportError, match="truncated"):
        writer.feedback()


def test_a_closed_segment_is_refused(weights_pair, monkeypatch):
    segment, writer = weights_pair()
    publish(writer, 1)
    segment.close()
    segment.close()
    assert refused(segment) == "truncated"
    segment.report(1)
    assert writer.feedback().installed_version == 0
    # As another thread sees it that passed the checks just before.
    monkeypatch.setattr(segment._segment, "intact", lambda: True)
    assert segment.latest_version() == 0
    monkeypatch.setattr(segment, "latest_version", lambda: 1)
    assert refused(segment) == "truncated"
    segment.report(1)


def test_the_engine_reports_feedback(weights_pair):
    segment, writer = weights_pair()
    first = writer.feedback()
    assert (first.installed_version, first.refused_version) == (0, 0)
    assert first.engine_alive
    segment.report(4, 5, "norm", swap_pause_ms=1.5)
    got = writer.feedback()
    assert (got.installed_version, got.refused_version) == (4, 5)
    assert (got.refused_reason, got.swap_pause_ms_last) == ("norm", 1.5)
    segment.report(6, 5, "x" * 100 + "\u20ac")
    want = writer.feedback()
    assert want.refused_reason == "x" * 64
    writer._segment.buf[4096 + 8 * 64] ^= 255  # a torn report is the report before
    assert writer.feedback() == want


def test_one_trainer_at_a_time(weights_pair):
    segment, writer = weights_pair()
    with pytest.raises(TransportError, match=str(os.getpid())):
        WeightsWriter.attach(segment.name)
    writer.close()
    WeightsWriter.attach(segment.name).close()
