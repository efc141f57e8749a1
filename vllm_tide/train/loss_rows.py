"""Which row is taught by what, and how much it weighs.

    loss = sum_i gamma^i sum_terms w_term (sum_r m_r l_r) / (sum_r m_r)

over the rows r of step i. m_r is one over the rows of the row's request, so every
request weighs the same however long it is; both sums go over all ranks before they are
divided, so a rank with short documents weighs no more than another. Three kinds of rows
have means of their own: committed rows, those of them with a following token in the
draft vocabulary (`next_token`), and rejected branches (the two expectations of Aurora's
eq. 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_tide.train.loss_terms import DISCARD, NEXT_TOKEN

if TYPE_CHECKING:
    from vllm_tide.train.branch_rows import BranchPlan
    from vllm_tide.train.masks import Plan
    from vllm_tide.train.packing import PackedBatch

# A request with fewer trained rows than this weighs less than a full one, so that
# equal weight per request does not hand a batch to its shortest documents.
MIN_ROWS_OF_FULL_WEIGHT = 64
NUM_KINDS = 3  # committed, labelled, branch
_KINDS = {NEXT_TOKEN: 1, DISCARD: 2}


def kind_of(term: str) -> int:
    """Which of the `NUM_KINDS` kinds of rows a term is a mean over."""
    return _KINDS.get(term, 0)


@dataclass(frozen=True)
class LossRows:
    """L loss rows: committed rows of every step, then branch rows of every step.

    Attributes:
        teacher: int64 [L], index into the teacher rows [N trunk | M branch].
        step: int64 [L], training-time-test step.
        doc: int64 [L], document of the batch.
        token: int64 [L], target id of the token that really followed, -1 none.
        branch: bool [L], rejected branch row.
    """

    teacher: Tensor
    step: Tensor
    doc: Tensor
    token: Tensor
    branch: Tensor

    @property
    def num_committed(self) -> int:
        """Rows before the first branch row."""
        return self.branch.numel() - int(self.branch.sum())

    @classmethod
    def from_plan(
        cls, batch: PackedBatch, plan: Plan | None, branches: BranchPlan | None = None
    ) -> LossRows:
        """Rows of a batch, in the order of `gather`."""
        follows = following_tokens(batch)
        trunk = [] if plan is None else plan.targets
        off = [] if branches is None else branches.targets
        teacher = [*trunk, *off]
        if not teacher:
            raise ValueError("neither plan has a row with a loss.")
        sizes = [t.numel() for t in teacher]
        steps = torch.tensor([*range(len(trunk)), *range(len(off))])
        repeats = torch.tensor(sizes)
        return cls(
            teacher=torch.cat(teacher),
            step=torch.repeat_interleave(steps, repeats),
            doc=torch.cat(
                [batch.doc_ids[t] for t in trunk]
                + ([] if branches is None else branches.docs)
            ),
            token=torch.cat(
                [follows[t] for t in trunk]
                + ([] if branches is None else branches.tokens)
            ),
            branch=torch.arange(sum(sizes)) >= sum(sizes[: len(trunk)]),
        )

    def labels(self, draft_ids: Tensor) -> Tensor:
        """int64 [L], draft id of the following token; -1 none, outside D, or a branch.

        Args:
            draft_ids: int64 [V_t], -1 outside the draft vocabulary.
        """
        none = (self.token < 0) | self.branch
        return draft_ids[self.token.clamp(min=0)].masked_fill(none, -1)


def following_tokens(batch: PackedBatch) -> Tensor:
    """int64 [N], the token after each packed row; -1 at the end of a document."""
    out = torch.full_like(batch.tokens, -1)
    same = batch.doc_ids[1:] == batch.doc_ids[:-1]
    out[:-1] = torch.where(same, batch.tokens[1:], -1)
    return out


def gather(
    outputs: Sequence[Tensor], plan: Plan | None, branches: BranchPlan | None = None
) -> Tensor:
    """Outputs of `forward_ttt` in the order of `LossRows`, [L, H].

    Args:
        outputs: Per step, the trunk's loss rows, then the branches'.
        plan: As planned for the trunk.
        branches: As planned for the branches.
    """
    sizes = [] if plan is None else [t.numel() for t in plan.targets]
    sizes += [0] * (len(outputs) - len(sizes))
    if branches is None:
        return torch.cat(list(outputs))
    halves = [(out[:n], out[n:]) for out, n in zip(outputs, sizes, strict=True)]
    return torch.cat([trunk for trunk, _ in halves] + [off for _, off in halves])


def request_weights(rows: LossRows, keys: Sequence[int]) -> Tensor:
    """float64 [L]: one over the rows of the row's request, at most 1/64.

    Committed and branch rows are counted apart, at step 0. Documents with one key are
    one request.

    Args:
        rows: The rows.
        keys: Request key of each document.
    """
    numbers: dict[int, int] = {}
    owner = torch.tensor([numbers.setdefault(k, len(numbers)) for k in keys])
    place = owner[rows.doc] + len(numbers) * rows.branch
    counts = torch.zeros(2 * len(numbers), dtype=torch.float64)
    counts.index_add_(0, place, (rows.step == 0).to(torch.float64))
    return (1.0 / counts.clamp(min=MIN_ROWS_OF_FULL_WEIGHT))[place]


def kind_weights(rows: LossRows, labels: Tensor, weights: Tensor) -> Tensor:
    """float64 [NUM_KINDS, L]: weight of each row, zero outside the kind.

    Args:
        rows: The rows.
        labels: int64 [L], from `LossRows.labels`.
        weights: float64 [L], from `request_weights`.
    """
    committed = weights.masked_fill(rows.branch, 0.0)
    return torch.stack([committed, committed * (labels >= 0), weights * rows.branch])


def sum_by_step(values: Tensor, step: Tensor, num_steps: int) -> Tensor:
    """float64 [G, num_steps]: sums of `values` [G, L] over the rows of each step."""
    out = torch.zeros(values.shape[0], num_steps, dtype=torch.float64)
    return out.index_add_(1, step, values.to(torch.float64))
