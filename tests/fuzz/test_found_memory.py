"""Defects that fuzzing found in the readers of shared memory, one test each."""

import contextlib
import json
import os
import secrets

import pytest

from tests.fuzz.memory import BODIES, FIELDS, SPEC, TENSORS, sealed, write
from vllm_tide import _shm
from vllm_tide.transport import (
    RingReader,
    RingWriter,
    TransportError,
    WeightsSegment,
    WeightsWriter,
    draft_weights,
)
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.record import FORMAT_VERSION
from vllm_tide.transport.ring import MAGIC, Atomic, peek_ring
from vllm_tide.transport.shm import (
    DATA_AT,
    NAME_PREFIX,
    PAGE_BYTES,
    SHM_DIR,
    is_orphaned,
)
from vllm_tide.transport.weights import _FEEDBACK, _FEEDBACK_AT, peek_weights
from vllm_tide.transport.weights import MAGIC as WEIGHTS_MAGIC


@contextlib.contextmanager
def segment(page, size):
    """A segment of zeros behind an arbitrary header."""
    name = f"{NAME_PREFIX}fuzz_{secrets.token_hex(8)}"
    path = f"{SHM_DIR}/{name}"
    with open(path, "wb") as file:
        file.write(page.ljust(size, b"\0")[:size])
    os.chmod(path, 0o600)
    try:
        yield name
    finally:
        os.unlink(path)


@pytest.mark.parametrize(
    "change",
    ['"aux_layer_ids":[1e999]', '"aux_layer_ids":[1.5]', '"hidden_size":1e308'],
)
def test_a_ring_without_whole_numbers_in_its_description_is_refused(change):
    text = json.dumps(FIELDS)[:-1] + f",{change}}}"
    size = DATA_AT + 4096
    page = sealed(MAGIC, FORMAT_VERSION, size, text.encode())
    with segment(page, size) as name, pytest.raises(TransportError, match="not a ring"):
        RingReader.attach(name)


@pytest.mark.parametrize("capacity", [0, 100])
def test_a_ring_without_whole_lines_is_refused(capacity):
    size = DATA_AT + capacity
    page = sealed(MAGIC, FORMAT_VERSION, size, json.dumps(FIELDS).encode())
    with (
        segment(page, size) as name,
        pytest.raises(TransportError, match="positive multiple"),
    ):
        RingReader.attach(name)


def test_a_damaged_damage_counter_stops_no_reader():
    writer = RingWriter.create(SPEC, 4096)
    writer._segment.store(Atomic.CORRUPT, 2**64 - 1)
    reader = RingReader.attach(writer.name)
    write(writer, BODIES[1])
    writer._segment.buf[DATA_AT] ^= 1
    assert reader.read() is None
    assert reader.stats().corrupt_records == 0  # one more than that
    reader.close()
    writer.close()


@pytest.mark.parametrize("suffix", ["a\0b", "\ud800", "a b", "", "x" * 300])
def test_an_impossible_segment_name_is_refused(suffix):
    assert peek_ring(NAME_PREFIX + suffix) is None
    assert peek_weights(NAME_PREFIX + suffix) is None
    with pytest.raises(TransportError, match="not the name of a vllm_tide segment"):
        RingReader.attach(NAME_PREFIX + suffix)


@pytest.mark.timeout(10)
def test_a_pipe_among_the_segments_does_not_block():
    name = f"{NAME_PREFIX}fuzz_{secrets.token_hex(8)}"
    os.mkfifo(f"{SHM_DIR}/{name}", 0o600)
    try:
        assert not is_orphaned(name)
        assert peek_ring(name) is None
        with pytest.raises(TransportError):
            RingReader.attach(name)
    finally:
        os.unlink(f"{SHM_DIR}/{name}")


def test_counters_of_a_segment_of_size_zero_are_invalid():
    page = sealed(MAGIC, 2, 100, json.dumps(FIELDS).encode())
    with segment(page, DATA_AT) as name:
        assert peek_ring(name) is None


@pytest.mark.parametrize("space", [0, 2 * PAGE_BYTES - 1])
@pytest.mark.parametrize("end", [WeightsSegment, WeightsWriter])
def test_a_weights_segment_without_space_for_slots_is_refused(end, space):
    size = DATA_AT + space
    page = sealed(WEIGHTS_MAGIC, draft_weights.FORMAT_VERSION, size, b"{}")
    with segment(page, size) as name, pytest.raises(TransportError, match="too small"):
        end.attach(name)


def test_a_reason_that_is_no_text_does_not_grow_with_every_poll():
    engine = WeightsSegment.create(8192)
    trainer = WeightsWriter.attach(engine.name)
    body = _FEEDBACK.pack(1, 2, 0.5, b"\xff" * 64, 0)[:-4]
    whole = body + _shm.crc32c(body).to_bytes(4, "little")
    engine._segment.buf[_FEEDBACK_AT : _FEEDBACK_AT + len(whole)] = whole
    assert len(trainer.feedback().refused_reason) == 64
    engine._segment.buf[_FEEDBACK_AT] ^= 1  # torn: the previous report holds
    for _ in range(20):
        assert len(trainer.feedback().refused_reason) == 64
    trainer.close()
    engine.close()


def test_a_version_beyond_u64_is_not_published():
    engine = WeightsSegment.create(8192)
    trainer = WeightsWriter.attach(engine.name)
    trainer.publish(DraftWeights.encode(TENSORS, 1))
    trainer._last_published = 2**64 - 1
    with pytest.raises(TransportError, match="exceeds the maximum"):
        trainer.publish(DraftWeights.encode(TENSORS, 2**64))
    trainer.close()
    engine.close()


def test_a_descriptor_wider_than_an_int_is_not_truncated():
    with open("/dev/null", "rb") as file, pytest.raises(OSError, match="descriptor"):
        _shm.fd_size(2**32 + file.fileno())
