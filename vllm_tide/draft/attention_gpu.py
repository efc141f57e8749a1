"""Attention of the draft on GPUs: torch's FlexAttention, or xformers.

FlexAttention: the diagonals are additional keys after the step-0 rows. Key block j has
the keys of the active rows at step j, and row q attends to key q of each block. With a
block-sparse mask this costs one tile per diagonal and 128 rows, so one kernel computes
the forward pass and autograd all gradients.

On a CPU, torch runs FlexAttention unfused and without backward: for tests of the
forward pass only.
"""

from __future__ import annotations

import importlib
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from vllm_tide.draft.attention import (
    by_head,
    by_row,
    diagonal_gradients,
    diagonal_products,
    diagonal_values,
)
from vllm_tide.draft.config import DraftError
from vllm_tide.draft.rows import RowLayout

# Lengths are rounded up to whole tiles, which also limits the compiled variants.
_TILE = 128


def flex_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    kd: Tensor | None,
    vd: Tensor | None,
    active: Tensor,
    layout: RowLayout,
) -> Tensor:
    num_queries, num_rows = _padded(q.shape[0]), _padded(k0.shape[0])
    keys, values = [_pad(k0, num_rows)], [_pad(v0, num_rows)]
    if kd is not None and vd is not None:
        keys += [_pad(k, num_queries) for k in kd]
        values += [_pad(v, num_queries) for v in vd]
    k, v = _heads(torch.cat(keys)), _heads(torch.cat(values))
    attend, make_mask = _functions(q.device.type)
    mask = make_mask(
        _mask_of(active, layout, num_queries, num_rows),
        None,
        None,
        num_queries,
        k.shape[2],
        device=q.device,
    )
    out: Tensor = attend(
        _heads(_pad(q, num_queries)), k, v, block_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)[: q.shape[0]]


def _mask_of(active: Tensor, layout: RowLayout, num_queries: int, num_rows: int) -> Any:
    own, low, high = layout.spans(active)
    # A padding query attends to key 0, so that no softmax is empty.
    extra = (0, num_queries - active.numel())
    row, own, low, high = (F.pad(x, extra) for x in (active, own, low, high))

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        segment = (key >= own[query]) & (key <= row[query])
        prefix = (key >= low[query]) & (key < high[query])
        diagonal = (key >= num_rows) & ((key - num_rows) % num_queries == query)
        return segment | prefix | diagonal

    return mask


@cache
def _functions(device: str) -> tuple[Any, Any]:
    """Return FlexAttention and its mask builder, compiled except on a CPU."""
    if device == "cpu":
        return torch_flex.flex_attention, torch_flex.create_block_mask
    return (
        torch.compile(torch_flex.flex_attention),
        torch.compile(torch_flex.create_block_mask),
    )


def _padded(count: int) -> int:
    return -(-count // _TILE) * _TILE


def _pad(x: Tensor, count: int) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, count - x.shape[0]))


def _heads(x: Tensor) -> Tensor:
    """Convert [n, n_h, d] to [1, n_h, n, d]."""
    return x.transpose(0, 1)[None]


