"""The draft's attention by Torch's FlexAttention, for accelerators.

The diagonals are further keys after the step-0 rows: key block j holds the keys that
the active rows made at step j, and row q sees number q of each. A block-sparse mask
makes that cost one tile per diagonal and 128 rows, so one kernel does everything and
autograd gives all gradients.

Torch has no backward of FlexAttention on CPU and runs it unfused there: the CPU is for
tests of the forward only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from vllm_tide.draft.rows import RowLayout

# Lengths are rounded up to whole tiles; this also bounds how many are compiled for.
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
    """As `attention.packed_attention`."""
    num_queries, num_rows = _whole(q.shape[0]), _whole(k0.shape[0])
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
    """Mask function over padded indices."""
    own, low, high = layout.spans(active)
    # a padding query sees key 0 only, so that no softmax is over nothing
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
    """FlexAttention and its mask builder, compiled where that pays."""
    if device == "cpu":
        return torch_flex.flex_attention, torch_flex.create_block_mask
    return (
        torch.compile(torch_flex.flex_attention),
        torch.compile(torch_flex.create_block_mask),
    )


def _whole(count: int) -> int:
    return -(-count // _TILE) * _TILE


def _pad(x: Tensor, count: int) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, count - x.shape[0]))


def _heads(x: Tensor) -> Tensor:
    """[n, heads, d] to [1, heads, n, d]."""
    return x.transpose(0, 1)[None]
