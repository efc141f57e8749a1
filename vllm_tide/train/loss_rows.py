"""Rows of each training step, with teachers and weights.

Row t, training-time-test step i predicts token x_{t+2+i} with teacher y_{t+1+i}. It is
trained iff position t+1+i lies in the same document, has a captured teacher, and its
token is generated (eagle3-training.md c.6). So the first trained row is P-1 (P prompt
tokens): the first draft after prefill. The last captured position has no teacher for
its own row.

    loss = sum_i gamma^i sum_terms w_term (sum_r m_r l_r) / (sum_r m_r)

over the rows r of step i. m_r is one over the rows of the row's request, so every
request weighs the same however long it is; both sums go over all ranks before they are
divided, so a rank with short documents weighs no more than another. Three kinds of rows
have means of their own: committed rows, those of them with a following token in the
draft vocabulary (`next_token`), and rejected branches (the two expectations of Aurora's
eq. 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_tide.draft.rows import StepRows, rows_of_steps
from vllm_tide.train.loss_terms import DISCARD, NEXT_TOKEN, LossMix

if TYPE_CHECKING:
    from vllm_tide.train.packing import BranchPlan, PackedBatch


@dataclass(frozen=True)
class Plan:
    """Rows of all steps.

    Attributes:
        steps: Rows computed and trained per step.
        targets: Per step int64 [L_i], packed index of the teacher of each loss row.
    """

    steps: list[StepRows]
    targets: list[Tensor]

    @property
    def num_loss_rows(self) -> int:
        return sum(t.numel() for t in self.targets)


def plan_steps(
    valid: Tensor, doc_ids: Tensor, num_steps: int, *, complete: bool = False
) -> Plan | None:
    """Plan the rows of every step.

    Args:
        valid: bool [N], position may serve as teacher (generated token, captured).
        doc_ids: int64 [N], document of each packed row, non-decreasing.
        complete: Keep only rows trained at every step (used by evaluation).

    Returns:
        None when nothing is trained. Steps after the last trained one are left out.
    """
    count = valid.numel()
    masks = []
    for i in range(num_steps):
        mask = torch.zeros(count, dtype=torch.bool)
        shift = i + 1
        if shift < count:
            same = doc_ids[shift:] == doc_ids[:-shift]
            mask[:-shift] = valid[shift:] & same
        masks.append(mask)
    if complete:
        every = torch.stack(masks).all(0)
        masks = [every] * num_steps
    steps = rows_of_steps(masks)
    if not steps:
        return None
    return Plan(steps, [s.active[s.loss] + 1 + i for i, s in enumerate(steps)])


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
        labels: int64 [L], from `LossRows.labels`.
        weights: float64 [L], from `request_weights`.
    """
    committed = weights.masked_fill(rows.branch, 0.0)
    return torch.stack([committed, committed * (labels >= 0), weights * rows.branch])


def sum_by_step(values: Tensor, step: Tensor, num_steps: int) -> Tensor:
    """float64 [G, num_steps]: sums of `values` [G, L] over the rows of each step."""
    out = torch.zeros(values.shape[0], num_steps, dtype=torch.float64)
    return out.index_add_(1, step, values.to(torch.float64))


# Sums a float64 vector over all ranks.
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossSums:
    """Sums over all ranks for T terms and K steps.

    Attributes:
        numerators: float64 [T, K], weighted values.
        denominators: float64 [T, K], weights; zero where a term has no row.
    """

    mix: LossMix
    numerators: Tensor
    denominators: Tensor
    num_tokens: int
    num_loss_rows: int
    num_branch_rows: int

    @property
    def means(self) -> Tensor:
        """float64 [T, K'], K' up to the last step with a row."""
        some = self.denominators > 0
        used = int(some.any(0).nonzero().max()) + 1
        mean = self.numerators / self.denominators.masked_fill(~some, 1.0)
        return mean[:, :used]

    @property
    def step_losses(self) -> list[float]:
        """Per step, the weighted sum of the terms' means."""
        means = self.means
        weights = torch.tensor(list(self.mix.weights.values()), dtype=means.dtype)
        return (weights @ means).tolist()

    @property
    def terms(self) -> dict[str, list[float]]:
        return dict(zip(self.mix.names, self.means.tolist(), strict=True))


class LossSummer:
    """Weighs the rows of one batch; one object per step.

    All on the host, where the rows were planned. One vector goes over the ranks before
    the logits (denominators: the gradient needs them) and one after (numerators: only
    reported). Every rank sends both, with or without rows.

    Args:
        reduce: Sums a float64 vector over ranks; None is one rank.
    """

    def __init__(
        self, mix: LossMix, num_steps: int, decay: float, reduce: Reduce | None = None
    ) -> None:
        self.mix, self.num_steps, self.decay = mix, num_steps, decay
        self.num_ranks = 1
        self._reduce = reduce
        self._kinds = [kind_of(name) for name in mix.names]
        self._step: Tensor | None = None
        self._by_term = torch.zeros(len(self._kinds), 0)
        self._denominators = torch.zeros(NUM_KINDS, num_steps)
        self._counts = [0, 0, 0]

    def weigh(
        self,
        rows: LossRows | None,
        labels: Tensor | None,
        keys: Sequence[int],
        num_tokens: int,
    ) -> Tensor | None:
        """Weight of each term at each row.

        Args:
            rows: This rank's L rows; None has none.

        Returns:
            float64 [T, L] (L = 0 without rows); None when no rank has a row that a
            term applies to.
        """
        sums = torch.zeros(NUM_KINDS, self.num_steps, dtype=torch.float64)
        counts = [1, num_tokens, 0, 0]
        if rows is not None and labels is not None:
            by_kind = kind_weights(rows, labels, request_weights(rows, keys))
            sums = sum_by_step(by_kind, rows.step, self.num_steps)
            self._by_term, self._step = by_kind[self._kinds], rows.step
            counts[2:] = rows.branch.numel(), rows.branch.numel() - rows.num_committed
        counted = torch.tensor(counts, dtype=torch.float64)
        vector = self._sum(torch.cat([sums.flatten(), counted]))
        self._denominators = vector[:-4].view_as(sums)[self._kinds]
        self.num_ranks, *self._counts = (int(c) for c in vector[-4:].tolist())
        if not bool((self._denominators > 0).any()):
            return None
        if self._step is None:
            return self._by_term.to(torch.float64)
        return self._by_term * self._scale()[:, self._step]

    def close(self, values: Tensor | None) -> LossSums:
        """Sum the values [T, L] of this rank (None has none) and of the others."""
        sums = torch.zeros_like(self._denominators)
        if values is not None and self._step is not None:
            weighed = values.cpu() * self._by_term
            sums = sum_by_step(weighed, self._step, self.num_steps)
        sums = self._sum(sums.flatten()).view_as(sums)
        return LossSums(self.mix, sums, self._denominators, *self._counts)

    def _scale(self) -> Tensor:
        """float64 [T, K]: w_term gamma^i / denominator; zero without a row."""
        share = self._denominators
        weights = torch.tensor(list(self.mix.weights.values()), dtype=torch.float64)
        decay = self.decay ** torch.arange(self.num_steps, dtype=torch.float64)
        inverse = torch.where(share > 0, 1.0 / share, 0.0)
        return weights[:, None] * decay * inverse

    def _sum(self, vector: Tensor) -> Tensor:
        return vector if self._reduce is None else self._reduce(vector)
