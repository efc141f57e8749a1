"""Rows that a GPU copies straight into the ring: the records are those of the host."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.transport.samples import identity, make_spec
from vllm_tide.capture import pinned
from vllm_tide.config import CaptureConfig
from vllm_tide.engine import capture_v2
from vllm_tide.engine.device_stage import DeviceStage
from vllm_tide.engine.step_log import Step
from vllm_tide.transport import RingReader, RingWriter

H, LAYERS, ROWS, TOPK = 6, (1, 2), 32, 3


class Event:
    """Happens when the test says so."""

    happened = True

    def record(self):
        pass

    def query(self):
        return Event.happened


class Stream:
    """Copies at once; where the host would wait is counted."""

    waits = 0

    def __init__(self, *_, **__):
        pass

    @staticmethod
    def priority_range():
        return 0, -5

    def wait_event(self, event):
        pass

    def synchronize(self):
        Stream.waits += 1


class Runtime:
    """`torch.cuda.cudart()`."""

    def __init__(self, error=0):
        self.error, self.held = error, {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        assert flags == 1
        if not self.error:
            self.held[address] = size
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.held[address]


@pytest.fixture
def gpu(monkeypatch):
    """A runtime that registers, under a `DeviceStage` whose device is the host."""
    runtime = Runtime()
    fakes = {
        "Event": Event, "Stream": Stream, "cudart": lambda: runtime,
        "device": lambda _: contextlib.nullcontext(),
        "stream": lambda _: contextlib.nullcontext(),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    # What a machine without a GPU cannot do, after a refusal.
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more)
    )
    monkeypatch.setattr(
        torch, "zeros", lambda *args, device="cpu", **more: zeros(*args, **more)
    )
    monkeypatch.setattr(Event, "happened", True)
    monkeypatch.setattr(Stream, "waits", 0)
    monkeypatch.setattr(capture_v2, "DIRECT_BYTES", 4 * len(LAYERS) * H * 2)

    def make_stage(device, *sizes):
        *sizes, dtype, hidden, logits, topk = sizes
        assert dtype == "bfloat16"
        kinds = torch.bfloat16, hidden, logits, topk, device
        return DeviceStage(*sizes, *kinds)

    monkeypatch.setattr(capture_v2, "make_stage", make_stage)
    return runtime


class Engine:
    """A `CaptureV2` and the ring it writes to."""

    def __init__(self, teacher, capacity=1 << 16):
        runner = SimpleNamespace(
            device=torch.device("cpu"), max_num_tokens=ROWS, max_num_reqs=4,
            num_speculative_steps=3, vocab_size=50, dtype=torch.bfloat16,
        )  # fmt: skip
        spec = make_spec(teacher, hidden_size=H, topk=TOPK, layers=LAYERS)
        self.ring = RingWriter.create(spec, capacity)
        self.reader = RingReader.attach(self.ring.name)
        config = CaptureConfig(teacher=teacher, teacher_topk=TOPK)
        self.capture = capture_v2.CaptureV2(
            runner, self.ring, config, len(LAYERS), H, 3
        )
        for key, name in enumerate("abcd"):
            extra = {"tide_capture": False} if name == "d" else {}
            params = SimpleNamespace(extra_args=extra, temperature=0.0)
            ticket = self.capture._admit(name, params, True)
            self.capture._tickets[name] = replace(ticket, key=key)

    def stage(self, seed=0, of_a=9, cut=False):
        """a prefills 9 rows, b verifies 3 drafts, c verifies 1, d is nobody's."""
        bounds = np.array([0, of_a, of_a + 4, of_a + 6, 24], np.int32)
        drafts = np.array([0, 3, 1, 0], np.int32)
        step = Step(
            req_ids=["a", "b", "c", "d"],
            bounds=bounds,
            drafts=drafts,
            padded=np.array([False, False, True, False]),
            logit_ends=np.cumsum(drafts + 1),
            num_prompt_tokens=np.array([9, 4, 4, 9], np.int32),
            steps=0,
            version=1,
            place=SimpleNamespace(),
            cut=cut,
        )
        random = torch.Generator().manual_seed(seed)
        rows = [
            torch.randn(24, H, generator=random).bfloat16()
            for _ in range(len(LAYERS) + 1)
        ]
        self.capture.on_logits(torch.randn(7, 50, generator=random))
        ids = torch.arange(24, dtype=torch.int32)
        self.capture.stage(step, ids, rows[0], rows[1:])
        step.start = np.array([0, 20, 30, 0])
        step.emitted = np.array([1, 2, 1, 1], np.int32)
        step.sampled = np.arange(16).reshape(4, 4)
        step.token_ids = ids.numpy()
        return step

    def records(self):
        out = []
        while (record := self.reader.read()) is not None:
            out.append(record)
        assert self.reader.stats().corrupt_records == 0
        return out

    def close(self):
        self.ring.close()
        self.capture.close()
        self.reader.close()


