"""The weighted loss against the target's distribution, fused with the draft's LM head.

    loss = sum_i gamma^i sum_terms w_term (sum_r m_r l_r) / (sum_r m_r)

over the rows r of step i. m_r is one over the rows of the row's request, so every
request weighs the same however long it is; both sums go over all ranks before they are
divided, so a rank with short documents weighs no more than another. Three kinds of rows
have means of their own: committed rows, those of them with a following token in the
draft vocabulary (`next_token`), and rejected branches (the two expectations of Aurora's
eq. 3).

Logits live only for one chunk of rows and never enter the autograd tape: the terms of
`loss_terms` give their gradients in closed form.

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

CHUNK_BYTES = 2 << 20  # fp32 logits of one chunk: larger ones are paged in each time
GPU_CHUNK_BYTES = 128 << 20  # each reads the whole LM head
HEAD_BLOCK_BYTES = 16 << 20  # logit gradients kept for one GEMM of the head gradient


# A request with fewer trained rows than this weighs less than a full one, so that
# equal weight per request does not hand a batch to its shortest documents.
MIN_ROWS_OF_FULL_WEIGHT = 64
NUM_KINDS = 3  # committed, labelled, branch
_KINDS = {NEXT_TOKEN: 1, DISCARD: 2}


def kind_of(term: str) -> int:
    """Kind of rows, of `NUM_KINDS`, that a term is a mean over."""
    return _KINDS.get(term, 0)


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
    """float64 [NUM_KINDS, L]: weight of each row, zero outside the kind."""
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
        """Weight of each term at each of this rank's rows, float64 [T, L].

        None when no rank has a row that a term applies to.
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


@dataclass(frozen=True)
class HiddenTeacher:
    """The whole distribution, from the target's final hidden state.

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
        kept: Tensor | None = None,
    ) -> HiddenTeacher:
        """Softmax of the target's logits.

        Args:
            hidden: [M, H] after the final norm.
            rows: [V_d, H] output rows of the draft vocabulary; with `kept`, all
                [V_t, H] rows.
            kept: int64 [V_d] target ids of the draft vocabulary: `mass` is wanted.
        """
        size = rows.shape[0] if kept is None else kept.numel()
        count, device = hidden.shape[0], hidden.device
        wide = torch.promote_types(dtype, torch.float32)
        probs = torch.empty(count, size, dtype=dtype, device=device)
        plogp = torch.empty(count, dtype=wide, device=device)
        mass = None if kept is None else torch.empty_like(plogp)
        chunk = max(1, _chunk_bytes(device) // (4 * rows.shape[0]))
        for lo, hi in _blocks(0, count, chunk):
            z = target.logits(hidden[lo:hi].to(rows.dtype), rows).to(wide)
            if mass is not None and kept is not None:
                whole = torch.logsumexp(z, -1)
                z = z[:, kept]
                mass[lo:hi] = (torch.logsumexp(z, -1) - whole).exp_()
            p = torch.softmax(z, dim=-1)
            lse = z.amax(-1) - p.amax(-1).log()
            plogp[lo:hi] = torch.linalg.vecdot(p, z) - lse
            probs[lo:hi] = p
        return cls(probs, plogp, mass)

    def outcomes(self, index: Tensor, z: Tensor) -> Outcomes:
        """Teacher rows `index` (int64 [n]) beside logits z [n, V_d]."""
        mass = None if self.mass is None else self.mass[index]
        return Outcomes(z, self.probs[index].to(z.dtype), self.plogp[index], mass)


@dataclass(frozen=True)
class TopKTeacher:
    """A captured top-k list, and all other tokens as one outcome.

    Attributes:
        ids: int64 [M, k] draft ids, -1 outside the draft vocabulary.
        probs: [M, k + 1] renormalised over the draft vocabulary, the rest last.
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

        The tail is taken to lie in D (which part of it does was not captured), unless
        the list names all of D. A row with no mass in D teaches nothing.
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
        probs[:, -1].masked_fill_(empty, 1.0)  # the rest, in proportion to q: no pull
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
    """The whole distribution, never in memory: a kernel takes the KL of logits.

    Attributes:
        hidden: [M, H] after the final norm, dtype of `rows`.
        target: Gives scale and soft cap of the logits.
        rows: [V_d, H] output rows of the draft vocabulary.
    """

    hidden: Tensor
    target: TargetRows
    rows: Tensor

    @staticmethod
    def fits(mix: LossMix, device: torch.device) -> bool:
        """True if it gives on this device what `HiddenTeacher` gives."""
        if device.type != "cuda" or mix.names not in (("forward_kl",), ("reverse_kl",)):
            return False
        from vllm_tide.kernels.launch import HAVE_TRITON  # slow: not on a CPU

        return HAVE_TRITON

    def pull(self, task: LossTask, part: slice, z: Tensor, grad_out: Tensor) -> Tensor:
        """Values [n] of loss rows with logits z; their gradient goes to `grad_out`."""
        from vllm_tide.kernels.kl_loss import kl_rows

        return kl_rows(
            z,
            self.target.logits(self.hidden[task.index[part]], self.rows),
            task.weights[0, part],
            reverse=task.mix.names == ("reverse_kl",),
            grad_out=grad_out,
        )


