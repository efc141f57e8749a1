"""Documents packed end to end into one batch: no padding, true RoPE positions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tide.train.sample import Sample, TopK

_LOOK_AHEAD = 16  # documents tried before a batch is closed with room left


@dataclass(frozen=True)
class PackedBatch:
    """N rows of D documents.

    Attributes:
        tokens: int64 [N].
        positions: int64 [N].
        features: [N, A*H], capture dtype.
        valid: bool [N], row may serve as teacher.
        doc_starts: D + 1 row offsets.
        doc_ids: int64 [N].
        keys: Request key per document.
        teacher_hidden: [N, H] or None.
        teacher_topk: Used when there is no hidden teacher.
        capacity: Rows the batch could have held.
    """

    tokens: Tensor
    positions: Tensor
    features: Tensor
    valid: Tensor
    doc_starts: list[int]
    doc_ids: Tensor
    keys: list[int]
    teacher_hidden: Tensor | None
    teacher_topk: TopK | None
    capacity: int

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.tokens.numel()

    def topk_rows(self, rows: Tensor) -> TopK:
        """Top-k teacher of some rows."""
        if self.teacher_topk is None:
            raise ValueError("the batch has no top-k teacher.")
        t = self.teacher_topk
        return TopK(t.ids[rows], t.logprobs[rows], t.tail_logprob[rows])

    @property
    def waste(self) -> float:
        """Share of the capacity left empty (0 to 1)."""
        return 1.0 - self.num_tokens / max(1, self.capacity)


def pack(samples: Sequence[Sample], capacity: int = 0) -> PackedBatch:
    """Concatenate documents."""
    starts = [0]
    for sample in samples:
        starts.append(starts[-1] + sample.num_tokens)
    lengths = torch.tensor([s.num_tokens for s in samples])
    hidden = [s.teacher_hidden for s in samples if s.teacher_hidden is not None]
    topk = [s.teacher_topk for s in samples if s.teacher_topk is not None]
    whole = len(hidden) == len(samples)
    if not whole and len(topk) != len(samples):
        raise ValueError("samples of one batch must share one kind of teacher.")
    return PackedBatch(
        tokens=torch.cat([s.tokens for s in samples]).long(),
        positions=torch.cat(
            [torch.arange(s.start, s.start + s.num_tokens) for s in samples]
        ),
        features=torch.cat([s.features for s in samples]),
        valid=torch.cat([s.valid for s in samples]),
        doc_starts=starts,
        doc_ids=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        keys=[s.key for s in samples],
        teacher_hidden=torch.cat(hidden) if whole else None,
        teacher_topk=None
        if whole
        else TopK(
            torch.cat([t.ids for t in topk]),
            torch.cat([t.logprobs for t in topk]),
            torch.cat([t.tail_logprob for t in topk]),
        ),
        capacity=max(capacity, starts[-1]),
    )


def take_batch(queue: deque[Sample], capacity: int) -> list[Sample]:
    """Remove documents from the queue until `capacity` rows are full.

    Looks a few documents ahead for one that fits; those passed over keep their order.
    A document longer than `capacity` is taken alone.
    """
    chosen: list[Sample] = []
    passed: list[Sample] = []
    room = capacity
    while queue and room > 1 and len(passed) < _LOOK_AHEAD:
        sample = queue.popleft()
        if sample.num_tokens <= room or not chosen and sample.num_tokens > capacity:
            chosen.append(sample)
            room -= sample.num_tokens
        else:
            passed.append(sample)
    queue.extendleft(reversed(passed))
    return chosen
