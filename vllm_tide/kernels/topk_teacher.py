"""Top-k teacher: the k likeliest tokens of each row of logits, and the tail's mass.

    logprobs = log_softmax(logits)[ids],  tail = log(1 - sum exp(logprobs))

Equivalent to `top_k_teacher` of `vllm_tide.engine.staging`, which runs on a CPU. Among
equal logits the lower id comes first, so all GPUs list the same tokens.

Runs in the vLLM worker before sampling. V is split over programs. Each computes its
part of the log-sum-exp and the best token of each of its groups. The k-th best of about
512 groups is a lower bound of the k-th best token, so each split lists only its few
tokens above that bound, and one program per row merges at most 64 lists. The logits are
read twice, and no [M, V] tensor is created.

A token is one int64: its logit in the high bits, mapped so that integers order as
floats do, and the complement of its id in the low bits. The maximum is then the best
token with ties resolved, and the k best tokens are k maxima. (`tl.topk` is slower: its
sorting network moves whole blocks through shared memory in every stage.)

Numerics: fp32. A row with a NaN, or of -inf only, has NaN log-probabilities and
meaningless ids.
Tested on: Triton's interpreter; compiled for sm_90, sm_100 and gfx942.
"""

from __future__ import annotations

from typing import NamedTuple

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

MAX_K = 64
MAX_VOCAB = 1 << 20
MAX_SPLITS = 64
MIN_BLOCK = 1024
MIN_GROUPS = 512

_EMPTY = tl.constexpr(-(1 << 63))  # below every token
_LOW_BITS = tl.constexpr(0x7FFFFFFF)
_FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class TopKRows(NamedTuple):
    """Teacher of M rows.

    Attributes:
        ids: int32 [M, k], likeliest first.
        logprobs: fp32 [M, k].
        tail_logprob: fp32 [M], log of the mass outside the list; -inf if it is 0.
    """

    ids: Tensor
    logprobs: Tensor
    tail_logprob: Tensor


def topk_teacher_reference(logits: Tensor, k: int) -> TopKRows:
    wide = logits.float()
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    # In fp64, because a CPU's fp32 sum of a long row depends on its vector width.
    top = torch.log_softmax(wide.double(), dim=-1).gather(-1, ids)
    tail = torch.log1p(-top.exp().sum(dim=-1).clamp(max=1.0))
    return TopKRows(ids.to(torch.int32), top.float(), tail.float())


@triton.jit
def _token_key(z, ids):
    z = tl.where(z == 0.0, 0.0, z)  # -0.0 is equal to 0.0, its bits are not
    bits = z.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & _LOW_BITS)
    return (order.to(tl.int64) << 32) | (ids ^ _LOW_BITS).to(tl.int64)


