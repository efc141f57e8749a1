"""Terms of the loss: values and gradients against their equations in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.train.loss_references import CASES, differences, make_problem
from vllm_tide.config import ConfigError, TrainConfig
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.loss_terms import FLOOR, LossMix, Outcomes, combine
from vllm_tide.train.losses import TopKTeacher
from vllm_tide.train.sample import TopK

ROWS, VOCAB = 7, 11
TEACHER_TERMS = ("forward_kl", "reverse_kl", "lk_hybrid", "discard")
TERMS = (*TEACHER_TERMS, "next_token")
ALL_TV = 1e9  # `lk_eta` at which `lk_hybrid` is the total variation


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _outcomes(z: torch.Tensor, p: torch.Tensor, mass=None) -> Outcomes:
    return Outcomes(z, p, torch.xlogy(p, p).sum(-1), mass)


def _one(term: str, outcomes: Outcomes, **knobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return value [n] and gradient [n, V] of one term."""
    count = outcomes.z.shape[0]
    values, grad = combine(
        outcomes,
        LossMix({term: 1.0}, **knobs),
        [term],
        torch.ones(1, count, dtype=outcomes.z.dtype),
        torch.full((count,), -1),
    )
    return values[0], grad


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("term", TERMS)
def test_value_and_gradient_follow_the_equation(term, case):
    for rows, vocab, hidden in ((13, 37, 9), (1, 5, 3), (3, 130, 17)):
        problem = make_problem(case, torch.float64, rows, vocab, hidden)
        gaps = differences(problem, term)
        assert gaps["value"] < 1e-13
        assert gaps["gradient"] < 1e-13 * max(1.0, gaps["gradient_scale"])


@pytest.mark.parametrize("term", TERMS)
def test_bfloat16_and_float32_are_close_to_float64(term):
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 0.1)):
        if term == "discard" and dtype == torch.bfloat16:
            continue  # the rounded teacher may take another token at the cut
        for case in CASES:
            gaps = differences(make_problem(case, dtype, 13, 37, 9), term)
            assert gaps["value"] < limit
            assert gaps["gradient"] < limit * max(1.0, gaps["gradient_scale"])


def test_gradient_at_a_tie_follows_the_equation():
    # q <= p counts a tie as accepted: -q (1 - s) on ties and below, q s above
    p = torch.tensor([[0.25, 0.5, 0.25]]).double()
    q = torch.tensor([[0.25, 0.25, 0.5]]).double()
    _, grad = _one("lk_hybrid", _outcomes(q.log(), p), lk_eta=ALL_TV)
    s = 0.5
    expected = torch.tensor([[-0.25 * (1 - s), -0.25 * (1 - s), 0.5 * s]]).double()
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-15)


def test_teacher_has_no_mass_on_some_tokens():
    z = _double(ROWS, VOCAB)
    p = _double(ROWS, VOCAB).softmax(-1)
    p[:, ::2] = 0.0
    p = p / p.sum(-1, keepdim=True)
    q = z.softmax(-1)
    some = p > 0
    logs = torch.where(some, (p / q).log(), 0.0)
    value, grad = _one("forward_kl", _outcomes(z, p))
    torch.testing.assert_close(value, (p * logs).sum(-1), rtol=0, atol=1e-14)
    torch.testing.assert_close(grad, q - p, rtol=0, atol=1e-15)
    # reverse KL would be infinite: the teacher counts as FLOOR there
    value, grad = _one("reverse_kl", _outcomes(z, p))
    ratio = (q / p.clamp_min(FLOOR)).log()
    torch.testing.assert_close(value, (q * ratio).sum(-1))
    torch.testing.assert_close(grad, q * (ratio - value[:, None]))
    value, _ = _one("lk_hybrid", _outcomes(z, p), lk_eta=ALL_TV)
    expected = 1 - torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("term", TEACHER_TERMS)
