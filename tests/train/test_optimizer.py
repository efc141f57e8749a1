"""AdamW moves what is trained, as torch's own, and its moments travel."""

from __future__ import annotations

import torch

from tests.train.toys import ToyTarget
from vllm_tide.config import TrainConfig
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.distributed import OneRank
from vllm_tide.train.step import BETAS

TOY = ToyTarget()
KNOBS = TrainConfig(batch_tokens=1024, learning_rate=5e-3)
DOCUMENTS = [TOY.document(7 * key, 30, 3, key) for key in range(4)]


def stepper(seed: int = 0, **changes) -> OneRank:
    return OneRank(TOY.draft(seed, **changes), TOY.rows, KNOBS)


def test_each_weight_moves_as_torch_moves_it():
    ours = stepper(draft_vocab_size=64)
    named = ours.step.draft.named_tensors()
    twin = {name: value.detach().clone() for name, value in named.items()}
    trained = {n: twin[n] for n, v in named.items() if v.requires_grad}
    adamw = torch.optim.AdamW(
        trained.values(), betas=BETAS, weight_decay=0.0, fused=True
    )
    for scale in (1.0, 0.5, 0.25):
        assert ours.run(DOCUMENTS, scale) is not None
        for name, value in trained.items():
            value.grad = named[name].grad.clone()
        adamw.param_groups[0]["lr"] = KNOBS.learning_rate * scale
        adamw.step()
        for name, value in named.items():
            assert torch.equal(value, twin[name]), name


def test_moments_of_which_some_are_missing_are_left_out(tmp_path):
    """As in a checkpoint of an earlier version, which moved matrices otherwise."""
    first = stepper()
    first.run(DOCUMENTS)
    matrix = next(p for p in reversed(first.step.parameters) if p.ndim == 2)
    del first.step.optimizer.state[matrix]
    path = first.save(tmp_path, TrainState(steps=1))
    again = stepper(seed=3)
    again.run(DOCUMENTS)
    assert again.load(path).steps == 1
    assert not again.step.optimizer.state
    for one, two in zip(first.step.parameters, again.step.parameters, strict=True):
        assert torch.equal(one, two)
    assert again.run(DOCUMENTS) is not None
