"""Trained rows; branches equal the draft on the counterfactual sequence."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.draft.rollout import rollout_logits
from tests.draft.test_rollout import SWITCHES, make_draft, make_sample
from tests.train.toys import HIDDEN, TOY, VOCAB
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.rows import StepRows
from vllm_tide.train.packing import (
    PackedBatch,
    num_branch_rows,
    pack,
    plan_rows,
    take_batch,
)
from vllm_tide.train.sample import Branch, Sample, TopK, split_windows

STEPS = 3


def make_branch(position: int, size: int) -> Branch:
    """Return a random branch."""
    return Branch(
        position=position,
        tokens=torch.randint(0, VOCAB, (size,), dtype=torch.int32),
        features=torch.randn(size, 3 * HIDDEN),
        teacher_hidden=torch.randn(size, HIDDEN),
    )


def make_samples() -> list[Sample]:
    """Return branches of every kind: two at one row, at the first and last row."""
    a = make_sample(9, 3, 0, 1)
    b = make_sample(6, 2, 4, 2)
    c = make_sample(12, 10, 30, 3)
    return [
        replace(a, branches=(make_branch(4, 4), make_branch(4, 2), make_branch(8, 1))),
        b,
        replace(c, branches=(make_branch(30, 3), make_branch(37, 5))),
    ]


def num_trunk(batch: PackedBatch, step: StepRows) -> int:
    """Return loss rows of documents in a step, then those of branches."""
    return int((step.active[step.loss] < batch.layout.num_trunk).sum())


def run(
    draft: Eagle3Draft,
    batch: PackedBatch,
    plan: list[StepRows],
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return logits per step, trunk rows first."""
    w = draft.compute_weights(dtype)
    return [draft.logits(x, w) for x in draft.forward_steps(batch.rows(plan), w)]


def expected_rows(
    draft: Eagle3Draft, samples: list[Sample], dtype: torch.dtype
) -> list[list[Tensor]]:
    """Return branch logits of all steps by the sequential rollout, in packed order."""
    w = draft.compute_weights(dtype)
    out: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for sample in samples:
        for branch in sample.branches:
            row = branch.position - sample.start
            # The sequence in which the branch was accepted behind row.
            tokens = torch.cat([sample.tokens[: row + 1], branch.tokens])
            features = torch.cat([sample.features[: row + 1], branch.features])
            size = branch.tokens.numel()
            for j in range(size):
                steps = min(STEPS, size - j)
                logits = rollout_logits(
                    draft, w, tokens, features, row + j, steps, start=sample.start
                )
                for i in range(steps):
                    out[i].append(logits[i])
    return out


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@torch.no_grad()
def test_branch_rows_equal_the_counterfactual_sequence(switches: dict) -> None:
    """Every row of every branch at every step, and the trunk is unchanged."""
    draft, samples = make_draft(**switches), make_samples()
    batch, trunk = pack(samples), pack(samples, branches=False)
    plan = plan_rows(batch, STEPS)
    outputs = run(draft, batch, plan)
    alone = run(draft, trunk, plan_rows(trunk, STEPS))
    expected = expected_rows(draft, samples, torch.float32)
    counts = [num_trunk(batch, step) for step in plan]
    assert [len(w) for w in expected] == [
        step.loss.numel() - count for step, count in zip(plan, counts, strict=True)
    ]
    for i, (logits, count) in enumerate(zip(outputs, counts, strict=True)):
        torch.testing.assert_close(logits[:count], alone[i], rtol=0, atol=1e-5)
        scale = max(1.0, float(torch.stack(expected[i]).abs().max()))
        error = (logits[count:] - torch.stack(expected[i])).abs().max()
        assert float(error) <= 1e-5 * scale


