"""Teachers, the fused LM head, and weights of rows, requests, steps and ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.train.loss_references import loss_rows
from tests.train.toys import VOCAB as TOY_VOCAB
from tests.train.toys import ToyTarget
from vllm_tide.config import TrainConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train import loss_terms, losses
from vllm_tide.train.loss_terms import LossMix
from vllm_tide.train.losses import HiddenTeacher, fused_lm_head_loss
from vllm_tide.train.packing import (
    Batch,
    PackedBatch,
    following_tokens,
    pack,
    plan_rows,
)
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep

ROWS, HIDDEN, VOCAB = 7, 5, 11
TOY = ToyTarget()


def _double(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _teacher(
    hidden: torch.Tensor, rows: torch.Tensor, target_ids=None
) -> HiddenTeacher:
    target = TargetRows(rows, rows)
    return HiddenTeacher.from_hidden(hidden, target, rows, torch.float64, target_ids)


@pytest.mark.parametrize("chunk_bytes", [4, 4 * VOCAB * 3, 1 << 20])
def test_fused_lm_head_equals_autograd(monkeypatch, chunk_bytes):
    """Chunks and blocks of any size; committed rows first, then branch rows."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(losses, "LOGIT_GRAD_BYTES", 2 * chunk_bytes)
    normed, head = _double(ROWS, HIDDEN, grad=True), _double(VOCAB, HIDDEN, grad=True)
    hidden, rows = _double(4, HIDDEN), _double(VOCAB, HIDDEN)
    index, weights = torch.tensor([0, 1, 2, 3, 1, 0, 3]), torch.rand(3, ROWS).double()
    labels = torch.tensor([3, 0, -1, 10, 5, -1, -1])
    p = (hidden @ rows.T).softmax(-1)[index]
    log_q = (normed @ head.T).log_softmax(-1)
    expected = torch.zeros(3, ROWS).double()
    expected[0] = (p * (p.log() - log_q)).sum(-1)
    expected[1] = -log_q.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    expected[1] = expected[1] * (labels >= 0)
    expected[2] = expected[0]  # discard that filters nothing
    used = torch.ones(3, ROWS, dtype=torch.bool)
    used[:2, 5:], used[2, :5] = False, False
    expected_grads = torch.autograd.grad(
        (expected * used * weights).sum() * 3, [normed, head]
    )
    mix = LossMix(
        {"forward_kl": 1.0, "next_token": 1.0, "discard": 1.0}, discard_topk=VOCAB
    )
    total, values = fused_lm_head_loss(
        normed,
        head,
        head.detach(),
        _teacher(hidden, rows),
        mix,
        loss_rows(index, labels, 5),
        weights,
    )
    torch.testing.assert_close(values, (expected * used).detach(), rtol=0, atol=1e-13)
    ours = torch.autograd.grad(total * 3, [normed, head])
    torch.testing.assert_close(ours, expected_grads, rtol=0, atol=1e-13)


def _with_branch(sample: Sample, position: int, size: int) -> Sample:
    """Reject `size` random tokens after a position."""
    branch = TOY.branch(position, torch.randint(0, TOY_VOCAB, (size,)))
    return replace(sample, branches=(*sample.branches, branch))


def _documents() -> list[Sample]:
    sizes = [(5, 20, 4, 1), (9, 7, 2, 2), (3, 90, 1, 3), (8, 12, 3, 3)]
    out = [TOY.document(*s) for s in sizes]
    out[0] = _with_branch(_with_branch(out[0], 6, 3), 11, 1)
    out[2] = _with_branch(out[2], 40, 4)
    return out


