"""Rows stored for the draft while it does not run, compared with a plain list."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_tide.config import MIB
from vllm_tide.engine.catchup import DraftBacklog

SLOTS, LAYERS = 6, 3


class Reference:
    """Every stored row in order: (slot, position, number)."""

    def __init__(self, most_rows):
        self.most = most_rows
        self.steps = []
        self.holes = 0

    def keep(self, rows, padded):
        self.steps.append((padded, dict(rows)))
        while sum(step[0] for step in self.steps) > self.most:
            self.holes += len(self.steps.pop(0)[1])

    def forget(self, slot):
        for _, rows in self.steps:
            for key in [key for key in rows if key[0] == slot]:
                del rows[key]

    def of(self, slot):
        """Return the last run of consecutive positions."""
        missed = [
            (p, n) for _, rows in self.steps for (s, p), n in rows.items() if s == slot
        ]
        stored = []
        for position, number in reversed(missed):
            if stored and stored[-1][0] != position + 1:
                break
            stored.append((position, number))
        return stored[::-1], len(missed)


@pytest.mark.parametrize("hidden", [2, MIB // (4 * LAYERS * 40)])
def test_missed_rows_are_stored(hidden):
    """Prompts and steps of one row, requests that end, rejected rows, padded tensors;
    with wide rows some 40 of them fit, and older ones are dropped."""
    rng = np.random.default_rng(hidden)
    runner = SimpleNamespace(dtype=torch.float32)
    backlog = DraftBacklog(runner, 1, LAYERS, hidden, SLOTS)
    reference = Reference(MIB // (4 * LAYERS * hidden))
    position, number, compared = np.zeros(SLOTS, np.int64), 0, 0
    for _ in range(400):
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
        for slot in slots[rng.random(len(slots)) < 0.1]:  # another request
            backlog.forget(int(slot))
            reference.forget(slot)
            position[slot] = 0
        prompt = position[slots] == 0
        rows = np.where(prompt, rng.integers(2, 9, len(slots)), rng.integers(1, 4))
        count = np.where(prompt, rows, rng.integers(1, rows + 1))
        first = np.cumsum(rows) - rows
        padded = int(rows.sum()) + int(rng.integers(3))
        base = number + torch.arange(padded, dtype=torch.float32)[:, None]
        layers = [(base + 0.25 * i).repeat(1, hidden) for i in range(LAYERS)]
        stored = {
            (slot, position[slot] + j): number + first[i] + j
            for i, slot in enumerate(slots)
            for j in range(count[i])
        }
        step = slots, first, count, position[slots]
        backlog.keep(layers, *step, int(rows.sum()))
        reference.keep(stored, padded)
        position[slots] += count
        number += padded
        for slot in range(SLOTS):
            expected, missing = reference.of(slot)
            assert backlog.missing[slot] == missing
            start, span = backlog._span(slot)
            assert len(span) == len(expected)
            if not len(span):
                continue
            compared += 1
            assert start == expected[0][0]
            features = backlog._features(span).view(len(span), LAYERS, hidden)
            seen = features[:, :, [0, -1]] - 0.25 * torch.arange(LAYERS)[:, None]
            assert (seen == torch.tensor([n for _, n in expected])[:, None, None]).all()
        if rng.random() < 0.2:  # the draft catches up on some of them
            caught = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
            backlog.seen(caught)
            for slot in caught:
                reference.forget(slot)
    assert compared > 500
    assert backlog.holes == reference.holes
    assert (backlog.holes > 0) == (hidden > 2)


def test_nothing_is_stored_once_nothing_is_missing():
    runner = SimpleNamespace(dtype=torch.float32)
    backlog = DraftBacklog(runner, 1, LAYERS, 2, SLOTS)
    one = np.ones(2, np.int64)
    for place in range(5):
        backlog.keep(
            [torch.zeros(2, 2)] * LAYERS, np.arange(2), one, one, one * place, 2
        )
    backlog.seen(np.array([0]))
    assert len(backlog._steps) == 5
    backlog.seen(np.array([1]))
    assert not backlog._steps
    backlog.keep([torch.zeros(2, 2)] * LAYERS, np.arange(2), one, one, one, 2)
    backlog.keep([torch.zeros(2, 2)] * LAYERS, np.arange(1, 3), one, one, one, 2)
    backlog.forget(0)
    assert len(backlog._steps) == 2
    backlog.forget(1)
    assert len(backlog._steps) == 1, "a step that no request needs"


def test_part_of_a_buffer_is_copied():
    """An embedding feature is in a buffer that the next step overwrites."""
    runner = SimpleNamespace(dtype=torch.float32)
    backlog = DraftBacklog(runner, 1, LAYERS, 2, SLOTS)
    buffer, own = torch.full((8, 2), 7.0), torch.full((3, 2), 5.0)
    one = np.ones(1, np.int64)
    backlog.keep([buffer[:3], own, own], one, one - 1, 3 * one, one - 1, 3)
    assert backlog._steps[0].features[1] is own
    buffer.zero_()
    _, rows = backlog._span(1)
    assert backlog._features(rows).tolist() == [[7.0, 7.0, 5.0, 5.0, 5.0, 5.0]] * 3
