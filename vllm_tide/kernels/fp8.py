"""Rows in fp8: two formats of one byte, encoded with integer operations.

    e4m3fn    bias 7, largest 448, a NaN a sign, negative zero   (OCP: NVIDIA, gfx950)
    e4m3fnuz  bias 8, largest 240, one NaN, no negative zero     (gfx942)

A hardware cast would be shorter, but it exists for one of the formats on each chip, for
neither before sm_89, and Triton's interpreter does not round it to nearest even. The
integers are the same everywhere, so a row packed on one chip is the row packed on any
other; the op that uses them is bound by memory.

Lineage: the rounding is that of PyTorch's `c10/util/Float8_e4m3fn.h`. Numerics: round
to nearest even, too large saturates, NaN stays NaN.
"""

from __future__ import annotations

import torch

from vllm_tide.kernels.launch import tl, triton

LARGEST: dict[torch.dtype, float] = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
}
"""Largest finite value of each format."""

MIN_SCALE = 2.0**-100
"""No row's scale is smaller, so a row of zeros divides by no zero."""

_SIZE_BITS = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
_LARGEST_FN_BITS = tl.constexpr(0x43E00000)  # 448.0
_LARGEST_FNUZ_BITS = tl.constexpr(0x43700000)  # 240.0


@triton.jit
def widen(x, FROM_BF16: tl.constexpr):
    """The value in fp32; a bfloat16 comes as its bits (int16), so that it is exact."""
    if FROM_BF16:
        wide = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def size_bits(x):
    """Bits of |x| for fp32 x, int32: ordered as |x| is, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & _SIZE_BITS


@triton.jit
def encode_fp8(x, FNUZ: tl.constexpr):
    """The format's code (uint8) of each fp32 x."""
    BIAS: tl.constexpr = 8 if FNUZ else 7
    # Added to a value below the smallest normal one, it leaves the code in the low
    # bits, rounded by the addition itself.
    SHIFT: tl.constexpr = 2.0 ** (21 - BIAS)
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = size_bits(x)
    nan = size > INFINITY_BITS
    if FNUZ:
        size = tl.minimum(size, _LARGEST_FNUZ_BITS)
    else:
        size = tl.minimum(size, _LARGEST_FN_BITS)
    odd = (size >> 20) & 1
    normal = (size + ((BIAS - 127) << 23) + 0x7FFFF + odd) >> 20
    shifted = size.to(tl.float32, bitcast=True) + SHIFT
    small = shifted.to(tl.int32, bitcast=True) - ((148 - BIAS) << 23)
    code = tl.where(size < ((128 - BIAS) << 23), small, normal)
    if FNUZ:
        code = tl.where(code == 0, 0, code | sign)  # 0x80 means NaN
        code = tl.where(nan, 0x80, code)
    else:
        code = tl.where(nan, 0x7F, code | sign)
    return code.to(tl.uint8)
