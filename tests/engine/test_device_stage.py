"""Rows that a GPU copies to the host give the same records as on a CPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.transport.samples import identity, make_spec
from vllm_tide.capture.step import Step
from vllm_tide.config import CaptureConfig
from vllm_tide.engine import capture, device_stage
from vllm_tide.engine.device_stage import DeviceStage
from vllm_tide.transport import RingReader, RingWriter

H, LAYERS, ROWS, TOPK = 6, (1, 2), 32, 3


class Event:
    """An event that the test completes."""

    happened = True

    def record(self):
        pass

    def query(self):
        return Event.happened


class Stream:
    """A stream that copies at once."""

    def __init__(self, *_, **__):
        pass

    @staticmethod
    def priority_range():
        return 0, -5

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass


class Runtime:
    """`torch.cuda.cudart()`."""

    def __init__(self, error=0):
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        assert flags == 1
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.registered[address]


@pytest.fixture
def gpu(monkeypatch):
    """A runtime that registers, under a `DeviceStage` with the host as its device."""
    runtime = Runtime()
    fakes = {
        "Event": Event, "Stream": Stream, "cudart": lambda: runtime,
        "device": lambda _: contextlib.nullcontext(),
        "stream": lambda _: contextlib.nullcontext(),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    # Not possible on a machine without a GPU, after a refusal.
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more)
    )
    monkeypatch.setattr(
        torch, "zeros", lambda *args, device="cpu", **more: zeros(*args, **more)
    )
    monkeypatch.setattr(Event, "happened", True)

    def make_stage(device, places, layout, capacity):
        assert layout.dtype == torch.bfloat16
        return DeviceStage(places, layout, device, capacity)

    monkeypatch.setattr(capture, "make_stage", make_stage)
    return runtime


class Engine:
    """A `Capture` and the ring it writes to."""

    def __init__(self, teacher, capacity=1 << 18):
        runner = SimpleNamespace(
            device=torch.device("cpu"), max_num_tokens=ROWS, max_num_reqs=4,
            num_speculative_steps=3, vocab_size=50, dtype=torch.bfloat16,
        )  # fmt: skip
        spec = make_spec(teacher, hidden_size=H, topk=TOPK, layers=LAYERS)
        self.ring = RingWriter.create(spec, capacity)
        self.reader = RingReader.attach(self.ring.name)
        config = CaptureConfig(teacher=teacher, teacher_topk=TOPK)
        self.capture = capture.Capture(runner, self.ring, config, 3, 3)
        for key, name in enumerate("abcd"):
            extra = {"tide_capture": False} if name == "d" else {}
            params = SimpleNamespace(extra_args=extra, temperature=0.0)
            ticket = self.capture._admit(name, params, True)
            self.capture._tickets[name] = replace(ticket, key=key)

    def stage(self, seed=0, cut=False, send=True):
        """a prefills 9 rows, b verifies 3 drafts, c verifies 1, d is not captured."""
        bounds = np.array([0, 9, 13, 15, 24], np.int32)
        drafts = np.array([0, 3, 1, 0], np.int32)
        step = Step(
            req_ids=["a", "b", "c", "d"],
            bounds=bounds,
            drafts=drafts,
            padding=np.array([0, 0, 1, 0], np.int32),
            logit_ends=np.cumsum(drafts + 1),
            num_prompt_tokens=np.array([9, 4, 4, 9], np.int32),
            steps=0,
            version=1,
            buffer=None,
            cut=cut,
        )
        random = torch.Generator().manual_seed(seed)
        rows = [
            torch.randn(24, H, generator=random).bfloat16()
            for _ in range(len(LAYERS) + 1)
        ]
        self.capture.on_logits(torch.randn(7, 50, generator=random))
        ids = torch.arange(24, dtype=torch.int32)
        self.capture.stage(step, rows[0], rows[1:])
        if send and step.staged is not None:
            step.staged.send()
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
    assert not gpu.registered


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_records_equal_those_of_a_cpu(engine, gpu, teacher, monkeypatch):
    per_stage = []
    for make_stage in (capture.make_stage, device_stage.make_stage):
        monkeypatch.setattr(capture, "make_stage", make_stage)
        each = engine(teacher)
        for seed in range(3):
            step = each.stage(seed)
            assert each.records() == []
            each.capture.write(step)
            step.staged.release()
            per_stage.append([identity(record) for record in each.records()])
        assert not each.ring.drops
        assert each.capture.rows == 3 * (9 + 4 + 1)
    assert (
        per_stage[:3] == per_stage[3:]
        and [len(records) for records in per_stage] == [3] * 6
    )


def test_only_captured_rows_are_staged(engine):
    """d's 9 rows and c's placeholder are between or after the others'."""
    each = engine("hidden")
    each.capture._tickets["a"].refusal = "opted_out"
    step = each.stage()
    assert len(step.staged.features) == 4 + 1
    each.capture.write(step)
    assert [record.num_rows for record in each.records()] == [4, 1]


