"""The trainer's cycles and gate: live draft, candidate, evidence."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.toys import (
    TOY,
    documents_of,
    set_gains,
    small,
    toy_trainer,
    weights_of,
)
from vllm_tide.train.evaluate import (
    FORMS,
    evaluate,
    gain,
)
from vllm_tide.train.gpu import INTERRUPTED
from vllm_tide.train.judgement import (
    MIN_RATE,
    PUBLISH_EVIDENCE,
    RATE_GROWTH,
    Evidence,
    Pair,
    cycle_lr_scale,
    next_rate,
    without_evaluation,
)
from vllm_tide.train.reservoir import in_holdout
from vllm_tide.train.step import has_fast_bfloat16

pytestmark = pytest.mark.usefixtures("small")

__all__ = ["small"]


def test_the_live_draft_changes_when_published_and_returns_to_a_snapshot():
    trainer = toy_trainer()
    snapshot, before = trainer.snapshot(), weights_of(trainer.live)
    trainer.train_cycle()
    assert torch.equal(weights_of(trainer.live), before)
    assert not torch.equal(weights_of(trainer.draft), before)
    trainer.published()
    assert torch.equal(weights_of(trainer.live), weights_of(trainer.draft))
    trainer.restore(snapshot)
    assert torch.equal(weights_of(trainer.draft), before)
    assert torch.equal(weights_of(trainer.live), before)


def test_the_gate_refuses_a_small_gain_and_without_a_scored_request():
    result = toy_trainer(min_gain=10.0).train_cycle()
    assert not result.publish
    assert "below min_gain" in result.reason
    trainer = toy_trainer(0)
    key = next(k for k in range(100) if not in_holdout(k, 0.3))
    trainer.add_samples([TOY.document(1, 60, 3, key)])
    result = trainer.train_cycle()
    assert not result.publish
    assert "no request has been scored" in result.reason


def test_requests_are_scored_before_they_are_learned():
    """No holdout here: the gate has the newest requests alone."""
    trainer = toy_trainer(0, holdout_share=1e-9)
    rng = random.Random(4)
    trainer.add_samples(documents_of(rng, 20))
    first = trainer.train_cycle()  # the candidate was the live draft until now
    assert first.fresh_requests == 0
    trainer.add_samples(documents_of(rng, 10))
    unseen = trainer.buffer.train[-10:]
    new = trainer.evaluate(samples=unseen)
    live = trainer.evaluate(trainer.live, samples=unseen)
    second = trainer.train_cycle()
    assert second.fresh_requests == 10
    assert (second.gain, second.gain_error) == pytest.approx(gain(new, live))
    # By all of these gains together, not by one standard error of this cycle.
    expected = Evidence()
    expected.add(list(Pair(new, live).gains("served").values()))
    assert second.evidence == pytest.approx(expected.wealth)
    enough = expected.wealth >= PUBLISH_EVIDENCE
    assert second.publish == (enough and expected.gain >= 0.01)
    assert second.new is not None
    assert not second.new.requests  # held-out figures are of held-out requests alone
    trainer.published()
    trainer.add_samples(documents_of(rng, 10))
    assert trainer.train_cycle().fresh_requests == 0  # the same draft again


def test_the_first_steps_after_a_reset_are_small(monkeypatch):
    trainer = toy_trainer(40, steps_per_cycle=12, max_passes=100)
    scales, run = [], trainer.stepper.run

    def record(samples, scale):
        scales.append(scale)
        return run(samples, scale)

    monkeypatch.setattr(trainer.stepper, "run", record)
    trainer.train_cycle()
    first = [0.5 / 8 * MIN_RATE, 2 / 8 * MIN_RATE]
    assert scales[:2] == pytest.approx(first)
    rate = trainer.rate
    assert trainer.train_cycle() and max(scales[12:]) == pytest.approx(rate)
    trainer.restore(trainer.snapshot())
    trainer.train_cycle()
    assert scales[24] < 0.1


def test_a_cycle_after_one_without_gain_takes_one_pass(monkeypatch):
    trainer = toy_trainer(40, steps_per_cycle=100, max_passes=100)
    improved = iter((False, False, True, True))

    def judged(*given):
        gained = 1.0 if next(improved) else 0.0
        result = without_evaluation(1, 0.0, "planted")
        return replace(result, improved=bool(gained), gain=gained)

    monkeypatch.setattr("vllm_tide.train.trainer.judge", judged)
    passes = []
    for cycle in range(4):
        trainer.train_cycle()
        done = [sample.trained.count(cycle) for sample in trainer.buffer.train]
        passes.append(max(done))
    assert passes == [4, 1, 1, 4]


def test_a_slow_device_makes_short_cycles_and_scores_few_rows(monkeypatch):
    trainer = toy_trainer(40, steps_per_cycle=12, max_passes=100)
    assert trainer.train_cycle().steps == 12
    monkeypatch.setattr("vllm_tide.train.trainer.CYCLE_SECONDS", 0.0)
    assert trainer.train_cycle().steps == 4
    monkeypatch.setattr("vllm_tide.train.trainer.MIN_SCORED_ROWS", 32)
    short = trainer.train_cycle()
    assert short.steps == 4
    assert sum(s.num_tokens for s in trainer.buffer.holdout) > 128
    assert sum(row[0] for row in short.new.requests.values()) <= 64


def test_requests_during_a_cycle_are_scored_before_they_are_learned():
    trainer = toy_trainer(0, holdout_share=1e-9, steps_per_cycle=8)
    rng = random.Random(4)
    trainer.add_samples(TOY.document(rng.randrange(64), 20, 3, k) for k in range(20))
    trainer.train_cycle()
    trainer.add_samples(TOY.document(rng.randrange(64), 20, 3, k) for k in (30, 31))
    late = {rng.getrandbits(64) for _ in range(8)}
    ahead = iter(late)  # the first of them during the evaluation of those two

    def arrive() -> bool:
        if (key := next(ahead, None)) is not None:
            trainer.add_samples([TOY.document(rng.randrange(64), 20, 3, key)])
        return True

    amid = trainer.train_cycle(arrive)
    assert amid.fresh_requests == 2
    assert amid.steps == 8  # more than one pass over the requests of its start
    assert not any(s.trained for s in trainer.buffer.train if s.key in late)
    assert trainer.train_cycle().fresh_requests == 8
    trainer.train_cycle()  # the previous one may have published its scored candidate
    assert all(s.trained for s in trainer.buffer.train if s.key in late)


@pytest.mark.parametrize("lost", [0.02, 0.2])
def test_holdout_requests_of_past_traffic_do_not_block_a_draft(lost):
    trainer = toy_trainer(40, holdout_share=0.3, learning_rate=1e-9)
    trainer.train_cycle()
    rng = random.Random(9)
    trainer.add_samples(documents_of(rng, 40))
    holdout = {s.key for s in trainer.buffer.holdout}

    def gain(sample):
        return (-lost if sample.key in holdout else 1.0) * (1 + sample.key % 3 / 20)

    set_gains(trainer, gain)
    trainer._live_scores.keep(())  # of the real evaluation
    result = trainer.train_cycle()
    assert result.publish and result.improved and result.steps == 0
    assert result.evidence >= PUBLISH_EVIDENCE
    # It could not be sent: training continues from it in any case.
    trainer.add_samples(documents_of(rng, 8))
    assert trainer.train_cycle().steps > 0


def test_a_draft_that_is_worse_on_the_newest_requests_is_not_published():
    trainer = toy_trainer(40, learning_rate=1e-9)
    trainer.train_cycle()
    trainer.add_samples(documents_of(random.Random(9), 8))
    trainer.evidence = Evidence(running=2 * PUBLISH_EVIDENCE, total=50.0, weight=20.0)
    fresh = {s.key for s in trainer.unscored}

    def gain(sample):
        return (-0.1 if sample.key in fresh else 1.0) * (1 + sample.key % 3 / 20)

    set_gains(trainer, gain)
    trainer._live_scores.keep(())
    result = trainer.train_cycle()
    assert not result.publish and not result.improved
    assert "the newest requests got worse" in result.reason


def test_a_harmful_cycle_is_undone_and_the_next_one_steps_smaller(monkeypatch):
    trainer, rng = toy_trainer(40), random.Random(5)
    trainer.rate = 1.0
    before = weights_of(trainer.live)

    gains, rates, undone = iter((0.001, -1.0, -1.0, 1.0)), [], []

    def judged(new, old, form="greedy"):
        return (current, 0.1)

    monkeypatch.setattr("vllm_tide.train.judgement.gain", judged)
    for current in gains:
        result = trainer.train_cycle()
        assert result.gain == current
        trainer.add_samples(documents_of(rng, 8))
        rates.append(trainer.rate)
        undone.append(torch.equal(weights_of(trainer.draft), before))
        assert undone[-1] == result.harmful
        assert not (result.harmful and result.publish)
    # The third has no candidate yet that new requests could score.
    assert undone == [False, True, False, False]
    assert rates == pytest.approx([1.0, 0.5, 0.5 * RATE_GROWTH, 1.0])
    assert next_rate(MIN_RATE, replace(result, harmful=True)) == MIN_RATE


def test_lost_tokens_are_no_harm_while_the_divergence_falls(monkeypatch):
    trainer = toy_trainer(40)
    trainer.train_cycle()
    trainer.add_samples(documents_of(random.Random(5), 8))
    rate = trainer.rate

    def judged(new, old, form="served"):
        return (0.05, 0.1) if form == "mass" else (-1.0, 0.1)

    monkeypatch.setattr("vllm_tide.train.judgement.gain", judged)
    result = trainer.train_cycle()
    assert result.fresh_requests and not result.harmful and not result.publish
    assert trainer.rate == pytest.approx(min(1.0, rate * RATE_GROWTH))
    assert not torch.equal(weights_of(trainer.draft), weights_of(trainer.live))


@pytest.mark.parametrize("when", [0, 1, 4, 7])
def test_a_cycle_with_another_draft_is_not_scored(when):
    """At any call of `progress`: fresh requests, steps, held-out requests."""
    trainer = toy_trainer()
    trainer.train_cycle()
    snapshot = trainer.snapshot()
    rng = random.Random(2)
    trainer.add_samples(documents_of(rng, 30))
    calls = []

    def progress() -> bool:
        calls.append(1)
        if len(calls) == when + 1:
            trainer.restore(snapshot)
        return True

    result = trainer.train_cycle(progress)
    assert (result.publish, result.new) == (False, None)
    assert "another draft" in result.reason
    assert len(calls) > when


def test_a_partly_learned_request_is_not_scored():
    trainer = toy_trainer(0, holdout_share=1e-9)
    trainer.add_samples([TOY.document(1, 40, 3, 7), TOY.document(2, 40, 3, 8)])
    trainer.train_cycle()
    late = TOY.document(1, 60, 3, 7)
    trainer.add_samples([late.window(40, 60, 0), TOY.document(3, 40, 3, 9)])
    assert {s.key for s in trainer.buffer.fresh} == {7, 9}
    assert {s.key for s in trainer.unscored} == {9}
    trainer.buffer.purge()  # however long ago the first part was learned
    trainer.add_samples([late.window(40, 60, 0)])
    assert not trainer.unscored


def test_the_live_draft_is_evaluated_once_on_the_same_windows(monkeypatch):
    trainer = toy_trainer(40, batch_tokens=4096, steps_per_cycle=1)
    counted: Counter[str] = Counter()

    def counting(draft, target, samples, depth, **kwargs):
        evaluation = evaluate(draft, target, samples, depth, **kwargs)
        counted["live" if draft is trainer.live else "new"] += evaluation.num_rows
        return evaluation

    monkeypatch.setattr("vllm_tide.train.trainer.evaluate", counting)
    results = [trainer.train_cycle() for _ in range(3)]
    num_rows = trainer.evaluate(trainer.live).num_rows
    assert (counted["live"], counted["new"]) == (
        2 * num_rows,
        3 * num_rows,
    )  # and once above
    exact = trainer.evaluate(trainer.live, samples=trainer.buffer.holdout)
    for result in results:
        for key, row in exact.requests.items():
            assert result.live.requests[key] == pytest.approx(row)
    trainer.published()
    counted.clear()
    trainer.train_cycle()
    assert counted["live"] == num_rows  # another draft
    counted.clear()
    trainer.add_samples(documents_of(random.Random(3), 9))
    trainer.train_cycle()
    assert 0 < counted["live"] < num_rows  # the new requests alone


def test_a_purge_during_a_comparison_keeps_windows_scored_on_both_drafts(monkeypatch):
    trainer, rng = toy_trainer(60), random.Random(6)
    trainer.train_cycle()
    trainer.add_samples(TOY.document(5, 20, 3, rng.getrandbits(64)) for _ in range(20))
    whole, purges = trainer.evaluate, 0

    def evaluate(draft=None, progress=None, samples=None):
        nonlocal purges
        evaluation = whole(draft, progress, samples)
        in_share = in_holdout(samples[0].key, trainer.config.holdout_share)
        if draft is trainer.live and in_share:  # held-out requests that are new
            trainer.purge(tenant=7)  # no such tenant; drops scores
            purges += 1
        return evaluation

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    result = trainer.train_cycle()
    assert purges
    assert result.new is not None
    assert result.new.requests


def test_enough_evidence_publishes_the_scored_draft_without_more_steps():
    trainer = toy_trainer(40, holdout_share=0.3)
    trainer.train_cycle()
    scored = weights_of(trainer.draft)
    trainer.evidence = Evidence(running=19.0, total=5.0, weight=20.0, requests=60)
    waiting = trainer.buffer.new_tokens
    set_gains(trainer, lambda _: 0.5)
    trainer.add_samples(documents_of(random.Random(8), 10))
    result = trainer.train_cycle()
    assert (result.publish, result.steps) == (True, 0)
    assert result.evidence >= PUBLISH_EVIDENCE > 19
    assert result.new is not None
    assert {s.key for s in trainer.buffer.holdout} == set(result.new.requests)
    assert torch.equal(weights_of(trainer.draft), scored)
    assert trainer.buffer.new_tokens > waiting  # not learned yet
    # Without a publisher, training continues.
    assert trainer.train_cycle().steps == 3


def test_evaluations_add_up():
    trainer = toy_trainer()
    holdout = trainer.buffer.holdout
    whole = trainer.evaluate(samples=holdout)
    parts = trainer.evaluate(samples=holdout[:3]) + trainer.evaluate(
        samples=holdout[2:]
    )
    again = trainer.evaluate(samples=[*holdout, holdout[2]])
    for form in FORMS:
        assert parts.acceptance(form) == pytest.approx(again.acceptance(form))
    assert parts.num_rows == again.num_rows > whole.num_rows
    key = holdout[2].key
    assert parts.requests[key] == pytest.approx(again.requests[key])


@pytest.mark.parametrize(
    ("when", "later"), [(0, False), (1, False), (3, False), (4, True), (7, True)]
)
def test_an_interrupted_cycle_returns_its_tokens(when, later):
    """During its steps and its evaluations, in the first cycle or a later one."""
    trainer = toy_trainer()
    if later:
        trainer.train_cycle()
        trainer.add_samples(documents_of(random.Random(2), 30))
    new, unseen = trainer.buffer.new_tokens, {s.key for s in trainer.unscored}
    calls = []

    def progress() -> bool:
        calls.append(1)
        return len(calls) <= when

    result = trainer.train_cycle(progress)
    assert (result.reason, result.publish, result.new) == (INTERRUPTED, False, None)
    assert len(calls) == when + 1
    assert trainer.buffer.new_tokens == new
    if not later:
        left = {s.key for s in trainer.unscored}
        assert left < unseen if result.steps else left == unseen
        # The candidate's training data do not score it any more.
        assert left == unseen & {s.key for s in trainer._queue}
    assert trainer.train_cycle().new is not None
    assert trainer.buffer.new_tokens == 0


def test_the_learning_rate_warms_up_and_decays_in_a_cycle():
    scales = [cycle_lr_scale(i, 32) for i in range(32)]
    assert 0 < scales[0] < scales[2] < 1
    assert max(scales) == 1.0
    assert 0.1 <= scales[-1] < 0.3


@pytest.mark.parametrize(("isa", "may"), [("AVX2", False), ("AVX512_CORE_AMX", True)])
def test_bfloat16_is_not_fast_without_onednn_support(monkeypatch, isa, may):
    """It was emulated on a machine limited to AVX2: a cycle took 90 s for 4."""
    text = "flags : fpu avx512_bf16 amx_bf16\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert has_fast_bfloat16() is may
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert has_fast_bfloat16()
