"""Selection on the device: the answers of the NumPy verifier, ties included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_tide.control.verifier import ABSENT, select
from vllm_tide.kernels import select_tokens as op
from vllm_tide.kernels.select_tokens import select_tokens


def instance(rng, ties, most_requests=10, most_steps=4):
    """Chances [R, K], drafted [R], a staircase and the number of plain tokens."""
    requests, steps = rng.integers(1, most_requests), rng.integers(1, most_steps)
    shape = (requests, steps)
    chance = rng.choice([0.0, 0.25, 0.5, 1.0], shape) if ties else rng.random(shape)
    drafted = rng.integers(0, steps + 1, requests)
    base = int(rng.integers(0, 6))
    rise = rng.random(base + requests * steps + 1)
    rise *= rng.random(rise.shape) < 0.3
    seconds = (1.0 + np.cumsum(rise)).astype(np.float32)
    return chance.astype(np.float32), drafted, seconds, base


def survival_of(chance, drafted):
    """float32 [K, R], as the policy hands it to the verifier."""
    survival = np.cumprod(chance.T, axis=0, dtype=np.float32)
    survival[np.arange(chance.shape[1])[:, None] >= drafted] = ABSENT
    return survival


def agrees(found, choice):
    assert found.lengths.dtype == torch.int32
    assert found.lengths.tolist() == choice.lengths.tolist()
    assert found.total.item() == choice.total
    assert found.tokens.item() == pytest.approx(choice.tokens, rel=1e-14)
    assert found.seconds.item() == choice.seconds


def compare(seed, ties, limited, barred, count):
    rng = np.random.default_rng(seed)
    chosen = 0
    for _ in range(count):
        chance, drafted, seconds, base = instance(rng, ties)
        n, sunk = len(drafted), float(rng.choice([0.0, 0.37]))
        costs = seconds[base:].astype(np.float64) + sunk
        limit = float(rng.choice(costs)) if limited else math.inf
        bar = n / costs[0] * rng.uniform(0.5, 3.0) if barred else None
        choice = select(survival_of(chance, drafted), n, costs, limit, bar)
        found = select_tokens(
            torch.from_numpy(chance),
            torch.from_numpy(seconds),
            base,
            num_drafted=torch.from_numpy(drafted),
            sunk_seconds=sunk,
            limit=limit,
            bar=bar,
        )
        agrees(found, choice)
        chosen += choice.total > 0
    assert chosen > count // 4


@pytest.mark.interpreted
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("limited", [False, True], ids=["", "limited"])
@pytest.mark.parametrize("barred", [False, True], ids=["ratio", "bar"])
def test_kernel_answers_as_the_verifier(monkeypatch, ties, limited, barred):
    monkeypatch.setattr(op, "_select_reference", None)
    monkeypatch.setattr(op, "_SCANNED", 4)  # several blocks of the scan
    monkeypatch.setattr(op, "_RANKED", 4)
    monkeypatch.setattr(op, "_OTHERS", 8)
    compare(4 * ties + 2 * limited + barred, ties, limited, barred, 12)


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("limited", [False, True], ids=["", "limited"])
@pytest.mark.parametrize("barred", [False, True], ids=["ratio", "bar"])
def test_reference_answers_as_the_verifier(ties, limited, barred):
    compare(10 + 4 * ties + 2 * limited + barred, ties, limited, barred, 100)


def large(requests=200, steps=5):
    rng = np.random.default_rng(0)
    chance = rng.random((requests, steps)).astype(np.float32) ** 0.3
    stairs = 1 + np.floor(np.arange(requests * (steps + 1) + 1) / 64) * 0.05
    seconds = stairs.astype(np.float32)
    drafted = np.full(requests, steps)
    costs = seconds[requests:].astype(np.float64)
    return chance, seconds, select(survival_of(chance, drafted), requests, costs)


@pytest.mark.interpreted
def test_a_large_batch_on_a_staircase(monkeypatch):
    monkeypatch.setattr(op, "_select_reference", None)
    chance, seconds, choice = large()
    assert 0 < choice.total < chance.size
    found = select_tokens(
        torch.from_numpy(chance), torch.from_numpy(seconds), len(chance)
    )
    agrees(found, choice)


@pytest.mark.interpreted
def test_ties_are_given_up_from_the_last_request(monkeypatch):
    monkeypatch.setattr(op, "_select_reference", None)
    seconds = torch.cat([torch.ones(8), torch.full((5,), 100.0)])
    chance = torch.tensor([[0.5, 1.0, 1.0]] * 4)
    found = select_tokens(chance, seconds, 0)
    assert found.lengths.tolist() == [3, 3, 1, 0]
    assert found.total.item() == 7


def budget_cases(chance, seconds):
    """Selections at every budget, by its argument and by the end of the table."""
    for budget in range(chance.numel() + 1):
        by_argument = select_tokens(chance, seconds, 2, budget=budget)
        by_table = select_tokens(chance, seconds[: 3 + budget].contiguous(), 2)
        costs = seconds[2:].double().numpy().copy()
        costs[budget + 1 :] = np.inf
        drafted = np.full(len(chance), chance.shape[1])
        survival = survival_of(chance.numpy(), drafted)
        choice = select(survival, len(chance), costs)
        agrees(by_argument, choice)
        agrees(by_table, choice)


@pytest.mark.interpreted
def test_a_budget_and_the_end_of_the_table_bound_the_choice(monkeypatch):
    monkeypatch.setattr(op, "_select_reference", None)
    budget_cases(torch.tensor([[0.9, 0.8], [0.7, 0.7], [1.0, 0.1]]), torch.ones(9))


def test_a_budget_bounds_the_reference_too():
    budget_cases(torch.tensor([[0.9, 0.8], [0.7, 0.7], [1.0, 0.1]]), torch.ones(9))


@pytest.mark.interpreted
def test_numbers_may_be_tensors_and_are_read_when_the_kernel_runs(monkeypatch):
    monkeypatch.setattr(op, "_select_reference", None)
    chance = torch.tensor([[0.9, 0.8], [0.7, 0.3]])
    seconds = 1.0 + 0.2 * torch.arange(9.0)
    bar = torch.tensor([0.5], dtype=torch.float64)
    many = select_tokens(chance, seconds, torch.tensor([2]), bar=bar)
    assert many.lengths.tolist() == [2, 2]
    bar.fill_(100.0)
    assert select_tokens(chance, seconds, 2, bar=bar).total.item() == 0


@pytest.mark.interpreted
def test_plain_tokens_are_not_the_requests(monkeypatch):
    """A prefill chunk emits nothing, so the same step is worth less."""
    monkeypatch.setattr(op, "_select_reference", None)
    chance, seconds = torch.tensor([[0.4], [0.4]]), torch.tensor([1.0, 1.3, 1.3])
    assert select_tokens(chance, seconds, 0, plain_tokens=2).total.item() == 2
    assert select_tokens(chance, seconds, 0, plain_tokens=4).total.item() == 0


@pytest.mark.interpreted
def test_chances_that_are_none(monkeypatch):
    monkeypatch.setattr(op, "_select_reference", None)
    nan = float("nan")
    chance = torch.tensor([[nan, 1.0], [-0.5, 1.0], [1.5, 1.5]])
    found = select_tokens(chance, torch.tensor([1.0, 1.0, 1.0, 2, 2, 2, 2]), 0)
    assert found.lengths.tolist() == [0, 0, 2]
    assert found.tokens.item() == 5.0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_choose_from(shape):
    found = select_tokens(torch.zeros(shape), torch.tensor([1.0, 2.0]), 1)
    assert found.lengths.tolist() == [0] * shape[0]
    assert [found.total.item(), found.tokens.item()] == [0, shape[0]]
    assert found.seconds.item() == 2.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chance": torch.zeros(2, 2).double()}, "chance must be"),
        ({"chance": torch.zeros(2)}, "chance must be"),
        ({"chance": torch.zeros(2, 3).T}, "neighbours in memory"),
        ({"step_seconds": torch.ones(4).half()}, "step_seconds must be fp32"),
        ({"step_seconds": torch.ones(0)}, "not empty"),
        ({"num_drafted": torch.zeros(3, dtype=torch.int64)}, r"num_drafted must be \["),
        ({"num_drafted": torch.zeros(2)}, "num_drafted must be int32"),
    ],
    ids=["double", "1d", "transposed", "half", "empty", "long", "float"],
)
def test_wrong_inputs_say_what_is_wrong(change, says):
    given = {"chance": torch.zeros(2, 2), "step_seconds": torch.ones(5)}
    with pytest.raises(ValueError, match=says):
        select_tokens(**(given | change), base_tokens=0)
