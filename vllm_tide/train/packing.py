"""Documents packed end to end into one batch: no padding, true RoPE positions.

Rejected branches follow after all documents. Row j (j = 0..m-1) of a branch at anchor a
pairs the feature of position a + j with the drafted token b_{j+1}; its teacher is the
target's distribution at a + j + 1 on the branch (eagle3-training.md c.8). At step i the
row embeds b_{j+1+i}, with the teacher of position a + j + 1 + i, so a branch has one
row fewer per step. Aurora calls the loss on them discard sampling (section 3).

Row t of a document, training-time-test step i, predicts token x_{t+2+i} with teacher
y_{t+1+i}. It is trained iff position t+1+i is in the same document, has a captured
teacher, and its token is generated (eagle3-training.md c.6), unless the memory drafted
at t+1: the draft is not used there. So the first trained row is P-1 (P prompt tokens):
the first draft after prefill. The last captured position is not trained: its row has
no teacher.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from vllm_tide.draft.rows import RowLayout, Rows, StepRows
from vllm_tide.train.sample import Branch, Sample, TopK

_MAX_SKIPPED = 16  # documents that do not fit before a batch is closed


@dataclass(frozen=True)
class PackedBatch:
    """R rows: N rows of D documents, then the rows of their branches.

    Token, `valid` and teacher of entry j of a branch are of position a + j + 1: see
    `RowLayout.ahead`.

    Attributes:
        tokens: int64 [R]; `positions` and `features` as in `draft.rows.Rows`.
        valid: bool [R], the entry is a usable teacher.
        starts: bool [R], a chain may have it as its first teacher.
        segments: int64 [R], document of each row; D + b for branch b.
        teacher: [R, H] after the final norm, or top-k lists.
    """

    tokens: Tensor
    positions: Tensor
    features: Tensor
    valid: Tensor
    starts: Tensor
    segments: Tensor
    layout: RowLayout
    keys: list[int]
    teacher: Tensor | TopK

    def rows(self, steps: Sequence[StepRows]) -> Rows:
        return Rows(self.tokens, self.positions, self.features, self.layout, steps)


@dataclass(frozen=True)
class LossRows:
    """L loss rows: committed rows of every step, then branch rows of every step.

    Attributes:
        order: int64 [L], index into the concatenated outputs of `forward_steps`.
        teacher: int64 [L], row of `Batch.teacher`.
        step: int64 [L], training-time-test step.
        doc: int64 [L], document of the batch.
        label: int64 [L], draft id of the following committed token; -1 none, or
            outside of the draft vocabulary.
    """

    order: Tensor
    teacher: Tensor
    step: Tensor
    doc: Tensor
    label: Tensor
    num_committed: int


@dataclass(frozen=True)
class Batch:
    """A packed batch with the rows to train, planned on the host.

    Attributes:
        teacher: M rows, those that `loss` needs.
    """

    rows: Rows
    loss: LossRows
    teacher: Tensor | TopK

    @classmethod
    def from_plan(
        cls, packed: PackedBatch, steps: Sequence[StepRows], draft_ids: Tensor
    ) -> Batch:
        """Plan the loss rows of `steps` (at least one).

        Args:
            draft_ids: See `VocabMap`.
        """
        row = torch.cat([step.active[step.loss] for step in steps])
        sizes = torch.tensor([step.loss.numel() for step in steps])
        step = torch.repeat_interleave(torch.arange(len(steps)), sizes)
        order = (row >= packed.layout.num_trunk).int().argsort(stable=True)
        row, step = row[order], step[order]
        branch = row >= packed.layout.num_trunk
        ahead = packed.layout.ahead(row, step)
        token = following_tokens(packed)[ahead].masked_fill(branch, -1)
        doc_of = torch.tensor([*range(len(packed.keys)), *packed.layout.docs])
        used, teacher = torch.unique(ahead, return_inverse=True)
        loss = LossRows(
            order=order,
            teacher=teacher,
            step=step,
            doc=doc_of[packed.segments[row]],
            label=draft_ids[token.clamp(min=0)].masked_fill(token < 0, -1),
            num_committed=int((~branch).sum()),
        )
        return cls(packed.rows(steps), loss, packed.teacher[used])


def pack(samples: Sequence[Sample], *, branches: bool = True) -> PackedBatch:
    """Concatenate documents, then the branches of all of them.

    Raises:
        ValueError: The documents have different kinds of teachers.
    """
    count = len(samples)
    hidden = all(s.teacher_hidden is not None for s in samples)
    if not hidden and any(s.teacher_topk is None for s in samples):
        raise ValueError("samples of one batch must have one kind of teacher.")
    parts: list[Sample | Branch] = [*samples]
    features, docs, anchors = [s.features for s in samples], [], []
    for doc, sample in enumerate(samples if branches else ()):
        for branch in usable_branches(sample, hidden=hidden):
            row = branch.position - sample.start
            parts.append(branch)
            features += [sample.features[row : row + 1], branch.features[:-1]]
            docs.append(doc)
            anchors.append(row)
    sizes = [part.tokens.numel() for part in parts]
    ends = list(accumulate(sizes, initial=0))
    first = [p.start if isinstance(p, Sample) else p.position for p in parts]
    full = [p.teacher_hidden for p in parts if p.teacher_hidden is not None]
    topk = [p.teacher_topk for p in parts if p.teacher_topk is not None]
    valid = [*(s.valid for s in samples), torch.ones(ends[-1] - ends[count]) > 0]
    return PackedBatch(
        tokens=torch.cat([part.tokens for part in parts]).long(),
        positions=torch.cat(
            [torch.arange(at, at + n) for at, n in zip(first, sizes, strict=True)]
        ),
        features=torch.cat(features),
        valid=torch.cat(valid),
        starts=torch.cat([*(s.starts for s in samples), valid[-1]]),
        segments=torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(sizes)),
        layout=RowLayout(
            ends[: count + 1],
            ends[count:],
            [ends[doc] + row for doc, row in zip(docs, anchors, strict=True)],
            docs,
        ),
        keys=[s.key for s in samples],
        teacher=torch.cat(full) if hidden else cat_topk(topk),
    )


def take_batch(
    queue: deque[Sample], capacity: int, *, branches: bool = True
) -> list[Sample]:
    """Remove documents from the queue to fill `capacity` rows.

    Skips up to `_MAX_SKIPPED` documents that do not fit; they stay in order. A document
    longer than `capacity` is a batch by itself. `branches` counts branch rows too.
    """
    chosen: list[Sample] = []
    skipped: list[Sample] = []
    free = capacity
    while queue and free > 1 and len(skipped) < _MAX_SKIPPED:
        sample = queue.popleft()
        size = sample.num_tokens + (num_branch_rows(sample) if branches else 0)
        if size <= free or not chosen and size > capacity:
            chosen.append(sample)
            free -= size
        else:
            skipped.append(sample)
    queue.extendleft(reversed(skipped))
    return chosen


def usable_branches(sample: Sample, *, hidden: bool) -> list[Branch]:
    """Return the branches of a document with the batch's kind of teacher.

    A branch in the context rows of a window is trained with the window before. A branch
    without a captured teacher is not trained.
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
    """Count the rows that the branches of a document add to a batch."""
    hidden = sample.teacher_hidden is not None
    return sum(b.tokens.numel() for b in usable_branches(sample, hidden=hidden))


