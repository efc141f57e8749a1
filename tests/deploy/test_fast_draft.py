"""The fast draft's steps against algorithm 1, its scores, and its decay."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from tests.draft.test_dflash import plain_block, shape
from tests.sidecar.test_sidecar import KNOBS, Engine, attach
from tests.train.toys import TOY, VOCAB, toy_trainer
from tests.transport.samples import write_record
from vllm_tide.deploy.fast_draft import RATES, FastDraft, FastStep, Gain
from vllm_tide.draft import DFlashDraft
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.tensor_bytes import from_bytes
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train import step as steps
from vllm_tide.train.assemble import Assembler
from vllm_tide.train.packing import pack
from vllm_tide.transport.record import Phase, Record

PREFILL, VERIFY = Phase
PROMPT, DEPTH = 4, 3


def rows_of(tokens):
    """Return features and teachers of tokens, whatever came before them."""
    x = torch.tensor(tokens)
    return TOY.features(x), TOY.head[TOY.next_token(x)]


def record(key, start, tokens, accepted, phase=VERIFY, **more) -> Record:
    features, hidden = rows_of([max(0, token) for token in tokens])
    return Record(
        key, phase, start, PROMPT, accepted, -1, 0, np.array(tokens, np.int32),
        features.numpy(), 0, hidden.numpy(), **more,
    )  # fmt: skip


class Stream:
    """An open request: a prompt, then verify steps with rejected tokens."""

    def __init__(self, key: int, seed: int = 0) -> None:
        self.key, self.random = key, np.random.default_rng(seed)
        self.tokens = [int(self.random.integers(VOCAB))]
        for _ in range(PROMPT - 1):
            self.tokens.append(self.follows(self.tokens[-1]))

    def follows(self, token: int) -> int:
        return int(TOY.next_token(torch.tensor(token)))

    def prefill(self) -> Record:
        return record(self.key, 0, self.tokens, PROMPT - 1, PREFILL)

    def verify(self, accepted: int | None = None, **more) -> Record:
        """Draft `DEPTH` tokens, of which so many are right."""
        if accepted is None:
            accepted = int(self.random.integers(DEPTH + 1))
        start, rows = len(self.tokens), [self.follows(self.tokens[-1])]
        for i in range(DEPTH):
            right = self.follows(rows[-1])
            rows.append(right if i < accepted else (right + 1 + i) % VOCAB)
        self.tokens += rows[: accepted + 1]
        return record(self.key, start, rows, accepted, **more)


class Reference:
    """Algorithm 1 in float64: drafts of a row, and one step of Adam on it."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self.draft, config = draft, draft.config
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.w = {
            name: tensor.detach().double().clone().requires_grad_()
            for name, tensor in draft.named_tensors().items()
        }
        self.adam = torch.optim.Adam(self.w.values(), RATES["exact"], (0.9, 0.95))

    def norm(self, x, name):
        scale = x.pow(2).mean(-1, keepdim=True) + self.draft.config.rms_norm_eps
        return x * scale.rsqrt() * self.w[name]

    def rotated(self, x, positions):
        angle = positions[:, None, None] * self.draft._inv_freq.double()
        cos, sin = angle.cos().float(), angle.sin().float()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(self, tokens, hidden, positions, keys, values):
        """Compute one layer for n rows; the last one attends to all keys."""
        at, size = "midlayer.self_attn.", len(tokens)
        e = self.norm(TOY.embed[tokens].double(), "midlayer.input_layernorm.weight")
        z = torch.cat([e, self.norm(hidden, "midlayer.hidden_norm.weight")], -1)
        q, k, v = (
            (z @ self.w[f"{at}{n}_proj.weight"].T).view(size, -1, 8) for n in "qkv"
        )
        keys.append(self.rotated(k, positions)), values.append(v)
        k, v = (
            torch.cat(x).repeat_interleave(self.heads // self.kv, 1)
            for x in (keys, values)
        )
        q = self.rotated(q, positions)[-1]
        score = torch.einsum("hd,khd->hk", q, k) * 8**-0.5
        mixed = torch.einsum("hk,khd->hd", score.softmax(-1), v).flatten()
        a = hidden[-1] + self.w[f"{at}o_proj.weight"] @ mixed
        post = self.norm(a, "midlayer.post_attention_layernorm.weight")
        gate, up = (
            self.w[f"midlayer.mlp.{n}_proj.weight"] @ post for n in ("gate", "up")
        )
        return a + self.w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def update(self, before, chain):
        """Run one step; `before` tokens are committed, `chain` was drafted from."""
        features, _ = rows_of(before)
        hidden = features.double() @ self.w["fc.weight"].T
        inputs = torch.tensor([*before[1:], chain[0]])
        positions = torch.arange(len(before)).double()
        keys, values, loss = [], [], 0.0
        for i, token in enumerate(chain):
            out = self.layer(inputs, hidden, positions, keys, values)
            q = (self.w["lm_head.weight"] @ self.norm(out, "norm.weight")).log_softmax(
                -1
            )
            _, teacher = rows_of([token])
            p = (teacher[0].double() @ TOY.head.double().T).log_softmax(-1)
            loss = loss + 0.8**i * (p.exp() * (p - q)).sum()
            inputs, hidden = torch.tensor([*chain, 0])[i + 1 : i + 2], out[None]
            positions = positions[-1:] + 1
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.w.values(), 1.0)
        self.adam.step()


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    made.manifest = replace(
        made.manifest,
        tide={
            "train": KNOBS,
            "test_time": {"adapt": "exact", "stride": 1, "min_tokens": 0},
        },
    )
    made.announce()
    yield made
    made.close()