@dataclass(frozen=True)
class _Blocks:
    """Queries and keys of all blocks, concatenated.

    Attributes:
        places: int64 [Q], index of each query; rows that are not computed leave unused
            indices within a block.
        keys: int64 [K], step-0 row of each key.
    """

    places: Tensor
    num_places: int
    keys: Tensor
    bias: Any

    def spread(self, x: Tensor) -> Tensor:
        """Place queries [Q, n_h, d] into [1, num_places, n_h, d]."""
        out = x.new_zeros(1, self.num_places, *x.shape[1:])
        out[0, self.places] = x
        return out

    def inputs(self, q: Tensor, k0: Tensor, v0: Tensor) -> list[Tensor]:
        """Return query, key, value [1, n, n_h, d] of all blocks."""
        group = q.shape[1] // k0.shape[1]
        rows = [x[self.keys].repeat_interleave(group, 1)[None] for x in (k0, v0)]
        return [self.spread(q), *rows]

    def fold(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Sum the keys' gradient [1, K, n_h, d] into that of `rows` [R, n_kv, d]."""
        heads = grad.view(len(self.keys), rows.shape[1], -1, rows.shape[2]).sum(2)
        return torch.zeros_like(rows).index_add_(0, self.keys, heads)


def _blocks_of(active: Tensor, layout: RowLayout, fmha: Any) -> _Blocks:
    # First and end row of each segment, and of the trunk rows before it.
    starts, branches = layout.doc_starts, layout.branch_starts
    ranges = [(lo, hi, 0, 0) for lo, hi in pairwise(starts)]
    ranges += [
        (branches[b], branches[b + 1], starts[doc], layout.anchors[b])
        for b, doc in enumerate(layout.docs)
    ]
    rows = active.tolist()
    places: list[int] = []
    keys: list[Tensor] = []
    q_sizes: list[int] = []
    k_sizes: list[int] = []
    at = num_places = 0
    for lo, hi, k_lo, k_hi in ranges:
        end = bisect_left(rows, hi, at)
        if at == end:
            continue
        first, last = rows[at], rows[end - 1]
        places += [num_places + row - first for row in rows[at:end]]
        keys += [torch.arange(k_lo, k_hi), torch.arange(lo, last + 1)]
        q_sizes.append(last + 1 - first)
        k_sizes.append(k_hi - k_lo + last + 1 - lo)
        num_places, at = num_places + q_sizes[-1], end
    device = active.device
    bias = fmha.attn_bias.BlockDiagonalCausalFromBottomRightMask.from_seqlens(
        q_sizes, k_sizes, device=device
    )
    where = torch.tensor(places, device=device)
    return _Blocks(where, num_places, torch.cat(keys).to(device), bias)


class _XformersAttention(torch.autograd.Function):
    """Step-0 rows by xformers, diagonals in closed form."""

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
        kv, wide = k0.shape[1], torch.promote_types(q.dtype, torch.float32)
        part, lse = _call(
            fmha.memory_efficient_attention_forward_requires_grad,
            *blocks.inputs(q, k0, v0),
            attn_bias=blocks.bias,
        )
        if lse.ndim != 3 or lse.shape[0] != 1 or lse.shape[2] < blocks.num_places:
            raise DraftError(
                "tide.train.attention is 'xformers', but its log-sum-exp has the "
                f"unsupported shape {tuple(lse.shape)}; install another version, or "
                "use flex or packed."
            )
        out = by_head(part[0, blocks.places], kv).to(wide)
        total = lse[0, :, blocks.places].to(wide).view(out.shape[:-1])  # [kv,g,Q]
        diag = None
        if kd is not None and vd is not None:
            scores = diagonal_products(by_head(q, kv), kd, wide) * q.shape[-1] ** -0.5
            merged = torch.logsumexp(torch.cat([total[None], scores]), dim=0)
            diag = (scores - merged).exp()
            out = out * (total - merged).exp()[..., None]
            out, total = out + diagonal_values(diag, vd.to(wide)), merged
        out = by_row(out).to(q.dtype)
        ctx.blocks, ctx.fmha, ctx.diag = blocks, fmha, diag
        ctx.lse = lse
        ctx.save_for_backward(q, k0, v0, kd, vd, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, kd, vd, out, total = ctx.saved_tensors
        blocks, go, kv = ctx.blocks, grads[0].contiguous(), k0.shape[1]
        # Unused indices keep their log-sum-exp; their gradient is zero.
        lse = ctx.lse.clone()
        lse[0, :, blocks.places] = total.flatten(0, 1).to(lse.dtype)
        gq, gk, gv = _call(
            ctx.fmha.memory_efficient_attention_backward,
            blocks.spread(go),
            blocks.spread(out),
            lse,
            *blocks.inputs(q, k0, v0),
            attn_bias=blocks.bias,
        )
        gq = gq[0, blocks.places]
        gk0, gv0 = blocks.fold(gk, k0), blocks.fold(gv, v0)
        if ctx.diag is None:
            return gq, gk0, gv0, None, None, None, None
        goh = by_head(go, kv)
        delta = (goh * by_head(out, kv)).sum(-1, dtype=ctx.diag.dtype)
        more, gkd, gvd = diagonal_gradients(
            by_head(q, kv), kd, vd, goh, ctx.diag, delta
        )
        return gq + by_row(more), gk0, gv0, gkd, gvd, None, None


def _call(function: Any, *args: Any, **more: Any) -> Any:
    try:
        return function(*args, **more)
    except NotImplementedError as error:  # no kernel to dispatch to
        raise DraftError(
            "tide.train.attention is 'xformers', which has no kernel for this device, "
            f"dtype and head_dim; use flex or packed ({str(error).splitlines()[0]})"
        ) from error


def xformers_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    kd: Tensor | None,
    vd: Tensor | None,
    active: Tensor,
    layout: RowLayout,
) -> Tensor:
    """Attend with xformers' block-diagonal biases; arguments as `packed_attention`.

    One memory-efficient attention over the step-0 rows, merged with the diagonals by
    log-sum-exp. Each document and each branch is a block of queries and keys, causal
    from the bottom right: the m rows of a branch come after the trunk rows before its
    anchor, which gives the mask of eagle3-training.md c.8. As blocks cannot share keys,
    the trunk rows before an anchor are copied for every branch.

    The backward pass calls xformers' backward with the merged output and log-sum-exp:
    with p = exp(s - lse) and ds = p (go v - go out) it returns the part of the gradient
    through the step-0 rows (as in ring attention, arXiv:2310.01889).

    Raises:
        DraftError: The result of this xformers version is not supported, or it has no
            kernel for this device and dtype (0.0.35: bfloat16 and float16 only).
    """
    fmha: Any = importlib.import_module("xformers.ops").fmha
    blocks = _blocks_of(active, layout, fmha)
    out: Tensor = _XformersAttention.apply(q, k0, v0, kd, vd, blocks, fmha)
    return out
