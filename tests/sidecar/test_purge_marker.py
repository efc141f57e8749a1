"""A marker sequence of tokens, planted as traffic, is nowhere after a purge."""

from __future__ import annotations

import gc
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from tests.sidecar.test_sidecar import TOY, VOCAB, Engine, attach
from tests.transport.commands import purge
from tests.transport.samples import make_record, make_spec, write_record
from vllm_tide.sidecar.report import StatusCollector
from vllm_tide.train.assemble import VERIFY
from vllm_tide.train.gpu import INTERRUPTED
from vllm_tide.transport import RingReader, RingWriter
from vllm_tide.transport.record import Record
from vllm_tide.transport.shm import DATA_AT

TENANT = 0xFF
MARKER = (7, 61, 2, 45, 33, 18, 50, 9, 60, 1)
VALUE = 1234.567
"""In every feature and teacher of the marked rows."""
TRACES = tuple(
    np.asarray(MARKER, kind).tobytes() for kind in (np.int32, np.int64, np.uint16)
) + (np.full(4, VALUE, np.float32).tobytes(),)
AS_TEXT = rf"7, *61, *2, *45|{int(VALUE)}\.5"


def traces(data: bytes) -> int:
    return sum(data.count(trace) for trace in TRACES)


def in_files(folder: Path) -> int:
    return sum(traces(f.read_bytes()) for f in folder.rglob("*") if f.is_file())


def in_ring(ring: RingWriter) -> int:
    return traces(bytes(ring._segment.buf))


def in_tensors() -> int:
    """Count it in any live tensor of this process, with shared memory too."""
    gc.collect()
    count = 0
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == "cpu":
            raw = torch.empty(0, dtype=torch.uint8).set_(thing.untyped_storage())
            count += traces(raw.numpy().tobytes())
    return count


def plant(engine: Engine, requests: int, finished: bool = True) -> None:
    """Write requests of the marked tenant; unfinished ones stay open in the trainer."""
    size = len(MARKER)
    for _ in range(requests):
        hidden = TOY.head.shape[1]
        record = Record(
            engine._random.getrandbits(64), VERIFY, 0, 3, size - 1, -1, 0,
            np.asarray(MARKER, np.int32),
            np.full((size, 3 * hidden), VALUE, np.float32), 0,
            np.full((size, hidden), VALUE, np.float32), finished=finished,
            tenant=TENANT,
        )  # fmt: skip
        assert write_record(engine.ring, record)


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    yield made
    made.close()


def test_no_byte_of_ring_buffers_and_checkpoint_is_left(engine, tmp_path, caplog):
    caplog.set_level("DEBUG")
    engine.manifest.tide["train"] = engine.manifest.tide["train"] | {
        "checkpoint_cycles": 1,
        "steps_per_cycle": 2,
        "batch_tokens": 512,
    }
    engine.announce()
    assert max(MARKER) < VOCAB
    engine.serve(40)
    plant(engine, 40)
    plant(engine, 3, finished=False)
    assert in_ring(engine.ring) > 40
    sidecar = attach(engine)
    assert sidecar._tick()
    assert in_ring(engine.ring) == 0  # records that were read are gone
    assert in_tensors() > 0
    buffer = sidecar.trainer.buffer
    assert {s.tenant for s in buffer.train} == {s.tenant for s in buffer.holdout}
    sidecar._train()
    assert sidecar.trainer.steps == 2
    assert list(tmp_path.rglob("checkpoints/*"))
    plant(engine, 5)
    assert in_ring(engine.ring) > 0
    command = purge(engine.run_dir, TENANT)
    assert sidecar._tick()
    assert command.answer["ok"] and command.answer["engines"] == ["test"]
    assert command.answer["removed"]["open_rows"] == 3 * len(MARKER)
    sidecar._save_checkpoint()
    sidecar._update_status(force=True)
    assert in_tensors() == in_ring(engine.ring) == in_files(tmp_path) == 0
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: sidecar.status))
    texts = [caplog.text, generate_latest(registry).decode()]
    texts += [f.read_text() for f in engine.run_dir.glob("*.json*")]
    assert len(texts) > 4 and "cycle" in caplog.text
    assert not [text for text in texts if re.search(AS_TEXT, text)]
    assert buffer.train and {s.tenant for s in buffer.train} == {0}
    sidecar.feeds.close()


def test_a_purge_ends_the_cycle_that_holds_documents(engine, monkeypatch):
    engine.manifest.tide["train"] = engine.manifest.tide["train"] | {
        "batch_tokens": 512
    }
    engine.announce()
    engine.serve(40)
    plant(engine, 40)
    sidecar = attach(engine)
    assert sidecar._tick()
    asked = []
    step = sidecar.trainer._one_step

    def ask_then_step(rate):
        if not asked:
            asked.append(purge(engine.run_dir, TENANT))
        return step(rate)

    monkeypatch.setattr(sidecar.trainer, "_one_step", ask_then_step)
    sidecar._train()
    assert sidecar.trainer.steps == 1
    assert sidecar.status.last_decision == INTERRUPTED
    assert asked[0].answer is None
    assert sidecar._tick()
    assert asked[0].answer["ok"]
    assert in_tensors() == 0
    assert not sidecar._purge_waits and sidecar._tick_in_cycle()
    sidecar.feeds.close()


def test_windows_that_are_too_old_are_not_trained_any_more(engine):
    engine.manifest.tide["train"] = engine.manifest.tide["train"] | {
        "max_age_s": 60.0,
        "batch_tokens": 512,
    }
    engine.announce()
    plant(engine, 40)
    sidecar = attach(engine)
    assert sidecar._tick()
    trainer = sidecar.trainer
    now = time.time() + 60.0
    trainer.buffer._clock = lambda: now
    engine.serve(40)  # a pass begins with earlier windows
    trainer._queue = trainer.buffer.shuffled()
    assert {s.tenant for s in trainer._queue} == {TENANT}
    sidecar._next_expiry = 0.0
    assert sidecar._tick()
    assert not trainer._queue
    assert {s.tenant for s in trainer.buffer.train} == {0}
    assert in_tensors() == 0
    assert trainer.rows_skipped["evicted_expired"] > 0
    sidecar.feeds.close()


def content(ring: RingWriter) -> int:
    """Return used lines of 64 bytes, without the frames' first ones."""
    lines = np.frombuffer(ring._segment.buf, np.uint8, offset=DATA_AT).reshape(-1, 64)
    frames = (lines[:, :4] == np.frombuffer(b"TIDE", np.uint8)).all(axis=1)
    return int(lines[~frames].any(axis=1).sum())


def test_the_ring_contains_no_read_or_skipped_record():
    spec = make_spec()
    ring = RingWriter.create(spec, 1 << 14)
    reader = RingReader.attach(ring.name)
    for lap in range(60):  # several laps, pads at the end among them
        assert write_record(ring, make_record(spec, lap, 3 + lap % 7))
        if lap % 3:
            assert content(ring) > 0
            while reader.read() is not None:
                pass
            assert content(ring) == 0
    assert write_record(ring, make_record(spec, 1))
    damaged = bytes(byte ^ 1 for byte in ring._segment.buf[DATA_AT:])
    ring._segment.buf[DATA_AT:] = damaged
    begin, size = reader._tail, reader.stats().used_bytes
    assert reader.read() is None
    assert reader.stats().corrupt_records == 1
    left = np.frombuffer(ring._segment.buf, np.uint8, offset=DATA_AT)
    assert not np.roll(left, -begin)[:size].any()  # skipped records are blank
    del left
    reader.close()
    ring.close()
