"""Draft-token selection: which prefix of each request's draft is worth verifying.

    survival[j, r] = chance[r, 0] * ... * chance[r, j]    value of one more token
    m tokens cost  step_seconds[base_tokens + m] + sunk_seconds
    m maximises    (plain_tokens + sum of the m largest survivals) / cost
             or    plain_tokens + sum - bar * cost

The answers are those of `vllm_tide.control.verifier.select`, ties included: survival
never rises along a draft, so the m most likely tokens of the batch are a prefix of
every request; the best m is a scan over all of them, across every stair; among equal
values the fewest tokens win, and among equal survivals the first requests.

Runs in the vLLM worker, on the device: nothing is read back, every number that changes
from step to step may be a tensor, so the op can be part of a captured graph. Three
launches: survivals, their order, and one program that scans it.

Numerics: survivals are fp32 products in order; sums and costs are fp64, as in NumPy. A
parallel sum may differ from NumPy's in the last bit, which matters only between sets
whose values agree to 16 digits.
Tested on: Triton's interpreter; compiled for sm_90, sm_100 and gfx942.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_tide.kernels.launch import Variant, cdiv, runs_triton, tl, triton

_ABSENT = tl.constexpr(-1.0)  # survival of a token that was not drafted
_REQUESTS, _RANKED, _OTHERS, _SCANNED = 128, 32, 128, 1024  # elements of a program
_FUSED = False  # tokens - bar * cost is rounded twice, as in NumPy
_ALL = 1 << 30  # a budget that is none


class Selection(NamedTuple):
    """The chosen set, on the device of its input.

    Attributes:
        lengths: int32 [R], draft tokens of each request to verify.
        total: int64 [1], their number.
        tokens: float64 [1], tokens expected to be emitted.
        seconds: float64 [1], what the step is expected to take.
    """

    lengths: Tensor
    total: Tensor
    tokens: Tensor
    seconds: Tensor


class _Terms(NamedTuple):
    """The numbers of one round, each a tensor of one element on the device."""

    base_tokens: Tensor  # int64
    budget: Tensor  # int64
    plain_tokens: Tensor  # float64, as are the others
    sunk_seconds: Tensor
    limit: Tensor
    bar: Tensor


def _survival_reference(chance: Tensor, num_drafted: Tensor) -> Tensor:
    """fp32 [K, R], -1 where nothing was drafted."""
    requests, steps = chance.shape
    clean = torch.where(chance > 0, chance.clamp(max=1.0), 0.0)
    out = torch.empty(steps, requests, dtype=torch.float32, device=chance.device)
    product = torch.ones(requests, dtype=torch.float32, device=chance.device)
    for j in range(steps):
        product = product * clean[:, j]
        out[j] = torch.where(num_drafted > j, product, -1.0)
    return out


def _select_reference(
    chance: Tensor,
    num_drafted: Tensor,
    step_seconds: Tensor,
    terms: _Terms,
    has_bar: bool,
) -> Selection:
    """The same in Torch; it does not wait for the device either."""
    survival = _survival_reference(chance, num_drafted)
    flat = survival.flatten()  # may be empty
    order = flat.sort(descending=True).values
    number = torch.arange(flat.numel() + 1, device=flat.device)
    place = terms.base_tokens + number
    known = (place < step_seconds.numel()) & (number <= terms.budget)
    known[1:] &= order >= 0
    at = place.clamp(max=step_seconds.numel() - 1)
    cost = step_seconds[at].to(torch.float64) + terms.sunk_seconds
    sums = torch.cumsum(order.to(torch.float64), 0)
    tokens = torch.cat([terms.plain_tokens, sums + terms.plain_tokens])
    value = tokens - terms.bar * cost if has_bar else tokens / cost
    known &= cost <= terms.limit
    known[0] = True  # verifying nothing is always allowed
    best = value.masked_fill(~known, -math.inf).argmax().view(1)
    # Above every survival when nothing is chosen.
    least = torch.cat([order.new_full((1,), 2.0), order])[best]
    ties = (survival == least).sum(0)
    kept = (survival >= least).sum(0)
    surplus = kept.sum() - best
    before = ties.cumsum(0) - ties
    room = (ties.sum() - surplus - before).clamp(min=0)
    lengths = (kept - ties + torch.minimum(room, ties)).to(torch.int32)
    return Selection(lengths, best, tokens[best], cost[best])


@triton.jit
def _survival_kernel(
    chance, stride, num_drafted, survival, requests, steps, BLOCK: tl.constexpr
):
    # One program per BLOCK requests.
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = request < requests
    drafted = tl.load(num_drafted + request, mask=inside, other=0)
    product = tl.full([BLOCK], 1.0, tl.float32)
    for j in range(steps):
        c = tl.load(chance + request * stride + j, mask=inside, other=0.0)
        product = product * tl.where(c > 0.0, tl.minimum(c, 1.0), 0.0)
        alive = tl.where(j < drafted, product, _ABSENT)
        tl.store(survival + j * requests + request, alive, mask=inside)


@triton.jit
def _rank_kernel(survival, order, count, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    # One program per BLOCK tokens: each counts the tokens before it. Quadratic, but
    # the comparisons are spread over the device, and unlike a sorting network this
    # compiles once, in a moment, for every number of tokens.
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    mine = tl.load(survival + token, mask=inside, other=_ABSENT)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, OTHERS):
        other = start + tl.arange(0, OTHERS)
        # A lane beyond the last token is below every survival.
        theirs = tl.load(survival + other, mask=other < count, other=-2.0)
        larger = theirs[None, :] > mine[:, None]
        same = (theirs[None, :] == mine[:, None]) & (other[None, :] < token[:, None])
        rank += tl.sum((larger | same).to(tl.int32), axis=1)
    tl.store(order + rank, mine, mask=inside)


@triton.jit
def _select_kernel(
    survival,
    order,
    step_seconds,
    num_seconds,
    base_tokens,
    budget,
    plain_tokens,
    sunk_seconds,
    limit,
    bar,
    out_lengths,
    out_total,
    out_tokens,
    out_seconds,
    requests,
    steps,
    HAS_BAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program in all.
    base = tl.load(base_tokens)
    most = tl.load(budget)
    plain = tl.load(plain_tokens)
    sunk = tl.load(sunk_seconds)
    slowest = tl.load(limit)
    worth = tl.load(bar)
    lane = tl.arange(0, BLOCK)
    best = 0
    least = 2.0  # above every survival
    best_tokens = plain
    none_at = tl.minimum(base, num_seconds - 1)
    best_cost = tl.load(step_seconds + none_at).to(tl.float64) + sunk
    best_value = plain - worth * best_cost if HAS_BAR else plain / best_cost
    before = plain * 0.0
    for start in range(0, requests * steps, BLOCK):
        flat = start + lane
        likely = tl.load(order + flat, mask=flat < requests * steps, other=_ABSENT)
        sums = tl.cumsum(likely.to(tl.float64), axis=0) + before
        tokens = sums + plain
        # flat + 1 tokens are verified when token `flat` of the order is the last.
        number = (flat + 1).to(tl.int64)
        place = base + number
        known = (likely >= 0.0) & (place < num_seconds) & (number <= most)
        cost = tl.load(step_seconds + place, mask=known, other=1.0)
        cost = cost.to(tl.float64) + sunk
        value = tokens - worth * cost if HAS_BAR else tokens / cost
        value = tl.where(known & (cost <= slowest), value, float("-inf"))
        highest = tl.max(value, axis=0)
        first = tl.argmax(value, axis=0, tie_break_left=True)
        better = highest > best_value  # of equal values the fewest tokens win
        last = lane == first
        best = tl.where(better, start + first + 1, best)
        least = tl.where(better, tl.sum(tl.where(last, likely, 0.0), axis=0), least)
        chosen = tl.sum(tl.where(last, tokens, 0.0), axis=0)
        best_tokens = tl.where(better, chosen, best_tokens)
        chosen = tl.sum(tl.where(last, cost, 0.0), axis=0)
        best_cost = tl.where(better, chosen, best_cost)
        best_value = tl.where(better, highest, best_value)
        before += tl.sum(likely.to(tl.float64), axis=0)
    tl.store(out_total, best)
    tl.store(out_tokens, best_tokens)
    tl.store(out_seconds, best_cost)
    room = best
    for start in range(0, requests, BLOCK):
        request = start + lane
        for j in range(steps):
            at = survival + j * requests + request
            s = tl.load(at, mask=request < requests, other=_ABSENT)
            room -= tl.sum((s > least).to(tl.int32), axis=0)
    # `room` tokens as likely as the last one fit; the first requests get them.
    for start in range(0, requests, BLOCK):
        request = start + lane
        inside = request < requests
        surer = tl.zeros([BLOCK], tl.int32)
        ties = tl.zeros([BLOCK], tl.int32)
        for j in range(steps):
            at = survival + j * requests + request
            s = tl.load(at, mask=inside, other=_ABSENT)
            surer += (s > least).to(tl.int32)
            ties += (s == least).to(tl.int32)
        left = room - (tl.cumsum(ties, axis=0) - ties)
        kept = surer + tl.minimum(tl.maximum(left, 0), ties)
        tl.store(out_lengths + request, kept, mask=inside)
        room -= tl.sum(ties, axis=0)


def select_tokens(
    chance: Tensor,
    step_seconds: Tensor,
    base_tokens: Tensor | int,
    *,
    num_drafted: Tensor | None = None,
    plain_tokens: Tensor | float | None = None,
    budget: Tensor | int | None = None,
    sunk_seconds: Tensor | float = 0.0,
    limit: Tensor | float = math.inf,
    bar: Tensor | float | None = None,
) -> Selection:
    """Choose how many draft tokens of each request the target should verify.

    Args:
        chance: fp32 [R, K], probability that a drafted token is accepted if those
            before it are. Clamped to 0..1; NaN counts as 0. Rows may be strided.
        step_seconds: fp32 or float64 [T], contiguous: seconds of a step of 0, 1, ...
            T - 1 tokens in all. What lies beyond the table is never chosen.
        base_tokens: Tokens of the step without any draft token (0..T-1).
        num_drafted: int32 or int64 [R], drafted tokens of each request; None means K.
        plain_tokens: Tokens that the step emits without any draft token; None means R.
        budget: Most draft tokens in all; None means no bound but the table's.
        sunk_seconds: Added to every cost: draft time already spent, host time.
        limit: Seconds the step may take; verifying nothing is always allowed.
        bar: Tokens per second that time is worth. None maximises tokens / seconds.

    A number may be a Python number or a tensor of one element on the same device: a
    captured graph freezes the former and reads the latter anew.

    Returns:
        A `Selection`.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    _check(chance, step_seconds, num_drafted)
    device, (requests, steps) = chance.device, chance.shape
    if num_drafted is None:
        num_drafted = torch.full((requests,), steps, dtype=torch.int32, device=device)
    terms = _Terms(
        _term(base_tokens, torch.int64, device),
        _term(_ALL if budget is None else budget, torch.int64, device),
        _term(
            float(requests) if plain_tokens is None else plain_tokens,
            torch.float64,
            device,
        ),
        _term(sunk_seconds, torch.float64, device),
        _term(limit, torch.float64, device),
        _term(0.0 if bar is None else bar, torch.float64, device),
    )
    count = requests * steps
    if not count or not runs_triton(chance, step_seconds):
        has_bar = bar is not None
        return _select_reference(chance, num_drafted, step_seconds, terms, has_bar)
    survival = torch.empty(steps, requests, dtype=torch.float32, device=device)
    _survival_kernel[(cdiv(requests, _REQUESTS),)](
        chance,
        chance.stride(0),
        num_drafted,
        survival,
        requests,
        steps,
        BLOCK=_REQUESTS,
        num_warps=1,
    )
    order = torch.empty(count, dtype=torch.float32, device=device)
    _rank_kernel[(cdiv(count, _RANKED),)](
        survival, order, count, BLOCK=_RANKED, OTHERS=_OTHERS, num_warps=4
    )
    out = Selection(
        torch.empty(requests, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int64, device=device),
        torch.empty(1, dtype=torch.float64, device=device),
        torch.empty(1, dtype=torch.float64, device=device),
    )
    _select_kernel[(1,)](
        survival,
        order,
        step_seconds,
        step_seconds.numel(),
        *terms,
        *out,
        requests,
        steps,
        HAS_BAR=bar is not None,
        BLOCK=_SCANNED,
        num_warps=4,
        enable_fp_fusion=_FUSED,
    )
    return out