@pytest.fixture
def engine(gpu, monkeypatch):
    made = []

    def make(*args, **kwargs):
        made.append(Engine(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not gpu.held


@pytest.mark.parametrize("teacher", ["hidden", "topk", "both"])
def test_records_are_those_that_the_host_would_have_copied(
    engine, gpu, teacher, monkeypatch
):
    found = []
    for error in (0, 1):
        monkeypatch.setattr(gpu, "error", error)
        each = engine(teacher)
        for seed in range(3):
            step = each.stage(seed)
            assert sorted(step.slots) == ([] if error else [0, 1])
            assert each.records() == []
            each.capture.write(step)
            step.staged.release()
            found.append([identity(record) for record in each.records()])
        assert not each.ring.drops and not Stream.waits
        assert each.capture.rows == 3 * (9 + 4 + 1)
    assert found[:3] == found[3:] and [len(records) for records in found] == [3] * 6


def test_laps_and_a_full_ring(engine):
    each = engine("hidden", 1500)
    for seed in range(40):
        step = each.stage(seed)
        each.capture.write(step)
        step.staged.release()
        if seed % 3:
            each.records()
    stats = each.ring.stats()
    assert (
        0 < stats.dropped_records < 120 == stats.dropped_records + stats.written_records
    )
    assert set(each.ring.drops) == {"full"}


def test_rows_after_a_requests_end_and_a_fault_leave_no_slot_open(engine, monkeypatch):
    each = engine("hidden")
    first, second, third = each.stage(0), each.stage(1), each.stage(2)
    each.capture.write(first, overrun=["a"])
    assert [record.num_rows for record in each.records()] == [4]
    second.sampled = None  # something of ours fails
    with pytest.raises(IndexError):
        each.capture.write(second)
    each.capture.write(third)
    # The first step's last one was written behind what was promised by then.
    assert [record.num_rows for record in each.records()] == [9, 4, 1, 1]


def test_records_of_a_request_stay_in_order(engine):
    each = engine("hidden")
    steps = [each.stage(seed, of_a) for seed, of_a in enumerate((9, 2, 9))]
    assert [sorted(step.slots) for step in steps] == [[0, 1], [1], [1]]
    for number, step in enumerate(steps):
        step.start = step.start + 10 * number
        each.capture.write(step)
    found = each.records()
    for key in range(3):
        assert [r.start // 10 % 10 for r in found if r.key == key] == [
            [0, 2, 3][key] + number for number in range(3)
        ]
    assert each.stage(3).slots.keys() == {0, 1}


def test_a_copy_that_fails_gives_the_room_back(engine, monkeypatch):
    each = engine("hidden")
    failing = lambda *_: (_ for _ in ()).throw(RuntimeError("a copy"))  # noqa: E731
    with monkeypatch.context() as broken:
        broken.setattr(each.capture._stage, "_landing", failing)
        with pytest.raises(RuntimeError, match="a copy"):
            each.stage()
    assert Stream.waits == 1
    step = each.stage()
    each.capture.write(step)
    assert len(each.records()) == 3


def test_records_say_with_which_chance_their_drafts_were_verified(engine):
    each = engine("hidden")
    step = each.stage()
    step.verify_chance, step.explored, step.cost = 0.0, {"b": 0.25}, 2.0
    each.capture.write(step)
    told = [(record.verify_chance, record.cost) for record in each.records()]
    assert told == [(0.0, 2.0), (0.25, 2.0), (0.0, 2.0)]


def test_rows_of_a_step_that_the_device_cuts_go_through_the_host(engine):
    each = engine("hidden")
    step = each.stage(cut=True)
    assert not step.slots
    step.bounds, step.drafts = np.array([0, 9, 11, 13, 24]), np.array([0, 1, 1, 0])
    each.capture.write(step)
    assert [len(record.token_ids) for record in each.records()] == [9, 2, 1]


def test_a_ring_that_replaces_one_is_written_by_the_host(engine):
    each, other = engine("hidden"), engine("hidden")
    step = each.stage()
    each.capture.use_ring(other.ring)
    each.capture.write(step)
    assert other.ring.dropped_rows == {"truncated": 9 + 4}
    step.staged.release()
    step = each.stage()
    assert not step.slots
    each.capture.write(step)
    assert len(other.records()) == 1 + 3


@pytest.mark.parametrize("missing", [False, True])
def test_a_runtime_that_registers_nothing_is_said_once(
    gpu, caplog, monkeypatch, missing
):
    caplog.set_level("INFO", "vllm.tide")
    if missing:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: object())
    else:
        gpu.error = 2
    memory = torch.empty(64, dtype=torch.uint8)
    assert pinned.register(memory, gpu, "the host copies") is None
    (line,) = (record.message for record in caplog.records)
    error = -1 if missing else 2
    assert line == (
        "vllm_tide: 0 MiB are not registered with the GPU's runtime "
        f"(error {error}): the host copies"
    )
