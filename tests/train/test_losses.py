"""Losses: values and gradients against autograd in float64."""

from __future__ import annotations

import pytest
import torch

from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train import losses
from vllm_tide.train.losses import Teacher, forward_kl, fused_head_loss
from vllm_tide.train.sample import TopK

ROWS, HIDDEN, VOCAB = 7, 5, 11


def _double(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_forward_kl_value_and_gradient():
    z, p = _double(ROWS, VOCAB, grad=True), _double(ROWS, VOCAB).softmax(-1)
    expected = (p * (p.log() - z.log_softmax(-1))).sum(-1)
    (grad,) = torch.autograd.grad(expected.sum(), z)
    value, ours = forward_kl(z.detach().clone(), p, (p * p.log()).sum(-1))
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(ours, grad, rtol=0, atol=1e-15)


@pytest.mark.parametrize("chunk_bytes", [4, 4 * VOCAB * 3, 1 << 20])
def test_fused_head_equals_autograd(monkeypatch, chunk_bytes):
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(losses, "HEAD_BLOCK_BYTES", 2 * chunk_bytes)
    normed, head = _double(ROWS, HIDDEN, grad=True), _double(VOCAB, HIDDEN, grad=True)
    hidden, rows = _double(4, HIDDEN), _double(VOCAB, HIDDEN)
    index, weights = torch.tensor([0, 1, 2, 3, 1, 0, 3]), torch.rand(ROWS).double()
    p = (hidden @ rows.T).softmax(-1)[index]
    per_row = (p * (p.log() - (normed @ head.T).log_softmax(-1))).sum(-1)
    expected = torch.autograd.grad((per_row * weights).sum() * 3, [normed, head])
    teacher = Teacher.from_hidden(hidden, TargetRows(rows, rows), rows, torch.float64)
    total, values = fused_head_loss(
        normed, head, head.detach(), teacher, index, weights
    )
    torch.testing.assert_close(values, per_row.detach(), rtol=0, atol=1e-13)
    ours = torch.autograd.grad(total * 3, [normed, head])
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_frozen_head_gets_no_gradient():
    normed, head = _double(ROWS, HIDDEN, grad=True), _double(VOCAB, HIDDEN)
    teacher = Teacher.from_hidden(
        _double(ROWS, HIDDEN), TargetRows(head, head), head, torch.float64
    )
    total, _ = fused_head_loss(
        normed, head, head, teacher, torch.arange(ROWS), torch.ones(ROWS).double()
    )
    total.backward()
    assert head.grad is None
    assert normed.grad is not None


def _topk(z: torch.Tensor, k: int) -> TopK:
    logp = z.log_softmax(-1)
    values, ids = logp.topk(k)
    tail = (1 - values.exp().sum(-1)).clamp_min(0).log()
    return TopK(ids.int(), values, tail)


def test_topk_teacher_is_the_bucketed_kl():
    target, z = _double(ROWS, VOCAB) * 2, _double(ROWS, VOCAB, grad=True)
    topk = _topk(target, 4)
    teacher = Teacher.from_topk(topk, VocabMap.identity(VOCAB), torch.float64)
    p, logq = topk.logprobs.exp(), z.log_softmax(-1)
    listed = logq.gather(1, topk.ids.long())
    tail = topk.tail_logprob.exp()
    rest = (1 - listed.exp().sum(-1)).log()
    expected = (p * (p.log() - listed)).sum(-1) + tail * (tail.log() - rest)
    (grad,) = torch.autograd.grad(expected.sum(), z)
    detached = z.detach().clone()
    completed, plogp = teacher.rows(torch.arange(ROWS), detached)
    value, ours = forward_kl(detached, completed, plogp)
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours, grad, rtol=0, atol=1e-12)


def test_topk_of_the_whole_vocabulary_is_the_hidden_teacher():
    hidden, rows = _double(ROWS, HIDDEN), _double(VOCAB, HIDDEN)
    whole = Teacher.from_hidden(hidden, TargetRows(rows, rows), rows, torch.float64)
    logp, ids = (hidden @ rows.T).log_softmax(-1).sort(descending=True)
    topk = TopK(ids.int(), logp, torch.full((ROWS,), float("-inf")).double())
    listed = Teacher.from_topk(topk, VocabMap.identity(VOCAB), torch.float64)
    z, index = _double(ROWS, VOCAB), torch.arange(ROWS)
    a = forward_kl(z.clone(), *listed.rows(index, z))
    b = forward_kl(z.clone(), *whole.rows(index, z))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_pruned_vocabulary_renormalises_the_teacher():
    hidden, rows = _double(ROWS, HIDDEN), _double(VOCAB, HIDDEN)
    kept = torch.tensor([1, 4, 5, 9])
    teacher = Teacher.from_hidden(
        hidden, TargetRows(rows, rows), rows[kept], torch.float64
    )
    full = (hidden @ rows.T).softmax(-1)[:, kept]
    expected = full / full.sum(-1, keepdim=True)
    torch.testing.assert_close(teacher.probs, expected)