def test_labels_outside_the_draft_vocabulary_are_none():
    packed = pack(_documents()[:1])
    (step,) = steps = plan_rows(packed, 1, branches=False)
    vocab = VocabMap.from_target_ids(torch.arange(0, TOY_VOCAB, 2), TOY_VOCAB)
    labels = Batch.from_plan(packed, steps, vocab.draft_ids).loss.label
    # Row t predicts token t + 2; the last row has none.
    tokens = following_tokens(packed)[step.active[step.loss] + 1]
    for token, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert label == (token // 2 if token >= 0 and token % 2 == 0 else -1)


def test_no_chain_begins_where_the_memory_drafted():
    """Its rows remain context, and teachers of chains that began before them."""
    document = TOY.document(5, 20, 4, 1)
    memory = torch.zeros(document.num_tokens, dtype=torch.bool)
    memory[12:15] = True
    packed = pack([replace(document, by_memory=memory)])
    taught: set[int] = set()
    for number, (step, other) in enumerate(
        zip(plan_rows(packed, 4), plan_rows(pack([document]), 4), strict=True)
    ):
        rows = other.active[other.loss]  # row t is taught by position t + 1 first
        rows = rows[~memory[rows + 1]]
        assert torch.equal(step.active[step.loss], rows)
        taught.update((rows + 1 + number).tolist())
    assert taught >= {12, 13, 14}


def _reference_loss(
    draft: Eagle3Draft, batch: PackedBatch, config: TrainConfig
) -> torch.Tensor:
    """L = sum_i gamma^i sum_terms w N_i / D_i, row by row."""
    plan = plan_rows(batch, config.ttt_steps)
    starts, trunk = batch.layout.doc_starts, batch.layout.num_trunk
    weights = draft.compute_weights(torch.float32)
    outputs = draft.forward_steps(batch.rows(plan), weights)
    kinds: dict[str, list[list[tuple[int, torch.Tensor]]]] = {}
    for i, out in enumerate(outputs):
        for r, at in enumerate(plan[i].active[plan[i].loss].tolist()):
            t, d = at + i + (at < trunk), int(batch.segments[at])
            d = d if at < trunk else batch.layout.docs[d - len(batch.keys)]
            log_q = (draft.tensor("lm_head.weight") @ out[r]).log_softmax(-1)
            y = batch.teacher[t]
            p = (TOY.head @ y).softmax(-1)
            losses = {}
            if at >= trunk:
                top = p.topk(loss_terms.DISCARD_TOPK)
                f = top.values / top.values.sum()
                losses["discard"] = (f * (f.log() - log_q[top.indices])).sum()
            else:
                losses["forward_kl"] = (p * (p.log() - log_q)).sum()
                if t + 1 < starts[d + 1]:
                    losses["next_token"] = -log_q[batch.tokens[t + 1]]
            for name, value in losses.items():
                steps = kinds.setdefault(name, [[] for _ in outputs])
                steps[i].append((batch.keys[d], value))
    total = torch.zeros(())
    for name, steps in kinds.items():
        kind = "discard" if name == "discard" else "forward_kl"
        sizes: dict[int, int] = {}
        for key, _ in kinds[kind][0]:
            sizes[key] = sizes.get(key, 0) + 1
        for i, rows in enumerate(steps):
            m = [1 / max(64, sizes[key]) for key, _ in rows]
            mean = sum(w * v for w, (_, v) in zip(m, rows, strict=True)) / sum(m)
            total = total + config.loss[name] * draft.step_decay**i * mean
    return total


def test_loss_of_a_batch_is_the_sum_of_per_step_means():
    config = TrainConfig(loss={"discard": 0.3, "forward_kl": 1.0, "next_token": 0.2})
    draft, batch = TOY.draft(), pack(_documents())
    made = TrainStep(draft, TOY.rows, config)
    losses = made.loss_of(batch)
    assert losses is not None
    total, result = losses
    expected = _reference_loss(draft, batch, config)
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    ours = torch.autograd.grad(total, made.parameters)
    expected_grads = torch.autograd.grad(expected, made.parameters)
    for a, b in zip(ours, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert result.num_branch_rows == (3 + 2 + 1) + 1 + (4 + 3 + 2)
    weighted = sum(x * 0.8**i for i, x in enumerate(result.step_losses))
    assert weighted == pytest.approx(float(expected.detach()), rel=1e-5)


def test_branches_are_unused_unless_discard_is_named():
    plain = [replace(d, branches=()) for d in _documents()]
    losses_of = []
    for documents in (_documents(), plain):
        result = TrainStep(TOY.draft(), TOY.rows, TrainConfig()).run(pack(documents))
        assert result is not None
        assert result.num_branch_rows == 0
        losses_of.append((result.loss, result.grad_norm))
    assert losses_of[0] == pytest.approx(losses_of[1], rel=1e-5)


def test_discard_alone_trains_on_branch_rows_only():
    config = TrainConfig(loss={"discard": 1.0}, learning_rate=1e-2)
    step, batch = TrainStep(TOY.draft(), TOY.rows, config), pack(_documents())
    first = step.run(batch)
    for _ in range(10):
        last = step.run(batch)
    assert first is not None
    assert last is not None
    assert first.num_loss_rows == first.num_branch_rows == 16
    assert last.loss < first.loss
    assert step.run(pack(_documents()[3:])) is None


def test_infinite_gradient_changes_nothing():
    documents = _documents()
    features = documents[0].features.clone()
    features[5] = float("nan")
    documents[0] = replace(documents[0], features=features)
    draft = TOY.draft()
    before = [t.detach().clone() for t in draft.named_tensors().values()]
    assert TrainStep(draft, TOY.rows, TrainConfig()).run(pack(documents)) is None
    after = draft.named_tensors().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