def cat_topk(parts: Sequence[TopK]) -> TopK:
    return TopK(
        torch.cat([t.ids for t in parts]),
        torch.cat([t.logprobs for t in parts]),
        torch.cat([t.tail_logprob for t in parts]),
    )


def plan_rows(
    batch: PackedBatch,
    num_steps: int,
    *,
    committed: bool = True,
    branches: bool = True,
    complete: bool = False,
) -> list[StepRows]:
    """Plan the rows of every step up to the last with a trained row; may be empty.

    Args:
        complete: Plan only rows trained at every step (for evaluation).
    """
    layout = batch.layout
    last, rows = layout.num_rows - 1, torch.arange(layout.num_rows)
    trunk = rows < layout.num_trunk
    at = layout.ahead(rows, torch.arange(num_steps)[:, None])  # [K, R]
    trained = (at <= last) & (trunk & committed | ~trunk & branches)
    at = at.clamp_(max=last)
    trained &= (batch.segments[at] == batch.segments) & batch.valid[at]
    trained &= batch.starts[at[0]]
    if complete:
        trained = trained.all(0).expand_as(trained)
    needed = trained.flip(0).cumsum(0).flip(0) > 0  # trained now or later
    steps: list[StepRows] = []
    for mask, computed in zip(trained, needed, strict=True):
        if bool(computed.any()):
            active = computed.nonzero().flatten()
            steps.append(StepRows(active, mask[active].nonzero().flatten()))
    return steps


def following_tokens(batch: PackedBatch) -> Tensor:
    """Return int64 [R], the token after each packed row; -1 at a document's end."""
    out = torch.full_like(batch.tokens, -1)
    same = batch.segments[1:] == batch.segments[:-1]
    out[:-1] = torch.where(same, batch.tokens[1:], -1)
    return out
