"""KL losses: values and gradients of the definitions in float64, and of training's."""

from __future__ import annotations

import math

import pytest
import torch

from tests.train.loss_references import loss_rows
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.kernels import kl_loss as op
from vllm_tide.kernels.kl_loss import FLOOR, kl_rows, kl_rows_reference
from vllm_tide.train import loss_terms, losses
from vllm_tide.train.loss_terms import LossMix
from vllm_tide.train.losses import (
    HiddenTeacher,
    KernelTeacher,
    fused_lm_head_loss,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest relative rounding of a gradient stored in each dtype. The interpreter
# truncates to bfloat16, unlike a GPU, so it is a whole step.
STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
KINDS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def draw(*shape, scale=2.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random) * scale


def by_definition(z, t, weights, reverse):
    """Return values, and the gradient by autograd, in float64."""
    z = z.double().detach().requires_grad_()
    p, q = t.double().softmax(-1), z.softmax(-1)
    if reverse:
        values = (q * (q / p.clamp_min(FLOOR)).log()).sum(-1)
    else:
        values = (p * (p / q).log()).sum(-1)
    (grad,) = torch.autograd.grad((values * weights.double()).sum(), z)
    return values.detach(), grad


def check(z, t, weights, reverse):
    grad = torch.empty_like(z)
    values = kl_rows(z, t, weights, reverse=reverse, grad_out=grad)
    assert torch.equal(kl_rows(z, t, weights, reverse=reverse), values)
    expected, slope = by_definition(z, t, weights, reverse)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=2e-6, atol=1e-5)
    largest = float(slope.abs().max()) if slope.numel() else 0.0
    torch.testing.assert_close(
        grad.double(), slope, rtol=STEP[z.dtype], atol=1e-6 + 2e-6 * largest
    )


@pytest.mark.interpreted
@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 131), (1, 64), (2, 65)])
def test_the_kernel_equals_the_definition(monkeypatch, dtype, reverse, rows, size):
    monkeypatch.setattr(op, "MAX_BLOCK", 64)
    monkeypatch.setattr(op, "kl_rows_reference", None)
    z, t = draw(rows, size).to(dtype), draw(rows, size, seed=1).to(dtype)
    check(z, t, torch.linspace(0.1, 1.0, rows), reverse)


@pytest.mark.interpreted
@KINDS
def test_large_vocabulary(monkeypatch, reverse):
    monkeypatch.setattr(op, "kl_rows_reference", None)
    z, t = draw(1, 262_144), draw(1, 262_144, scale=3.0, seed=1)
    check(z, t, torch.ones(1), reverse)


@pytest.mark.interpreted
@KINDS
def test_strided_rows_and_no_rows(monkeypatch, reverse):
    monkeypatch.setattr(op, "kl_rows_reference", None)
    z, t = draw(6, 50)[::2, 3:44], draw(3, 90, seed=1)[:, 20:61]
    check(z, t, torch.ones(3), reverse)
    none = kl_rows(z[:0], t[:0], torch.ones(0), reverse=reverse)
    assert none.shape == (0,)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("interpreted", [True, False], ids=["kernel", "reference"])
