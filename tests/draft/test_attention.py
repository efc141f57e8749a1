"""Every attention equals one dense mask, forward and backward, branches included."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.draft import fake_xformers
from vllm_tide.draft.attention import attention_backend, packed_attention
from vllm_tide.draft.attention_gpu import flex_attention, xformers_attention
from vllm_tide.draft.config import DraftError
from vllm_tide.draft.rows import RowLayout

DOCS = [0, 5, 6, 13]
TRUNK = RowLayout(DOCS, [13], [], [])
# two branches at one anchor, one at the first row of its document, one row alone
BRANCHES = RowLayout(DOCS, [13, 16, 18, 19, 23], [3, 3, 5, 11], [0, 0, 1, 2])
SOME = [2, 4, 7, 9, 11, 14, 15, 17, 18, 20, 22]
CASES = [
    (TRUNK, list(range(13))),
    (TRUNK, [3, 4, 6, 9, 12]),
    (TRUNK, [7]),
    (BRANCHES, list(range(23))),
    (BRANCHES, SOME),
    (BRANCHES, [14, 22]),
    (BRANCHES, [0, 1, 12]),
]
nightly = pytest.mark.nightly


def seen_by_the_text(layout: RowLayout, row: int, key: int) -> bool:
    """Return the mask of section c.8, literally."""
    count = layout.doc_starts[-1]
    if row < count:  # trunk: causal, same document
        ends = layout.doc_starts[1:]
        doc = [sum(r >= end for end in ends) for r in (row, key)]
        return key <= row and doc[0] == doc[1]
    of = [sum(r >= s for s in layout.branch_starts) - 1 for r in (row, key)]
    if key >= count:  # allow(branch j, branch k) = k <= j
        return of[0] == of[1] and key <= row
    first = layout.doc_starts[layout.docs[of[0]]]
    return first <= key <= layout.anchors[of[0]] - 1  # s <= a - 1


def dense(q, k0, v0, kd, vd, active, layout):
    """Compute one softmax over the permitted keys, row by row."""
    group = q.shape[1] // k0.shape[1]
    out = []
    for at, row in enumerate(active.tolist()):
        keys = [r for r in range(layout.num_rows) if seen_by_the_text(layout, row, r)]
        k, v = k0[keys], v0[keys]
        if kd is not None:
            k, v = torch.cat([k, kd[:, at]]), torch.cat([v, vd[:, at]])
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        p = torch.einsum("hd,khd->hk", q[at], k).mul(q.shape[-1] ** -0.5).softmax(-1)
        out.append(torch.einsum("hk,khd->hd", p, v))
    return torch.stack(out)


def _inputs(
    diagonals: int,
    count: int,
    rows: int,
    dtype: torch.dtype = torch.float64,
    heads: int = 4,
) -> list[Tensor | None]:
    torch.manual_seed(diagonals)
    kv, dim = 2, 6

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    kd = leaf(diagonals, count, kv, dim) if diagonals else None
    vd = leaf(diagonals, count, kv, dim) if diagonals else None
    return [leaf(count, heads, dim), leaf(rows, kv, dim), leaf(rows, kv, dim), kd, vd]


@pytest.fixture
def xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An xformers made of plain Torch."""
    ops = ModuleType("xformers.ops")
    ops.fmha = fake_xformers.fmha
    monkeypatch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)


def check(
    attend, layout: RowLayout, active: list[int], diagonals: int, heads: int = 4
) -> None:
    """Assert that values and all gradients agree in float64."""
    rows = torch.tensor(active)
    args = _inputs(diagonals, rows.numel(), layout.num_rows, heads=heads)
    ours = attend(*args, rows, layout)
    theirs = dense(*args, rows, layout)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    gradients_agree(ours, theirs, [a for a in args if a is not None], 1e-12)


def gradients_agree(ours: Tensor, theirs: Tensor, leaves: list, atol: float) -> None:
    weight = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((theirs * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def every(*diagonals: int) -> pytest.MarkDecorator:
    """Return two cases, and all others at night: layout, active rows, diagonals."""
    fast = [(TRUNK, [3, 4, 6, 9, 12], 0), (BRANCHES, SOME, diagonals[-1])]
    more = [(*case, j) for case in CASES for j in diagonals]
    slow = [pytest.param(*case, marks=nightly) for case in more if case not in fast]
    return pytest.mark.parametrize("layout, active, diagonals", fast + slow)


@every(0, 1, 3)
def test_packed_attention_equals_the_reference(layout, active, diagonals) -> None:
    check(packed_attention, layout, active, diagonals)


def test_many_heads_of_a_block_equal_the_reference() -> None:
    """DFlash: its slots are further attention heads, and its diagonals small GEMMs."""
    check(packed_attention, TRUNK, [3, 4, 6, 9, 12], 3, heads=24)


@every(0, 2)
@pytest.mark.parametrize("rounding", [0, 5])
@pytest.mark.usefixtures("xformers")
def test_xformers_attention_equals_the_reference(
    rounding, layout, active, diagonals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_xformers, "rounding", rounding)
    check(xformers_attention, layout, active, diagonals)


def test_xformers_without_a_kernel_names_the_knob() -> None:
    pytest.importorskip("xformers.ops.fmha")
    with pytest.raises(DraftError, match=r"tide\.train\.attention .*no kernel"):
        xformers_attention(*_inputs(0, 13, 13), torch.arange(13), TRUNK)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layout, active, diagonals", [(*CASES[1], 2), (*CASES[4], 3)])
@torch.no_grad()
def test_flex_attention_equals_the_reference(layout, active, diagonals) -> None:
    """The forward on CPU; Torch has no backward of it there."""
    rows = torch.tensor(active)
    args = [
        None if x is None else x.detach()
        for x in _inputs(diagonals, rows.numel(), layout.num_rows, torch.float32)
    ]
    ours = flex_attention(*args, rows, layout)
    theirs = dense(*args, rows, layout)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("name", ["flex", "xformers"])
@every(0, 1, 3)
def test_accelerated_attention_equals_the_reference(
    name, layout, active, diagonals
) -> None:
    """Values and gradients on the device, in fp32 where there are kernels of it."""
    dtype, atol = torch.float32, 5e-3  # TF32 in the kernels
    if name == "xformers":
        pytest.importorskip("xformers")
        dtype, atol = torch.bfloat16, 5e-2
    rows = torch.tensor(active, device="cuda")
    torch.manual_seed(0)
    kd, vd = torch.randn(2, max(1, diagonals), len(active), 2, 32, device="cuda")
    args = [
        torch.randn(len(active), 4, 32, device="cuda"),
        *torch.randn(2, layout.num_rows, 2, 32, device="cuda"),
        *((kd, vd) if diagonals else (None, None)),
    ]
    args = [None if x is None else x.to(dtype).requires_grad_() for x in args]
    leaves = [x for x in args if x is not None]
    ours = attention_backend(name, "cuda")(*args, rows, layout).float()
    wide = [None if x is None else x.float() for x in args]
    theirs = dense(*wide, rows, layout)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    gradients_agree(ours, theirs, leaves, 4 * atol)


def test_a_device_has_its_attentions_and_errors_name_the_knob() -> None:
    assert attention_backend("auto", "cpu") is packed_attention
    assert attention_backend("auto", "cuda") is flex_attention
    for name in ("flex", "xformers", "sdpa"):
        with pytest.raises(DraftError, match=r"tide\.train\.attention"):
            attention_backend(name, "cpu")