def test_a_full_ring_truncates_requests_and_stages_nothing_more(engine):
    each = engine("hidden", 3000)
    rows = each.ring.spec.row_bytes
    for seed in range(40):
        step = each.stage(seed)
        if step.staged is not None:
            assert step.size >= len(step.staged.features) * rows
            each.capture.write(step)
            step.staged.release()
    assert not each.ring.drops and each.capture.budget.staged == 0
    tickets = each.capture._tickets
    assert {tickets[name].refusal for name in "abc"} <= {"over_budget", "cut_short"}
    written = each.capture.rows
    lost = each.capture.dropped["over_budget"] + each.capture.dropped["cut_short"]
    assert written + lost == 40 * (9 + 4 + 1) and written
    assert sum(record.num_rows for record in each.records()) == written
    each.capture.forget("abc")
    each.records()
    # New requests are admitted again.
    for name in "abc":
        each.capture._admit(name, None, True)
    assert each.stage().staged is not None


def test_rows_after_a_requests_end_and_a_fault(engine):
    each = engine("hidden")
    first, second, third = each.stage(0), each.stage(1), each.stage(2)
    each.capture.write(first, overrun=["a"])
    second.sampled = None  # an error of TIDE itself
    with pytest.raises(IndexError):
        each.capture.write(second)
    each.capture.write(third)
    assert [record.num_rows for record in each.records()] == [4, 1, 9, 4, 1]
    assert each.capture.budget.staged == 0


def test_records_have_the_verify_chance_of_their_drafts(engine):
    each = engine("hidden")
    step = each.stage()
    step.verify_chance, step.explored, step.cost = 0.0, {"b": 0.25}, 2.0
    each.capture._tickets["c"].capped = True
    each.capture.write(step)
    recorded = [(record.verify_chance, record.cost) for record in each.records()]
    assert recorded == [(0.0, 2.0), (0.25, 2.0), (0.0, 0.0)]


def test_rows_of_a_step_that_the_device_cuts_are_separated_later(engine):
    each = engine("hidden")
    step = each.stage(cut=True)
    step.bounds, step.drafts = np.array([0, 9, 11, 13, 24]), np.array([0, 1, 1, 0])
    each.capture.write(step)
    records = each.records()
    assert [len(record.token_ids) for record in records] == [9, 2, 1]
    np.testing.assert_array_equal(records[1].features, step.staged.features[9:11])


def test_rows_are_copied_at_the_end_of_the_step(engine):
    """So that they do not delay the copies of the step's tokens."""
    each = engine("hidden")
    step = each.stage(send=False)
    step.staged.host.zero_()
    packed = step.staged.on_device.clone()
    assert step.staged.filled()  # a step that is lost has no pending copy
    Event.happened = False
    step.staged.send()
    assert not step.staged.filled()
    assert step.staged.host.equal(packed) and packed.any()
    Event.happened = True
    assert step.staged.filled()
