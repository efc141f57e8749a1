"""The trainer's gate, its live and candidate drafts, and the data it refuses."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.toys import VOCAB, ToyTarget
from vllm_tide.config import TrainConfig
from vllm_tide.draft import VocabMap
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.train.assemble import VERIFY
from vllm_tide.train.evaluate import (
    FORMS,
    Evaluation,
    evaluate,
    gain,
)
from vllm_tide.train.judgement import ENOUGH, REGROWTH, Evidence, Pair, cycle_lr_scale
from vllm_tide.train.reservoir import SampleBuffer, is_held_out
from vllm_tide.train.step import has_fast_bfloat16
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport.record import Record

TOY = ToyTarget()
KNOBS = {
    "batch_tokens": 128,
    "steps_per_cycle": 3,
    "learning_rate": 5e-3,
    "buffer_tokens": 4096,
    "holdout_share": 0.3,
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("vllm_tide.train.reservoir.WINDOW_TOKENS", 64)
    monkeypatch.setattr("vllm_tide.train.reservoir.HOLDOUT_TOKENS", 512)


def _trainer(count: int = 30, **changes) -> Trainer:
    trainer = Trainer(TOY.draft(), TOY.rows, TrainConfig(**{**KNOBS, **changes}))
    rng = random.Random(1)
    trainer.add_samples(
        TOY.document(rng.randrange(64), 20, 3, rng.getrandbits(64))
        for _ in range(count)
    )
    return trainer


def _weights(draft: Eagle3Draft) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in draft.named_tensors().values()])


def test_live_draft_moves_only_when_published():
    trainer = _trainer()
    before = _weights(trainer.live)
    trainer.train_cycle()
    assert torch.equal(_weights(trainer.live), before)
    assert not torch.equal(_weights(trainer.draft), before)
    trainer.published()
    assert torch.equal(_weights(trainer.live), _weights(trainer.draft))


def test_restore_goes_back_to_a_snapshot():
    trainer = _trainer()
    snapshot, before = trainer.snapshot(), _weights(trainer.live)
    trainer.train_cycle()
    trainer.published()
    trainer.restore(snapshot)
    assert torch.equal(_weights(trainer.draft), before)
    assert torch.equal(_weights(trainer.live), before)


def test_gate_refuses_a_gain_below_min_gain():
    result = _trainer(min_gain=10.0).train_cycle()
    assert not result.publish
    assert "below min_gain" in result.reason


def test_gate_refuses_without_held_out_requests():
    trainer = _trainer(0)
    key = next(k for k in range(100) if not is_held_out(k, 0.3))
    trainer.add_samples([TOY.document(1, 60, 3, key)])
    result = trainer.train_cycle()
    assert not result.publish
    assert "no request has been scored" in result.reason


def test_requests_are_judged_before_they_are_learnt_from():
    """Nothing is held out here: the gate has the newest requests alone."""
    trainer = _trainer(0, holdout_share=1e-9)
    rng = random.Random(4)

    def requests(count: int) -> set[int]:
        keys = {rng.getrandbits(64) for _ in range(count)}
        trainer.add_samples(TOY.document(rng.randrange(VOCAB), 20, 3, k) for k in keys)
        return keys

    requests(20)
    first = trainer.train_cycle()  # the candidate was the live draft until now
    assert first.fresh_requests == 0
    newest = requests(10)
    unseen = [s for s in trainer.buffer.train if s.key in newest]
    new, live = (
        trainer.evaluate(samples=unseen),
        trainer.evaluate(trainer.live, samples=unseen),
    )
    second = trainer.train_cycle()
    assert second.fresh_requests == 10
    assert (second.gain, second.gain_error) == pytest.approx(gain(new, live))
    # By all of these gains together, not by one standard error of this cycle.
    expected = Evidence()
    expected.add(list(Pair(unseen, new, live).gains("served").values()))
    assert second.evidence == pytest.approx(expected.wealth)
    assert second.publish == (expected.wealth >= ENOUGH and expected.gain >= 0.01)
    assert second.new is not None
    assert not second.new.requests  # held-out figures are of held-out requests alone
    trainer.published()
    requests(10)
    assert trainer.train_cycle().fresh_requests == 0  # the same draft again


def test_requests_that_come_amid_a_cycle_are_judged_before_they_are_learnt_from():
    trainer = _trainer(0, holdout_share=1e-9, steps_per_cycle=8)
    rng = random.Random(4)
    trainer.add_samples(TOY.document(rng.randrange(64), 20, 3, k) for k in range(20))
    trainer.train_cycle()
    trainer.add_samples(TOY.document(rng.randrange(64), 20, 3, k) for k in (30, 31))
    late = {rng.getrandbits(64) for _ in range(8)}
    ahead = iter(late)  # the first of them amid the evaluation of those two

    def arrive() -> bool:
        if (key := next(ahead, None)) is not None:
            trainer.add_samples([TOY.document(rng.randrange(64), 20, 3, key)])
        return True

    amid = trainer.train_cycle(arrive)
    assert amid.fresh_requests == 2
    assert amid.steps == 8  # more than one pass, over what was there when it began
    assert not any(s.trained for s in trainer.buffer.train if s.key in late)
    assert trainer.train_cycle().fresh_requests == 8
    trainer.train_cycle()  # the one before may have published what it scored
    assert all(s.trained for s in trainer.buffer.train if s.key in late)


def test_fresh_requests_do_not_outvote_held_out_ones_that_got_worse(monkeypatch):
    trainer = _trainer(40, holdout_share=0.3, learning_rate=1e-9)
    trainer.train_cycle()
    rng = random.Random(9)
    trainer.add_samples(
        TOY.document(rng.randrange(VOCAB), 20, 3, rng.getrandbits(64))
        for _ in range(40)
    )
    held = {s.key for s in trainer.buffer.holdout}

    def judge(draft=None, progress=None, samples=None):
        """The candidate is worse on what is held out, much better on the rest."""
        found = Evaluation(3)
        found.reached = {f: [0.0] * 3 for f in FORMS}
        for index, sample in enumerate(samples):
            sign = 0.0 if draft is trainer.live else -0.1 if sample.key in held else 1.0
            found.requests[sample.key] = [20.0] + [20.0 + sign * (20 + index % 3)] * 4
        return found

    monkeypatch.setattr(trainer, "evaluate", judge)
    trainer._live_scores.keep(())  # of the real evaluation
    result = trainer.train_cycle()
    assert result.gain > result.gain_error > 0
    assert not result.publish
    assert "held-out requests got worse" in result.reason
    assert result.evidence >= ENOUGH


def test_a_cycle_that_does_harm_is_undone_and_the_next_one_steps_smaller(monkeypatch):
    trainer = _trainer(40)
    before = _weights(trainer.live)
    gains = iter([-1.0, -1.0, 0.001, 1.0, -1.0])

    def judged(new, old, form="greedy"):
        return (current, 0.1)

    monkeypatch.setattr("vllm_tide.train.judgement.gain", judged)
    rates = []
    for current in gains:
        result = trainer.train_cycle()
        rates.append(trainer.rate)
        harmed = current < -0.5
        assert torch.equal(_weights(trainer.draft), before) == harmed
        assert not (harmed and result.publish)
        if result.publish:
            trainer.published()
            before = _weights(trainer.live)
    small = 0.25 * REGROWTH
    assert rates == pytest.approx([0.5, 0.25, small, 2 * small, small])


def test_lost_tokens_are_no_harm_while_the_distribution_gets_nearer(monkeypatch):
    trainer = _trainer(40)

    def judged(new, old, form="served"):
        return (0.05, 0.1) if form == "mass" else (-1.0, 0.1)

    monkeypatch.setattr("vllm_tide.train.judgement.gain", judged)
    result = trainer.train_cycle()
    assert not result.harmful and not result.publish
    assert trainer.rate == 1.0
    assert not torch.equal(_weights(trainer.draft), _weights(trainer.live))


@pytest.mark.parametrize("when", [0, 1, 4, 7])
def test_a_draft_put_back_during_a_cycle_is_not_judged_by_it(when):
    """At any call of `progress`: the fresh requests, the steps, the held-out ones."""
    trainer = _trainer()
    trainer.train_cycle()
    snapshot = trainer.snapshot()
    rng = random.Random(2)
    trainer.add_samples(
        TOY.document(rng.randrange(VOCAB), 20, 3, rng.getrandbits(64))
        for _ in range(30)
    )
    calls = []

    def progress() -> bool:
        calls.append(1)
        if len(calls) == when + 1:
            trainer.restore(snapshot)
        return True

    result = trainer.train_cycle(progress)
    assert len(calls) > when
    assert (result.publish, result.new) == (False, None)
    assert "another draft" in result.reason


@pytest.mark.parametrize("when", [0, 1, 4, 7])
def test_a_cycle_ends_soon_wherever_it_is_told_to(when):
    trainer = _trainer()
    trainer.train_cycle()
    rng = random.Random(2)
    trainer.add_samples(
        TOY.document(rng.randrange(VOCAB), 20, 3, rng.getrandbits(64))
        for _ in range(30)
    )
    calls = []

    def progress() -> bool:
        calls.append(1)
        return len(calls) <= when

    assert trainer.train_cycle(progress).reason == "interrupted"
    assert len(calls) == when + 1


def test_a_request_of_which_a_part_was_learnt_is_not_judged():
    trainer = _trainer(0, holdout_share=1e-9)
    trainer.add_samples([TOY.document(1, 40, 3, 7), TOY.document(2, 40, 3, 8)])
    trainer.train_cycle()
    late = TOY.document(1, 60, 3, 7)
    trainer.add_samples([late.window(40, 60, 0), TOY.document(3, 40, 3, 9)])
    assert {s.key for s in trainer.buffer.fresh} == {7, 9}
    assert {s.key for s in trainer.unscored} == {9}
    trainer.buffer.purge()  # however long ago the first part was learnt
    trainer.add_samples([late.window(40, 60, 0)])
    assert not trainer.unscored


def test_the_live_draft_is_evaluated_once_on_the_same_windows(monkeypatch):
    trainer = _trainer(40, batch_tokens=4096, steps_per_cycle=1)
    counted: Counter[str] = Counter()

    def counting(draft, target, samples, depth, **kwargs):
        found = evaluate(draft, target, samples, depth, **kwargs)
        counted["live" if draft is trainer.live else "new"] += found.num_rows
        return found

    monkeypatch.setattr("vllm_tide.train.trainer.evaluate", counting)
    results = [trainer.train_cycle() for _ in range(3)]
    held = trainer.evaluate(trainer.live).num_rows
    assert (counted["live"], counted["new"]) == (2 * held, 3 * held)  # and once above
    for result in results:
        exact = trainer.evaluate(trainer.live, samples=trainer.buffer.holdout)
        for key, row in exact.requests.items():
            assert result.live.requests[key] == pytest.approx(row)
    trainer.published()
    counted.clear()
    before = trainer.train_cycle().live
    assert counted["live"] == held  # another draft
    assert before.acceptance() == pytest.approx(
        trainer.evaluate(trainer.live).acceptance()
    )
    rng = random.Random(3)
    while (counted.clear(), len(trainer.buffer.holdout))[1] == len(before.requests):
        trainer.add_samples([TOY.document(5, 20, 3, rng.getrandbits(64))])
    result = trainer.train_cycle()
    assert 0 < counted["live"] < held  # the new requests alone


def test_what_is_purged_is_not_kept_for_its_scores():
    trainer = _trainer(40)
    trainer.train_cycle()
    held = trainer.buffer.holdout
    assert not trainer._live_scores.missing(held)
    trainer.purge()
    assert trainer._live_scores.missing(held) == held


def test_a_restore_amid_an_evaluation_leaves_no_score_of_the_draft_that_is_gone():
    trainer = _trainer(40)
    snapshot = trainer.snapshot()
    for when in range(5, 0, -1):
        calls = []

        def progress(when=when, calls=calls) -> bool:
            calls.append(1)
            if len(calls) == 3 + when:  # three steps come before
                trainer.restore(snapshot)
            return True

        trainer.train_cycle(progress)
    exact = trainer.evaluate(trainer.live)
    kept = trainer._live_scores.of(trainer.buffer.holdout).requests
    for key, row in kept.items():
        assert row == pytest.approx(exact.requests[key])


def test_enough_evidence_publishes_what_was_scored_without_more_steps():
    trainer = _trainer(40, holdout_share=0.3)
    trainer.train_cycle()
    scored = _weights(trainer.draft)
    trainer.evidence = Evidence(running=19.0, total=5.0, weight=20.0, requests=60)
    trainer._differs, waiting = True, trainer.buffer.new_tokens
    rng = random.Random(8)

    def better(draft=None, progress=None, samples=None):
        found = Evaluation(3)
        more = 0.0 if draft is trainer.live else 10.0
        for sample in samples:
            found.requests[sample.key] = [20.0] + [20.0 + more] * 4
        return found

    trainer.evaluate = better  # type: ignore[method-assign]
    trainer.add_samples(
        TOY.document(rng.randrange(VOCAB), 20, 3, rng.getrandbits(64))
        for _ in range(10)
    )
    result = trainer.train_cycle()
    assert (result.publish, result.steps) == (True, 0)
    assert result.evidence >= ENOUGH > 19
    assert result.new is not None
    assert {s.key for s in trainer.buffer.holdout} == set(result.new.requests)
    assert torch.equal(_weights(trainer.draft), scored)
    assert trainer.buffer.new_tokens > waiting  # what came is still to be learnt
    # Where nobody could publish it, training goes on.
    assert trainer.train_cycle().steps == 3


def test_a_cycles_time_is_told_apart(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    trainer = _trainer()
    exact = trainer.evaluate

    def slow(draft=None, progress=None, samples=None):
        clock[0] += 3.0
        return exact(draft, progress, samples)

    def progress() -> bool:
        clock[0] += 10.0
        return True

    calls = []
    trainer.evaluate = slow  # type: ignore[method-assign]
    result = trainer.train_cycle(lambda: calls.append(1) or progress())
    assert result.evaluation_s == 6.0  # both drafts on what is held out
    assert result.elsewhere_s == 10.0 * len(calls) > 30.0


def test_evaluations_add_up():
    trainer = _trainer()
    held = trainer.buffer.holdout
    whole = trainer.evaluate(samples=held)
    parts = trainer.evaluate(samples=held[:3]) + trainer.evaluate(samples=held[2:])
    again = trainer.evaluate(samples=[*held, held[2]])
    for form in FORMS:
        assert parts.acceptance(form) == pytest.approx(again.acceptance(form))
    assert parts.num_rows == again.num_rows > whole.num_rows
    key = held[2].key
    assert parts.requests[key] == pytest.approx(again.requests[key])


def test_progress_is_called_per_step_and_ends_the_cycle():
    calls = []

    def progress() -> bool:
        calls.append(1)
        return len(calls) < 2

    result = _trainer().train_cycle(progress)
    assert (result.steps, result.reason) == (2, "interrupted")


def test_training_is_deterministic():
    first, second = _trainer(), _trainer()
    first.train_cycle()
    second.train_cycle()
    assert torch.equal(_weights(first.draft), _weights(second.draft))


def test_new_tokens_are_counted_once():
    trainer = _trainer()
    assert trainer.buffer.new_tokens > 100
    trainer.train_cycle()
    assert trainer.buffer.new_tokens == 0


@pytest.mark.parametrize("when", [0, 1, 3])
def test_an_interrupted_cycle_gives_its_tokens_back(when):
    """After its first step, after its second, and while the candidate is judged."""
    trainer = _trainer()
    new, unseen = trainer.buffer.new_tokens, {s.key for s in trainer.unscored}
    calls = []

    def progress() -> bool:
        calls.append(1)
        return len(calls) <= when

    result = trainer.train_cycle(progress)
    assert result.reason == "interrupted"
    assert trainer.buffer.new_tokens == new
    left = {s.key for s in trainer.unscored}
    assert left < unseen if result.steps else left == unseen
    # What the candidate has learnt from is judged by no more.
    assert left == unseen & {s.key for s in trainer._queue}
    assert trainer.train_cycle().new is not None
    assert trainer.buffer.new_tokens == 0


def test_evaluation_of_a_draft_against_itself_has_no_gain():
    trainer = _trainer()
    new, live = trainer.evaluate(), trainer.evaluate(trainer.live)
    assert gain(new, live) == (0.0, 0.0)


def test_acceptance_mass_counts_what_the_pruned_draft_cannot_say():
    kept = VocabMap.from_target_ids(torch.arange(0, VOCAB, 2), VOCAB)
    draft = TOY.draft()
    pruned = Eagle3Draft(
        replace(draft.config, draft_vocab_size=VOCAB // 2),
        draft.named_tensors()
        | {"lm_head.weight": draft.tensor("lm_head.weight")[kept.target_ids]},
        kept,
        TOY.embed,
    )
    sample = TOY.document(1, 30, 1, 5)
    result = evaluate(pruned, TOY.rows, [sample], 2)
    p = torch.softmax(sample.teacher_hidden @ TOY.head.T, -1)[:, kept.target_ids]
    assert result.reached["mass"][0] <= float(p[1:-1].sum(-1).sum()) + 1e-4
    assert result.reached["greedy"][0] <= result.num_rows


def test_rows_the_pruned_draft_cannot_say_are_not_trained():
    kept = VocabMap.from_target_ids(torch.arange(0, VOCAB, 2), VOCAB)
    draft = Eagle3Draft.initialise(
        replace(TOY.draft().config, draft_vocab_size=VOCAB // 2),
        TOY.embed,
        TOY.head,
        kept,
    )
    trainer = Trainer(draft, TOY.rows, TrainConfig(**KNOBS))
    key = next(k for k in range(100) if not is_held_out(k, 0.3))
    document = TOY.document(1, 30, 1, key)
    trainer.add_samples([document])
    (stored,) = trainer.buffer.train
    best = (document.teacher_hidden @ TOY.head.T).argmax(-1)
    assert torch.equal(stored.in_vocab, best % 2 == 0)
    assert trainer.train_cycle().steps == 1


def test_a_candidate_that_is_no_number_shows_in_the_loss():
    trainer = _trainer()
    trainer.train_cycle()
    assert trainer.last_loss > 0
    trainer.draft.take({n: t * np.nan for n, t in trainer.snapshot().items()})
    assert trainer.train_cycle().reason == "no row could be trained"
    assert np.isnan(trainer.last_loss)


def passes_of(trainer: Trainer) -> Counter[int]:
    """Counts steps on each request from now on."""
    seen: Counter[int] = Counter()
    run = trainer.stepper.run

    def counted(samples, *how):
        seen.update(sample.key for sample in samples)
        return run(samples, *how)

    trainer.stepper.run = counted
    return seen


def test_a_small_buffer_gets_few_steps(monkeypatch):
    """60 tokens in batches of 64: four passes in a cycle at most."""
    monkeypatch.setattr("vllm_tide.train.reservoir.window_tokens", lambda _: 64)
    key = next(k for k in range(100) if not is_held_out(k, 0.3))
    for most, steps in ((1, [1, 0]), (6, [4, 2, 0]), (10**6, [4, 4, 4])):
        knobs = {**KNOBS, "max_passes": most, "steps_per_cycle": 9, "batch_tokens": 64}
        trainer = Trainer(TOY.draft(), TOY.rows, TrainConfig(**knobs))
        seen = passes_of(trainer)
        trainer.add_samples([TOY.document(1, 60, 3, key)])
        found = [trainer.train_cycle() for _ in steps]
        assert [result.steps for result in found] == steps
        assert seen == {key: sum(steps)}
    assert trainer.train_cycle().reason != "no row could be trained"


@pytest.mark.parametrize("wanted", [None, {0}, {0, 1}])
@pytest.mark.parametrize("changes", [{}, {"tenant_share": 0.5}, {"max_passes": 3}])
def test_no_document_is_trained_on_more_often_than_max_passes(wanted, changes):
    trainer = _trainer(0, steps_per_cycle=40, **changes)
    seen, rng = passes_of(trainer), random.Random(3)
    most = trainer.config.max_passes
    for _ in range(4):
        for n in range(9):
            document = TOY.document(rng.randrange(VOCAB), 40, 3, rng.getrandbits(64))
            more = {"group": n // 8, "tenant": n % 3}
            trainer.buffer.add(replace(document, **more))
        before = seen.copy()
        result = trainer.train_cycle(wanted_groups=wanted)
        if result.publish and not result.steps:  # first what was scored
            result = trainer.train_cycle(wanted_groups=wanted)
        assert result.steps > 0
        assert max((seen - before).values()) <= 4
        assert max(seen.values()) <= most
    if wanted is None and not changes:  # and none starves: new ones have their four
        newest = [s.key for s in trainer.buffer.train[-3:]]
        assert min(seen[key] for key in newest) >= 3


def test_publication_leaves_t2d_out_and_keeps_d2t():
    kept = VocabMap.from_target_ids(torch.arange(40), VOCAB)
    draft = Eagle3Draft.initialise(
        replace(TOY.draft().config, draft_vocab_size=40), TOY.embed, TOY.head, kept
    )
    names = set(Trainer(draft, TOY.rows, TrainConfig(**KNOBS)).candidate_tensors())
    assert "d2t" in names
    assert "t2d" not in names


@pytest.mark.parametrize("version", [0, 99])
def test_stale_draft_versions_are_trained_on(version):
    """Features and teacher come from the target, whatever draft made the tokens."""
    trainer = _trainer(0)
    document = TOY.document(1, 20, 3, 77)
    record = Record(
        77, VERIFY, 0, 3, 19, -1, version,
        document.tokens.numpy(),
        document.features.numpy(), 0, document.teacher_hidden.numpy(), finished=True,
    )  # fmt: skip
    trainer.add_records([record], 0.0)
    assert trainer.buffer.num_samples == 1
    assert trainer.rows_read == 20


def test_tokens_outside_the_vocabulary_are_refused_and_counted():
    trainer = _trainer(0)
    document = TOY.document(1, 20, 3, 7)
    trainer.add_samples([replace(document, tokens=document.tokens + 60)])
    assert trainer.rows_skipped == {"token_out_of_range": 20}


def test_buffers_stay_bounded_and_keep_the_newest():
    buffer = SampleBuffer(TrainConfig(**{**KNOBS, "buffer_tokens": 1024}))
    for key in range(300):
        buffer.add(TOY.document(1, 20, 3, key))
        assert buffer.train_tokens <= 1024
        assert buffer.holdout_tokens <= 512
    newest = max(k for k in range(300) if not is_held_out(k, 0.3))
    assert buffer.train[-1].key == newest
    assert buffer.evicted["train"] > 0
    assert not {s.key for s in buffer.train} & {s.key for s in buffer.holdout}


def test_held_out_share_is_what_was_asked():
    share = sum(is_held_out(k, 0.1) for k in range(20000)) / 20000
    assert abs(share - 0.1) < 0.01


def test_learning_rate_warms_up_and_decays_in_a_cycle():
    scales = [cycle_lr_scale(i, 32) for i in range(32)]
    assert 0 < scales[0] < scales[2] < 1
    assert max(scales) == 1.0
    assert 0.1 <= scales[-1] < 0.3


def test_a_pruned_vocabulary_follows_what_the_target_says():
    toy = ToyTarget()
    ids = torch.arange(VOCAB // 2)
    vocab = VocabMap.from_target_ids(ids, VOCAB)
    draft = Eagle3Draft.initialise(
        replace(toy.draft().config, draft_vocab_size=VOCAB // 2),
        toy.rows.embed_tokens,
        toy.rows.lm_head,
        vocab,
    )
    config = TrainConfig(batch_tokens=256, steps_per_cycle=4, holdout_share=0.3)
    trainer = Trainer(draft, toy.rows, config)
    assert trainer.vocabulary is not None
    trainer.vocabulary.counts[VOCAB // 2 :] = 10_000.0
    trainer.add_samples(toy.document(k % VOCAB, 60, 3, k) for k in range(20))
    before = trainer.snapshot()
    trainer.train_cycle()
    new = trainer.draft.vocab.target_ids
    assert int((new >= VOCAB // 2).sum()) == VOCAB - VOCAB // 2
    assert torch.equal(trainer.live.vocab.target_ids, ids)
    assert torch.equal(trainer.candidate_tensors()["d2t"], trainer.draft.vocab.d2t)
    trainer.published()
    assert torch.equal(trainer.live.vocab.target_ids, new)
    published = trainer.snapshot()
    trainer.restore(before)
    assert torch.equal(trainer.draft.vocab.target_ids, ids)
    assert torch.equal(trainer.live.tensor("fc.weight"), before["fc.weight"])
    trainer.restore(published)
    assert torch.equal(trainer.live.vocab.target_ids, new)


@pytest.mark.parametrize(
    ("isa", "may"),
    [("AVX2", False), ("avx512_core", False), ("AVX512_CORE_AMX", True)],
)
def test_bfloat16_is_not_fast_where_onednn_may_not_use_it(monkeypatch, isa, may):
    """It was emulated on a machine limited to AVX2: a cycle took 90 s for 4."""
    text = "flags : fpu avx512_bf16 amx_bf16\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert has_fast_bfloat16() is may
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert has_fast_bfloat16()