@triton.jit
def _split_kernel(
    logits,
    stride,
    vocab,
    groups,
    tops,
    sums,
    splits,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    # One program per row and run of BLOCK tokens, in GROUPS groups.
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    ids = split * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    z = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    z = z.to(tl.float32)
    top = tl.max(z, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    at = row * splits + split
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp(z - base), axis=0))
    key = tl.where(inside, _token_key(z, ids), _EMPTY)
    best = tl.max(tl.reshape(key, (GROUPS, BLOCK // GROUPS)), axis=1)
    tl.store(groups + at * GROUPS + tl.arange(0, GROUPS), best)


@triton.jit
def _floor_kernel(groups, floors, k, count, GROUPS: tl.constexpr):
    # One program per row: the k-th best group, or `_EMPTY` if there are fewer.
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, GROUPS)
    key = tl.load(groups + row * count + number, mask=number < count, other=_EMPTY)
    for _ in range(k - 1):
        key = tl.where(key == tl.max(key, axis=0), _EMPTY, key)
    tl.store(floors + row, tl.max(key, axis=0))


@triton.jit
def _list_kernel(
    logits,
    stride,
    vocab,
    floors,
    keys,
    k,
    splits,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    # One program per row and run of BLOCK tokens: its best tokens above the floor.
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    ids = split * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    z = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    key = tl.where(inside, _token_key(z.to(tl.float32), ids), _EMPTY)
    floor = tl.load(floors + row)
    out = keys + (row * splits + split) * k
    best = tl.max(key, axis=0)
    listed = 0
    while (listed < k) & (best >= floor):
        tl.store(out + listed, best)
        key = tl.where(key == best, _EMPTY, key)
        best = tl.max(key, axis=0)
        listed += 1
    left = tl.arange(0, MOST)
    tl.store(out + left, _EMPTY, mask=(left >= listed) & (left < k))


@triton.jit
def _merge_kernel(
    keys,
    tops,
    sums,
    out_ids,
    out_logprobs,
    out_tail,
    k,
    splits,
    SPLITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    # One program per row.
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    have = part < splits
    top = tl.load(tops + row * splits + part, mask=have, other=float("-inf"))
    total = tl.load(sums + row * splits + part, mask=have, other=0.0)
    highest = tl.max(top, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    log_total = tl.log(tl.sum(total * tl.exp(top - base), axis=0))
    number = tl.arange(0, CANDIDATES)
    count = splits * k
    key = tl.load(keys + row * count + number, mask=number < count, other=_EMPTY)
    out = row * k
    listed = tl.zeros([1], tl.float32)
    for i in range(k):
        best = tl.max(key, axis=0)
        order = (best >> 32).to(tl.int32)
        bits = order ^ ((order >> 31) & _LOW_BITS)
        logprob = (bits.to(tl.float32, bitcast=True) - base) - log_total
        tl.store(out_ids + out + i, ((best & _LOW_BITS) ^ _LOW_BITS).to(tl.int32))
        tl.store(out_logprobs + out + i, logprob)
        listed += tl.exp(logprob)
        key = tl.where(key == best, _EMPTY, key)
    listed = tl.where(listed > 1.0, 1.0, listed)  # keeps a NaN
    tl.store(out_tail + row + tl.arange(0, 1), tl.log(1.0 - listed))


class TopKWorkspace:
    """Preallocated memory of `topk_teacher`.

    Args:
        k: Tokens listed by every call, at most V.
    """

    def __init__(self, max_rows: int, vocab: int, k: int, device: torch.device) -> None:
        splits, groups = cdiv(vocab, _block(vocab)), _groups(vocab, k)
        narrow = {"dtype": torch.float32, "device": device}
        self.ids = torch.empty(max_rows, k, dtype=torch.int32, device=device)
        self.logprobs = torch.empty(max_rows, k, **narrow)
        self.tail = torch.empty(max_rows, **narrow)
        wide = {"dtype": torch.int64, "device": device}
        self.keys = torch.empty(max_rows, splits, k, **wide)
        self.groups = torch.empty(max_rows, splits, groups, **wide)
        self.floors = torch.empty(max_rows, **wide)
        self.tops = torch.empty(max_rows, splits, **narrow)
        self.sums = torch.empty_like(self.tops)


def topk_teacher(
    logits: Tensor, k: int, workspace: TopKWorkspace | None = None
) -> TopKRows:
    """Return the k likeliest tokens of each row, their log-probabilities and the tail.

    Args:
        logits: [M, V], bfloat16, float16 or float32; rows may be strided. The reference
            is used for V above 2**20.
        k: Tokens listed, at least 1, limited to V. The reference is used for k above
            64.
        workspace: Memory for this V and k. The result consists of views of it, valid
            until the next call. None allocates.

    Returns:
        A `TopKRows` with min(k, V) tokens.

    Raises:
        ValueError: A shape, dtype or k is wrong.
    """
    if (
        logits.ndim != 2
        or logits.dtype not in _FLOATS
        or not logits.shape[1]
        or (logits.stride(1) != 1 and logits.shape[1] > 1)
    ):
        raise ValueError(
            "logits must be floats [M, V] with V at least 1 and contiguous rows, not "
            f"{logits.dtype} {list(logits.shape)}."
        )
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}.")
    rows, vocab = logits.shape
    k = min(k, vocab)
    if k > MAX_K or vocab > MAX_VOCAB or not runs_triton(logits):
        return topk_teacher_reference(logits, k)
    if workspace is not None and (
        workspace.ids.shape[1] != k or len(workspace.ids) < rows
    ):
        raise ValueError(f"the workspace is not for {rows} rows and {k} tokens.")
    if workspace is None:
        workspace = TopKWorkspace(rows, vocab, k, logits.device)
    out = TopKRows(
        workspace.ids[:rows], workspace.logprobs[:rows], workspace.tail[:rows]
    )
    if not rows:
        return out
    block = _block(vocab)
    splits = cdiv(vocab, block)
    keys, tops, sums = workspace.keys, workspace.tops, workspace.sums
    stride, warps = logits.stride(0), _num_warps(block)
    groups = _groups(vocab, k)
    firsts = keys if k == 1 else workspace.groups  # for k = 1 a group is the list
    _split_kernel[(rows, splits)](
        logits,
        stride,
        vocab,
        firsts,
        tops,
        sums,
        splits,
        BLOCK=block,
        GROUPS=groups,
        num_warps=warps,
    )
    if k > 1:
        count = splits * groups
        together = power_of_two(count)
        _floor_kernel[(rows,)](
            firsts,
            workspace.floors,
            k,
            count,
            GROUPS=together,
            num_warps=_num_warps(together),
        )
        _list_kernel[(rows, splits)](
            logits,
            stride,
            vocab,
            workspace.floors,
            keys,
            k,
            splits,
            BLOCK=block,
            MOST=MAX_K,
            num_warps=warps,
        )
    candidates = power_of_two(splits * k)
    _merge_kernel[(rows,)](
        keys,
        tops,
        sums,
        out.ids,
        out.logprobs,
        out.tail_logprob,
        k,
        splits,
        SPLITS=power_of_two(splits),
        CANDIDATES=candidates,
        num_warps=_num_warps(candidates),
    )
    return out


def _block(vocab: int) -> int:
    return max(MIN_BLOCK, power_of_two(cdiv(vocab, MAX_SPLITS)))


def _groups(vocab: int, k: int) -> int:
    """Return groups per split: at least 512 over all splits, or one per token."""
    block = _block(vocab)
    most = power_of_two(cdiv(MIN_GROUPS, cdiv(vocab, block)))
    return 1 if k == 1 else min(block, most)


def _num_warps(size: int) -> int:
    """Return warps for at least 16 elements per thread of 32, within the registers."""
    return max(1, min(8, size // 512))


def variants() -> list[Variant]:
    """Return the variants for `compile_all`: V up to 32k, 128k, 256k; k = 64."""
    sums = {"tops": "*fp32", "sums": "*fp32"}
    sizes = {"k": "i32", "splits": "i32"}
    outs = {"out_ids": "*i32", "out_logprobs": "*fp32", "out_tail": "*fp32"}
    out = []
    for dtype, block in (
        ("bf16", MIN_BLOCK),
        ("bf16", 2048),
        ("bf16", 4096),
        ("fp16", 4096),
        ("fp32", 4096),
    ):
        types = {"logits": f"*{dtype}", "stride": "i32", "vocab": "i32"}
        name = f"{dtype}-block{block}"
        warps = _num_warps(block)
        first = types | {"groups": "*i64", **sums, "splits": "i32"}
        for groups in (1, 8) if block == 4096 else (16,):
            constants = {"BLOCK": block, "GROUPS": groups}
            more = f"{name}-groups{groups}"
            out.append(Variant(_split_kernel, more, first, constants, warps))
        types |= {"floors": "*i64", "keys": "*i64", **sizes}
        constants = {"BLOCK": block, "MOST": MAX_K}
        out.append(Variant(_list_kernel, name, types, constants, warps))
    types = {"groups": "*i64", "floors": "*i64", "k": "i32", "count": "i32"}
    constants, warps = {"GROUPS": MIN_GROUPS}, _num_warps(MIN_GROUPS)
    out.append(Variant(_floor_kernel, "groups512", types, constants, warps))
    for splits, candidates in ((32, 2048), (64, 4096)):
        constants = {"SPLITS": splits, "CANDIDATES": candidates}
        name = f"splits{splits}-k64"
        types = {"keys": "*i64", **sums, **outs, **sizes}
        warps = _num_warps(candidates)
        out.append(Variant(_merge_kernel, name, types, constants, warps))
    return out
