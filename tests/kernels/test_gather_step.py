"""The block of a step's numbers equals the reference, one launch for any size."""

from __future__ import annotations

import pytest
import torch

from vllm_tide.kernels import gather_step as op
from vllm_tide.kernels.gather_step import gather_step, gather_step_reference


def parts(n, rows, width, depth, cut):
    random = torch.Generator().manual_seed(n)

    def some(*shape, dtype=torch.int32):
        return torch.randint(-1, 1 << 18, shape, generator=random).to(dtype)

    tensors = [some(n), some(n), some(n, 7, dtype=torch.int64)[:, :width], some(rows)]
    tensors.append(torch.rand(n, 9, generator=random)[:, :depth])
    tensors.append(some(n, 5, dtype=torch.int64)[:, 0])
    return tensors + [some(n + 1), some(n + 1)] * cut


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("n", "rows", "width", "depth", "cut"),
    [
        (3, 11, 4, 3, True),
        (5, 2500, 1, 3, False),
        pytest.param(1, 1, 1, 1, False, marks=pytest.mark.nightly),
        pytest.param(40, 64, 6, 5, False, marks=pytest.mark.nightly),
        pytest.param(40, 64, 6, 5, True, marks=pytest.mark.nightly),
    ],
)
def test_the_block_equals_the_reference(monkeypatch, n, rows, width, depth, cut):
    given = parts(n, rows, width, depth, cut)
    size = sum(part.numel() for part in given)
    ours, expected = (torch.full((size + 3,), 7, dtype=torch.int32) for _ in range(2))
    gather_step_reference(given, expected)
    monkeypatch.setattr(op, "gather_step_reference", None)
    gather_step(given, ours)
    assert torch.equal(ours, expected) and ours[-3:].tolist() == [7] * 3
    assert expected[:n].tolist() == given[0].tolist()
    at = 2 * n + n * width + rows
    sure = expected[at : at + n * depth].view(torch.float32).view(n, depth)
    assert torch.equal(sure, given[4])


def test_no_step_size_compiles_another_kernel():
    assert set(op._NUMBERS) == {
        name for name, kind in op.variants()[0].types.items() if kind == "i32"
    }
