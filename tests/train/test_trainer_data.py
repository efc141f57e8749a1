"""Records that the trainer uses and learns from; pruned drafts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train.toys import (
    KNOBS,
    TOY,
    VOCAB,
    documents_of,
    small,
    toy_trainer,
    weights_of,
)
from tests.train.toys import config as shape
from vllm_tide.config import TrainConfig
from vllm_tide.draft import VocabMap
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.train import step
from vllm_tide.train.assemble import VERIFY
from vllm_tide.train.evaluate import evaluate
from vllm_tide.train.reservoir import SampleBuffer, in_holdout
from vllm_tide.train.sample import Branch, TopK
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport.record import Record

pytestmark = pytest.mark.usefixtures("small")

__all__ = ["small"]


def pruned_draft(target_ids: torch.Tensor) -> Eagle3Draft:
    vocab = VocabMap.from_target_ids(target_ids, VOCAB)
    config = shape(draft_vocab_size=target_ids.numel())
    return Eagle3Draft.initialise(config, TOY.embed, TOY.head, vocab)


def test_acceptance_mass_includes_tokens_outside_the_draft_vocabulary():
    target_ids = torch.arange(0, VOCAB, 2)
    sample = TOY.document(1, 30, 1, 5)
    result = evaluate(pruned_draft(target_ids), TOY.rows, [sample], 1)
    p = torch.softmax(sample.teacher_hidden @ TOY.head.T, -1)[:, target_ids]
    accepted = [(result.acceptance(form) - 1) * 29 for form in ("mass", "greedy")]
    assert accepted[0] <= float(p[1:].sum(-1).sum()) + 1e-4
    assert accepted[1] <= result.num_rows == 29


def test_rows_outside_the_draft_vocabulary_are_not_trained():
    draft = pruned_draft(torch.arange(0, VOCAB, 2))
    trainer = Trainer(draft, TOY.rows, TrainConfig(**KNOBS))
    key = next(k for k in range(100) if not in_holdout(k, 0.3))
    document = TOY.document(1, 30, 1, key)
    trainer.add_samples([document])
    (stored,) = trainer.buffer.train
    assert torch.equal(stored.in_vocab[:-1], document.tokens[1:] % 2 == 0)
    assert trainer.train_cycle().steps == 1


def test_a_candidate_that_is_not_finite_shows_in_the_loss():
    trainer = toy_trainer()
    trainer.train_cycle()
    assert trainer.last_loss > 0
    trainer.draft.take({n: t * np.nan for n, t in trainer.snapshot().items()})
    assert trainer.train_cycle().reason == "no row could be trained"
    assert np.isnan(trainer.last_loss)


@pytest.mark.parametrize("changes", [{}, {"tenant_share": 0.5}, {"max_passes": 3}])
def test_no_document_is_trained_on_more_often_than_max_passes(changes):
    trainer = toy_trainer(0, steps_per_cycle=20, **changes)
    seen, rng, run = Counter(), random.Random(3), trainer.stepper.run

    def counted(samples, *how):
        seen.update(sample.key for sample in samples)
        return run(samples, *how)

    trainer.stepper.run = counted
    most = trainer.config.max_passes
    for _ in range(4):
        for n in range(9):
            document = TOY.document(rng.randrange(VOCAB), 40, 3, rng.getrandbits(64))
            trainer.buffer.add(replace(document, tenant=n % 3))
        before = seen.copy()
        result = trainer.train_cycle()
        if result.publish and not result.steps:  # first the scored ones
            result = trainer.train_cycle()
        assert result.steps > 0
        assert max((seen - before).values()) <= 4
        assert max(seen.values()) <= most
    if not changes:  # and none starves: new ones have their four
        newest = [s.key for s in trainer.buffer.train[-3:]]
        assert min(seen[key] for key in newest) >= 3


def test_records_of_any_draft_version_are_trained_on():
    """Features and teacher come from the target, whichever draft made the tokens."""
    trainer = toy_trainer(0)
    document = TOY.document(1, 20, 3, 77)
    record = Record(
        77, VERIFY, 0, 3, 19, -1, 99,
        document.tokens.numpy(),
        document.features.numpy(), 0, document.teacher_hidden.numpy(), finished=True,
    )  # fmt: skip
    trainer.add_records([record], 0.0)
    assert trainer.buffer.num_samples == 1
    assert trainer.rows_read == 20


def test_tokens_outside_the_vocabulary_are_refused_and_counted():
    trainer = toy_trainer(0)
    document = TOY.document(1, 20, 3, 7)
    trainer.add_samples(
        [
            replace(document, tokens=document.tokens + 60),
            replace(document, tokens=document.tokens - VOCAB),
        ]
    )
    assert trainer.rows_skipped == {"token_out_of_range": 40}
    assert not trainer.buffer.num_samples


@pytest.mark.parametrize("odd", ["feature", "teacher", "topk", "branch", "logprob"])
def test_a_document_with_invalid_numbers_is_left_out(odd):
    """One such row would cost every batch it is packed into."""
    trainer, reason = toy_trainer(0), "not_finite"
    document = TOY.document(1, 20, 3, 7)
    if odd in ("feature", "teacher"):
        name = {"feature": "features", "teacher": "teacher_hidden"}[odd]
        values = getattr(document, name).clone()
        values[4, 0] = float("nan") if odd == "feature" else float("inf")
        document = replace(document, **{name: values})
    elif odd == "branch":
        reason, rows = "token_out_of_range", slice(5, 6)
        tokens = torch.tensor([VOCAB], dtype=torch.int32)
        branch = Branch(5, tokens, document.features[rows], None)
        document = replace(document, branches=(branch,))
    else:
        ids = torch.zeros(20, 2, dtype=torch.int32)
        logprobs = torch.full((20, 2), -1.0)
        if odd == "topk":
            reason = "token_out_of_range"
            ids[3, 1] = -1
        else:
            logprobs[3, 1] = float("nan")
        tail = torch.full((20,), -float("inf"))
        document = replace(
            document, teacher_hidden=None, teacher_topk=TopK(ids, logprobs, tail)
        )
    trainer.add_samples([document, TOY.document(2, 20, 3, 8)])
    assert trainer.rows_skipped == {reason: 20}
    assert trainer.buffer.num_samples == 1


def test_buffers_stay_bounded_and_keep_the_newest():
    buffer = SampleBuffer(TrainConfig(**{**KNOBS, "buffer_tokens": 1024}))
    for key in range(300):
        buffer.add(TOY.document(1, 20, 3, key))
        assert buffer.train_tokens <= 1024
        assert buffer.holdout_tokens <= 512
    newest = max(k for k in range(300) if not in_holdout(k, 0.3))
    assert buffer.train[-1].key == newest
    assert buffer.evicted["train"] > 0
    assert not {s.key for s in buffer.train} & {s.key for s in buffer.holdout}


def test_a_pruned_vocabulary_follows_the_targets_tokens():
    ids = torch.arange(VOCAB // 2)
    config = TrainConfig(batch_tokens=256, steps_per_cycle=4, holdout_share=0.3)
    trainer = Trainer(pruned_draft(ids), TOY.rows, config)
    assert trainer.vocabulary is not None
    trainer.vocabulary.counts[VOCAB // 2 :] = 10_000.0
    trainer.add_samples(TOY.document(k % VOCAB, 60, 3, k) for k in range(20))
    before = trainer.snapshot()
    trainer.train_cycle()
    new = trainer.draft.vocab.target_ids
    assert int((new >= VOCAB // 2).sum()) == VOCAB - VOCAB // 2
    assert torch.equal(trainer.live.vocab.target_ids, ids)
    sent = trainer.candidate_tensors()
    assert torch.equal(sent["d2t"], trainer.draft.vocab.d2t) and "t2d" not in sent
    trainer.published()
    assert torch.equal(trainer.live.vocab.target_ids, new)
    published = trainer.snapshot()
    trainer.restore(before)
    assert torch.equal(trainer.draft.vocab.target_ids, ids)
    assert torch.equal(trainer.live.tensor("fc.weight"), before["fc.weight"])
    trainer.restore(published)
    assert torch.equal(trainer.live.vocab.target_ids, new)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_training_raises_holdout_acceptance(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh draft accepts almost nothing; two cycles later most of it."""
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
    """A tail bucket carries the remaining mass."""
    knobs = TrainConfig(
        batch_tokens=256, steps_per_cycle=20, learning_rate=1e-2, holdout_share=0.2
    )
    trainer = Trainer(TOY.draft(), TOY.rows, knobs)
    trainer.rate = 1.0
    for sample in documents_of(random.Random(0), 80, 24):
        logp = (sample.teacher_hidden @ TOY.head.T).log_softmax(-1)
        values, ids = logp.topk(4)
        topk = TopK(ids.int(), values, (1 - values.exp().sum(-1)).clamp_min(0).log())
        trainer.add_samples([replace(sample, teacher_hidden=None, teacher_topk=topk)])
    result = trainer.train_cycle()
    assert result.new is not None and result.live is not None
    assert result.live.acceptance() < 2.0 < 2.5 < result.new.acceptance()


def test_a_batch_with_a_gradient_that_is_not_finite_changes_nothing():
    trainer = toy_trainer(0, holdout_share=1e-9)
    document = TOY.document(1, 20, 3, 7)
    huge = torch.full_like(document.features, 3e38)  # finite, and its sums are not
    trainer.add_samples([replace(document, features=huge)])
    before = weights_of(trainer.draft)
    trainer.train_cycle()
    assert trainer.skipped["unusable_batch"] > 0
    assert torch.equal(weights_of(trainer.draft), before)