def until_stepped(sidecar) -> None:
    before = sidecar.fast.steps
    for _ in range(100_000):  # it sleeps as long as it worked
        assert sidecar._tick()
        if sidecar.fast.steps > before:
            return
    raise AssertionError("no step was made")


def test_exact_is_test_time_speculation_and_restores_the_base(engine, monkeypatch):
    clone = Eagle3Draft.clone
    monkeypatch.setattr(Eagle3Draft, "clone", lambda d, *a: clone(d, *a).double())
    monkeypatch.setattr(steps, "COMPUTE_DTYPE", torch.float64)
    # However slow the machine, each step is published.
    monkeypatch.setattr("vllm_tide.deploy.fast_draft.PUBLISH_SHARE", math.inf)
    sidecar = attach(engine)
    base = {name: t.clone() for name, t in sidecar.trainer.live.named_tensors().items()}
    reference, stream = Reference(sidecar.trainer.live), Stream(7)
    assert write_record(engine.ring, stream.prefill())
    for _ in range(50):
        before = list(stream.tokens)
        verify = stream.verify()
        assert write_record(engine.ring, verify)
        until_stepped(sidecar)
        reference.update(before, verify.token_ids[:-1].tolist())
        installed = engine.weights.latest_version()
        engine.weights.report(installed, 0, "", 1.0)
    assert sidecar.fast.steps == 50
    for name, tensor in sidecar.fast.draft.named_tensors().items():
        torch.testing.assert_close(tensor, reference.w[name], rtol=0, atol=1e-6)
        moved = (tensor - base[name]).abs().max()
        assert moved > 1e-4, name
    assert write_record(engine.ring, stream.verify(finished=True))
    assert sidecar._tick()
    assert sidecar.fast.draft is None
    back = engine.weights.read()
    assert back.version == 100  # an even step; each of 50 was published
    for name, tensor in from_bytes(back.tensors).items():
        assert torch.equal(tensor, base[name])
        assert torch.equal(sidecar.trainer.live.named_tensors()[name], base[name])
    sidecar.feeds.close()


def test_a_step_of_exact_leaves_out_tokens_outside_the_draft_vocabulary():
    assembler, stream = Assembler(3 * TOY.embed.shape[1], "float32"), Stream(7)
    assembler.add(stream.prefill(), 0.0)
    assembler.add(stream.verify(1), 0.0)
    sample = assembler.last_verify_step(7, 256)
    assert sample.loss_from == PROMPT
    drafting = sample.loss_from - sample.start - 1
    trainer = toy_trainer(0)
    known = torch.ones(sample.num_tokens, dtype=torch.bool)
    results = []
    for position in (None, PROMPT, PROMPT + 1):
        known[:] = True
        if position is not None:
            known[position] = False
        step = FastStep(TOY.draft(), TOY.rows, trainer.config)
        step.drafting = drafting
        batch = pack([replace(sample, in_vocab=known.clone())], branches=False)
        results.append(step.run(batch))
    whole, first, second = results
    assert [r.num_loss_rows for r in results] == [3, 2, 2]
    assert first.step_losses == pytest.approx([0.0, *whole.step_losses[1:]])
    a, _, c = whole.step_losses
    assert second.step_losses == pytest.approx([a, 0.0, c])


def test_a_step_of_exact_with_dflash_is_the_block_of_the_last_drafts():
    assembler, stream = Assembler(3 * TOY.embed.shape[1], "float32"), Stream(7)
    assembler.add(stream.prefill(), 0.0)
    assembler.add(stream.verify(1), 0.0)
    sample = assembler.last_verify_step(7, 256)
    draft = DFlashDraft.initialise(shape(num_layers=2), TOY.embed, TOY.head, seed=3)
    config = toy_trainer(0, loss={"forward_kl": 1.0}, ttt_steps=DEPTH).config
    step = FastStep(draft, TOY.rows, config)
    step.dtype, step.target_rows = torch.float32, TOY.rows.lm_head
    step.drafting = row = sample.loss_from - sample.start - 1
    total, _ = step.loss_of(pack([sample], branches=False))
    expected = 0.0
    normed = plain_block(draft, sample, row, DEPTH)
    for i, slot in enumerate(normed):
        q = (draft.tensor("lm_head.weight") @ slot).log_softmax(-1)
        p = (TOY.head @ sample.teacher_hidden[row + 1 + i]).log_softmax(-1)
        expected = expected + draft.step_decay**i * (p.exp() * (p - q)).sum()
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    (ours,) = torch.autograd.grad(total, draft.tensor("fc.weight"))
    (theirs,) = torch.autograd.grad(expected, draft.tensor("fc.weight"))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["shared", "exact"])
