"""KL losses against the target's distribution, without tensors of probabilities.

    p = softmax(t), t the teacher's logits over the draft vocabulary;  q = softmax(z)

    forward  KL(p || q) = sum p (log p - log q)             d/dz = q - p
    reverse  KL(q || p) = sum q (log q - log max(p, FLOOR)) d/dz = q (log q/p - KL)

These are `forward_kl` and `reverse_kl` of `vllm_tide.train.loss_terms`: p is
renormalised over the draft vocabulary, values are nats per row, and rows are summed
with weights that the caller normalises.

Runs in the trainer, on a chunk of rows at a time (`KernelTeacher` of
`vllm_tide.train.losses`). One program per row reads both rows of logits for the two
log-sum-exps, then for the loss, then writes the gradient in the draft's dtype. No fp32
tensor has the width of the vocabulary.

Numerics: sums in fp32 for all dtypes of logits.
Source: the gradient in the forward pass as in Liger-Kernel's fused cross entropy.
Tested on: Triton's interpreter; compiled for sm_90, sm_100 and gfx942.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_tide.kernels.launch import Variant, power_of_two, runs_triton, tl, triton

FLOOR = 1e-30
"""Lower bound of teacher probabilities in logarithms, as in `loss_terms`."""
MAX_BLOCK = 8192

_LOG_FLOOR = tl.constexpr(math.log(FLOOR))
_LOWEST = tl.constexpr(-3.0e38)  # initial maximum; finite, so no inf - inf
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def kl_rows_reference(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    weights: Tensor,
    *,
    reverse: bool,
    grad_out: Tensor | None = None,
) -> Tensor:
    """Compute `kl_rows` in Torch, with the same arguments (and float64)."""
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    log_p = torch.log_softmax(teacher_logits.to(wide), dim=-1)
    log_q = torch.log_softmax(draft_logits.to(wide), dim=-1)
    p, q = log_p.exp(), log_q.exp()
    if reverse:
        ratio = log_q - log_p.clamp_min(math.log(FLOOR))
        pull = torch.where(q == 0, 0.0, q * ratio)
        values = pull.sum(-1)
        grad = pull - q * values[:, None]
    else:
        values = torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1)
        grad = q - p
    if grad_out is not None:
        grad_out.copy_(grad * weights[:, None])
    return values


@triton.jit
def _load_pair(z_row, t_row, start, vocab, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    inside = columns < vocab
    z = tl.load(z_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
    t = tl.load(t_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
    return z, t


@triton.jit
def _grow(top, total, x):
    """Update maximum and sum of exp(x - maximum) with one more block."""
    new = tl.maximum(top, tl.max(x, axis=0))
    return new, total * tl.exp(top - new) + tl.sum(tl.exp(x - new), axis=0)


@triton.jit
def _kl_kernel(
    draft_logits,
    draft_stride,
    teacher_logits,
    teacher_stride,
    weights,
    values,
    grad,
    grad_stride,
    vocab,
    REVERSE: tl.constexpr,
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row.
    row = tl.program_id(0).to(tl.int64)
    z_row = draft_logits + row * draft_stride
    t_row = teacher_logits + row * teacher_stride
    g_row = grad + row * grad_stride
    weight = tl.load(weights + row)
    q_top = _LOWEST
    q_sum = 0.0
    p_top = _LOWEST
    p_sum = 0.0
    for start in range(0, vocab, BLOCK):
        z, t = _load_pair(z_row, t_row, start, vocab, BLOCK)
        q_top, q_sum = _grow(q_top, q_sum, z)
        p_top, p_sum = _grow(p_top, p_sum, t)
    q_lse = q_top + tl.log(q_sum)
    p_lse = p_top + tl.log(p_sum)
    parts = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        z, t = _load_pair(z_row, t_row, start, vocab, BLOCK)
        log_q = z - q_lse
        log_p = t - p_lse
        q = tl.exp(log_q)
        if REVERSE:
            ratio = log_q - tl.maximum(log_p, _LOG_FLOOR)
            parts += tl.where(q == 0.0, 0.0, q * ratio)
        else:
            p = tl.exp(log_p)
            parts += tl.where(p == 0.0, 0.0, p * (log_p - log_q))
            if GRAD:
                columns = start + tl.arange(0, BLOCK)
                inside = columns < vocab
                slope = (weight * (q - p)).to(grad.dtype.element_ty)
                tl.store(g_row + columns, slope, mask=inside)
    value = tl.sum(parts, axis=0)
    tl.store(values + row, value)
    if REVERSE and GRAD:
        # The gradient needs the row's KL, which is complete only here.
        for start in range(0, vocab, BLOCK):
            z, t = _load_pair(z_row, t_row, start, vocab, BLOCK)
            log_q = z - q_lse
            q = tl.exp(log_q)
            ratio = log_q - tl.maximum(t - p_lse, _LOG_FLOOR)
            pull = tl.where(q == 0.0, 0.0, q * (ratio - value))
            columns = start + tl.arange(0, BLOCK)
            slope = (weight * pull).to(grad.dtype.element_ty)
            tl.store(g_row + columns, slope, mask=columns < vocab)


def kl_rows(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    weights: Tensor,
    *,
    reverse: bool,
    grad_out: Tensor | None = None,
) -> Tensor:
    """Return the KL of n rows of logits, and compute its gradient.

    Args:
        draft_logits: [n, V_d], bfloat16, float16 or float32 (float64 in the
            reference); rows may be strided.
        teacher_logits: [n, V_d], the same dtypes.
        weights: fp32 [n], weight of each row in the loss.
        reverse: KL(q || p) instead of KL(p || q).
        grad_out: [n, V_d], receives the gradient of the weighted sum with respect to
            `draft_logits`. It must not share memory with the inputs (warps of a program
            may read and write in different layouts).

    Returns:
        fp32 [n], unweighted values (nats).

    Raises:
        ValueError: A shape, dtype or stride is wrong.
    """
    _check_rows(draft_logits, teacher_logits, weights, grad_out)
    count, vocab = draft_logits.shape
    exact = torch.float64 in (draft_logits.dtype, teacher_logits.dtype)
    if exact or not runs_triton(draft_logits, teacher_logits, weights):
        return kl_rows_reference(
            draft_logits,
            teacher_logits,
            weights,
            reverse=reverse,
            grad_out=grad_out,
        )
    values = torch.empty(count, dtype=torch.float32, device=draft_logits.device)
    if not count:
        return values
    block = min(MAX_BLOCK, power_of_two(vocab))
    # Without a gradient the kernel does not use this pointer.
    grad = draft_logits if grad_out is None else grad_out
    _kl_kernel[(count,)](
        draft_logits,
        draft_logits.stride(0),
        teacher_logits,
        teacher_logits.stride(0),
        weights,
        values,
        grad,
        grad.stride(0),
        vocab,
        REVERSE=reverse,
        GRAD=grad_out is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return values


def _check_rows(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    weights: Tensor,
    grad_out: Tensor | None,
) -> None:
    floats = (*_NAMES, torch.float64)
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    shape = draft_logits.shape
    if len(shape) != 2 or not shape[1]:
        raise ValueError(f"draft_logits must be [n, V], not {list(shape)}.")
    for name, tensor, expected, dtypes in (
        ("draft_logits", draft_logits, shape, floats),
        ("teacher_logits", teacher_logits, shape, floats),
        ("weights", weights, shape[:1], (torch.float32, wide)),
        ("grad_out", grad_out, shape, floats),
    ):
        if tensor is not None and (
            tensor.shape != expected
            or tensor.dtype not in dtypes
            or (tensor.stride(-1) != 1 and expected[-1] > 1)
        ):
            raise ValueError(
                f"{name} must be {list(expected)} of {dtypes}, rows contiguous, not "
                f"{list(tensor.shape)} of {tensor.dtype}, stride {tensor.stride()}."
            )


def _num_warps(block: int) -> int:
    """Return warps for 16 elements per thread of 32; 16 warps are the limit on ROCm."""
    return max(1, min(16, block // 512))


def variants() -> list[Variant]:
    """Return the variants for `compile_all`: vocabularies of `MAX_BLOCK` and more."""
    out = []
    for dtype, reverse, grad in (
        ("bf16", False, True),
        ("bf16", True, True),
        ("bf16", False, False),
        ("fp16", False, True),
        ("fp32", False, True),
        ("fp32", True, True),
    ):
        types = {"draft_logits": f"*{dtype}", "draft_stride": "i32"}
        types |= {"teacher_logits": f"*{dtype}", "teacher_stride": "i32"}
        types |= {"weights": "*fp32", "values": "*fp32"}
        types |= {"grad": f"*{dtype}", "grad_stride": "i32"}
        types["vocab"] = "i32"
        constants = {"REVERSE": reverse, "GRAD": grad, "BLOCK": MAX_BLOCK}
        name = f"{dtype}-{'reverse' if reverse else 'forward'}"
        name += "" if grad else "-loss"
        warps = _num_warps(MAX_BLOCK)
        out.append(Variant(_kl_kernel, name, types, constants, warps))
    return out