@dataclass(frozen=True)
class LossTask:
    """Inputs and options of each of L loss rows.

    Attributes:
        index: int64 [L], row of the teacher.
        weights: [T, L], weight of each term at each row, at least fp32.
        labels: int64 [L], draft id of the token that followed, -1 none.
        num_committed: Rows before this one get the mix's committed terms, the others
            its branch terms.
    """

    mix: LossMix
    index: Tensor
    weights: Tensor
    labels: Tensor
    num_committed: int

    def segments(self) -> list[tuple[int, int, int, int]]:
        """Runs of rows with their terms: first row, end, first term, end."""
        first, terms = len(self.mix.committed), len(self.mix.names)
        rows, split = self.index.numel(), self.num_committed
        runs = [(0, split, 0, first), (split, rows, first, terms)]
        return [run for run in runs if run[0] < run[1] and run[2] < run[3]]


def _chunk_bytes(device: torch.device) -> int:
    return CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES


def _blocks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for lo in range(start, stop, size):
        yield lo, min(stop, lo + size)


class _FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        master: Tensor,
        head: Tensor,
        teacher: Teacher | KernelTeacher,
        task: LossTask,
    ) -> tuple[Tensor, Tensor]:
        count, size = normed.shape[0], head.shape[0]
        wide = torch.promote_types(normed.dtype, torch.float32)
        values = torch.zeros_like(task.weights)
        grad_normed = torch.zeros_like(normed)
        grad_head = torch.zeros_like(master) if master.requires_grad else None
        chunk = max(1, min(count, _chunk_bytes(normed.device) // (4 * size)))
        per_block = max(1, HEAD_BLOCK_BYTES // (normed.element_size() * size * chunk))
        block = max(1, min(count, per_block * chunk))
        kept = torch.empty(block, size, dtype=normed.dtype, device=normed.device)
        names = task.mix.names
        for first, end, low, high in task.segments():
            terms = slice(low, high)
            for start, stop in _blocks(first, end, block):
                for lo, hi in _blocks(start, stop, chunk):
                    z = torch.mm(normed[lo:hi], head.t())
                    g = kept[lo - start : hi - start]
                    if isinstance(teacher, KernelTeacher):
                        values[0, lo:hi] = teacher.pull(task, slice(lo, hi), z, g)
                    else:
                        values[terms, lo:hi], grad = combine(
                            teacher.outcomes(task.index[lo:hi], z.to(wide)),
                            task.mix,
                            names[terms],
                            task.weights[terms, lo:hi],
                            task.labels[lo:hi],
                        )
                        g.copy_(grad)
                    torch.mm(g, head, out=grad_normed[lo:hi])
                if grad_head is not None:
                    grad_head += torch.mm(kept[: stop - start].t(), normed[start:stop])
        ctx.save_for_backward(grad_normed, grad_head)
        ctx.mark_non_differentiable(values)
        return (values * task.weights).sum(), values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_normed, grad_head = ctx.saved_tensors
        scale = grads[0]
        if grad_head is not None:
            grad_head = grad_head * scale
        return (grad_normed * scale).to(grad_normed.dtype), grad_head, None, None, None


def fused_head_loss(
    normed: Tensor,
    master: Tensor,
    head: Tensor,
    teacher: Teacher | KernelTeacher,
    task: LossTask,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of all terms over all rows, and the terms' values.

    Args:
        normed: [L, H] output rows of the draft, compute dtype.
        master: [V_d, H] fp32 parameter that receives the gradient.
        head: [V_d, H] the same in the compute dtype, detached.

    Returns:
        Scalar loss; unweighted values [T, L] (detached), zero where a term does not
        apply.
    """
    total, values = _FusedHeadLoss.apply(normed, master, head, teacher, task)
    return total, values
