"""Row packing: chosen rows of three layers, with tokens and verdicts, into one block.

    out.features[i] = [a[r] | b[r] | c[r]],  r = rows[i]

and in fp8, with one scale for the 3H values of a row,

    scale[i] = max(max |x| / largest, MIN_SCALE),  features[i] = fp8(x / scale[i])

Runs in the vLLM worker after the target's forward. The wrapper neither allocates nor
waits for the device, so it can be part of a captured graph: a row index outside
0..num_rows-1 (say -1) packs nothing, which is how a graph of fixed size packs fewer.

Numerics: a dtype that does not change is copied bit by bit; others are rounded to
nearest even; division is IEEE. Every chip writes the same bytes (see `fp8`).
Tested on: Triton's interpreter; compiled for sm_90, sm_100 and gfx942.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_tide.kernels.fp8 import (
    INFINITY_BITS,
    LARGEST,
    MIN_SCALE,
    encode_fp8,
    size_bits,
    widen,
)
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
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_INTEGERS = (torch.int32, torch.int64)
_VERDICTS = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def pack_rows_reference(
    features: Sequence[Tensor],
    token_ids: Tensor,
    verdicts: Tensor,
    rows: Tensor,
    layout: PackLayout,
    block: Tensor,
) -> None:
    """`pack_rows` in Torch, the same arguments."""
    out, count = layout.views(block), rows.numel()
    num_rows = token_ids.numel()
    there = (rows >= 0) & (rows < num_rows)
    if not num_rows:  # nothing to index
        out.token_ids[:count] = -1
        out.verdicts[:count] = 0
        if out.scales is not None:
            out.scales[:count] = 0.0
        return
    at = rows.clamp(0, num_rows - 1).long()
    out.token_ids[:count] = torch.where(there, token_ids[at].to(torch.int32), -1)
    out.verdicts[:count] = torch.where(there, verdicts[at].to(torch.int32), 0)
    wide = torch.cat([f[at] for f in features], dim=-1)
    if out.scales is not None:
        largest = LARGEST[layout.dtype]
        wide = wide.to(torch.float32)
        size = wide.abs().amax(-1)
        scale = (size / largest).clamp_min(MIN_SCALE)
        scale = scale.masked_fill(~size.isfinite(), float("nan"))
        out.scales[:count] = torch.where(there, scale, 0.0)
        wide = (wide / scale[:, None]).clamp(-largest, largest)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[layout.dtype.itemsize]
    old, new = out.features[:count].view(bits), wide.to(layout.dtype).view(bits)
    old.copy_(torch.where(there[:, None], new, old))


@triton.jit
def _convert(x, FROM_BF16: tl.constexpr, TO: tl.constexpr):
    if TO == "bits":
        y = x
    elif TO == "fp16":
        y = widen(x, FROM_BF16).to(tl.float16)
    elif TO == "fp32":
        y = widen(x, FROM_BF16)
    else:
        # bfloat16 as its bits, rounded to nearest even: the interpreter's cast cuts.
        wide = widen(x, FROM_BF16)
        bits = wide.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(size_bits(wide) > INFINITY_BITS, 0x7FC0, bits).to(tl.int16)
    return y


@triton.jit
def _pack_narrow(token_ids, verdicts, out_ids, out_verdicts, source, there, row):
    token = tl.load(token_ids + source, mask=there, other=-1)
    tl.store(out_ids + row, token.to(tl.int32))
    verdict = tl.load(verdicts + source, mask=there, other=0)
    tl.store(out_verdicts + row, verdict.to(tl.int32))


@triton.jit
def _pack_rows_kernel(
    a,
    b,
    c,
    a_stride,
    b_stride,
    c_stride,
    token_ids,
    verdicts,
    rows,
    num_rows,
    out_ids,
    out_verdicts,
    out_features,
    width,
    FROM_BF16: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row and BLOCK columns of each layer.
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = tl.load(rows + row).to(tl.int64)
    there = (source >= 0) & (source < num_rows)
    if part == 0:
        _pack_narrow(token_ids, verdicts, out_ids, out_verdicts, source, there, row)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < tl.where(there, width, 0)
    x = tl.load(a + source * a_stride + columns, mask=inside, other=0)
    y = tl.load(b + source * b_stride + columns, mask=inside, other=0)
    z = tl.load(c + source * c_stride + columns, mask=inside, other=0)
    out = out_features + row * (3 * width) + columns
    tl.store(out, _convert(x, FROM_BF16, TO), mask=inside)
    tl.store(out + width, _convert(y, FROM_BF16, TO), mask=inside)
    tl.store(out + 2 * width, _convert(z, FROM_BF16, TO), mask=inside)


@triton.jit
def _pack_rows_fp8_kernel(
    a,
    b,
    c,
    a_stride,
    b_stride,
    c_stride,
    token_ids,
    verdicts,
    rows,
    num_rows,
    out_ids,
    out_verdicts,
    out_scales,
    out_features,
    width,
    largest,
    FROM_BF16: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row: the scale needs all of it; the second reading hits the L2.
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + row).to(tl.int64)
    there = (source >= 0) & (source < num_rows)
    _pack_narrow(token_ids, verdicts, out_ids, out_verdicts, source, there, row)
    a_row = a + source * a_stride
    b_row = b + source * b_stride
    c_row = c + source * c_stride
    end = tl.where(there, width, 0)
    top = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < end
        x = tl.load(a_row + columns, mask=inside, other=0)
        y = tl.load(b_row + columns, mask=inside, other=0)
        z = tl.load(c_row + columns, mask=inside, other=0)
        top = tl.maximum(top, size_bits(widen(x, FROM_BF16)))
        top = tl.maximum(top, size_bits(widen(y, FROM_BF16)))
        top = tl.maximum(top, size_bits(widen(z, FROM_BF16)))
    # As integers, so that a NaN is the largest and is not lost.
    size = tl.max(top, axis=0)
    scale = tl.div_rn(size.to(tl.float32, bitcast=True), largest)
    scale = tl.maximum(scale, _MIN_SCALE)
    scale = tl.where(size >= INFINITY_BITS, float("nan"), scale)
    tl.store(out_scales + row, tl.where(there, scale, 0.0))
    out = out_features + row * (3 * width)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < end
        x = widen(tl.load(a_row + columns, mask=inside, other=0), FROM_BF16)
        y = widen(tl.load(b_row + columns, mask=inside, other=0), FROM_BF16)
        z = widen(tl.load(c_row + columns, mask=inside, other=0), FROM_BF16)
        at = out + columns
        tl.store(at, encode_fp8(tl.div_rn(x, scale), FNUZ), mask=inside)
        tl.store(at + width, encode_fp8(tl.div_rn(y, scale), FNUZ), mask=inside)
        tl.store(at + 2 * width, encode_fp8(tl.div_rn(z, scale), FNUZ), mask=inside)


def pack_rows(
    features: Sequence[Tensor],
    token_ids: Tensor,
    verdicts: Tensor,
    rows: Tensor,
    layout: PackLayout,
    block: Tensor,
) -> None:
    """Gather chosen rows into the first rows of a staging block.

    Args:
        features: Three tensors [num_rows, H] of one dtype (bfloat16, float16 or
            float32), lowest layer first; rows may be strided, values of a row not.
        token_ids: int32 or int64 [num_rows], input token of each row.
        verdicts: bool or integer [num_rows], what became of each row's token; copied.
        rows: int32 or int64 [n], n <= max_rows, on the same device. An index outside
            0..num_rows-1 packs nothing: token id -1, features left as they were.
        layout: Of the block.
        block: uint8 [>= layout.num_bytes], written in place: see
            `PackLayout.views`.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    _check(features, token_ids, verdicts, rows, layout)
    out = layout.views(block)
    if not rows.numel():
        return
    if not runs_triton(*features, token_ids, verdicts, rows, block):
        pack_rows_reference(features, token_ids, verdicts, rows, layout, block)
        return
    dtype, width = features[0].dtype, layout.hidden_size
    copied = dtype == layout.dtype
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    as_bits = copied or dtype == torch.bfloat16
    a, b, c = (f.view(bits) if as_bits else f for f in features)
    strides = (a.stride(0), b.stride(0), c.stride(0))
    if verdicts.dtype == torch.bool:
        verdicts = verdicts.view(torch.uint8)
    inputs = (a, b, c, *strides, token_ids, verdicts, rows, token_ids.numel())
    size = min(_BLOCK, power_of_two(width))
    from_bf16 = dtype == torch.bfloat16
    if out.scales is not None:
        codes = out.features.view(torch.uint8)
        fnuz = layout.dtype == torch.float8_e4m3fnuz
        _pack_rows_fp8_kernel[(rows.numel(),)](
            *inputs,
            out.token_ids,
            out.verdicts,
            out.scales,
            codes,
            width,
            LARGEST[layout.dtype],
            FROM_BF16=from_bf16,
            FNUZ=fnuz,
            BLOCK=size,
            num_warps=_NUM_WARPS,
        )
        return
    stored = out.features
    if copied or layout.dtype == torch.bfloat16:
        stored = stored.view(bits if copied else torch.int16)
    _pack_rows_kernel[(rows.numel(), cdiv(width, size))](
        *inputs,
        out.token_ids,
        out.verdicts,
        stored,
        width,
        FROM_BF16=from_bf16,
        TO="bits" if copied else _NAMES[layout.dtype],
        BLOCK=size,
        num_warps=_NUM_WARPS,
    )


