"""The draft's attention by xformers' block-diagonal biases, for accelerators.

One memory-efficient attention over the step-0 rows, merged with the diagonals by
log-sum-exp. Each document and each branch is a block of queries with its keys beside
it, causal from the bottom right: the m rows of a branch stand below the rows of the
trunk before its anchor, which is exactly the mask of eagle3-training.md c.8. What was
given up: the trunk rows before an anchor are copied once per branch, as the biases let
no two blocks share keys.

The backward pass hands the merged output and log-sum-exp to xformers' own: with
p = exp(s - lse) and ds = p (go v - go out) it then gives the part of the gradient that
goes through the step-0 rows (as in ring attention, arXiv:2310.01889).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_tide.draft.config import DraftError
from vllm_tide.draft.rows import RowLayout


@dataclass(frozen=True)
class _Blocks:
    """Queries and keys of all blocks, one after another.

    Attributes:
        places: int64 [Q], place of each query; blocks may have empty places, because
            rows that are not computed stay between those that are.
        num_places: Places in all.
        block: int64 [Q], block of each query.
        offset: int64 [Q], its place in the block.
        keys: int64 [K], step-0 row of each key.
        bias: xformers' mask over both.
    """

    places: Tensor
    num_places: int
    block: Tensor
    offset: Tensor
    keys: Tensor
    bias: Any


def _block_ranges(layout: RowLayout) -> Iterator[tuple[int, int, int, int]]:
    """First and end row of each segment, and the trunk rows before it."""
    for doc in range(len(layout.doc_starts) - 1):
        yield layout.doc_starts[doc], layout.doc_starts[doc + 1], 0, 0
    for branch, doc in enumerate(layout.docs):
        lo, hi = layout.branch_starts[branch], layout.branch_starts[branch + 1]
        yield lo, hi, layout.doc_starts[doc], layout.anchors[branch]


def _make_blocks(active: Tensor, layout: RowLayout, fmha: Any) -> _Blocks:
    rows = active.tolist()
    offsets: list[int] = []
    counts: list[int] = []
    keys: list[Tensor] = []
    q_sizes: list[int] = []
    k_sizes: list[int] = []
    at = 0
    for lo, hi, k_lo, k_hi in _block_ranges(layout):
        first = at
        while at < len(rows) and rows[at] < hi:
            at += 1
        if at == first:
            continue
        start, last = rows[first], rows[at - 1]
        offsets += [row - start for row in rows[first:at]]
        counts.append(at - first)
        keys += [torch.arange(k_lo, k_hi), torch.arange(lo, last + 1)]
        q_sizes.append(last + 1 - start)
        k_sizes.append(k_hi - k_lo + last + 1 - lo)
    bias = fmha.attn_bias.BlockDiagonalCausalFromBottomRightMask.from_seqlens(
        q_sizes, k_sizes
    )
    block = torch.repeat_interleave(torch.tensor(counts))
    offset = torch.tensor(offsets)
    places = torch.tensor([0, *q_sizes]).cumsum(0)[block] + offset
    device = active.device
    return _Blocks(
        places.to(device),
        sum(q_sizes),
        block.to(device),
        offset.to(device),
        torch.cat(keys).to(device),
        bias,
    )


def _lse_at(lse: Tensor, blocks: _Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """View of a log-sum-exp and where the queries are: `view[i, :, j]` is [Q, n_h].

    Kernels return it as [n_h, n], [1, n_h, n] or [blocks, n_h, longest], the last axis
    perhaps rounded up.
    """
    view = lse if lse.ndim == 3 else lse[None]
    if view.shape[0] == 1 and view.shape[2] >= blocks.num_places:
        return view, torch.zeros_like(blocks.places), blocks.places
    if view.shape[0] == int(blocks.block[-1]) + 1:
        return view, blocks.block, blocks.offset
    raise DraftError(
        "tide.train.attention is 'xformers', but this version returns a log-sum-exp of "
        f"shape {tuple(lse.shape)}; install another one, or use flex or packed."
    )


class _XformersAttention(torch.autograd.Function):
    """Trunk by xformers, diagonals in closed form."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        kd: Tensor | None,
        vd: Tensor | None,
        blocks: _Blocks,
        fmha: Any,
    ) -> Tensor:
        """See `xformers_attention`."""
        group = q.shape[1] // k0.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        trunk = _trunk_inputs(q, k0, v0, blocks)
        part, lse = fmha.memory_efficient_attention_forward_requires_grad(
            *trunk, attn_bias=blocks.bias
        )
        out = part[0, blocks.places].to(wide)  # [Q,n_h,d]
        view, i, j = _lse_at(lse, blocks)
        total = view[i, :, j].to(wide)  # [Q,n_h]
        diag = None
        if kd is not None and vd is not None:
            scores = _diagonal(q, kd, group, wide) * q.shape[-1] ** -0.5
            whole = torch.logsumexp(torch.cat([total[None], scores]), dim=0)
            diag = (scores - whole).exp()  # [j,Q,n_h]
            values = vd.repeat_interleave(group, 2).to(wide)
            out = out * (total - whole).exp()[..., None]
            out = out + (diag[..., None] * values).sum(0)
            total = whole
        out = out.to(q.dtype)
        ctx.blocks, ctx.fmha, ctx.diag = blocks, fmha, diag
        ctx.lse_like = lse
        ctx.save_for_backward(q, k0, v0, kd, vd, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k0, v0, kd, vd."""
        q, k0, v0, kd, vd, out, total = ctx.saved_tensors
        blocks, go = ctx.blocks, grads[0]
        kv, dim = k0.shape[1:]
        group, scale = q.shape[1] // kv, dim**-0.5
        trunk = _trunk_inputs(q, k0, v0, blocks)
        # empty places keep their own log-sum-exp; their gradient is zero
        lse = ctx.lse_like.clone()
        view, i, j = _lse_at(lse, blocks)
        view[i, :, j] = total.to(lse.dtype)
        wide_out = _spread(out, blocks)
        gq, gk, gv = ctx.fmha.memory_efficient_attention_backward(
            _spread(go, blocks), wide_out, lse, *trunk, attn_bias=blocks.bias
        )
        gq = gq[0, blocks.places]
        gk0 = torch.zeros_like(k0).index_add_(0, blocks.keys, _fold(gk[0], kv))
        gv0 = torch.zeros_like(v0).index_add_(0, blocks.keys, _fold(gv[0], kv))
        if ctx.diag is None:
            return gq, gk0, gv0, None, None, None, None
        wide = ctx.diag.dtype
        delta = (go * out).sum(-1, dtype=wide)
        gs = (_diagonal(go, vd, group, wide) - delta) * ctx.diag * scale
        gs = gs.to(q.dtype)[..., None]
        gq = gq + (gs * kd.repeat_interleave(group, 2)).sum(0)
        pd = ctx.diag.to(q.dtype)[..., None]
        gkd = torch.stack([_fold(g, kv) for g in gs * q[None]])
        gvd = torch.stack([_fold(g, kv) for g in pd * go[None]])
        return gq, gk0, gv0, gkd, gvd, None, None


def _trunk_inputs(q: Tensor, k0: Tensor, v0: Tensor, blocks: _Blocks) -> list[Tensor]:
    """Query, key, value [1, n, n_h, d] of all blocks."""
    group = q.shape[1] // k0.shape[1]
    keys = k0[blocks.keys].repeat_interleave(group, 1)
    values = v0[blocks.keys].repeat_interleave(group, 1)
    return [_spread(q, blocks), keys[None], values[None]]


def _spread(x: Tensor, blocks: _Blocks) -> Tensor:
    """Queries [Q, n_h, d] at their places, [1, num_places, n_h, d]."""
    out = x.new_zeros(1, blocks.num_places, *x.shape[1:])
    out[0, blocks.places] = x
    return out


def _diagonal(x: Tensor, y: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Products x . y of [Q, n_h, d] with [j, Q, n_kv, d], as [j, Q, n_h]."""
    return (x[None] * y.repeat_interleave(group, 2)).sum(-1, dtype=dtype)


def _fold(grad: Tensor, kv: int) -> Tensor:
    """Sum [n, n_h, d] over the query heads of each key head."""
    return grad.view(grad.shape[0], kv, -1, grad.shape[-1]).sum(2)


def xformers_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    kd: Tensor | None,
    vd: Tensor | None,
    active: Tensor,
    layout: RowLayout,
) -> Tensor:
    """As `attention.packed_attention`.

    Raises:
        DraftError: This xformers answers in an unknown form.
    """
    fmha: Any = importlib.import_module("xformers.ops").fmha
    blocks = _make_blocks(active, layout, fmha)
    out: Tensor = _XformersAttention.apply(q, k0, v0, kd, vd, blocks, fmha)
    return out
