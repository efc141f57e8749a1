"""Muon for matrices and AdamW for the rest: each as torch's own, in one state."""

from __future__ import annotations

import pytest
import torch

from tests.train.toys import ToyTarget
from vllm_tide.config import TrainConfig
from vllm_tide.train import checkpoint
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.distributed import OneRank
from vllm_tide.train.step import BETAS, MUON_RATE, TrainStep, muon_is_cheap

TOY = ToyTarget()
KNOBS = TrainConfig(batch_tokens=1024, learning_rate=5e-3)
DOCUMENTS = [TOY.document(7 * key, 30, 3, key) for key in range(4)]


def stepper(seed: int = 0, **changes) -> OneRank:
    return OneRank(TOY.draft(seed, **changes), TOY.rows, KNOBS)


def test_each_weight_moves_as_its_own_optimizer_of_torch_moves_it():
    ours = stepper(draft_vocab_size=64)
    named = ours.step.draft.named_tensors()
    matrices = {n for n, v in named.items() if any(v is m for m in ours.step.matrices)}
    assert "lm_head.weight" not in matrices and len(matrices) == 8
    assert all(named[name].ndim == 2 for name in matrices)
    twin = {name: value.detach().clone() for name, value in named.items()}
    trained = {n: twin[n] for n, v in named.items() if v.requires_grad}
    muon = torch.optim.Muon(
        [twin[n] for n in matrices], weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    rest = [value for name, value in trained.items() if name not in matrices]
    adamw = torch.optim.AdamW(rest, betas=BETAS, weight_decay=0.0, fused=True)
    for scale in (1.0, 0.5, 0.25):
        assert ours.run(DOCUMENTS, scale) is not None
        for name, value in trained.items():
            value.grad = named[name].grad.clone()
        rate = KNOBS.learning_rate * scale
        for optimizer, lr in ((muon, MUON_RATE * rate), (adamw, rate)):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        for name, value in named.items():
            assert torch.equal(value, twin[name]), name


def test_a_reset_forgets_the_moments_of_both():
    ours = stepper()
    ours.run(DOCUMENTS)
    state = ours.step.optimizer.state
    kinds = [frozenset(state[parameter]) for parameter in ours.step.parameters]
    assert set(kinds) == {
        frozenset({"momentum_buffer"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }
    assert checkpoint.optimizer_steps(ours.step) == 1
    ours.step.reset()
    assert not state and not ours.step.optimizer.muon.state


def test_moments_of_another_optimizer_are_left_out(tmp_path, monkeypatch):
    """As where one rank's checkpoint is gone on from by several, and back."""
    for saved in (True, False):
        monkeypatch.setattr(TrainStep, "whole_matrices", saved)
        first = stepper()
        first.run(DOCUMENTS)
        path = first.save(tmp_path, TrainState(steps=1))
        monkeypatch.setattr(TrainStep, "whole_matrices", not saved)
        again = stepper(seed=3)
        assert bool(again.step.matrices) != saved
        again.run(DOCUMENTS)
        assert again.load(path).steps == 1
        assert not again.step.optimizer.state
        for one, two in zip(first.step.parameters, again.step.parameters, strict=True):
            assert torch.equal(one, two)
        assert again.run(DOCUMENTS) is not None


@pytest.mark.parametrize(
    ("hidden", "mlp", "rows", "cheap"),
    [(256, 512, 1024 * 3, True), (4096, 14336, 2048 * 3, False)],
)
def test_muon_moves_matrices_only_where_it_is_cheap(hidden, mlp, rows, cheap):
    shapes = [(hidden, 3 * hidden), (hidden, hidden), (3 * mlp, hidden)]
    matrices = [torch.empty(shape, device="meta") for shape in shapes]
    lm_head = torch.empty(8 * mlp, hidden, device="meta")
    assert muon_is_cheap(matrices, [*matrices, lm_head], rows) == cheap
    assert muon_is_cheap([], [lm_head], rows)
