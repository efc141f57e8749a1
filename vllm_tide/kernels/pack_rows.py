"""Row packing: rows of some layers into one block.

    out[i] = [a[rows[i]] | b[rows[i]] | c[rows[i]] | ...]

A launch packs three layers, as many as EAGLE-3 reads. If their number is no multiple of
three, the last launch writes the last layer more than once.
Runs in the vLLM worker after the target's forward. The wrapper neither allocates nor
blocks on the device, so it can be part of a captured graph.

Numerics: an unchanged dtype is copied bit by bit; conversions use rounding to nearest
even. All GPUs write the same bytes.
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

_BLOCK, _NUM_WARPS = 1024, 4
_SIZE_BITS = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def pack_rows_reference(features: Sequence[Tensor], rows: Tensor, out: Tensor) -> None:
    out[: len(rows)] = torch.cat([f[rows] for f in features], dim=-1)


@triton.jit
def _widen(x, FROM_BF16: tl.constexpr):
    """Convert to fp32; bfloat16 is passed as its bits (int16), which is exact."""
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
        # bfloat16 bits, rounded to nearest even; the interpreter's cast truncates.
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
    rows,
    out,
    out_stride,
    b_column,
    c_column,
    width,
    FROM_BF16: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row and BLOCK columns of each layer.
    to = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows + to).to(tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(a + row * a_stride + columns, mask=inside, other=0)
    y = tl.load(b + row * b_stride + columns, mask=inside, other=0)
    z = tl.load(c + row * c_stride + columns, mask=inside, other=0)
    out += to * out_stride + columns
    tl.store(out, _convert(x, FROM_BF16, TO), mask=inside)
    tl.store(out + b_column, _convert(y, FROM_BF16, TO), mask=inside)
    tl.store(out + c_column, _convert(z, FROM_BF16, TO), mask=inside)


def pack_rows(features: Sequence[Tensor], rows: Tensor, out: Tensor) -> None:
    """Pack rows into the first rows of a staging block.

    Args:
        features: Tensors [>= rows of the step, H] of one dtype (bfloat16, float16 or
            float32), lowest layer first; rows may be strided, but each contiguous.
        rows: int32 [n], row numbers within the layers; not checked.
        out: bfloat16, float16 or float32 [>= n, layers * H], contiguous; written in
            place.

    Raises:
        ValueError: A shape, dtype or stride is wrong.
    """
    _check(features, rows, out)
    if not rows.numel():
        return
    if not runs_triton(*features, rows, out):
        pack_rows_reference(features, rows, out)
        return
    dtype, width = features[0].dtype, features[0].shape[1]
    copied = dtype == out.dtype
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    as_bits = copied or dtype == torch.bfloat16
    layers = [f.view(bits) if as_bits else f for f in features]
    size = min(_BLOCK, power_of_two(width))
    stored = out
    if copied or out.dtype == torch.bfloat16:
        stored = out.view(bits if copied else torch.int16)
    last = len(layers) - 1
    for i in range(0, len(layers), 3):
        j, k = min(i + 1, last), min(i + 2, last)
        _pack_rows_kernel[(rows.numel(), cdiv(width, size))](
            layers[i],
            layers[j],
            layers[k],
            layers[i].stride(0),
            layers[j].stride(0),
            layers[k].stride(0),
            rows,
            stored[:, i * width :],
            stored.stride(0),
            (j - i) * width,
            (k - i) * width,
            width,
            FROM_BF16=dtype == torch.bfloat16,
            TO="bits" if copied else _NAMES[out.dtype],
            BLOCK=size,
            num_warps=_NUM_WARPS,
        )


def _check(features: Sequence[Tensor], rows: Tensor, out: Tensor) -> None:
    if rows.ndim != 1 or rows.dtype != torch.int32 or not rows.is_contiguous():
        raise ValueError("rows must be int32 [n], contiguous.")
    if out.ndim != 2 or out.dtype not in _NAMES or not out.is_contiguous():
        raise ValueError("out must be floats [rows, layers * H], contiguous.")
    if rows.numel() > len(out):
        raise ValueError(f"{rows.numel()} rows do not fit a block of {len(out)}.")
    if not features or any(
        f.dtype not in _NAMES
        or f.dtype != features[0].dtype
        or f.ndim != 2
        or f.shape[1] * len(features) != out.shape[1]
        or f.stride(1) != 1
        for f in features
    ):
        raise ValueError(
            "features must be layers of one floating dtype with contiguous rows, as "
            f"wide together as out ({out.shape[1]})."
        )


def variants() -> list[Variant]:
    strides = dict.fromkeys(("a_stride", "b_stride", "c_stride"), "i32")
    out = []
    for source, to, kind, stored in (
        ("bf16", "bits", "*i16", "*i16"),
        ("fp32", "bits", "*i32", "*i32"),
        ("fp16", "bf16", "*fp16", "*i16"),
        ("bf16", "fp16", "*i16", "*fp16"),
    ):
        types = {"a": kind, "b": kind, "c": kind, **strides}
        types |= {"rows": "*i32", "out": stored, "width": "i32"}
        types |= dict.fromkeys(("out_stride", "b_column", "c_column"), "i32")
        constants = {"FROM_BF16": source == "bf16", "TO": to, "BLOCK": _BLOCK}
        name = f"{source}-{to}"
        out.append(Variant(_pack_rows_kernel, name, types, constants, _NUM_WARPS))
    return out