def _term(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element; filled on the device, so that no copy waits for the host."""
    if isinstance(value, Tensor):
        return value.to(dtype).view(1)
    return torch.full((1,), value, dtype=dtype, device=device)


def _check(chance: Tensor, step_seconds: Tensor, num_drafted: Tensor | None) -> None:
    if chance.ndim != 2 or chance.dtype != torch.float32:
        raise ValueError(
            f"chance must be fp32 [R, K], not {chance.dtype} {list(chance.shape)}."
        )
    if chance.stride(1) != 1 and chance.shape[1] > 1:
        raise ValueError("chances of one request must be neighbours in memory.")
    floats = (torch.float32, torch.float64)
    if step_seconds.ndim != 1 or step_seconds.dtype not in floats:
        raise ValueError("step_seconds must be fp32 or float64 [T].")
    if not step_seconds.numel() or not step_seconds.is_contiguous():
        raise ValueError("step_seconds must be contiguous and not empty.")
    if num_drafted is None:
        return
    integers = (torch.int32, torch.int64)
    if num_drafted.dtype not in integers or not num_drafted.is_contiguous():
        raise ValueError("num_drafted must be int32 or int64 and contiguous.")
    if tuple(num_drafted.shape) != (chance.shape[0],):
        raise ValueError(
            f"num_drafted must be [{chance.shape[0]}], not {list(num_drafted.shape)}."
        )


def variants() -> list[Variant]:
    """What `compile_all` compiles; no size is built in."""
    sizes = {"requests": "i32", "steps": "i32"}
    types = {"chance": "*fp32", "stride": "i32", "num_drafted": "*i32"}
    types |= {"survival": "*fp32", **sizes}
    out = [Variant(_survival_kernel, "fp32", types, {"BLOCK": _REQUESTS}, 1)]
    types = {"survival": "*fp32", "order": "*fp32", "count": "i32"}
    tile = {"BLOCK": _RANKED, "OTHERS": _OTHERS}
    out.append(Variant(_rank_kernel, "fp32", types, tile, 4))
    types = {"survival": "*fp32", "order": "*fp32", "num_seconds": "i32"}
    types |= dict.fromkeys(("base_tokens", "budget"), "*i64")
    doubles = ("plain_tokens", "sunk_seconds", "limit", "bar")
    types |= dict.fromkeys(doubles, "*fp64")
    types |= {"out_lengths": "*i32", "out_total": "*i64"}
    types |= {"out_tokens": "*fp64", "out_seconds": "*fp64", **sizes}
    for has_bar, table in ((False, "fp32"), (True, "fp32"), (True, "fp64")):
        constants = {"HAS_BAR": has_bar, "BLOCK": _SCANNED}
        name = f"{'bar' if has_bar else 'ratio'}-{table}"
        seconds = {"step_seconds": f"*{table}"}
        kinds = types | seconds
        out.append(Variant(_select_kernel, name, kinds, constants, 4, _FUSED))
    return out