def _check(
    features: Sequence[Tensor],
    token_ids: Tensor,
    verdicts: Tensor,
    rows: Tensor,
    layout: PackLayout,
) -> None:
    if len(features) != NUM_LAYERS:
        raise ValueError(f"three layers are packed, not {len(features)}.")
    shape = (token_ids.numel(), layout.hidden_size)
    for f in features:
        if f.dtype not in _NAMES or f.dtype != features[0].dtype:
            raise ValueError(
                "the three layers must be of one dtype (bfloat16, float16 or float32), "
                f"not {[str(g.dtype) for g in features]}."
            )
        if tuple(f.shape) != shape or f.stride(1) != 1:
            raise ValueError(
                f"a layer must be {list(shape)} with neighbouring values in a row, not "
                f"{list(f.shape)} with strides {list(f.stride())}."
            )
    if token_ids.ndim != 1 or token_ids.dtype not in _INTEGERS:
        raise ValueError("token_ids must be int32 or int64 [num_rows].")
    if verdicts.shape != token_ids.shape or verdicts.dtype not in _VERDICTS:
        raise ValueError("verdicts must be bool or integer [num_rows].")
    if rows.ndim != 1 or rows.dtype not in _INTEGERS:
        raise ValueError("rows must be int32 or int64 [n].")
    if rows.numel() > layout.max_rows:
        raise ValueError(
            f"{rows.numel()} rows do not fit a staging block of {layout.max_rows}."
        )
    for narrow in (token_ids, verdicts, rows):
        if not narrow.is_contiguous():
            raise ValueError("token_ids, verdicts and rows must be contiguous.")


