"""Packed attention equals one dense mask, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_tide.draft.attention import (
    packed_attention,
    reference_attention,
    slice_documents,
)

DOCS = [0, 5, 6, 13]


def _inputs(diagonals: int, active: Tensor) -> list[Tensor | None]:
    torch.manual_seed(diagonals)
    rows, heads, kv, dim = DOCS[-1], 4, 2, 6
    count = active.numel()

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    kd = leaf(diagonals, count, kv, dim) if diagonals else None
    vd = leaf(diagonals, count, kv, dim) if diagonals else None
    return [leaf(count, heads, dim), leaf(rows, kv, dim), leaf(rows, kv, dim), kd, vd]


@pytest.mark.parametrize("diagonals", [0, 1, 3])
@pytest.mark.parametrize("active", [list(range(13)), [3, 4, 6, 9, 12], [7]])
def test_packed_attention_equals_dense_mask(diagonals: int, active: list[int]) -> None:
    """Values and all gradients agree in float64."""
    rows = torch.tensor(active)
    doc_ids = torch.tensor([0] * 5 + [1] + [2] * 7)
    args = _inputs(diagonals, rows)
    ours = packed_attention(*args, slice_documents(rows, DOCS))
    theirs = reference_attention(*args, rows, doc_ids)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    leaves = [a for a in args if a is not None]
    weight = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((theirs * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
