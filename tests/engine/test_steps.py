"""Steps of Model Runner V2 are read in order, once landed, and never waited for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_tide.capture.step import Step
from vllm_tide.engine.steps import BUFFERS, ConfidenceTable, StepLog
from vllm_tide.engine.worker_v2 import WorkerTideV2

K, REQS, ROWS = 3, 4, 16


class Later:
    """An event that the test completes."""

    def __init__(self) -> None:
        self.happened = False

    def record(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


@pytest.fixture
def log() -> StepLog:
    log = StepLog(ROWS, REQS, K, torch.device("cpu"))
    for buffer in log.buffers:
        buffer._event = Later()
    return log


def batch(**change) -> SimpleNamespace:
    """Request a prefills 5 rows from position 2; b verifies two drafts at 20."""
    return SimpleNamespace(
        **{
            "req_ids": ["a", "b"],
            "num_reqs": 2,
            "num_tokens": 8,
            "query_start_loc_np": np.array([0, 5, 8, 8], np.int32),
            "num_draft_tokens_per_req": np.array([0, 2], np.int32),
            "is_prefilling_np": np.array([True, False]),
            "cu_num_logits_np": np.array([0, 1, 4], np.int32),
            "max_query_len": None,
            "idx_mapping_np": np.array([3, 1]),
            "seq_lens": torch.tensor([7, 23, 0], dtype=torch.int32),
            "input_ids": torch.arange(ROWS, dtype=torch.int32),
            **change,
        }
    )


def record(log: StepLog, of: SimpleNamespace | None = None) -> Step | None:
    output = SimpleNamespace(
        num_sampled=torch.tensor([0, 2], dtype=torch.int32),
        sampled_token_ids=torch.arange(8).view(2, 4),
    )
    of = of or batch()
    step = log.open(of, np.array([0, 11, 0, 9], np.int32), 4)
    if step is not None:
        drafted = torch.arange(REQS * K).view(REQS, K)
        log.fill(step, of, output, torch.full((REQS, K), 0.5), drafted)
    return step


def land(step: Step) -> None:
    step.buffer._event.happened = True


def test_a_landed_step_has_the_devices_decision(log):
    step = record(log)
    assert list(log.landed()) == []
    land(step)
    assert list(log.landed()) == [step]
    assert step.start.tolist() == [2, 20]
    assert step.emitted.tolist() == [0, 2]
    assert step.sampled[1, :2].tolist() == [4, 5]
    assert step.token_ids.tolist() == list(range(8))
    assert step.num_prompt_tokens.tolist() == [9, 11]
    assert step.drafts.tolist() == [0, 2] and step.padding.tolist() == [0, 0]
    assert step.logit_ends.tolist() == [1, 4]
    assert list(log.landed()) == []


def test_drafts_of_a_prefilling_request_are_placeholders(log):
    step = record(log, batch(num_draft_tokens_per_req=np.array([3, 2], np.int32)))
    assert step.padding.tolist() == [3, 0]
    assert record(log, batch(num_draft_tokens_per_req=None)).drafts.tolist() == [0, 0]


def test_steps_are_read_in_order_even_if_a_later_one_lands_first(log):
    first, second = record(log), record(log)
    land(second)
    assert list(log.landed()) == []
    land(first)
    assert list(log.landed()) == [first, second]


def test_a_step_without_a_slot_is_left_out_and_slots_are_reused(log):
    steps = [record(log) for _ in range(BUFFERS)]
    assert record(log) is None and log.lost == 1
    land(steps[0])
    assert len(list(log.landed())) == 1
    assert record(log) is None
    assert list(log.done(wait_for_next=False)) == [steps[0]]
    after = record(log)
    assert after.after_gap and not any(step.after_gap for step in steps)
    land(steps[1])
    list(log.landed()), list(log.done(wait_for_next=False))
    assert not record(log).after_gap


def test_ends_belong_to_the_newest_pending_step(log):
    assert not log.begin(["x"])
    first, second = record(log), record(log)
    assert log.begin(["a"]) and log.begin(["b"])
    assert first.ended is None and second.ended == ("a", "b")
    for step in (first, second):
        land(step)
    list(log.landed())
    assert list(log.done(wait_for_next=True)) == []  # ends after it were not reported
    assert list(log.done(wait_for_next=False)) == [first, second]
    assert not log.begin(["c"])


class Rows:
    """Staged rows that arrive when the test completes them."""

    def __init__(self) -> None:
        self.arrived, self.released = False, 0

    def filled(self) -> bool:
        return self.arrived

    def release(self) -> None:
        self.released += 1


def test_a_step_is_done_when_its_rows_arrived_and_then_released(log):
    first, second = record(log), record(log)
    first.staged = Rows()
    for step in (first, second):
        land(step)
    # Control learns from both at once; the records wait, in order.
    assert list(log.landed()) == [first, second]
    assert list(log.done(wait_for_next=False)) == []
    first.staged.arrived = True
    for step in log.done(wait_for_next=False):
        assert step is second or not first.staged.released
    assert first.staged.released == 1


def test_an_unfilled_step_is_lost_but_its_rows_are_awaited(log):
    first = log.open(batch(), np.zeros(4, np.int32), 0)
    first.full, first.staged = True, Rows()
    assert list(log.landed()) == []  # its slot's event belongs to the step before
    second = record(log)
    land(second)
    assert list(log.landed()) == [second]
    assert first.full is None and second.after_gap
    assert list(log.done(wait_for_next=False)) == []
    first.staged.arrived = True
    assert list(log.done(wait_for_next=False)) == [first, second]
    assert first.staged.released == 1
    third = log.open(batch(), np.zeros(4, np.int32), 0)
    with pytest.raises(AttributeError):
        log.fill(third, batch(), None, torch.zeros(REQS, K), torch.zeros(REQS, K))
    assert list(log.done(wait_for_next=False)) == [third]
    assert record(log).after_gap


def test_landed_steps_are_learned_after_the_launch_of_a_step():
    worker, taken = object.__new__(WorkerTideV2), []
    worker._log = SimpleNamespace(begin=lambda ended: True)
    worker._take_landed = lambda: taken.append(True)
    worker._begin((), empty=False)
    assert not taken
    worker._begin((), empty=True)  # nothing is launched
    assert taken


@pytest.mark.parametrize("block", [False, True])
def test_confidences_are_the_highest_probabilities(block):
    """By draft pass, for a whole block, and from vLLM's acceptance estimator."""
    requests, depth, vocab = 3, 4, 50
    logits = torch.randn(requests, depth, vocab)
    expected = logits.softmax(-1).amax(-1)
    table = ConfidenceTable(requests + 2, depth, vocab, torch.device("cpu"), block)
    if block:
        steps = torch.arange(depth).repeat(requests)
        table.keep(logits.flatten(0, 1), steps)
    else:
        for step in range(depth):
            table.keep(logits[:, step], torch.tensor(step))
    torch.testing.assert_close(table.table[:requests], expected)
    slots = torch.tensor([4, 0, 2])
    features = torch.zeros(6, depth)
    features[slots] = torch.logit(expected)
    again = ConfidenceTable(requests + 2, depth, vocab, torch.device("cpu"))
    again.take(SimpleNamespace(features=features), slots)
    torch.testing.assert_close(again.table[:requests], expected)
