"""Losses of the draft against the target's distribution, fused with the LM head.

A loss is a function of logits and teacher that returns value and closed-form gradient
(eagle3-training.md c.5), so logits live only for one chunk of rows and never enter the
autograd tape. Register further losses in `LOSSES`.

Shapes: L loss rows, M teacher rows, V_d draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.sample import TopK

# (logits [n,V_d] which may be overwritten, teacher [n,V_d], sum p log p [n])
#   -> (value [n], d value / d logits [n,V_d]); all at least fp32
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

CHUNK_BYTES = 2 << 20  # fp32 logits of one chunk: larger ones are paged in each time
HEAD_BLOCK_BYTES = 16 << 20  # logit gradients kept for one GEMM of the head gradient


def forward_kl(logits: Tensor, p: Tensor, plogp: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q), gradient q - p (p sums to one)."""
    cross = torch.linalg.vecdot(p, logits)
    top = logits.amax(-1)
    q = torch.softmax(logits, dim=-1)
    lse = top - q.amax(-1).log()
    return plogp - cross + lse, q.sub_(p)


LOSSES: dict[str, Loss] = {"forward_kl": forward_kl}


@dataclass
class Teacher:
    """Target distribution over the draft vocabulary for M rows.

    Attributes:
        probs: [M, V_d], renormalised over the draft vocabulary; rows of a top-k
            teacher hold zeros outside the list.
        plogp: [M], sum of p log p (tail bucket included).
        tail: [M] mass to spread outside the list in proportion to q, or None.
    """

    probs: Tensor
    plogp: Tensor
    tail: Tensor | None = None

    @classmethod
    def from_hidden(
        cls, hidden: Tensor, target: TargetRows, rows: Tensor, dtype: torch.dtype
    ) -> Teacher:
        """Softmax of the target's logits restricted to D.

        Args:
            hidden: [M, H] after the final norm.
            target: Gives scale and soft cap of the logits.
            rows: [V_d, H] output rows of D, dtype `dtype`.
            dtype: Dtype the probabilities are stored in.
        """
        count, size = hidden.shape[0], rows.shape[0]
        wide = torch.promote_types(dtype, torch.float32)
        probs = torch.empty(count, size, dtype=dtype, device=hidden.device)
        plogp = torch.empty(count, dtype=wide, device=hidden.device)
        chunk = max(1, CHUNK_BYTES // (4 * size))
        for lo in range(0, count, chunk):
            z = target.logits(hidden[lo : lo + chunk].to(dtype), rows).to(wide)
            p = torch.softmax(z, dim=-1)
            lse = z.amax(-1) - p.amax(-1).log()
            plogp[lo : lo + chunk] = torch.linalg.vecdot(p, z) - lse
            probs[lo : lo + chunk] = p
        return cls(probs, plogp)

    @classmethod
    def from_topk(cls, topk: TopK, vocab: VocabMap, dtype: torch.dtype) -> Teacher:
        """Top-k list and tail bucket, restricted to D and renormalised.

        The tail is taken to lie in D: which part of it does is not captured.
        """
        wide = torch.promote_types(dtype, torch.float32)
        ids = vocab.draft_ids[topk.ids.long()]
        p = topk.logprobs.to(wide).exp().masked_fill(ids < 0, 0.0)
        tail = topk.tail_logprob.to(wide).exp()
        total = p.sum(-1) + tail
        p, tail = p / total[:, None], tail / total
        probs = torch.zeros(ids.shape[0], vocab.target_ids.numel(), dtype=wide)
        probs.scatter_add_(1, ids.clamp(min=0), p)
        plogp = torch.xlogy(p, p).sum(-1) + torch.xlogy(tail, tail)
        return cls(probs.to(dtype), plogp, tail)

    def rows(self, index: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher rows for `logits`: p [n, V_d] and sum p log p [n].

        A tail bucket is completed to tail * q_v / q_tail off the list; with that p the
        KL and its gradient equal those of the bucketed distribution.
        """
        p = self.probs[index].to(logits.dtype)
        plogp = self.plogp[index]
        if self.tail is None:
            return p, plogp
        tail = self.tail[index]
        log_q = torch.log_softmax(logits, dim=-1)
        off = log_q.masked_fill(p > 0, float("-inf"))
        off = off.exp()
        rest = off.sum(-1).clamp_min(1e-30)
        spread = off * (tail / rest)[:, None]
        # sum of spread log spread = tail (log tail - log rest) + sum spread log off
        entropy = torch.xlogy(tail, tail / rest) + torch.xlogy(spread, off).sum(-1)
        listed = plogp - torch.xlogy(tail, tail)
        return p + spread, listed + entropy


class _FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        master: Tensor,
        head: Tensor,
        teacher: Teacher,
        index: Tensor,
        weights: Tensor,
        loss: Loss,
    ) -> tuple[Tensor, Tensor]:
        """See `fused_head_loss`."""
        count, size = normed.shape[0], head.shape[0]
        wide = torch.promote_types(normed.dtype, torch.float32)
        values = torch.empty(count, dtype=wide, device=normed.device)
        grad_normed = torch.empty_like(normed)
        with_head = master.requires_grad
        grad_head = torch.zeros_like(master) if with_head else None
        chunk = max(1, min(count, CHUNK_BYTES // (4 * size)))
        per_block = max(1, HEAD_BLOCK_BYTES // (normed.element_size() * size * chunk))
        block = min(count, per_block * chunk)
        kept = torch.empty(block, size, dtype=normed.dtype, device=normed.device)
        for start in range(0, count, block):
            stop = min(count, start + block)
            for lo in range(start, stop, chunk):
                hi = min(stop, lo + chunk)
                z = torch.mm(normed[lo:hi], head.t()).to(wide)
                p, plogp = teacher.rows(index[lo:hi], z)
                values[lo:hi], grad = loss(z, p, plogp)
                grad.mul_(weights[lo:hi, None])
                g = kept[lo - start : hi - start]
                g.copy_(grad)
                torch.mm(g, head, out=grad_normed[lo:hi])
            if grad_head is not None:
                grad_head += torch.mm(kept[: stop - start].t(), normed[start:stop])
        ctx.save_for_backward(grad_normed, grad_head)
        ctx.mark_non_differentiable(values)
        return torch.dot(values, weights), values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients computed in the forward pass."""
        grad_normed, grad_head = ctx.saved_tensors
        scale = grads[0]
        if grad_head is not None:
            grad_head = grad_head * scale
        return (grad_normed * scale).to(grad_normed.dtype), grad_head, *[None] * 5


def fused_head_loss(
    normed: Tensor,
    master: Tensor,
    head: Tensor,
    teacher: Teacher,
    index: Tensor,
    weights: Tensor,
    loss: Loss = forward_kl,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of per-row losses, and the rows' values.

    Args:
        normed: [L, H] output rows of the draft, compute dtype.
        master: [V_d, H] fp32 parameter that receives the gradient.
        head: [V_d, H] the same in the compute dtype, detached.
        teacher: Teacher rows.
        index: int64 [L], row of `teacher` for each loss row.
        weights: [L], at least fp32.
        loss: Member of `LOSSES`.

    Returns:
        Scalar loss, and the unweighted values [L] (detached).
    """
    total, values = _FusedHeadLoss.apply(
        normed, master, head, teacher, index, weights, loss
    )
    return total, values
