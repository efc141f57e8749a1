"""Every term of the loss by its equation, and problems to compare them on.

The references are written from the papers directly on probabilities, and differentiated
by autograd; they share no code with `vllm_tide.train`. Cases: the whole vocabulary, a
pruned one, a top-k teacher with its tail as one outcome, both. Values are compared in
nats, gradients of a weighted sum over rows with respect to the draft's output rows and
LM head.

float64 shows the mathematics; float32 and bfloat16 show what training computes, against
the same references on the same rounded inputs in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.loss_terms import LossMix
from vllm_tide.train.losses import (
    HiddenTeacher,
    Teacher,
    TopKTeacher,
    fused_lm_head_loss,
)
from vllm_tide.train.packing import LossRows
from vllm_tide.train.sample import TopK

ETA, DISCARD_TOPK = 3.0, 4
CASES = ("whole", "pruned", "topk", "pruned_topk")


@dataclass
class Rows:
    """Inputs of a reference in float64; B outcomes per row.

    Attributes:
        true_p: [n, B] the target's mass; sums to less than one when pruned.
        q: [n, B] the draft's, differentiable.
        q_label: [n] the draft's probability of the token that followed.
        listed: Outcomes that are one token each (all but the tail's).
    """

    true_p: Tensor
    q: Tensor
    q_label: Tensor
    listed: int

    @property
    def p_hat(self) -> Tensor:
        """Return probabilities renormalised over the outcomes."""
        return self.true_p / self.true_p.sum(-1, keepdim=True)


def kl(a: Tensor, b: Tensor) -> Tensor:
    """Sum a log(a / b) per row; outcomes with a = 0 add nothing."""
    some = a > 0
    safe_a, safe_b = torch.where(some, a, 1.0), torch.where(some, b, 1.0)
    return (safe_a * (safe_a / safe_b).log() * some).sum(-1)


def acceptance(rows: Rows) -> Tensor:
    """Sum min(p, q)."""
    return torch.minimum(rows.true_p, rows.q).sum(-1)


def lk_hybrid(rows: Rows) -> Tensor:
    """LAMBDA KL + (1 - LAMBDA) TV, LAMBDA = exp(-eta sg[a])."""
    share = torch.exp(-ETA * acceptance(rows).detach())
    return share * kl(rows.p_hat, rows.q) + (1 - share) * (1 - acceptance(rows))


def discard(rows: Rows) -> Tensor:
    """Return the KL against the k likeliest listed tokens."""
    p = rows.p_hat[:, : rows.listed]
    cut = p.sort(-1, descending=True).values[:, min(DISCARD_TOPK, rows.listed) - 1]
    remaining = torch.where(p >= cut[:, None], p, 0.0)
    return kl(remaining / remaining.sum(-1, keepdim=True), rows.q[:, : rows.listed])


REFERENCES: dict[str, Callable[[Rows], Tensor]] = {
    "forward_kl": lambda r: kl(r.p_hat, r.q),
    "reverse_kl": lambda r: kl(r.q, r.p_hat),
    "next_token": lambda r: -r.q_label.log(),
    "lk_hybrid": lk_hybrid,
    "discard": discard,
}


@dataclass
class Problem:
    """A random problem; tensors in the compute dtype."""

    normed: Tensor
    head: Tensor
    hidden: Tensor
    rows: Tensor
    vocab: VocabMap
    labels: Tensor
    weights: Tensor
    topk: TopK | None

    def teacher(self) -> Teacher:
        """Build the teacher as training does."""
        if self.topk is not None:
            return TopKTeacher.from_topk(self.topk, self.vocab)
        target, dtype = TargetRows(self.rows, self.rows), self.normed.dtype
        if self.vocab.is_identity:
            return HiddenTeacher.from_hidden(self.hidden, target, self.rows, dtype)
        target_ids = self.vocab.target_ids
        return HiddenTeacher.from_hidden(
            self.hidden, target, self.rows, dtype, target_ids
        )

    def reference(self, normed: Tensor, head: Tensor) -> Rows:
        """Return the same inputs in float64, straight from the definitions."""
        q = (normed @ head.T).softmax(-1)
        label = q.gather(1, self.labels[:, None])[:, 0]
        target_ids = self.vocab.target_ids
        if self.topk is None:
            p = (self.hidden.double() @ self.rows.double().T).softmax(-1)
            return Rows(p[:, target_ids], q, label, target_ids.numel())
        columns_p, columns_q = [], []
        in_list = torch.zeros(q.shape[0], self.vocab.draft_ids.numel())
        in_list.scatter_(1, self.topk.ids.long(), 1.0)
        mass = torch.zeros_like(in_list, dtype=torch.float64)
        mass.scatter_(1, self.topk.ids.long(), self.topk.logprobs.double().exp())
        for j, token in enumerate(target_ids.tolist()):
            named = in_list[:, token]
            columns_p.append(mass[:, token])
            columns_q.append(q[:, j] * named)
        tail = q.sum(-1) - torch.stack(columns_q, -1).sum(-1)
        columns_p.append(self.topk.tail_logprob.double().exp())
        columns_q.append(tail)
        p, q = torch.stack(columns_p, -1), torch.stack(columns_q, -1)
        return Rows(p, q, label, target_ids.numel())


def make_problem(
    case: str, dtype: torch.dtype, rows: int, vocab: int, hidden: int, seed: int = 0
) -> Problem:
    """Return a random problem of a case."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=random, dtype=torch.float64) * scale
        return values.to(dtype)

    which = VocabMap.identity(vocab)
    if case.startswith("pruned"):
        target_ids = (
            torch.randperm(vocab, generator=random)[: vocab * 2 // 3].sort().values
        )
        which = VocabMap.from_target_ids(target_ids, vocab)
    size = which.target_ids.numel()
    problem = Problem(
        normed=draw(rows, hidden),
        head=draw(size, hidden, scale=0.7),
        hidden=draw(rows, hidden),
        rows=draw(vocab, hidden, scale=0.7),
        vocab=which,
        labels=torch.randint(0, size, (rows,), generator=random),
        weights=torch.rand(rows, generator=random, dtype=torch.float64) + 0.1,
        topk=None,
    )
    if case.endswith("topk"):
        logp = (problem.hidden.double() @ problem.rows.double().T).log_softmax(-1)
        values, ids = logp.topk(max(1, vocab // 4))
        tail = torch.log1p(-values.exp().sum(-1))
        wide = torch.promote_types(dtype, torch.float32)
        problem.topk = TopK(ids.int(), values.to(wide), tail.to(wide))
    return problem


def loss_rows(teacher: Tensor, label: Tensor, num_committed: int) -> LossRows:
    """Return loss rows of one document and step."""
    zeros = torch.zeros_like(teacher)
    return LossRows(zeros, teacher, zeros, zeros, label, num_committed)


def differences(problem: Problem, term: str) -> dict[str, float]:
    """Return the largest absolute difference of values and gradients of one term."""
    wide = torch.promote_types(problem.normed.dtype, torch.float32)
    count = problem.normed.shape[0]
    normed = problem.normed.clone().requires_grad_()
    master = problem.head.to(wide).requires_grad_()
    total, values = fused_lm_head_loss(
        normed,
        master,
        problem.head,
        problem.teacher(),
        LossMix({term: 1.0}, ETA, DISCARD_TOPK),
        loss_rows(torch.arange(count), problem.labels, count * (term != "discard")),
        problem.weights.to(wide)[None],
    )
    ours = torch.autograd.grad(total, [normed, master])
    inputs = [
        x.double().detach().clone().requires_grad_()
        for x in (problem.normed, problem.head)
    ]
    expected = REFERENCES[term](problem.reference(*inputs))
    expected_grads = torch.autograd.grad((expected * problem.weights).sum(), inputs)
    pairs = [(values[0], expected), *zip(ours, expected_grads, strict=True)]
    gaps = [float((a.double() - b).detach().abs().max()) for a, b in pairs]
    scale = max(float(w.abs().max()) for w in expected_grads)
    return {"value": gaps[0], "gradient": max(gaps[1:]), "gradient_scale": scale}
