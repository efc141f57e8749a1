"""The n-gram memory on a device: drafts by prompt lookup in a request's own text.

Three kernels per step, with preallocated buffers; nothing allocates or blocks:

* `grade` compares the last proposals with the sampled tokens, and counts accepted
  tokens of each source by length of the match, before the draft runs;
* `scan` maintains a copy of the newest tokens of each request (vLLM's are in host
  memory), and finds the last occurrence of the text's end in it;
* `choose` replaces the draft's tokens by those that followed that occurrence, if their
  expected acceptance is higher.

Sums have a fixed order, so all ranks of a group make equal decisions. Model Runner V2
needs Triton anyway, so the reference is in the tests.
Tested on: Triton's interpreter; compiled for sm_90, sm_100 and gfx942.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_tide.kernels.launch import Variant, cdiv, power_of_two, tl, triton

WINDOW = 1 << 15
"""Newest tokens of a request that are searched."""
_BLOCK, _ROWS = tl.constexpr(1024), tl.constexpr(32)
_BUCKETS = tl.constexpr(6)  # `MATCHES` of `memory/source.py`, and no match
_MOST_MATCH = tl.constexpr(8)
# A score consists of the order of a match, its end and its length.
_ORDER_BIT, _PLACE_BIT = tl.constexpr(40), tl.constexpr(8)
# They change from step to step, so no kernel may be specialized to them.
_NUMBERS = ("n", "width", "sampled_stride", "their_stride", "parts", "best_stride",
            "draft_stride", "confidence_stride", "depth", "capacity")  # fmt: skip


class NgramTable:
    """State of the memory for the running requests, on the device.

    Args:
        most: Tokens proposed, K.
        prior: Prior acceptance of a token of the draft, and of the memory.
        shrink: Prior weight (tokens) for shrinking depths to buckets, these to `prior`.
        half_life: Tokens after which a count has half its weight.

    Attributes:
        window: Newest tokens stored per request, a power of two.
        tokens: int32 [R, window], a circular buffer per request.
        known: int32 [R], length of the text at the buffer's end; 0: empty.
        proposals: int32 [2, R, K], last proposals of draft and memory; -1: none.
        bucket: int32 [R], bucket of the match length of these.
        is_memory: int32 [R], 1 if the newest drafts are the memory's.
        counts: fp32 [2, 2, buckets, K], tries and hits of each source, decayed.
        chance: fp32 [2, buckets, K], acceptance of a token after accepted ones.
        seen: int32 [2, R], `num_sampled` and `num_rejected` of a step without the
            results of the memory's tokens.
        first: int64 [R], the draft's first token of each request of a step, as its
            complement if the memory's tokens replaced the draft's.
    """

    def __init__(
        self,
        capacity: int,
        longest: int,
        most: int,
        device: torch.device,
        prior: tuple[float, float],
        shrink: float,
        half_life: float,
        window: int = WINDOW,
    ) -> None:
        self.capacity, self.most = capacity, most
        self.window = min(power_of_two(longest), window)
        self.parts = cdiv(self.window, _BLOCK.value) + 1

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = ints(capacity, self.window)
        self.known, self.bucket, self.is_memory = (ints(capacity) for _ in range(3))
        self.proposals = ints(2, capacity, most) - 1
        self.counts = ints(2, 2, _BUCKETS.value, most, dtype=torch.float32)
        self.chance = torch.zeros_like(self.counts[:, 0])
        self.chance += torch.tensor(prior, device=device)[:, None, None]
        self.seen, self.start = ints(2, capacity), ints(capacity)
        self.first = ints(capacity, dtype=torch.int64)
        self.best = ints(capacity, self.parts, dtype=torch.int64)
        self._sizes = {"K": most, "K_PO2": power_of_two(most)}
        self._priors = {"DRAFT_PRIOR": prior[0], "MEMORY_PRIOR": prior[1]}
        self._priors |= {"SHRINK": shrink, "HALF_LIFE": half_life}

    def forget(self) -> None:
        """Clear the state of all requests; keep the counts."""
        self.known.zero_()
        self.is_memory.zero_()
        self.proposals.fill_(-1)

    def grade(
        self,
        slots: Tensor,
        sampled: Tensor,
        num_sampled: Tensor,
        num_rejected: Tensor,
        total_len: Tensor,
        prefill_len: Tensor,
    ) -> None:
        """Count accepted tokens of the last proposals, and fill `seen`.

        Args:
            slots: int64 [n], distinct.
            sampled: int64 [n, w], this step's tokens.
            num_sampled: int32 [n], number of these tokens; 0 inside a prompt.
            num_rejected: int32 [n].
            total_len: int32 [R], length of each slot's text with this step's tokens.
            prefill_len: int32 [R], length of each slot's prefill.
        """
        _grade_kernel[(2 * _BUCKETS.value,)](
            slots,
            sampled,
            num_sampled,
            num_rejected,
            total_len,
            prefill_len,
            self.known,
            self.proposals,
            self.bucket,
            self.is_memory,
            self.counts,
            self.chance,
            self.start,
            self.seen,
            len(slots),
            sampled.shape[1],
            sampled.stride(0),
            self.capacity,
            **self._sizes,
            **self._priors,
            num_warps=4,
        )

    def choose(
        self,
        slots: Tensor,
        num_sampled: Tensor,
        total_len: Tensor,
        texts: Tensor,
        longest: int,
        drafts: Tensor,
        depth: int,
        confidence: Tensor | None,
    ) -> None:
        """Look up the texts' ends and overwrite worse drafts; call after `grade`.

        Args:
            texts: int32 [R, >= longest], the slots' texts.
            longest: Most tokens of any request of the step.
            drafts: int64 [n, K], the draft's tokens, of which `depth` were drafted.
            confidence: fp32 [n, K] or None, their probabilities, overwritten too.
        """
        n, parts = len(slots), min(cdiv(longest, _BLOCK.value), self.parts)
        _scan_kernel[(n, parts)](
            slots,
            num_sampled,
            total_len,
            self.start,
            texts,
            self.tokens,
            self.best,
            texts.stride(0),
            self.parts,
            WINDOW=self.window,
            num_warps=4,
        )
        _choose_kernel[(n,)](
            slots,
            num_sampled,
            total_len,
            self.tokens,
            self.best,
            self.chance,
            drafts,
            drafts if confidence is None else confidence,
            self.known,
            self.proposals,
            self.bucket,
            self.is_memory,
            self.first,
            parts,
            self.parts,
            drafts.stride(0),
            0 if confidence is None else confidence.stride(0),
            depth,
            self.capacity,
            WINDOW=self.window,
            CONFIDENCE=confidence is not None,
            PARTS_PO2=power_of_two(self.parts),
            **self._sizes,
            num_warps=1,
        )


@triton.jit(do_not_specialize=_NUMBERS)
def _grade_kernel(
    slots,
    sampled,
    num_sampled,
    num_rejected,
    total_len,
    prefill_len,
    known,
    proposals,
    bucket,
    is_memory,
    counts,
    chance,
    start,
    seen,
    n,
    width,
    sampled_stride,
    capacity,
    K: tl.constexpr,
    K_PO2: tl.constexpr,
    DRAFT_PRIOR: tl.constexpr,
    MEMORY_PRIOR: tl.constexpr,
    SHRINK: tl.constexpr,
    HALF_LIFE: tl.constexpr,
):
    # One program per source and bucket, over all requests.
    program = tl.program_id(0)
    source, mine = program // _BUCKETS, program % _BUCKETS
    k = tl.arange(0, K_PO2)
    column = k[None, :]
    tries = tl.zeros([K_PO2], tl.float32)
    hits = tl.zeros([K_PO2], tl.float32)
    labels = tl.zeros([_ROWS], tl.int32)
    for head in range(0, n, _ROWS):
        b = head + tl.arange(0, _ROWS)
        inside = b < n
        slot = tl.load(slots + b, mask=inside, other=0).to(tl.int64)
        count = tl.load(num_sampled + b, mask=inside, other=0)
        base = tl.load(total_len + slot, mask=inside, other=0) - count
        prefill = tl.load(prefill_len + slot, mask=inside, other=0)
        # After a prefill the slot may belong to another request.
        goes_on = (tl.load(known + slot, mask=inside, other=0) == base) & (
            base != prefill
        )
        came = tl.where(inside & goes_on, tl.minimum(count, K), 0)
        there = column < came[:, None]
        token = tl.load(
            sampled + (b * sampled_stride).to(tl.int64)[:, None] + column,
            mask=there & (column < width),
            other=-2,
        )
        guess = tl.load(
            proposals + ((source * capacity + slot) * K)[:, None] + column,
            mask=inside[:, None] & (column < K),
            other=-1,
        )
        right = tl.min(tl.where(there & (token == guess), K_PO2, column), axis=1)
        given = tl.sum((guess >= 0).to(tl.int32), axis=1)
        judged = tl.minimum(tl.minimum(right + 1, came), given)
        labels += judged
        judged = tl.where(
            tl.load(bucket + slot, mask=inside, other=-1) == mine, judged, 0
        )
        right = tl.minimum(right, judged)
        tries += tl.sum((column < judged[:, None]).to(tl.float32), axis=0)
        hits += tl.sum((column < right[:, None]).to(tl.float32), axis=0)
        if program == 0:
            tl.store(start + b, tl.where(goes_on, base, 0), mask=inside)
            hidden = tl.load(is_memory + slot, mask=inside, other=0) > 0
            rejected = tl.load(num_rejected + b, mask=inside, other=0)
            counted = tl.where(hidden, tl.minimum(count, 1), count)
            tl.store(seen + b, counted, mask=inside)
            tl.store(seen + capacity + b, tl.where(hidden, 0, rejected), mask=inside)
    keep = tl.exp2(-tl.sum(labels, axis=0).to(tl.float32) / HALF_LIFE)
    at = counts + (source * 2 * _BUCKETS + mine) * K + k
    tries += keep * tl.load(at, mask=k < K, other=0.0)
    hits += keep * tl.load(at + _BUCKETS * K, mask=k < K, other=0.0)
    tl.store(at, tries, mask=k < K)
    tl.store(at + _BUCKETS * K, hits, mask=k < K)
    # Beta means, shrunk to the bucket's mean, which is shrunk to the prior.
    prior = tl.where(source == 0, DRAFT_PRIOR, MEMORY_PRIOR)
    mean = (tl.sum(hits, axis=0) + SHRINK * prior) / (tl.sum(tries, axis=0) + SHRINK)
    mean = (hits + SHRINK * mean) / (tries + SHRINK)
    tl.store(chance + program * K + k, mean, mask=k < K)


@triton.jit
def _token(ours, theirs, at, low, start, WINDOW: tl.constexpr):
    """Load tokens of a text: this step's from vLLM's copy; -1 below `low`."""
    new = tl.load(theirs + at, mask=(at >= low) & (at >= start), other=-1)
    old = tl.load(ours + (at & (WINDOW - 1)), mask=(at >= low) & (at < start), other=-1)
    return tl.where(at >= start, new, old)


@triton.jit(do_not_specialize=_NUMBERS)
def _scan_kernel(
    slots,
    num_sampled,
    total_len,
    start,
    texts,
    tokens,
    best,
    their_stride,
    best_stride,
    WINDOW: tl.constexpr,
):
    # One program per request and _BLOCK places of its text.
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + b).to(tl.int64)
    total = tl.load(total_len + slot)
    low = tl.maximum(total - WINDOW, 0)
    head = (low // _BLOCK + part) * _BLOCK
    result = tl.zeros((), tl.int64)
    if (tl.load(num_sampled + b) > 0) & (head < total):
        begin = tl.load(start + b)
        ours, theirs = tokens + slot * WINDOW, texts + slot * their_stride
        at = head + tl.arange(0, _BLOCK)
        new = (at >= tl.maximum(low, begin)) & (at < total)
        token = tl.load(theirs + at, mask=new, other=0)
        # No program reads the overwritten places: their old tokens are below `low`.
        tl.store(ours + (at & (WINDOW - 1)), token, mask=new)
        same = at < total
        run = tl.zeros([_BLOCK], tl.int32)
        for j in tl.static_range(0, 2):
            place = tl.where(same, at - 1 - j, -1)
            last = _token(ours, theirs, total - 1 - j, low, begin, WINDOW)
            same = (
                same
                & (place >= low)
                & (_token(ours, theirs, place, low, begin, WINDOW) == last)
            )
            run += same.to(tl.int32)
        if tl.max(same.to(tl.int32), axis=0) > 0:
            for i in range(2, _MOST_MATCH):
                place = tl.where(same, at - 1 - i, -1)
                last = _token(ours, theirs, total - 1 - i, low, begin, WINDOW)
                same = (
                    same
                    & (place >= low)
                    & (_token(ours, theirs, place, low, begin, WINDOW) == last)
                )
                run += same.to(tl.int32)
        order = (run >= 2).to(tl.int64) + (run >= 3).to(tl.int64)
        order += (run >= 5).to(tl.int64)
        score = (order << _ORDER_BIT) | (at.to(tl.int64) << _PLACE_BIT) | run
        result = tl.max(tl.where(order > 0, score, 0), axis=0)
    tl.store(best + b * best_stride + part, result)


@triton.jit(do_not_specialize=_NUMBERS)
def _choose_kernel(
    slots,
    num_sampled,
    total_len,
    tokens,
    best,
    chance,
    drafts,
    confidence,
    known,
    proposals,
    bucket,
    is_memory,
    first,
    parts,
    best_stride,
    draft_stride,
    confidence_stride,
    depth,
    capacity,
    WINDOW: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    PARTS_PO2: tl.constexpr,
    K: tl.constexpr,
    K_PO2: tl.constexpr,
):
    # One program per request.
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    k = tl.arange(0, K_PO2)
    drafted = k < depth
    own = tl.load(drafts + b * draft_stride + k, mask=drafted, other=-1)
    newest = tl.load(drafts + b * draft_stride)
    if tl.load(num_sampled + b) > 0:
        total = tl.load(total_len + slot)
        begin = tl.maximum(total - WINDOW, 0) // _BLOCK * _BLOCK
        whole = total - begin <= parts * _BLOCK
        i = tl.arange(0, PARTS_PO2)
        score = tl.load(best + b * best_stride + i, mask=i < parts, other=0)
        score = tl.where(whole, tl.max(score, axis=0), 0)
        place = ((score >> _PLACE_BIT) & 0xFFFFFFFF).to(tl.int32)
        run = (score & 0xFF).to(tl.int32)
        match = (run >= 2).to(tl.int32) + (run >= 3).to(tl.int32)
        match += (run >= 4).to(tl.int32) + (run >= 5).to(tl.int32)
        match += (run >= 8).to(tl.int32)
        # Continue beyond the text's end periodically, as in LZ77.
        ahead = place + k % tl.maximum(total - place, 1)
        proposed = tl.load(
            tokens + slot * WINDOW + (ahead & (WINDOW - 1)),
            mask=k < tl.where(run > 0, K, 0),
            other=-1,
        ).to(tl.int64)
        at = chance + match * K + k
        theirs = tl.load(at, mask=drafted, other=0.0)
        ours = tl.load(at + _BUCKETS * K, mask=drafted, other=0.0)
        gain = tl.sum(tl.cumprod(ours, axis=0), axis=0)
        gain -= tl.sum(tl.cumprod(theirs, axis=0), axis=0)
        better = (run > 0) & (gain > 0.0)
        over = k < tl.where(better, depth, 0)
        tl.store(drafts + b * draft_stride + k, proposed, mask=over)
        if CONFIDENCE:
            tl.store(confidence + b * confidence_stride + k, ours, mask=over)
        tl.store(proposals + slot * K + k, own.to(tl.int32), mask=k < K)
        there = proposals + (capacity + slot) * K + k
        tl.store(there, proposed.to(tl.int32), mask=k < K)
        tl.store(bucket + slot, match)
        tl.store(is_memory + slot, better.to(tl.int32))
        # A text that was not copied completely is copied again.
        tl.store(known + slot, tl.where(whole, total, 0))
        newest = tl.where(better, -1 - newest, newest)
    tl.store(first + b, newest)


def variants() -> list[Variant]:
    longs = dict.fromkeys(("slots", "sampled", "best", "drafts", "first"), "*i64")
    names = ("num_sampled", "num_rejected", "total_len", "prefill_len", "known",
             "proposals", "bucket", "is_memory", "start", "seen", "texts",
             "tokens")  # fmt: skip
    types = longs | dict.fromkeys(names, "*i32")
    types |= dict.fromkeys(("counts", "chance", "confidence"), "*fp32")
    types |= dict.fromkeys(_NUMBERS, "i32")
    sizes: dict[str, Any] = {"K": 7, "K_PO2": 8, "WINDOW": WINDOW, "CONFIDENCE": True}
    sizes |= {"PARTS_PO2": 64, "DRAFT_PRIOR": 0.6, "MEMORY_PRIOR": 0.4}
    sizes |= {"SHRINK": 8.0, "HALF_LIFE": 2000.0}
    result = []
    for kernel, warps in ((_grade_kernel, 4), (_scan_kernel, 4), (_choose_kernel, 1)):
        given = list(getattr(kernel, "arg_names", []))
        kinds = {name: types[name] for name in given if name in types}
        constants = {name: sizes[name] for name in given if name in sizes}
        result.append(Variant(kernel, "step", kinds, constants, warps))
    return result