def test_impossible_tokens_add_nothing(monkeypatch, interpreted):
    """Logits of -inf: p = 0 forward, q = 0 reverse, and p = 0 < q at the floor."""
    if not interpreted:
        monkeypatch.setattr(op, "runs_triton", lambda *tensors: False)
    inf = float("inf")
    z, t = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, -inf]])
    grad = torch.empty_like(z)
    ones = torch.ones(1)
    value = kl_rows(z, t, ones, reverse=False, grad_out=grad)
    assert value.item() == pytest.approx(math.log(1.5), rel=1e-6)
    assert grad[0].tolist() == pytest.approx([-1 / 6, -1 / 6, 1 / 3], rel=1e-5)
    value = kl_rows(t, z, ones, reverse=True, grad_out=grad)
    assert value.item() == pytest.approx(math.log(1.5), rel=1e-6)
    assert grad[0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    value = kl_rows(z, t, ones, reverse=True, grad_out=grad)
    expected = -math.log(3) - (2 * math.log(0.5) + math.log(FLOOR)) / 3
    assert value.item() == pytest.approx(expected, rel=1e-6)
    assert grad.isfinite().all()


def problem(pruned):
    """Return rows of a draft, its LM head, a teacher with more rows than one each."""
    hidden, rows = draw(4, 9, scale=1.0, seed=1), draw(60, 9, scale=0.7, seed=2)
    vocab = VocabMap.identity(60)
    if pruned:
        vocab = VocabMap.from_target_ids(torch.arange(0, 60, 3), 60)
    head = draw(vocab.target_ids.numel(), 9, scale=0.7, seed=3)
    index = torch.tensor([0, 1, 2, 3, 1, 0, 3])
    return draw(7, 9, scale=1.0, seed=4), head, hidden, rows, vocab, index


@pytest.mark.interpreted
@KINDS
@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
@pytest.mark.parametrize("chunk_bytes", [1, 60 * 4 * 3, 1 << 20])
def test_loss_and_gradients_equal_those_of_training(
    monkeypatch, reverse, pruned, chunk_bytes
):
    """Against train/losses.py: same weights, same rows, same LM head of the draft."""
    monkeypatch.setattr(op, "kl_rows_reference", None)
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    normed, head, hidden, rows, vocab, index = problem(pruned)
    term = "reverse_kl" if reverse else "forward_kl"
    weights = torch.linspace(0.1, 1.0, 7)[None]
    target_ids, mix = vocab.target_ids, LossMix({term: 1.0})
    at = loss_rows(index, torch.full_like(index, -1), 7)
    target = TargetRows(rows, rows, logit_scale=0.5, logit_softcap=2.0)
    taught = HiddenTeacher.from_hidden(hidden, target, rows[target_ids], torch.float32)
    a, b = normed.clone().requires_grad_(), head.clone().requires_grad_()
    expected, theirs = fused_lm_head_loss(a, b, b.detach(), taught, mix, at, weights)
    (expected * 3).backward()
    close = {"rtol": 1e-5, "atol": 2e-6}

    x, y = normed.clone().requires_grad_(), head.clone().requires_grad_()
    assert KernelTeacher.fits(mix, torch.device("cuda"))
    assert not KernelTeacher.fits(
        LossMix({term: 1.0, "next_token": 0.1}), torch.device("cuda")
    )
    kernel = KernelTeacher(hidden, target, rows[target_ids], reverse)
    total, values = fused_lm_head_loss(x, y, y.detach(), kernel, mix, at, weights)
    (total * 3).backward()
    for ours, its in ((values, theirs), (x.grad, a.grad), (y.grad, b.grad)):
        torch.testing.assert_close(ours, its, **close)


@KINDS
def test_the_reference_equals_the_definition(reverse):
    z, t = draw(5, 40).double(), draw(5, 40, seed=1).double()
    weights, grad = torch.rand(5).double(), torch.empty_like(z)
    values = kl_rows_reference(z, t, weights, reverse=reverse, grad_out=grad)
    expected, slope = by_definition(z, t, weights, reverse)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(grad, slope, rtol=0, atol=1e-13)


def test_the_floor_equals_trainings():
    assert FLOOR == loss_terms.FLOOR


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"draft_logits": torch.zeros(2)}, "draft_logits must be"),
        ({"draft_logits": torch.zeros(4, 2).T}, "draft_logits .* contiguous"),
        ({"teacher_logits": torch.zeros(2, 5)}, "teacher_logits must be"),
        ({"weights": torch.ones(2).half()}, "weights must be"),
        ({"grad_out": torch.zeros(2, 3)}, "grad_out must be"),
    ],
    ids=["1d", "transposed", "width", "half", "grad"],
)
def test_wrong_inputs_give_a_message(change, says):
    given = {
        "draft_logits": torch.zeros(2, 4),
        "teacher_logits": torch.zeros(2, 4),
        "weights": torch.ones(2),
    }
    with pytest.raises(ValueError, match=says):
        kl_rows(**(given | change), reverse=False)
