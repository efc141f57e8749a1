"""Top-k teacher: the tokens of a stable sort, the numbers of log_softmax."""

from __future__ import annotations

import pytest
import torch

from vllm_tide.kernels import topk_teacher as op
from vllm_tide.kernels.topk_teacher import topk_teacher, topk_teacher_reference


def draw(rows, vocab, dtype, scale=3.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=random) * scale).to(dtype)


def same(monkeypatch, logits, k):
    """Compare kernel and reference; the reference must not be called."""
    expected = topk_teacher_reference(logits, min(k, logits.shape[1]))
    monkeypatch.setattr(op, "topk_teacher_reference", None)
    result = topk_teacher(logits, k)
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert torch.equal(result.ids, expected.ids)
    exact = logits.double().log_softmax(-1).gather(-1, expected.ids.long())
    tail = 1.0 - exact.exp().sum(-1)
    close = {"rtol": 1e-6, "atol": 2e-6}
    for teacher in (result, expected):
        logprobs = teacher.logprobs.double()
        torch.testing.assert_close(logprobs, exact, **close)
        # The tail is a difference from one: it is compared as a probability.
        mass = teacher.tail_logprob.double().exp()
        torch.testing.assert_close(mass, tail, **close)
    return result


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("rows", "vocab", "k", "dtype"),
    [
        (3, 131, 8, torch.bfloat16),
        (2, 7, 64, torch.float16),
        (5, 64, 1, torch.float32),
        (2, 4000, 64, torch.float32),
        *(
            pytest.param(*shape, dtype, marks=pytest.mark.nightly)
            for shape in [(1, 1, 1), (3, 131, 8), (2, 1000, 64), (2, 7, 64), (1, 65, 3)]
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ),
    ],
)
def test_the_kernel_lists_the_references_tokens(monkeypatch, dtype, rows, vocab, k):
    monkeypatch.setattr(op, "MIN_BLOCK", 64 if vocab < 1000 else 256)
    same(monkeypatch, draw(rows, vocab, dtype), k)


@pytest.mark.nightly
@pytest.mark.interpreted
@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_large_vocabulary(monkeypatch, vocab):
    logits = draw(1, vocab, torch.bfloat16)
    result = same(monkeypatch, logits, 20)
    # bfloat16 has few values near the top, so ties were settled.
    assert (result.logprobs[0].diff() == 0).any()


@pytest.mark.interpreted
def test_equal_logits_are_ordered_by_id(monkeypatch):
    monkeypatch.setattr(op, "MIN_BLOCK", 32)
    logits = torch.zeros(3, 200)
    logits[1, ::2] = -0.0  # equal to 0.0
    logits[2, 3] = 1.0
    result = same(monkeypatch, logits, 5)
    assert result.ids[:2].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert result.ids[2].tolist() == [3, 0, 1, 2, 4]


@pytest.mark.interpreted
def test_forbidden_tokens_come_last_and_leave_no_tail(monkeypatch):
    monkeypatch.setattr(op, "MIN_BLOCK", 16)
    logits = torch.full((2, 50), float("-inf"))
    logits[0, [40, 3]] = torch.tensor([2.0, 1.0])
    logits[1, 20:] = draw(1, 30, torch.float32)[0]
    result = same(monkeypatch, logits, 6)
    assert result.ids[0].tolist() == [40, 3, 0, 1, 2, 4]
    assert result.logprobs[0, 2:].isneginf().all()
    # The remainder of one after rounding: nothing, or the last bit.
    assert result.tail_logprob[0].exp() <= 2e-7


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value")
def test_invalid_rows_are_nan(monkeypatch):
    monkeypatch.setattr(op, "topk_teacher_reference", None)
    logits = draw(4, 40, torch.float32)
    logits[0, 7], logits[1], logits[2, 3] = float("nan"), -float("inf"), float("inf")
    result = topk_teacher(logits, 4)
    assert result.logprobs[:3].isnan().any(-1).all()
    assert result.tail_logprob[:3].isnan().all()
    assert result.logprobs[3].isfinite().all()


@pytest.mark.interpreted
def test_strided_rows_and_no_rows(monkeypatch):
    wide = draw(4, 90, torch.float32)
    same(monkeypatch, wide[::2, 10:83], 7)
    result = topk_teacher(wide[:0], 7)
    assert [tuple(t.shape) for t in result] == [(0, 7), (0, 7), (0,)]


def test_the_reference_equals_captures_formula():
    """The formula of engine/staging.py, where no two logits are equal."""
    logits, k = draw(6, 500, torch.float32), 8
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top, ids = logprobs.topk(k, dim=-1)
    tail = torch.log1p(-top.exp().sum(dim=-1).clamp(max=1.0))
    result = topk_teacher_reference(logits, k)
    assert torch.equal(result.ids, ids.to(torch.int32))
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(result.logprobs, top, **close)
    torch.testing.assert_close(result.tail_logprob.exp(), tail.exp(), **close)


@pytest.mark.parametrize(
    ("logits", "k", "says"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), 1, "logits must be"),
        (torch.zeros(3), 1, "logits must be"),
        (torch.zeros(2, 0), 1, "logits must be"),
        (torch.zeros(2, 3).T, 1, "contiguous rows"),
        (torch.zeros(2, 3), 0, "k must be"),
    ],
    ids=["float64", "1d", "empty", "transposed", "zero"],
)
def test_wrong_inputs_give_a_message(logits, k, says):
    with pytest.raises(ValueError, match=says):
        topk_teacher(logits, k)
