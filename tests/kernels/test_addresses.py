"""Elements beyond 2**31 are addressed correctly: every kernel at its last row.

No memory of that size is needed: `address_recorder` runs one program of a kernel as
the row it would have, and the set of addresses it touches is compared with arithmetic
on Python's integers.
"""

from __future__ import annotations

import mmap

import pytest
import torch

pytestmark = pytest.mark.interpreted
LIMIT = 1 << 31


def anchor(dtype):
    """A pointer to memory that does not exist."""
    return torch.zeros(1, dtype=dtype)


def anchors(*dtypes):
    return [anchor(dtype) for dtype in dtypes]


def mapped(tensor):
    """Place the tensor in separate pages.

    On the heap, an address computed from an anchor may fall into it and count as real.
    """
    pages = mmap.mmap(-1, tensor.numel() * tensor.element_size())
    return torch.frombuffer(pages, dtype=tensor.dtype).copy_(tensor)


def recorder(monkeypatch, program, *real):
    # Only importable where triton is, and only right under its interpreter.
    from tests.kernels.address_recorder import AddressRecorder

    return AddressRecorder(monkeypatch, real, program)


def touched(*spans):
    from tests.kernels.address_recorder import span

    return set().union(*(span(tensor, offsets) for tensor, offsets in spans))


def test_pack_rows(monkeypatch):
    from vllm_tide.kernels.pack_rows import _pack_rows_kernel

    row, part, width, stride, out_stride = 200_000, 7, 8192, 24_576, 40_960
    a, b, c, out = anchors(*[torch.int16] * 4)
    rows = mapped(torch.full((row + 1,), row, dtype=torch.int32))
    seen = recorder(monkeypatch, (row, part), rows)
    _pack_rows_kernel[(1,)](
        *(a, b, c, stride, stride + 1, stride + 2, rows, out),
        *(out_stride, width, 2 * width, width),
        FROM_BF16=True,
        TO="bits",
        BLOCK=1024,
    )
    columns = range(part * 1024, width)
    first = row * out_stride
    assert min(row * stride, first) > LIMIT
    assert seen.addresses == touched(
        (a, [row * stride + i for i in columns]),
        (b, [row * (stride + 1) + i for i in columns]),
        (c, [row * (stride + 2) + i for i in columns]),
        *((out, [first + part * width + i for i in columns]) for part in range(3)),
    )


def test_topk_teacher(monkeypatch):
    from vllm_tide.kernels.topk_teacher import (
        _floor_kernel,
        _list_kernel,
        _merge_kernel,
        _split_kernel,
    )

    row, split, vocab, k, splits, block = 1_000_000, 48, 200_000, 64, 49, 4096
    logits, keys = anchors(torch.bfloat16, torch.int64)
    groups, floors = anchors(torch.int64, torch.int64)
    tops, sums, logprobs, tail = anchors(*[torch.float32] * 4)
    ids = anchor(torch.int32)
    at, first = row * splits + split, row * splits * k
    assert min(row * vocab, first) > LIMIT
    with monkeypatch.context() as patch:
        seen = recorder(patch, (row, split))
        sizes, source = (k, splits), (logits, vocab, vocab)
        part = (logits, range(row * vocab + split * block, (row + 1) * vocab))
        _split_kernel[(1,)](*source, groups, tops, sums, splits, BLOCK=block, GROUPS=16)
        assert seen.addresses == touched(
            part,
            (tops, [at]),
            (sums, [at]),
            (groups, range(at * 16, at * 16 + 16)),
        )
    with monkeypatch.context() as patch:
        seen = recorder(patch, (row,))
        _floor_kernel[(1,)](groups, floors, 2, 16 * splits, GROUPS=1024)
        assert seen.addresses == touched(
            (groups, range(row * 16 * splits, (row + 1) * 16 * splits)),
            (floors, [row]),
        )
    with monkeypatch.context() as patch:
        seen = recorder(patch, (row, split))
        _list_kernel[(1,)](*source, floors, keys, *sizes, BLOCK=block, MOST=64)
        assert seen.addresses == touched(
            part, (floors, [row]), (keys, range(at * k, at * k + k))
        )
    seen = recorder(monkeypatch, (row,))
    _merge_kernel[(1,)](
        *(keys, tops, sums, ids, logprobs, tail, *sizes), SPLITS=64, CANDIDATES=4096
    )
    parts = range(row * splits, (row + 1) * splits)
    assert seen.addresses == touched(
        (keys, range(first, first + splits * k)),
        *((part, parts) for part in (tops, sums)),
        *((out, range(row * k, row * k + k)) for out in (ids, logprobs)),
        (tail, [row]),
    )


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_kl_loss(monkeypatch, reverse):
    from vllm_tide.kernels.kl_loss import _kl_kernel

    row, vocab, stride = 20_000, 30_000, 262_144
    z, t, grad = anchors(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    weights, values = anchors(torch.float32, torch.float32)
    seen = recorder(monkeypatch, (row,))
    _kl_kernel[(1,)](
        *(z, stride, t, stride + 1, weights, values, grad, stride + 2, vocab),
        REVERSE=reverse,
        GRAD=True,
        BLOCK=8192,
    )
    assert row * stride > LIMIT
    assert seen.addresses == touched(
        (z, range(row * stride, row * stride + vocab)),
        (t, range(row * (stride + 1), row * (stride + 1) + vocab)),
        (grad, range(row * (stride + 2), row * (stride + 2) + vocab)),
        (weights, [row]),
        (values, [row]),
    )
