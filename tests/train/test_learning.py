"""Training on a tiny deterministic target raises held-out acceptance."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.train.toys import TOY, documents_of
from vllm_tide.config import TrainConfig
from vllm_tide.train import step
from vllm_tide.train.sample import TopK
from vllm_tide.train.trainer import Trainer


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_training_raises_held_out_acceptance(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh draft accepts next to nothing; two cycles later most of it."""
    rng = random.Random(0)
    monkeypatch.setattr(step, "COMPUTE_DTYPE", getattr(torch, dtype))
    knobs = TrainConfig(batch_tokens=256, steps_per_cycle=40, learning_rate=1e-2)
    trainer = Trainer(TOY.draft(), TOY.rows, knobs)
    trainer.add_samples(
        TOY.document(rng.randrange(64), rng.randrange(8, 40), 3, rng.getrandbits(64))
        for _ in range(150)
    )
    before = trainer.evaluate().acceptance()
    assert trainer.buffer.new_tokens > 100
    result = trainer.train_cycle()
    assert result.publish, result.reason
    assert result.live is not None and result.new is not None
    assert result.live.acceptance() == pytest.approx(before)
    trainer.published()
    again = trainer.train_cycle()
    assert again.live is not None and again.new is not None
    assert again.live.acceptance() == pytest.approx(result.new.acceptance(), abs=0.05)
    assert before < 2.0
    assert again.new.acceptance() > 3.5


def test_training_on_a_topk_teacher_raises_acceptance_too() -> None:
    """A tail bucket carries the rest of the mass."""
    knobs = TrainConfig(
        batch_tokens=256, steps_per_cycle=20, learning_rate=1e-2, holdout_share=0.2
    )
    trainer = Trainer(TOY.draft(), TOY.rows, knobs)
    for sample in documents_of(random.Random(0), 80, 24):
        logp = (sample.teacher_hidden @ TOY.head.T).log_softmax(-1)
        values, ids = logp.topk(4)
        topk = TopK(ids.int(), values, (1 - values.exp().sum(-1)).clamp_min(0).log())
        trainer.add_samples([replace(sample, teacher_hidden=None, teacher_topk=topk)])
    result = trainer.train_cycle()
    assert result.new is not None and result.live is not None
    assert result.live.acceptance() < 2.0 < 2.5 < result.new.acceptance()
