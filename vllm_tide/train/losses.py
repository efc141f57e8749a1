"""The weighted loss against the target's distribution, fused with `lm_head`.

    loss = sum_i gamma^i sum_terms w_term (sum_r m_r l_r) / (sum_r m_r)

over the rows r of step i. m_r is one over the rows of the row's request, so that all
requests have equal weight. Both sums are reduced over all ranks before the division, so
that the document lengths of a rank do not change its weight. Three kinds of rows have
separate means: committed rows, committed rows with a following token in the draft
vocabulary (`next_token`), and rejected branches (the two expectations of Aurora's
eq. 3).

Logits exist for one chunk of rows at a time and not on the autograd tape: the terms of
`loss_terms` have closed-form gradients.

Shapes: L loss rows, M teacher rows, V_d draft and V_t target vocabulary, H hidden,
T terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.loss_terms import (
    DISCARD,
    NEXT_TOKEN,
    BucketedOutcomes,
    LossMix,
    Outcomes,
    combine,
)
from vllm_tide.train.packing import LossRows
from vllm_tide.train.sample import TopK

CHUNK_BYTES = 2 << 20  # fp32 logits of one chunk; larger ones are paged in each time
GPU_CHUNK_BYTES = 128 << 20  # each chunk reads the whole `lm_head`
LOGIT_GRAD_BYTES = 16 << 20  # logit gradients of one GEMM for the `lm_head` gradient


# A request with fewer trained rows has less weight; else the shortest documents would
# dominate a batch.
MIN_ROWS_OF_FULL_WEIGHT = 64
NUM_KINDS = 3  # committed, labelled, branch
_KINDS = {NEXT_TOKEN: 1, DISCARD: 2}


def kind_of(term: str) -> int:
    """Return the kind of rows (below `NUM_KINDS`) that a term averages over."""
    return _KINDS.get(term, 0)


def request_weights(rows: LossRows, keys: Sequence[int]) -> Tensor:
    """Return float64 [L]: one over the rows of the row's request, at most 1/64.

    Committed and branch rows are counted separately, at step 0. Documents with equal
    keys are one request.
    """
    numbers: dict[int, int] = {}
    owner = torch.tensor([numbers.setdefault(k, len(numbers)) for k in keys])
    place = owner[rows.doc] + len(numbers) * rows.branch
    counts = torch.zeros(2 * len(numbers), dtype=torch.float64)
    counts.index_add_(0, place, (rows.step == 0).to(torch.float64))
    return (1.0 / counts.clamp(min=MIN_ROWS_OF_FULL_WEIGHT))[place]


def kind_weights(rows: LossRows, labels: Tensor, weights: Tensor) -> Tensor:
    """Return float64 [NUM_KINDS, L]: weight of each row, zero outside the kind."""
    committed = weights.masked_fill(rows.branch, 0.0)
    return torch.stack([committed, committed * (labels >= 0), weights * rows.branch])


def sum_by_step(values: Tensor, step: Tensor, num_steps: int) -> Tensor:
    """Sum `values` [G, L] over the rows of each step; float64 [G, num_steps]."""
    out = torch.zeros(values.shape[0], num_steps, dtype=torch.float64)
    return out.index_add_(1, step, values.to(torch.float64))


# Sums a float64 vector over all ranks.
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossSums:
    """Sums over all ranks for T terms and K steps.

    Attributes:
        numerators: float64 [T, K], weighted values.
        denominators: float64 [T, K], weights; zero for a term without rows.
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
    """Weights and sums of one batch; one object per step.

    Runs on the host, where the rows are planned. One vector is reduced over the ranks
    before the logits (denominators, which the gradient needs) and one after them
    (numerators, for reports). Every rank reduces both, with or without rows.
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
        """Return the weight of each term at each row of this rank, float64 [T, L].

        None if no rank has a row that a term applies to.
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
        """Sum the values [T, L] over all ranks; None: this rank has no rows."""
        sums = torch.zeros_like(self._denominators)
        if values is not None and self._step is not None:
            weighed = values.cpu() * self._by_term
            sums = sum_by_step(weighed, self._step, self.num_steps)
        sums = self._sum(sums.flatten()).view_as(sums)
        return LossSums(self.mix, sums, self._denominators, *self._counts)

    def _scale(self) -> Tensor:
        """Return float64 [T, K]: w_term gamma^i / denominator; zero without a row."""
        share = self._denominators
        weights = torch.tensor(list(self.mix.weights.values()), dtype=torch.float64)
        decay = self.decay ** torch.arange(self.num_steps, dtype=torch.float64)
        inverse = torch.where(share > 0, 1.0 / share, 0.0)
        return weights[:, None] * decay * inverse

    def _sum(self, vector: Tensor) -> Tensor:
        return vector if self._reduce is None else self._reduce(vector)


