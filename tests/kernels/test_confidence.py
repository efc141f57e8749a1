"""The confidence of a draft: a softmax's maximum per step, also by kernel."""

from __future__ import annotations

import pytest
import torch

from vllm_tide.engine.worker_v2 import ConfidenceTable
from vllm_tide.kernels.topk_teacher import TopKWorkspace

REQS, DEPTH, VOCAB = 5, 3, 1500
CPU = torch.device("cpu")


def filled(confidences, dtype=torch.float32, rows=(REQS, 4, 2), vocab=VOCAB):
    """Fill the table and return the expected one."""
    random = torch.Generator().manual_seed(0)
    expected = torch.zeros(REQS, DEPTH)
    for step, n in enumerate(rows):
        logits = (4.0 * torch.randn(n, vocab, generator=random)).to(dtype)
        logits[0, 7:] = -torch.inf  # a draft with another vocabulary
        confidences.keep(logits, torch.tensor(step))
        expected[:n, step] = logits.float().softmax(-1).amax(-1)
    return expected


def test_each_step_fills_its_column_for_its_rows():
    confidences = ConfidenceTable(REQS, DEPTH, VOCAB, CPU)
    expected = filled(confidences)
    assert torch.equal(confidences.table, expected)
    assert (confidences.table[2:, 2] == 0.0).all()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("dtype", "vocab"), [(torch.bfloat16, VOCAB), (torch.float32, VOCAB // 3)]
)
def test_the_kernel_equals_the_reference(monkeypatch, dtype, vocab):
    confidences = ConfidenceTable(REQS, DEPTH, VOCAB, CPU)
    confidences._workspace = TopKWorkspace(REQS, VOCAB, 1, CPU)
    monkeypatch.setattr(torch, "softmax", None)
    expected = filled(confidences, dtype, vocab=vocab)
    torch.testing.assert_close(confidences.table, expected, rtol=1e-5, atol=1e-6)