def test_gradients_equal_those_of_the_counterfactual_sequence() -> None:
    """All parameters in float64, trunk and branches in one loss."""
    draft, samples = make_draft().double(), make_samples()
    batch = pack(samples)
    plan = plan_rows(batch, STEPS)
    outputs = run(draft, batch, plan, torch.float64)
    torch.manual_seed(0)
    weight = [torch.randn_like(x) for x in outputs]
    ours = torch.autograd.grad(
        sum((x * w).sum() for x, w in zip(outputs, weight, strict=True)),
        list(draft.parameters()),
    )
    off = expected_rows(draft, samples, torch.float64)
    w = draft.compute_weights(torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for i, step in enumerate(plan):
        rows = step.active[step.loss][: num_trunk(batch, step)].tolist()
        logits = []
        for at in rows:
            doc = int(batch.segments[at])
            sample = samples[doc]
            logits.append(
                rollout_logits(
                    draft,
                    w,
                    sample.tokens,
                    sample.features,
                    at - batch.layout.doc_starts[doc],
                    i + 1,
                    start=sample.start,
                )[i]
            )
        reference = torch.stack(logits + off[i])
        torch.testing.assert_close(outputs[i], reference, rtol=0, atol=1e-12)
        total = total + (reference * weight[i]).sum()
    theirs = torch.autograd.grad(total, list(draft.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * float(b.abs().max()))


def test_branches_train_where_no_trunk_row_does() -> None:
    draft, samples = make_draft(), make_samples()
    batch = pack([replace(s, has_teacher=s.has_teacher & False) for s in samples])
    assert plan_rows(batch, STEPS, branches=False) == []
    result = run(draft, batch, plan_rows(batch, STEPS))
    whole = pack(samples)
    plan = plan_rows(whole, STEPS)
    for step, a, b in zip(plan, result, run(draft, whole, plan), strict=True):
        off = b[num_trunk(whole, step) :]
        torch.testing.assert_close(a, off, rtol=0, atol=1e-5)
    only = plan_rows(whole, STEPS, committed=False)
    for a, b in zip(result, run(draft, whole, only), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_branch_rows_fill_the_capacity_of_a_batch() -> None:
    samples = make_samples()  # 9 + 7, 6, 12 + 8 rows
    assert [num_branch_rows(s) for s in samples] == [7, 0, 8]
    chosen = take_batch(deque(samples), 27)
    assert [s.key for s in chosen] == [1, 2]
    batch = pack(chosen)
    assert (batch.layout.num_trunk, batch.layout.num_rows) == (15, 22)
    assert [s.key for s in take_batch(deque(samples[2:]), 15)] == [3]  # alone


def test_topk_teachers_of_branches_are_packed() -> None:
    def topk(rows: int) -> TopK:
        ids = torch.randint(0, VOCAB, (rows, 4), dtype=torch.int32)
        return TopK(ids, torch.randn(rows, 4), torch.randn(rows))

    sample = make_sample(6, 2, 0, 1)
    branch = replace(make_branch(3, 3), teacher_hidden=None, teacher_topk=topk(3))
    hidden = make_branch(2, 2)  # of the wrong kind: left out
    sample = replace(
        sample, teacher_hidden=None, teacher_topk=topk(6), branches=(hidden, branch)
    )
    batch = pack([sample])
    assert batch.layout.num_rows - batch.layout.num_trunk == 3
    assert isinstance(batch.teacher, TopK)
    packed = batch.teacher[torch.tensor([7, 2])]
    assert torch.equal(packed.ids[0], branch.teacher_topk.ids[1])
    assert torch.equal(packed.logprobs[1], sample.teacher_topk.logprobs[2])
    assert torch.equal(packed.tail_logprob[0], branch.teacher_topk.tail_logprob[1])


def test_a_branch_is_trained_in_one_window_only() -> None:
    size = 100
    sample = make_sample(size, 1, 0, 1)
    sample = replace(sample, branches=tuple(make_branch(p, 1) for p in range(1, size)))
    positions = []
    for window in split_windows(sample, 24):
        batch = pack([window])
        assert batch.layout.num_rows > batch.layout.num_trunk
        positions += batch.positions[batch.layout.num_trunk :].tolist()
    assert sorted(positions) == list(range(1, size))


def _document(size: int, prompt: int) -> Sample:
    return TOY.document(1, size, prompt, key=1)


def test_complete_plan_keeps_rows_trained_at_every_step():
    batch = pack([_document(10, 4)])
    plan = plan_rows(batch, 3, complete=True)
    assert len(plan) == 3
    for step in plan:
        assert step.active[step.loss].tolist() == [3, 4, 5, 6]


def test_windows_train_every_row_once_and_keep_positions():
    sample = _document(100, 7)
    windows = split_windows(sample, 24)
    trained: list[int] = []
    for window in windows:
        assert window.num_tokens <= 24
        first = window.start - sample.start
        again = sample.tokens[first : first + window.num_tokens]
        assert torch.equal(window.tokens, again)
        positions = torch.arange(window.start, window.start + window.num_tokens)
        trained += positions[1:][window.valid[1:]].tolist()
    assert sorted(trained) == list(range(7, 100))


def test_windows_leave_out_a_long_prompt():
    windows = split_windows(_document(100, 95), 24)
    assert len(windows) == 1
    assert windows[0].start == 76


def test_rows_of_each_step_begin_at_the_prompts_end_and_need_a_teacher():
    """With a prompt of 4, row 3 embeds the first generated token and predicts x_5."""
    for prompt, expected in (
        (4, [range(3, 9), range(2, 8), range(1, 7)]),
        (1, [range(9), range(8), range(7)]),  # row 9 has no teacher
        (10, []),
    ):
        plan = plan_rows(pack([_document(10, prompt)]), 3)
        rows = [step.active[step.loss].tolist() for step in plan]
        assert rows == list(map(list, expected))
        sets = [set(step.active.tolist()) for step in plan]
        assert sets == sorted(sets, key=len, reverse=True)