def test_draft_has_no_mass_on_the_teachers_token(term):
    # exp(-300) is zero in float32: logarithms come from the logits, not from q
    z = torch.zeros(1, 3)
    z[0, 0] = 300.0
    p = torch.tensor([[0.0, 0.75, 0.25]])
    value, grad = _one(term, _outcomes(z, p))
    assert value.isfinite().all()
    assert grad.isfinite().all()
    if term == "forward_kl":
        assert float(value) == pytest.approx(
            300 + 0.75 * math.log(0.75) + 0.25 * math.log(0.25)
        )
        torch.testing.assert_close(grad, torch.tensor([[1.0, -0.75, -0.25]]))


def _listed(
    ids: list[list[int]], p: list[list[float]], tail: list[float], vocab: VocabMap
) -> TopKTeacher:
    logs = torch.tensor(p, dtype=torch.float64).log()
    other = torch.tensor(tail, dtype=torch.float64).log()
    return TopKTeacher.from_topk(TopK(torch.tensor(ids).int(), logs, other), vocab)


def test_draft_has_no_mass_on_the_tail():
    # the draft's mass off the list is exp(-400): the pull upwards must survive
    z = torch.full((1, 4), -400.0)
    z[0, 1] = 0.0
    z[0, 3] = -401.0
    teacher = _listed([[1]], [[0.5]], [0.5], VocabMap.identity(4))
    value, grad = _one("forward_kl", teacher.outcomes(torch.tensor([0]), z))
    off = torch.tensor([-400.0, -400.0, -401.0]).double()
    expected = -0.5 * float(off.logsumexp(-1)) + 2 * 0.5 * math.log(0.5)
    assert float(value) == pytest.approx(expected)
    within = off.softmax(-1)
    pull = [-0.5 * float(within[0]), 0.5, -0.5 * float(within[1])]
    assert grad[0].tolist() == pytest.approx([*pull, -0.5 * float(within[2])])


def test_a_list_of_a_whole_pruned_vocabulary_drops_the_tail():
    vocab = VocabMap.from_target_ids(torch.tensor([2, 5]), 8)
    teacher = _listed([[5, 0, 2]], [[0.4, 0.3, 0.1]], [0.2], vocab)
    assert teacher.mass is not None
    assert float(teacher.mass) == pytest.approx(0.5)
    assert teacher.probs[0].tolist() == pytest.approx([0.8, 0.0, 0.2, 0.0])
    z = _double(1, 2)
    q = z.softmax(-1)
    value, grad = _one("forward_kl", teacher.outcomes(torch.tensor([0]), z))
    p = torch.tensor([[0.2, 0.8]]).double()
    torch.testing.assert_close(value, (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(grad, q - p)


@pytest.mark.parametrize("term", TEACHER_TERMS)
def test_a_row_without_mass_in_the_vocabulary_has_no_loss(term):
    vocab = VocabMap.from_target_ids(torch.tensor([2, 5, 6]), 8)
    teacher = _listed([[0, 1]], [[0.6, 0.4]], [0.0], vocab)
    outcomes = teacher.outcomes(torch.tensor([0]), _double(1, 3))
    value, grad = _one(term, outcomes)
    assert value.isfinite().all()
    torch.testing.assert_close(grad, torch.zeros(1, 3).double(), rtol=0, atol=1e-15)


def test_all_weights_zero_is_refused():
    with pytest.raises(ConfigError, match=r"train\.loss: every weight is zero"):
        LossMix.from_config(TrainConfig(loss={"forward_kl": 0.0}))


def test_discard_comes_last_and_is_the_only_branch_term():
    loss = {"discard": 0.5, "reverse_kl": 0.0, "lk_hybrid": 2.0, "next_token": 1}
    mix = LossMix.from_config(TrainConfig(loss=loss))
    assert mix.names == ("lk_hybrid", "next_token", "discard")
    assert mix.committed == ("lk_hybrid", "next_token")
    assert mix.branch == ("discard",)
    assert mix.needs_mass
