"""Documents packed end to end into one batch: no padding, true RoPE positions.

Rejected branches follow after all documents. Row j (j = 0..m-1) of a branch at anchor a
pairs the feature of position a + j with the drafted token b_{j+1}; its teacher is the
target's distribution at a + j + 1 on the branch (eagle3-training.md c.8). At step i the
row embeds b_{j+1+i} and is taught by position a + j + 1 + i, so a branch has one row
fewer per step. Aurora calls the loss on them discard sampling (section 3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tide.draft.rows import BranchInputs, StepRows, rows_of_steps
from vllm_tide.train.sample import Branch, Sample, TopK

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
    branches: BranchRows | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_rows(self) -> int:
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


def _rows(trunk: Tensor, branch: Tensor | None, rows: Tensor) -> Tensor:
    """`torch.cat([trunk, branch])[rows]` without the copy."""
    if branch is None:
        return trunk[rows]
    count = trunk.shape[0]
    out = trunk[rows.clamp(max=count - 1)]
    beyond = rows >= count
    out[beyond] = branch[rows[beyond] - count]
    return out


def pack(samples: Sequence[Sample], *, branches: bool = True) -> PackedBatch:
    """Concatenate documents.

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
        branches=extra,
    )


def take_batch(
    queue: deque[Sample], capacity: int, *, branches: bool = True
) -> list[Sample]:
    """Remove documents from the queue until `capacity` rows are full.

    Looks a few documents ahead for one that fits; those passed over keep their order.
    A document longer than `capacity` is taken alone.

    Args:
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


@dataclass(frozen=True)
class BranchRows:
    """M rows of B branches, packed after the N trunk rows of a batch.

    Attributes:
        tokens: int64 [M], b_1..b_m per branch.
        features: [M, A*H], capture dtype; row 0 of a branch repeats the trunk's g_a.
        positions: int64 [M], a + j.
        valid: bool [M], the teacher of row r (position a + j + 1) may be used.
        starts: B + 1 row offsets.
        anchors: B trunk rows (packed index of position a).
        teacher_hidden: [M, H] at positions a + j + 1, or None.
        teacher_topk: Used when there is no hidden teacher.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    valid: Tensor
    starts: list[int]
    anchors: list[int]
    docs: list[int]
    teacher_hidden: Tensor | None
    teacher_topk: TopK | None

    @property
    def num_rows(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True)
class BranchPlan:
    """Branch rows of all steps; lists have one entry per step.

    A step after the last trained one is left out, so there may be fewer or more entries
    than in the trunk's `Plan`. `forward_ttt` returns
    `max(len(plan.steps), len(branch_plan.steps))` outputs; in each, the trunk's loss
    rows come first, then the branches', in the order of `targets`.

    Attributes:
        steps: Rows computed and trained; `active` counts branch rows 0..M-1.
        targets: int64 [L_i], teacher of each loss row, counted over the teacher rows
            [N trunk | M branch] as `PackedBatch.hidden_rows` and `topk_rows` take them.
        docs: int64 [L_i], document of each loss row.
        tokens: int64 [L_i], -1 throughout: no token of a branch really follows.
        inputs: Pass as `forward_ttt(..., branches=plan.inputs)`.
    """

    steps: list[StepRows]
    targets: list[Tensor]
    docs: list[Tensor]
    tokens: list[Tensor]
    inputs: BranchInputs

    @property
    def num_loss_rows(self) -> int:
        return sum(t.numel() for t in self.targets)


def plan_branches(batch: PackedBatch, num_steps: int) -> BranchPlan | None:
    """Plan the branch rows of every step.

    Returns:
        None when the batch has no branch row to train.
    """
    rows = batch.branches
    if rows is None:
        return None
    count = rows.num_rows
    sizes = torch.tensor(rows.starts).diff()
    ids = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    masks = []
    for i in range(min(num_steps, int(sizes.max()))):
        mask = torch.zeros(count, dtype=torch.bool)
        mask[: count - i] = rows.valid[i:] & (ids[i:] == ids[: count - i])
        masks.append(mask)
    steps = rows_of_steps(masks)
    if not steps:
        return None
    doc_of = torch.tensor(rows.docs)[ids]
    trained = [step.active[step.loss] for step in steps]
    return BranchPlan(
        steps=steps,
        targets=[batch.num_tokens + at + i for i, at in enumerate(trained)],
        docs=[doc_of[at] for at in trained],
        tokens=[torch.full_like(at, -1) for at in trained],
        inputs=BranchInputs(
            rows.tokens,
            rows.features,
            rows.positions,
            rows.starts,
            rows.anchors,
            rows.docs,
            steps,
        ),
    )


def usable_branches(sample: Sample, *, hidden: bool) -> list[Branch]:
    """Branches of a document that can be packed.

    A branch in the context rows of a window belongs to the window before it, and one
    whose teacher was not captured teaches nothing.

    Args:
        hidden: The batch has hidden teachers, else top-k ones.
    """
    low = max(sample.start, sample.loss_from)
    return [
        b
        for b in sample.branches
        if low <= b.position < sample.start + sample.num_tokens
        and b.tokens.numel()
        and (b.teacher_hidden if hidden else b.teacher_topk) is not None
    ]


def num_branch_rows(sample: Sample) -> int:
    """Rows that the branches of a document add to a batch."""
    hidden = sample.teacher_hidden is not None
    return sum(b.tokens.numel() for b in usable_branches(sample, hidden=hidden))


def pack_branches(
    samples: Sequence[Sample], doc_starts: Sequence[int], *, hidden: bool
) -> BranchRows | None:
    """Concatenate the branches of some documents.

    Args:
        hidden: The batch has hidden teachers, else top-k ones.

    Returns:
        None when there is no branch.
    """
    chosen: list[tuple[int, int, Branch]] = []
    features: list[Tensor] = []
    for doc, sample in enumerate(samples):
        for branch in usable_branches(sample, hidden=hidden):
            row = branch.position - sample.start
            chosen.append((doc, doc_starts[doc] + row, branch))
            features += [sample.features[row : row + 1], branch.features[:-1]]
    if not chosen:
        return None
    branches = [branch for _, _, branch in chosen]
    starts = [0]
    for branch in branches:
        starts.append(starts[-1] + branch.tokens.numel())
    full = [b.teacher_hidden for b in branches if b.teacher_hidden is not None]
    topk = [b.teacher_topk for b in branches if b.teacher_topk is not None]
    return BranchRows(
        tokens=torch.cat([b.tokens for b in branches]).long(),
        features=torch.cat(features),
        positions=torch.cat(
            [torch.arange(b.position, b.position + b.tokens.numel()) for b in branches]
        ),
        valid=torch.ones(starts[-1], dtype=torch.bool),
        starts=starts,
        anchors=[anchor for _, anchor, _ in chosen],
        docs=[doc for doc, _, _ in chosen],
        teacher_hidden=torch.cat(full) if hidden else None,
        teacher_topk=None if hidden else cat_topk(topk),
    )


def cat_topk(parts: Sequence[TopK]) -> TopK:
    return TopK(
        torch.cat([t.ids for t in parts]),
        torch.cat([t.logprobs for t in parts]),
        torch.cat([t.tail_logprob for t in parts]),
    )
