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

import math
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
from vllm_tide.train.packing import Batch, LossRows, PackedBatch
from vllm_tide.train.sample import TopK

CHUNK_BYTES = 2 << 20  # fp32 logits of one chunk; larger ones are paged in each time
GPU_CHUNK_BYTES = 128 << 20  # each chunk reads the whole `lm_head`
LOGIT_GRAD_BYTES = 16 << 20  # logit gradients of one GEMM for the `lm_head` gradient


# A request with fewer trained rows has less weight; else the shortest documents would
# dominate a batch.
MIN_ROWS_OF_FULL_WEIGHT = 64
NUM_KINDS = 3  # of rows that a term averages over: committed, labelled, branch
_KINDS = {NEXT_TOKEN: 1, DISCARD: 2}


Reduce = Callable[[Tensor], Tensor]
"""Sums a float64 vector over all ranks."""


@dataclass(frozen=True)
class StepResult:
    """Results of one step, over all ranks.

    Attributes:
        loss: Weighted sum over steps (gamma^i) and terms.
        step_losses: Weighted sum of the terms' means per training-time-test step.
        terms: Mean of each term at each step (nats).
    """

    loss: float
    step_losses: list[float]
    terms: dict[str, list[float]]
    num_tokens: int
    num_loss_rows: int
    num_branch_rows: int
    grad_norm: float = math.nan


def request_weights(rows: LossRows, keys: Sequence[int]) -> Tensor:
    """Return float64 [NUM_KINDS, L]: weight of each row, zero outside the kind.

    The weight is one over the rows of the row's request, at most 1/64. Committed and
    branch rows are counted separately, at step 0. Documents with equal keys are one
    request.
    """
    numbers: dict[int, int] = {}
    owner = torch.tensor([numbers.setdefault(k, len(numbers)) for k in keys])
    branch = torch.arange(rows.step.numel()) >= rows.num_committed
    place = owner[rows.doc] + len(numbers) * branch
    counts = torch.zeros(2 * len(numbers), dtype=torch.float64)
    counts.index_add_(0, place, (rows.step == 0).to(torch.float64))
    weights = (1.0 / counts.clamp(min=MIN_ROWS_OF_FULL_WEIGHT))[place]
    committed = weights.masked_fill(branch, 0.0)
    return torch.stack([committed, committed * (rows.label >= 0), weights * branch])


