"""The weighted loss against the target's distribution, fused with the draft's LM head.

Logits live only for one chunk of rows and never enter the autograd tape: the terms of
`loss_terms` give their gradients in closed form.

Shapes: L loss rows, M teacher rows, V_d draft and V_t target vocabulary, H hidden,
T terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.loss_terms import BucketedOutcomes, LossMix, Outcomes, combine
from vllm_tide.train.sample import TopK

CHUNK_BYTES = 2 << 20  # fp32 logits of one chunk: larger ones are paged in each time
GPU_CHUNK_BYTES = 128 << 20  # each reads the whole LM head
HEAD_BLOCK_BYTES = 16 << 20  # logit gradients kept for one GEMM of the head gradient


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
            target: Gives scale and soft cap of the logits.
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
        rows = self.index.numel()
        runs = [(0, self.num_committed, 0, first)]
        runs.append((self.num_committed, rows, first, terms))
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
        task: Terms, weights and labels per row.

    Returns:
        Scalar loss; unweighted values [T, L] (detached), zero where a term does not
        apply.
    """
    total, values = _FusedHeadLoss.apply(normed, master, head, teacher, task)
    return total, values
