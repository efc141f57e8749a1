"""Which rows are trained: the traps of eagle3-training.md c.6."""

from __future__ import annotations

import torch

from tests.train.toys import ToyTarget
from vllm_tide.train.packing import pack, plan_rows
from vllm_tide.train.sample import Sample, split_windows


def _sample(size: int, prompt: int) -> Sample:
    return ToyTarget().document(1, size, prompt, key=1)


def test_complete_plan_keeps_rows_trained_at_every_step():
    batch = pack([_sample(10, 4)])
    plan = plan_rows(batch, 3, complete=True)
    assert len(plan) == 3
    for step in plan:
        assert step.active[step.loss].tolist() == [3, 4, 5, 6]


def test_windows_train_every_row_once_and_keep_positions():
    sample = _sample(100, 7)
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
    windows = split_windows(_sample(100, 95), 24)
    assert len(windows) == 1
    assert windows[0].start == 76


def test_rows_of_each_step_begin_at_the_prompt_s_end_and_need_a_teacher():
    """With a prompt of 4, row 3 embeds the first generated token and predicts x_5."""
    for prompt, expected in (
        (4, [range(3, 9), range(2, 8), range(1, 7)]),
        (1, [range(9), range(8), range(7)]),  # row 9 has no teacher
        (10, []),
    ):
        plan = plan_rows(pack([_sample(10, prompt)]), 3)
        rows = [step.active[step.loss].tolist() for step in plan]
        assert rows == list(map(list, expected))
        sets = [set(step.active.tolist()) for step in plan]
        assert sets == sorted(sets, key=len, reverse=True)
