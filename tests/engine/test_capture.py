"""Capture without an engine; metadata-only records while no trainer collects."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_tide.config import CaptureConfig
from vllm_tide.engine.capture import Capture
from vllm_tide.engine.worker_v1 import landed_step
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.ring import Collect, RingReader, RingSpec, RingWriter
from vllm_tide.transport.tenant import KEY_BYTES, tenant_id

HIDDEN, VOCAB, ROWS, TOPK = 4, 50, 16, 3
KEY = b"k" * KEY_BYTES


class Step:
    """A runner in the middle of a step of two requests: a prefill and a verification.

    Request a prefills 5 tokens; b verifies 3 drafts of which one is accepted, with one
    placeholder after them.
    """

    def __init__(self, teacher: str, extra: dict | None = None) -> None:
        spec = RingSpec("e", HIDDEN, (1, 2), VOCAB, "float32", teacher, TOPK)
        self.ring = RingWriter.create(spec, 1 << 18)
        self.reader = RingReader.attach(self.ring.name)
        self.params = SimpleNamespace(extra_args=extra, temperature=0.0)
        self.runner = SimpleNamespace(
            max_num_tokens=ROWS,
            max_num_reqs=2,
            device=torch.device("cpu"),
            dtype=torch.float32,
            input_ids=SimpleNamespace(np=np.arange(ROWS, dtype=np.int32)),
            query_start_loc=SimpleNamespace(np=np.array([0, 5, 10])),
            input_batch=SimpleNamespace(
                req_ids=["a", "b"],
                num_computed_tokens_cpu=np.array([2, 20]),
                num_prompt_tokens=np.array([7, 6]),
            ),
        )
        self.output = SimpleNamespace(
            total_num_scheduled_tokens=10,
            scheduled_spec_decode_tokens={"b": [6, 7, 8, -1]},
        )
        config = CaptureConfig(teacher=teacher, teacher_topk=TOPK)
        self.capture = Capture(self.runner, self.ring, config, 3, tenant_key=KEY)
        generator = torch.Generator().manual_seed(0)
        self.aux = [torch.randn(10, HIDDEN, generator=generator) for _ in range(2)]
        self.hidden = torch.randn(10, HIDDEN, generator=generator)
        self.logits = torch.randn(6, VOCAB, generator=generator)

    def end(self, aux: bool = True, **of_step: Any) -> None:
        """End the step."""
        names = self.runner.input_batch.req_ids
        requests = [
            SimpleNamespace(
                req_id=name,
                sampling_params=self.params,
                mm_features=[],
                prompt_embeds=None,
            )
            for name in names
        ]
        self.capture.admit(SimpleNamespace(scheduled_new_reqs=requests))
        version = self.capture.draft_version
        step = landed_step(self.runner, self.output, [[9], [6, 30]], version)
        for name, value in of_step.items():
            setattr(step, name, value)
        self.capture.record(step, self.hidden, self.aux if aux else None)

    def run(self, aux: bool = True, **of_step: Any) -> list[Record]:
        self.capture.on_logits(self.logits)
        self.end(aux, **of_step)
        self.capture.draft_version += 1
        self.end(aux, **of_step)
        self.capture.forget(["a", "b"])
        records = []
        while (record := self.reader.read()) is not None:
            records.append(record)
        return records

    def close(self) -> None:
        self.reader.close()
        self.ring.close()


@pytest.fixture
def step():
    made = []

    def make(teacher="hidden", extra=None):
        made.append(Step(teacher, extra))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_a_metadata_only_record_equals_the_full_one_without_rows(step, teacher):
    full, light = step(teacher), step(teacher)
    light.reader.set_collect(Collect.METADATA)
    left_out = {"key", "features", "teacher_start"} | {
        f.name for f in fields(Record) if f.name.startswith("teacher_")
    }
    pairs = list(zip(full.run(), light.run(), strict=True))
    assert len(pairs) == 6
    for whole, ids in pairs:
        for field in fields(Record):
            if field.name not in left_out:
                a, b = getattr(whole, field.name), getattr(ids, field.name)
                np.testing.assert_array_equal(a, b, strict=isinstance(a, np.ndarray))
        if ids.num_rows:
            assert ids.metadata_only and not whole.metadata_only
            assert ids.teacher_start == ids.num_rows
            assert ids.teacher_hidden is ids.teacher_topk_ids is None
    verify = [b for _, b in pairs if b.phase == Phase.VERIFY and b.num_rows]
    assert [r.num_accepted for r in verify] == [1, 1]
    assert verify[0].token_ids.tolist() == [5, 6, 7, 8]
    assert full.capture.dropped == {"placeholder": 2, "prefix_cached": 22}
    assert light.capture.dropped == {"placeholder": 2, "ids_only": 18}
    assert (full.capture.rows, light.capture.rows) == (18, 0)
    assert full.capture.requests == light.capture.requests == 2


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_nothing_is_copied_while_the_trainer_does_not_collect(
    step, teacher, monkeypatch
):
    one = step(teacher)
    one.reader.set_collect(Collect.METADATA)

    def never(*_args, **_kwargs):
        raise AssertionError("rows were processed without a consumer")

    monkeypatch.setattr(one.capture._stage, "fill", never)
    monkeypatch.setattr(torch, "log_softmax", never)
    assert len(one.run()) == 6


def test_features_are_not_needed_for_metadata_only_records(step):
    one = step()
    assert [r for r in one.run(aux=False) if r.num_rows] == []
    one.reader.set_collect(Collect.METADATA)
    assert len([r for r in one.run(aux=False) if r.num_rows]) == 4


@pytest.mark.parametrize("first", [Collect.FULL, Collect.METADATA])
def test_a_collect_mode_that_changes_inside_a_step_gives_valid_records(step, first):
    one = step("topk")
    one.reader.set_collect(first)
    one.capture.on_logits(one.logits)
    one.reader.set_collect(Collect.METADATA if first is Collect.FULL else Collect.FULL)
    one.end()
    assert one.ring.drops == {}
    for _ in "ab":
        record = one.reader.read()
        assert record.metadata_only is (first is Collect.FULL)
        assert record.teacher_topk_ids is None
        assert record.teacher_start == record.num_rows


def test_every_record_of_a_request_carries_its_tenant(step):
    one = step(extra={"tide_tenant": "acme"})
    records = one.run()
    assert {r.tenant for r in records} == {tenant_id("acme", KEY)}
    assert sum(r.finished for r in records) == 2
    assert {r.tenant for r in step().run()} == {0}


def test_an_invalid_tenant_is_not_captured(step):
    one = step(extra={"tide_tenant": ["a", "b"]})
    assert one.run() == []
    assert one.capture.dropped == {"malformed_tenant": 2}


def test_a_record_has_its_steps_cost_and_verify_chance(step):
    full = step()
    records = full.run(cost=1.5, explored={"b": 0.125, "x": 0.5})
    recorded = {(r.phase, r.cost, r.verify_chance) for r in records if not r.finished}
    assert {cost for _, cost, _ in recorded} == {1.5}
    assert {chance for _, _, chance in recorded} == {1.0, 0.125}


def test_a_record_is_marked_when_its_drafts_came_from_the_memory(step):
    for light in (False, True):
        one = step()
        one.reader.set_collect(Collect.METADATA if light else Collect.FULL)
        records = one.run(aux=not light, memory=np.array([False, True]))
        from_memory = [r.memory for r in records if not r.finished]
        assert from_memory == [False, True] * (len(from_memory) // 2) and from_memory


def test_after_a_pause_no_older_step_is_mixed_into_a_record(step):
    for resumed in (False, True):
        one = step("topk")
        one.end()
        one.reader.read(), one.reader.read()
        one.capture.draft_version = 7
        if resumed:
            one.capture.resume()
        one.end()
        one.reader.read()
        record = one.reader.read()
        assert record.phase == Phase.VERIFY and record.draft_version == 7 * resumed


def test_a_fault_inside_a_step_does_not_hide_the_source_of_its_drafts(
    step, monkeypatch
):
    one = step()
    one.end()
    one.capture.draft_version = 4
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(one.capture._stage, "fill", lambda *_: 1 // 0)
        one.end()
    one.capture.draft_version = 5
    one.end()
    versions = [one.reader.read().draft_version for _ in range(4)]
    assert versions == [0, 0, 5, 4]  # the prompts' rows, and what was verified


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_a_pause_stops_output_and_ends_running_requests(step, teacher):
    one = step(teacher)
    one.capture.on_logits(one.logits)
    one.end()
    assert all(one.reader.read().num_rows for _ in "ab")
    one.reader.set_collect(Collect.NOTHING)
    ended = one.run()  # two steps, and the requests' end
    assert [(r.finished, r.num_rows, len(r.token_ids)) for r in ended] == [
        (True, 0, 0),
        (True, 0, 0),
    ]
    assert one.capture.dropped["paused"] == 20
    one.runner.input_batch.req_ids = ["c", "d"]
    one.output.scheduled_spec_decode_tokens = {"d": [6, 7, 8, -1]}
    assert one.run() == []  # they began in the pause: no record ever
    assert one.capture.dropped["paused"] == 40
    one.reader.set_collect(Collect.FULL)
    assert one.run() == []
    one.capture.forget(["c", "d"])
    assert len([r for r in one.run() if r.num_rows]) == 4  # others of these names
    assert one.capture.rows == 27