@dataclass(frozen=True)
class HiddenTeacher:
    """Full teacher distribution from the target's final hidden state.

    Attributes:
        probs: [M, V_d], renormalised over the draft vocabulary.
        plogp: [M] sum of p log p, at least fp32.
        mass: [M] true mass of the draft vocabulary, at least fp32; None means one.
    """

    probs: Tensor
    plogp: Tensor
    mass: Tensor | None = None

    @classmethod
    def from_hidden(
        cls,
        hidden: Tensor,
        target: TargetRows,
        rows: Tensor,
        dtype: torch.dtype,
        target_ids: Tensor | None = None,
    ) -> HiddenTeacher:
        """Compute the softmax of the target's logits.

        Args:
            hidden: [M, H] after the final norm.
            rows: [V_d, H] output rows of the draft vocabulary; all [V_t, H] rows if
                `target_ids` is given.
            target_ids: int64 [V_d] target ids of the draft vocabulary; sets `mass`.
        """
        size = rows.shape[0] if target_ids is None else target_ids.numel()
        count, device = hidden.shape[0], hidden.device
        wide = torch.promote_types(dtype, torch.float32)
        probs = torch.empty(count, size, dtype=dtype, device=device)
        plogp = torch.empty(count, dtype=wide, device=device)
        mass = None if target_ids is None else torch.empty_like(plogp)
        chunk = max(1, _chunk_bytes(device) // (4 * rows.shape[0]))
        for lo, hi in _blocks(0, count, chunk):
            z = target.logits(hidden[lo:hi].to(rows.dtype), rows).to(wide)
            if mass is not None and target_ids is not None:
                full = torch.logsumexp(z, -1)
                z = z[:, target_ids]
                mass[lo:hi] = (torch.logsumexp(z, -1) - full).exp_()
            p = torch.softmax(z, dim=-1)
            lse = z.amax(-1) - p.amax(-1).log()
            plogp[lo:hi] = torch.linalg.vecdot(p, z) - lse
            probs[lo:hi] = p
        return cls(probs, plogp, mass)

    def outcomes(self, index: Tensor, z: Tensor) -> Outcomes:
        """Combine teacher rows `index` (int64 [n]) with logits z [n, V_d]."""
        mass = None if self.mass is None else self.mass[index]
        return Outcomes(z, self.probs[index].to(z.dtype), self.plogp[index], mass)


@dataclass(frozen=True)
class TopKTeacher:
    """Teacher distribution over captured top-k tokens and one tail outcome.

    Attributes:
        ids: int64 [M, k] draft ids, -1 outside the draft vocabulary.
        probs: [M, k + 1] renormalised over the draft vocabulary, tail last.
        plogp: [M].
        mass: [M] mass before renormalising; None means one.
    """

    ids: Tensor
    probs: Tensor
    plogp: Tensor
    mass: Tensor | None = None

    @classmethod
    def from_topk(cls, topk: TopK, vocab: VocabMap) -> TopKTeacher:
        """Restrict a list and its tail to the draft vocabulary D.

        The tail counts as part of D (which share of it is in D is not captured), unless
        the list contains all of D. A row without mass in D has no gradient.
        """
        wide = torch.promote_types(topk.logprobs.dtype, torch.float32)
        ids = vocab.draft_ids[topk.ids.long()]
        inside = ids >= 0
        p = topk.logprobs.to(wide).exp().masked_fill(~inside, 0.0)
        tail = topk.tail_logprob.to(wide).exp()
        tail = tail.masked_fill(inside.sum(-1) == vocab.target_ids.numel(), 0.0)
        mass = p.sum(-1) + tail
        probs = torch.cat([p, tail[:, None]], -1)
        empty = mass <= 0
        probs = probs / mass.masked_fill(empty, 1.0)[:, None]
        probs[:, -1].masked_fill_(empty, 1.0)  # tail in proportion to q: no gradient
        plogp = torch.xlogy(probs, probs).sum(-1)
        return cls(ids, probs, plogp, None if vocab.is_identity else mass)

    def outcomes(self, index: Tensor, z: Tensor) -> Outcomes:
        return BucketedOutcomes(
            z,
            self.probs[index].to(z.dtype),
            self.plogp[index].to(z.dtype),
            None if self.mass is None else self.mass[index].to(z.dtype),
            self.ids[index],
        )


Teacher = HiddenTeacher | TopKTeacher
"""Target distribution over the draft vocabulary for M rows."""


@dataclass(frozen=True)
class KernelTeacher:
    """Full teacher distribution, not materialized: a kernel computes KL from logits.

    Attributes:
        hidden: [M, H] after the final norm, dtype of `rows`.
        target: Has scale and soft cap of the logits.
        rows: [V_d, H] output rows of the draft vocabulary.
    """

    hidden: Tensor
    target: TargetRows
    rows: Tensor

    @staticmethod
    def fits(mix: LossMix, device: torch.device) -> bool:
        """Return whether it supports these terms and this device."""
        if device.type != "cuda" or mix.names not in (("forward_kl",), ("reverse_kl",)):
            return False
        from vllm_tide.kernels.launch import HAVE_TRITON  # slow import; not for CPUs

        return HAVE_TRITON

    def compute(self, task: LossTask, part: slice, z: Tensor, out: Tensor) -> Tensor:
        """Return values [n] of loss rows with logits z; write the gradient to `out`."""
        from vllm_tide.kernels.kl_loss import kl_rows

        return kl_rows(
            z,
            self.target.logits(self.hidden[task.index[part]], self.rows),
            task.weights[0, part],
            reverse=task.mix.names == ("reverse_kl",),
            grad_out=out,
        )


@dataclass(frozen=True)
class LossTask:
    """Inputs and options of each of L loss rows.

    Attributes:
        index: int64 [L], row of the teacher.
        weights: [T, L], weight of each term at each row, at least fp32.
        labels: int64 [L], draft id of the following token, -1 none.
        num_committed: Number of leading rows with the committed terms of the mix; the
            other rows have its branch terms.
    """

    mix: LossMix
    index: Tensor
    weights: Tensor
    labels: Tensor
    num_committed: int

    def segments(self) -> list[tuple[int, int, int, int]]:
        """Return runs of rows with their terms: first row, end, first term, end."""
        first, terms = len(self.mix.committed), len(self.mix.names)
        rows, split = self.index.numel(), self.num_committed
        runs = [(0, split, 0, first), (split, rows, first, terms)]
        return [run for run in runs if run[0] < run[1] and run[2] < run[3]]


def _chunk_bytes(device: torch.device) -> int:
    return CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES


def _blocks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for lo in range(start, stop, size):
        yield lo, min(stop, lo + size)


class _FusedLmHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        master: Tensor,
        lm_head: Tensor,
        teacher: Teacher | KernelTeacher,
        task: LossTask,
    ) -> tuple[Tensor, Tensor]:
        count, size = normed.shape[0], lm_head.shape[0]
        wide = torch.promote_types(normed.dtype, torch.float32)
        values = torch.zeros_like(task.weights)
        grad_normed = torch.zeros_like(normed)
        grad_rows = torch.zeros_like(master) if master.requires_grad else None
        chunk = max(1, min(count, _chunk_bytes(normed.device) // (4 * size)))
        per_block = max(1, LOGIT_GRAD_BYTES // (normed.element_size() * size * chunk))
        block = max(1, min(count, per_block * chunk))
        grads = torch.empty(block, size, dtype=normed.dtype, device=normed.device)
        names = task.mix.names
        for first, end, low, high in task.segments():
            terms = slice(low, high)
            for start, stop in _blocks(first, end, block):
                for lo, hi in _blocks(start, stop, chunk):
                    z = torch.mm(normed[lo:hi], lm_head.t())
                    g = grads[lo - start : hi - start]
                    if isinstance(teacher, KernelTeacher):
                        values[0, lo:hi] = teacher.compute(task, slice(lo, hi), z, g)
                    else:
                        values[terms, lo:hi], grad = combine(
                            teacher.outcomes(task.index[lo:hi], z.to(wide)),
                            task.mix,
                            names[terms],
                            task.weights[terms, lo:hi],
                            task.labels[lo:hi],
                        )
                        g.copy_(grad)
                    torch.mm(g, lm_head, out=grad_normed[lo:hi])
                if grad_rows is not None:
                    grad_rows += torch.mm(grads[: stop - start].t(), normed[start:stop])
        ctx.save_for_backward(grad_normed, grad_rows)
        ctx.mark_non_differentiable(values)
        return (values * task.weights).sum(), values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_normed, grad_rows = ctx.saved_tensors
        scale = grads[0]
        if grad_rows is not None:
            grad_rows = grad_rows * scale
        return (grad_normed * scale).to(grad_normed.dtype), grad_rows, None, None, None


def fused_lm_head_loss(
    normed: Tensor,
    master: Tensor,
    lm_head: Tensor,
    teacher: Teacher | KernelTeacher,
    task: LossTask,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of all terms over all rows, and the terms' values.

    Args:
        normed: [L, H] output rows of the draft, compute dtype.
        master: [V_d, H] fp32 parameter that receives the gradient.
        lm_head: [V_d, H] the same in the compute dtype, detached.

    Returns:
        Scalar loss; unweighted values [T, L] (detached), zero for terms that do not
        apply.
    """
    total, values = _FusedLmHeadLoss.apply(normed, master, lm_head, teacher, task)
    return total, values
