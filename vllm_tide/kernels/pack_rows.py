"""Row packing: rows of three layers, with their tokens, into one block.

    out.features[i] = [a[rows[i]] | b[rows[i]] | c[rows[i]]]

Runs in the vLLM worker after the target's forward. The wrapper neither allocates nor
waits for the device, so it can be part of a captured graph.

Numerics: a dtype that does not change is copied bit by bit; others are rounded to
nearest even. Every chip writes the same bytes.
Tested on: Triton's interpreter; compiled for sm_90, sm_100 and gfx942.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_tide.kernels.launch import (
    Variant,
    cdiv,
    power_of_two,
    runs_triton,
    tl,
    triton,
)
from vllm_tide.kernels.pack_layout import NUM_LAYERS, PackLayout

_BLOCK, _NUM_WARPS = 1024, 4
_SIZE_BITS = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_INTEGERS = (torch.int32, torch.int64)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def pack_rows_reference(
    features: Sequence[Tensor],
    token_ids: Tensor,
    layout: PackLayout,
    block: Tensor,
    rows: Tensor,
) -> None:
    """`pack_rows` in Torch, the same arguments."""
    out, count = layout.views(block), rows.numel()
    out.token_ids[:count] = token_ids[rows]
    out.features[:count] = torch.cat([f[rows] for f in features], dim=-1)


@triton.jit
def _widen(x, FROM_BF16: tl.constexpr):
    """The value in fp32; a bfloat16 comes as its bits (int16), so that it is exact."""
    if FROM_BF16:
        wide = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _convert(x, FROM_BF16: tl.constexpr, TO: tl.constexpr):
    if TO == "bits":
        y = x
    elif TO == "fp16":
        y = _widen(x, FROM_BF16).to(tl.float16)
    elif TO == "fp32":
        y = _widen(x, FROM_BF16)
    else:
        # bfloat16 as its bits, rounded to nearest even: the interpreter's cast cuts.
        wide = _widen(x, FROM_BF16)
        bits = wide.to(tl.int32, bitcast=True)
        nan = (bits & _SIZE_BITS) > _INFINITY_BITS
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(nan, 0x7FC0, bits).to(tl.int16)
    return y


@triton.jit
def _pack_rows_kernel(
    a,
    b,
    c,
    a_stride,
    b_stride,
    c_stride,
    token_ids,
    rows,
    out_ids,
    out_features,
    width,
    FROM_BF16: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row and BLOCK columns of each layer.
    to = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows + to).to(tl.int64)
    if part == 0:
        tl.store(out_ids + to, tl.load(token_ids + row).to(tl.int32))
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(a + row * a_stride + columns, mask=inside, other=0)
    y = tl.load(b + row * b_stride + columns, mask=inside, other=0)
    z = tl.load(c + row * c_stride + columns, mask=inside, other=0)
    out = out_features + to * (3 * width) + columns
    tl.store(out, _convert(x, FROM_BF16, TO), mask=inside)
    tl.store(out + width, _convert(y, FROM_BF16, TO), mask=inside)
    tl.store(out + 2 * width, _convert(z, FROM_BF16, TO), mask=inside)


def pack_rows(
    features: Sequence[Tensor],
    token_ids: Tensor,
    layout: PackLayout,
    block: Tensor,
    rows: Tensor | None = None,
) -> None:
    """Pack rows into the first rows of a staging block.

    Args:
        features: Three tensors [>= rows of the step, H] of one dtype (bfloat16, float16
            or float32), lowest layer first; rows may be strided, values of a row not.
        token_ids: int32 or int64 [>= rows of the step]: input token of each row.
        layout: Of the block.
        block: uint8 [>= layout.num_bytes], written in place: see
            `PackLayout.views`.
        rows: int32 [n], n <= max_rows: which rows; None, which allocates, is all.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    if rows is None:
        device = token_ids.device
        rows = torch.arange(token_ids.numel(), dtype=torch.int32, device=device)
    _check(features, token_ids, rows, layout)
    out = layout.views(block)
    if not rows.numel():
        return
    if not runs_triton(*features, token_ids, rows, block):
        pack_rows_reference(features, token_ids, layout, block, rows)
        return
    dtype, width = features[0].dtype, layout.hidden_size
    copied = dtype == layout.dtype
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    as_bits = copied or dtype == torch.bfloat16
    a, b, c = (f.view(bits) if as_bits else f for f in features)
    size = min(_BLOCK, power_of_two(width))
    stored = out.features
    if copied or layout.dtype == torch.bfloat16:
        stored = stored.view(bits if copied else torch.int16)
    _pack_rows_kernel[(rows.numel(), cdiv(width, size))](
        a,
        b,
        c,
        a.stride(0),
        b.stride(0),
        c.stride(0),
        token_ids,
        rows,
        out.token_ids,
        stored,
        width,
        FROM_BF16=dtype == torch.bfloat16,
        TO="bits" if copied else _NAMES[layout.dtype],
        BLOCK=size,
        num_warps=_NUM_WARPS,
    )


def _check(
    features: Sequence[Tensor], token_ids: Tensor, rows: Tensor, layout: PackLayout
) -> None:
    if len(features) != NUM_LAYERS:
        raise ValueError(f"three layers are packed, not {len(features)}.")
    width = layout.hidden_size
    for f in features:
        if f.dtype not in _NAMES or f.dtype != features[0].dtype:
            raise ValueError(
                "the three layers must be of one dtype (bfloat16, float16 or float32), "
                f"not {[str(g.dtype) for g in features]}."
            )
        if f.shape[1:] != (width,) or f.stride(1) != 1 or len(f) < rows.numel():
            raise ValueError(
                f"a layer must be [rows, {width}] with neighbouring values in a row, "
                f"not {list(f.shape)} with strides {list(f.stride())}."
            )
    if token_ids.ndim != 1 or token_ids.dtype not in _INTEGERS:
        raise ValueError("token_ids must be int32 or int64 [rows].")
    if rows.ndim != 1 or rows.dtype != torch.int32:
        raise ValueError("rows must be int32 [n].")
    if rows.numel() > layout.max_rows:
        raise ValueError(
            f"{rows.numel()} rows do not fit a staging block of {layout.max_rows}."
        )
    if not token_ids.is_contiguous() or not rows.is_contiguous():
        raise ValueError("token_ids and rows must be contiguous.")


def variants() -> list[Variant]:
    """What `compile_all` compiles."""
    strides = dict.fromkeys(("a_stride", "b_stride", "c_stride"), "i32")
    ids = {"token_ids": "*i32", "rows": "*i32", "out_ids": "*i32"}
    out = []
    for source, to, kind, stored in (
        ("bf16", "bits", "*i16", "*i16"),
        ("fp32", "bits", "*i32", "*i32"),
        ("fp16", "bf16", "*fp16", "*i16"),
        ("bf16", "fp16", "*i16", "*fp16"),
    ):
        types = {"a": kind, "b": kind, "c": kind, **strides, **ids}
        types |= {"out_features": stored, "width": "i32"}
        constants = {"FROM_BF16": source == "bf16", "TO": to, "BLOCK": _BLOCK}
        name = f"{source}-{to}"
        out.append(Variant(_pack_rows_kernel, name, types, constants, _NUM_WARPS))
    return out