class LossSums:
    """Weights of the loss rows of one batch, and sums over T terms, K steps, all ranks.

    Runs on the host, where the rows are planned. One vector is reduced over the ranks
    before the logits (denominators, which the gradient needs) and one after them
    (numerators, for reports). Every rank reduces both, with or without rows.

    Args:
        batch: None: this rank has no row to train.
    """

    def __init__(
        self,
        mix: LossMix,
        num_steps: int,
        decay: float,
        reduce: Reduce | None,
        packed: PackedBatch | None,
        batch: Batch | None,
    ) -> None:
        self._mix, self._num_steps, self._decay = mix, num_steps, decay
        self._reduce = reduce
        kinds = [_KINDS.get(name, 0) for name in mix.names]
        self._step = torch.zeros(0, dtype=torch.int64)
        by_kind = torch.zeros(NUM_KINDS, 0, dtype=torch.float64)
        counts = [1, 0 if packed is None else packed.layout.num_rows, 0, 0]
        if packed is not None and batch is not None:
            rows = batch.loss
            by_kind, self._step = request_weights(rows, packed.keys), rows.step
            counts[2:] = rows.step.numel(), rows.step.numel() - rows.num_committed
        self._by_term = by_kind[kinds]
        sums = torch.cat([self._by_step(by_kind).flatten(), torch.tensor(counts)])
        sums = self._over_ranks(sums)
        self._denominators = sums[:-4].view(NUM_KINDS, num_steps)[kinds]
        self.num_ranks, *self._counts = map(int, sums[-4:].tolist())

    @property
    def is_empty(self) -> bool:
        """True if no rank has a row that a term applies to."""
        return not bool((self._denominators > 0).any())

    @property
    def weights(self) -> Tensor:
        """float64 [T, L]: w_term gamma^i m_r / denominator."""
        share = self._denominators
        decay = self._decay ** torch.arange(self._num_steps, dtype=torch.float64)
        inverse = torch.where(share > 0, 1.0 / share, 0.0)
        scale = self._term_weights[:, None] * decay * inverse
        return self._by_term * scale[:, self._step]

    def result(self, values: Tensor | None) -> StepResult:
        """Sum the values [T, L] over all ranks; None: this rank has no rows."""
        sums = torch.zeros_like(self._denominators)
        if values is not None:
            sums = self._by_step(values.cpu() * self._by_term)
        sums = self._over_ranks(sums.flatten()).view_as(sums)
        some = self._denominators > 0
        used = int(some.any(0).nonzero().max()) + 1  # up to the last step with a row
        means = (sums / self._denominators.masked_fill(~some, 1.0))[:, :used]
        losses = (self._term_weights @ means).tolist()
        return StepResult(
            sum(x * self._decay**i for i, x in enumerate(losses)),
            losses,
            dict(zip(self._mix.names, means.tolist(), strict=True)),
            *self._counts,
        )

    @property
    def _term_weights(self) -> Tensor:
        return torch.tensor(list(self._mix.weights.values()), dtype=torch.float64)

    def _by_step(self, values: Tensor) -> Tensor:
        out = torch.zeros(values.shape[0], self._num_steps, dtype=torch.float64)
        return out.index_add_(1, self._step, values.to(torch.float64))

    def _over_ranks(self, vector: Tensor) -> Tensor:
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
        reverse: Compute reverse KL.
    """

    hidden: Tensor
    target: TargetRows
    rows: Tensor
    reverse: bool

    @staticmethod
    def fits(mix: LossMix, device: torch.device) -> bool:
        """Return whether it supports these terms and this device."""
        if device.type != "cuda" or mix.names not in (("forward_kl",), ("reverse_kl",)):
            return False
        from vllm_tide.kernels.launch import HAVE_TRITON  # slow import; not for CPUs

        return HAVE_TRITON

    def compute(self, index: Tensor, z: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """Return values [n] of teacher rows `index`; write the gradient to `out`."""
        from vllm_tide.kernels.kl_loss import kl_rows

        return kl_rows(
            z,
            self.target.logits(self.hidden[index], self.rows),
            weights,
            reverse=self.reverse,
            grad_out=out,
        )


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
        mix: LossMix,
        rows: LossRows,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count, size = normed.shape[0], lm_head.shape[0]
        wide = torch.promote_types(normed.dtype, torch.float32)
        values = torch.zeros_like(weights)
        grad_normed = torch.zeros_like(normed)
        grad_rows = torch.zeros_like(master) if master.requires_grad else None
        chunk = max(1, min(count, _chunk_bytes(normed.device) // (4 * size)))
        per_block = max(1, LOGIT_GRAD_BYTES // (normed.element_size() * size * chunk))
        block = max(1, min(count, per_block * chunk))
        grads = torch.empty(block, size, dtype=normed.dtype, device=normed.device)
        split, names = rows.num_committed, mix.names
        committed = slice(0, len(mix.committed))
        branch = slice(len(mix.committed), len(names))
        for first, end, terms in ((0, split, committed), (split, count, branch)):
            if not names[terms]:
                continue
            for start, stop in _blocks(first, end, block):
                for lo, hi in _blocks(start, stop, chunk):
                    z = torch.mm(normed[lo:hi], lm_head.t())
                    g = grads[lo - start : hi - start]
                    index, weight = rows.teacher[lo:hi], weights[terms, lo:hi]
                    if isinstance(teacher, KernelTeacher):
                        values[0, lo:hi] = teacher.compute(index, z, weight[0], g)
                    else:
                        outcomes = teacher.outcomes(index, z.to(wide))
                        label = rows.label[lo:hi]
                        values[terms, lo:hi], grad = combine(
                            outcomes, mix, names[terms], weight, label
                        )
                        g.copy_(grad)
                    torch.mm(g, lm_head, out=grad_normed[lo:hi])
                if grad_rows is not None:
                    grad_rows += torch.mm(grads[: stop - start].t(), normed[start:stop])
        ctx.save_for_backward(grad_normed, grad_rows)
        ctx.mark_non_differentiable(values)
        return (values * weights).sum(), values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_normed, grad_rows = ctx.saved_tensors
        scale = grads[0]
        if grad_rows is not None:
            grad_rows = grad_rows * scale
        none = (None,) * 5
        return (grad_normed * scale).to(grad_normed.dtype), grad_rows, *none


def fused_lm_head_loss(
    normed: Tensor,
    master: Tensor,
    lm_head: Tensor,
    teacher: Teacher | KernelTeacher,
    mix: LossMix,
    rows: LossRows,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of all terms over all rows, and the terms' values.

    Args:
        normed: [L, H] output rows of the draft, compute dtype.
        master: [V_d, H] fp32 parameter that receives the gradient.
        lm_head: [V_d, H] the same in the compute dtype, detached.
        weights: [T, L], at least fp32.

    Returns:
        Scalar loss; unweighted values [T, L] (detached), zero for terms that do not
        apply.
    """
    total, values = _FusedLmHeadLoss.apply(
        normed, master, lm_head, teacher, mix, rows, weights
    )
    return total, values
