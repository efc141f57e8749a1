"""Training-time test equals a sequential rollout; packed equals unpacked."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.draft.rollout import rollout_logits
from tests.train.toys import HIDDEN, VOCAB, config, whole
from vllm_tide.draft.config import Rope
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.packing import pack, plan_rows
from vllm_tide.train.sample import Sample

STEPS = 4
SWITCHES = [
    {"norm_before_residual": a, "norm_output": b, **c}
    for a, b, c in itertools.product(
        (False, True), (False, True), ({}, {"fc_norm": True}, {"norm_before_fc": True})
    )
] + [{"rope": Rope(5e5, "llama3", 8.0, 1.0, 4.0, 64)}, {"draft_vocab_size": 40}]

FAST = (0, 4, 11, 12, 13)  # of those, each switch once


def make_draft(**changes: object) -> Eagle3Draft:
    """Return a random draft with norms that are not trivial."""
    torch.manual_seed(3)
    shape = config(**changes)
    target_ids = torch.randperm(VOCAB)[: shape.draft_vocab_size].sort().values
    draft = Eagle3Draft.initialise(
        shape,
        torch.randn(VOCAB, HIDDEN),
        torch.randn(VOCAB, HIDDEN) * 0.3,
        VocabMap.from_target_ids(target_ids, VOCAB),
    )
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return draft


def make_sample(size: int, prompt: int, start: int, key: int) -> Sample:
    """Return a random document."""
    tokens, features = torch.randint(0, VOCAB, (size,)), torch.randn(size, 3 * HIDDEN)
    return whole(tokens, features, torch.randn(size, HIDDEN), prompt, key, start)


def ttt_logits(draft: Eagle3Draft, samples: list[Sample]) -> dict[tuple, torch.Tensor]:
    """Return (document key, row, step) to logits."""
    batch = pack(samples)
    plan = plan_rows(batch, STEPS)
    weights = draft.compute_weights(torch.float32)
    outputs = draft.forward_steps(batch.rows(plan), weights)
    out = {}
    for i, (rows, normed) in enumerate(zip(plan, outputs, strict=True)):
        logits = draft.logits(normed, weights).detach()
        for at, value in zip(rows.active[rows.loss].tolist(), logits, strict=True):
            doc = int(batch.segments[at])
            out[batch.keys[doc], at - batch.layout.doc_starts[doc], i] = value
    return out


@pytest.mark.parametrize(
    "switches",
    [
        pytest.param(one, marks=() if i in FAST else pytest.mark.nightly, id=str(one))
        for i, one in enumerate(SWITCHES)
    ],
)
@torch.no_grad()
def test_teacher_forced_steps_equal_sequential_rollout(switches: dict) -> None:
    """Every trained row of every step, several documents, true positions."""
    draft = make_draft(**switches)
    samples = [make_sample(9, 3, 0, 1), make_sample(12, 10, 30, 2)]
    weights = draft.compute_weights(torch.float32)
    per_step = ttt_logits(draft, samples)
    assert (1, 2, 0) in per_step  # row P - 1, the first draft after prefill
    for (key, row, step), logits in per_step.items():
        sample = samples[key - 1]
        expected = rollout_logits(
            draft,
            weights,
            sample.tokens.long(),
            sample.features,
            row,
            step + 1,
            start=sample.start,
        )
        torch.testing.assert_close(logits, expected[step], rtol=0, atol=1e-4)


def test_packed_documents_equal_documents_alone() -> None:
    """No row attends to another document, and none is missing."""
    draft = make_draft()
    samples = [
        make_sample(n, p, s, n) for n, p, s in ((7, 1, 0), (2, 1, 4), (15, 6, 9))
    ]
    together = ttt_logits(draft, samples)
    alone = {k: v for s in samples for k, v in ttt_logits(draft, [s]).items()}
    assert together.keys() == alone.keys()
    for key, value in alone.items():
        torch.testing.assert_close(together[key], value, rtol=0, atol=1e-5)
