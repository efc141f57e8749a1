"""Documents packed end to end into one batch: no padding, true RoPE positions.

Rejected branches follow after all documents (`branch_rows`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tide.train.branch_rows import (
    BranchRows,
    cat_topk,
    num_branch_rows,
    pack_branches,
)
from vllm_tide.train.sample import Sample, TopK

_LOOK_AHEAD = 16  # documents tried before a batch is closed with room left


@dataclass(frozen=True)
class PackedBatch:
    """N rows of D documents, and M rows of their branches.

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
        capacity: Rows the batch could have held, branch rows included.
        branches: M rows, or None without any.
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
    branches: BranchRows | None = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.tokens.numel()

    @property
    def num_rows(self) -> int:
        """N + M."""
        more = 0 if self.branches is None else self.branches.num_rows
        return self.num_tokens + more

    def hidden_rows(self, rows: Tensor) -> Tensor:
        """Hidden teacher [L, H] of some rows.

        Args:
            rows: int64 [L], counted over [N trunk | M branch].
        """
        if self.teacher_hidden is None:
            raise ValueError("the batch has no hidden teacher.")
        branch = None if self.branches is None else self.branches.teacher_hidden
        return _rows(self.teacher_hidden, branch, rows)

    def topk_rows(self, rows: Tensor) -> TopK:
        """Top-k teacher of some rows.

        Args:
            rows: int64 [L], counted over [N trunk | M branch].
        """
        if self.teacher_topk is None:
            raise ValueError("the batch has no top-k teacher.")
        t = self.teacher_topk
        b = None if self.branches is None else self.branches.teacher_topk
        return TopK(
            _rows(t.ids, None if b is None else b.ids, rows),
            _rows(t.logprobs, None if b is None else b.logprobs, rows),
            _rows(t.tail_logprob, None if b is None else b.tail_logprob, rows),
        )

    @property
    def waste(self) -> float:
        """Share of the capacity left empty (0 to 1)."""
        return 1.0 - self.num_rows / max(1, self.capacity)


def _rows(trunk: Tensor, branch: Tensor | None, rows: Tensor) -> Tensor:
    """`torch.cat([trunk, branch])[rows]` without the copy."""
    if branch is None:
        return trunk[rows]
    count = trunk.shape[0]
    out = trunk[rows.clamp(max=count - 1)]
    beyond = rows >= count
    out[beyond] = branch[rows[beyond] - count]
    return out


def pack(
    samples: Sequence[Sample], capacity: int = 0, *, branches: bool = True
) -> PackedBatch:
    """Concatenate documents.

    Args:
        samples: Documents that share one kind of teacher.
        capacity: Rows the batch could hold.
        branches: Pack the rejected branches too.

    Raises:
        ValueError: The documents have different kinds of teachers.
    """
    starts = [0]
    for sample in samples:
        starts.append(starts[-1] + sample.num_tokens)
    lengths = torch.tensor([s.num_tokens for s in samples])
    hidden = [s.teacher_hidden for s in samples if s.teacher_hidden is not None]
    topk = [s.teacher_topk for s in samples if s.teacher_topk is not None]
    whole = len(hidden) == len(samples)
    if not whole and len(topk) != len(samples):
        raise ValueError("samples of one batch must share one kind of teacher.")
    extra = pack_branches(samples, starts, hidden=whole) if branches else None
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
        teacher_topk=None if whole else cat_topk(topk),
        capacity=max(capacity, starts[-1] + (0 if extra is None else extra.num_rows)),
        branches=extra,
    )


def take_batch(
    queue: deque[Sample], capacity: int, *, branches: bool = True
) -> list[Sample]:
    """Remove documents from the queue until `capacity` rows are full.

    Looks a few documents ahead for one that fits; those passed over keep their order.
    A document longer than `capacity` is taken alone.

    Args:
        queue: Documents, changed in place.
        capacity: Rows.
        branches: The branches will be packed too, so their rows count.
    """
    chosen: list[Sample] = []
    passed: list[Sample] = []
    room = capacity
    while queue and room > 1 and len(passed) < _LOOK_AHEAD:
        sample = queue.popleft()
        size = sample.num_tokens + (num_branch_rows(sample) if branches else 0)
        if size <= room or not chosen and size > capacity:
            chosen.append(sample)
            room -= size
        else:
            passed.append(sample)
    queue.extendleft(reversed(passed))
    return chosen