def variants() -> list[Variant]:
    """What `compile_all` compiles."""
    narrow = {"token_ids": "*i32", "verdicts": "*i32", "rows": "*i64"}
    strides = dict.fromkeys(("a_stride", "b_stride", "c_stride"), "i32")
    ends = {"num_rows": "i32", "out_ids": "*i32", "out_verdicts": "*i32"}
    out = []
    for source, to, kind, stored in (
        ("bf16", "bits", "*i16", "*i16"),
        ("fp32", "bits", "*i32", "*i32"),
        ("fp16", "bf16", "*fp16", "*i16"),
        ("bf16", "fp16", "*i16", "*fp16"),
    ):
        types = {"a": kind, "b": kind, "c": kind, **strides, **narrow, **ends}
        types |= {"out_features": stored, "width": "i32"}
        constants = {"FROM_BF16": source == "bf16", "TO": to, "BLOCK": _BLOCK}
        name = f"{source}-{to}"
        out.append(Variant(_pack_rows_kernel, name, types, constants, _NUM_WARPS))
    for source, fnuz, kind in (
        ("bf16", False, "*i16"),
        ("bf16", True, "*i16"),
        ("fp32", False, "*fp32"),
    ):
        types = {"a": kind, "b": kind, "c": kind, **strides, **narrow, **ends}
        types |= {"out_scales": "*fp32", "out_features": "*u8", "width": "i32"}
        types["largest"] = "fp32"
        constants = {"FROM_BF16": source == "bf16", "FNUZ": fnuz, "BLOCK": _BLOCK}
        name = f"{source}-{'e4m3fnuz' if fnuz else 'e4m3fn'}"
        out.append(Variant(_pack_rows_fp8_kernel, name, types, constants, _NUM_WARPS))
    return out