def test_the_teacher_behind_a_drafted_row_is_pruned_too(how):
    assembler, stream = Assembler(3 * TOY.embed.shape[1], "float32"), Stream(7)
    assembler.add(stream.prefill(), 0.0)
    assembler.add(stream.verify(1), 0.0)
    sample = assembler.last_verify_step(7, 256)
    fast = object.__new__(FastDraft)
    even = VocabMap.from_target_ids(torch.arange(0, VOCAB, 2), VOCAB)
    live = SimpleNamespace(vocab=even)
    fast._mode, fast._trainer = how, SimpleNamespace(live=live, target=TOY.rows)
    known, first = fast._mark_vocab(sample).in_vocab, sample.loss_from - sample.start
    assert torch.equal(known[: first - 1], sample.tokens[1:first] % 2 == 0)
    if how == "exact":
        best = (sample.teacher_hidden[first:] @ TOY.head.T).argmax(-1)
        assert torch.equal(known[first:], best % 2 == 0)
    else:
        assert torch.equal(known[first:-1], sample.tokens[first + 1 :] % 2 == 0)


def test_last_verify_step_has_the_last_drafted_tokens():
    assembler, stream = Assembler(3 * TOY.embed.shape[1], "float32"), Stream(7)
    assert assembler.add(stream.prefill(), 0.0) == []
    assert assembler.last_verify_step(7, 256) is None
    assembler.add(stream.verify(3), 0.0)
    before = list(stream.tokens)
    last = stream.verify(0)
    assembler.add(last, 0.0)
    sample = assembler.last_verify_step(7, 2)
    assert sample.loss_from == len(before)
    assert sample.tokens.tolist() == before[-3:] + last.token_ids[:-1].tolist()
    assert sample.start == len(before) - 3
    features, hidden = rows_of(sample.tokens.tolist())
    torch.testing.assert_close(sample.features, features)
    torch.testing.assert_close(sample.teacher_hidden, hidden)
    assert sample.valid.tolist() == [False] * 3 + [True] * DEPTH
    # A step of the memory, and one with a shortened draft.
    assembler.add(replace(stream.verify(1), memory=True), 0.0)
    assert assembler.last_verify_step(7, 2).loss_from == len(before)
    assert assembler.num_verify_steps(7) == 2
    start, short = len(stream.tokens), stream.verify(0)
    short.token_ids[2:] = -1
    assembler.add(short, 0.0)
    assert assembler.last_verify_step(7, 2).loss_from == start
    assert int(assembler.last_verify_step(7, 2).valid.sum()) == 1


def test_windows_of_an_open_request_teach_every_row_once():
    assembler, stream = Assembler(3 * TOY.embed.shape[1], "float32"), Stream(9)
    taught, upto, windows = [], 0, []
    assembler.add(stream.prefill(), 0.0)
    for i in range(60):
        assembler.add(stream.verify(), 0.0)
        if i == 30:  # a preemption: all is computed again, and nothing of it is new
            again = record(9, 0, stream.tokens[:-1], len(stream.tokens) - 2, PREFILL)
            assembler.add(again, 0.0)
        if i % 7 == 6 or i in (30, 59):
            for sample in assembler.window(9, upto, 8):
                windows.append(sample)
                taught += (sample.start + sample.valid.nonzero()[:, 0]).tolist()
                assert sample.start >= upto - 8
            upto = assembler.long_requests(0)[9]
    (document,) = assembler.flush()
    assert taught == list(range(PROMPT, document.num_tokens))
    for sample in windows:
        rows = slice(sample.start, sample.start + sample.num_tokens)
        assert torch.equal(sample.tokens, document.tokens[rows])
        assert torch.equal(sample.features, document.features[rows])
        assert torch.equal(sample.teacher_hidden, document.teacher_hidden[rows])


def test_gain_is_a_ratio_with_its_error():
    pairs = [(30, 6.0), (50, 2.0), (40, 8.0), (60, 9.0)]
    gain = Gain()
    assert math.isnan(gain.mean)
    for rows, total in pairs:
        gain.add(rows, total)
    n, total = np.array(pairs).T
    later = n.sum() - n.cumsum()
    weights = 0.5 ** (later / 512)
    rows = weights @ n
    assert gain.mean == pytest.approx(weights @ total / rows)
    squares = ((weights * (total - gain.mean * n)) ** 2).sum()
    assert gain.error == pytest.approx(math.sqrt(squares * 4 / 3) / rows)
