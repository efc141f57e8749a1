"""A step's small arrays in one block, for a single copy to the host.

    out = [parts[0] | parts[1] | ...], int32 each, row after row

Runs in the vLLM worker at the end of a step. Separate copies would each synchronize the
model's stream with a copy engine. The wrapper neither allocates nor blocks.

Numerics: the low 32 bits of integers, the bits of fp32.
Tested on: Triton's interpreter; compiled for sm_90, sm_100 and gfx942.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_tide.kernels.launch import Variant, cdiv, runs_triton, tl, triton

_BLOCK = 1024
# They change from step to step, so the kernel must not be specialized to them.
_NUMBERS = ("n", "rows", "width", "depth", "sampled_stride", "confidence_stride",
            "drafted_stride")  # fmt: skip


def gather_step_reference(parts: Sequence[Tensor], out: Tensor) -> None:
    at = 0
    for part in parts:
        bits = part.view(torch.int32) if part.dtype == torch.float32 else part
        out[at : at + part.numel()].view(part.shape).copy_(bits)
        at += part.numel()


@triton.jit
def _put(source, stride, width, count, out, i):
    inside = i < count
    x = tl.load(source + (i // width) * stride + i % width, mask=inside, other=0)
    tl.store(out + i, x.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS)
def _gather_step_kernel(
    seq_lens,
    emitted,
    sampled,
    token_ids,
    confidence,
    drafted,
    bounds,
    logit_bounds,
    out,
    n,
    rows,
    width,
    depth,
    sampled_stride,
    confidence_stride,
    drafted_stride,
    BLOCK: tl.constexpr,
):
    # One program per part and BLOCK of its values.
    part = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = out + 2 * n + n * width
    confidences = ids + rows
    first = confidences + n * depth
    if part == 0:
        _put(seq_lens, 1, 1, n, out, i)
    elif part == 1:
        _put(emitted, 1, 1, n, out + n, i)
    elif part == 2:
        _put(sampled, sampled_stride, width, n * width, out + 2 * n, i)
    elif part == 3:
        _put(token_ids, 1, 1, rows, ids, i)
    elif part == 4:
        _put(confidence, confidence_stride, depth, n * depth, confidences, i)
    elif part == 5:
        _put(drafted, drafted_stride, 1, n, first, i)
    elif part == 6:
        _put(bounds, 1, 1, n + 1, first + n, i)
    else:
        _put(logit_bounds, 1, 1, n + 1, first + 2 * n + 1, i)


def gather_step(parts: Sequence[Tensor], out: Tensor) -> None:
    """Concatenate a step's arrays.

    Args:
        parts: seq_lens int32 [n], emitted int32 [n], sampled int64 [n, w], token_ids
            int32 [rows], confidence fp32 [n, K], drafted int64 [n]; if the device cut
            drafts also bounds and logit_bounds, int32 [n + 1]. Two-dimensional ones and
            drafted may be strided by row.
        out: int32 [>= sum of sizes].
    """
    if not runs_triton(*parts, out):
        gather_step_reference(parts, out)
        return
    seq_lens, emitted, sampled, token_ids, confidence, drafted = parts[:6]
    bounds, logit_bounds = parts[6:] or (seq_lens, seq_lens)
    most = max(part.numel() for part in parts)
    _gather_step_kernel[(len(parts), cdiv(most, _BLOCK))](
        seq_lens,
        emitted,
        sampled,
        token_ids,
        confidence.view(torch.int32),
        drafted,
        bounds,
        logit_bounds,
        out,
        len(seq_lens),
        len(token_ids),
        sampled.shape[1],
        confidence.shape[1],
        sampled.stride(0),
        confidence.stride(0),
        drafted.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def variants() -> list[Variant]:
    narrow = ("seq_lens", "emitted", "token_ids", "confidence", "bounds", "out")
    types = dict.fromkeys((*narrow, "logit_bounds"), "*i32")
    types |= {"sampled": "*i64", "drafted": "*i64"} | dict.fromkeys(_NUMBERS, "i32")
    return [Variant(_gather_step_kernel, "step", types, {"BLOCK": _BLOCK}, 4)]
