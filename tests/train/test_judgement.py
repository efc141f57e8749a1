"""The publication gate: evidence over cycles, in the served form."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from scripts.bench import judges
from tests.train.toys import VOCAB, ToyTarget, documents_of, set_gains
from vllm_tide.config import TrainConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.train.distributed import OneRank
from vllm_tide.train.gpu import INTERRUPTED
from vllm_tide.train.judgement import Evidence, judge
from vllm_tide.train.trainer import Trainer

TOY = ToyTarget()
KNOBS = {
    "batch_tokens": 64,
    "steps_per_cycle": 1,
    "learning_rate": 1e-9,
    "holdout_share": 1e-9,
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("vllm_tide.train.reservoir.WINDOW_TOKENS", 64)


def trainer_of(**changes) -> Trainer:
    return Trainer(TOY.draft(), TOY.rows, TrainConfig(**{**KNOBS, **changes}))


def cycles_until_published(gain: float, seed: int, cycles: int = 20) -> int | None:
    trainer, rng = trainer_of(buffer_tokens=1024), random.Random(seed)
    set_gains(trainer, lambda _: rng.gauss(gain, 0.15))
    for cycle in range(cycles):
        trainer.add_samples(documents_of(rng, rng.randint(3, 8), 12))
        if trainer.train_cycle().publish:
            return cycle + 1
    return None


@pytest.mark.parametrize("seeds", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_better_candidates_are_published_soon_and_useless_ones_are_not(seeds):
    """A gate of one standard error published nearly all of the useless ones."""
    useless = [cycles_until_published(0.0, seed) for seed in range(seeds)]
    assert sum(n is not None for n in useless) <= seeds // 20
    better = [cycles_until_published(0.1, seed) for seed in range(seeds)]
    assert sum(n is not None and n <= 11 for n in better) >= 0.9 * seeds


@pytest.mark.nightly
def test_the_gate_keeps_its_error_rate():
    verdict = judges.gate_rows(0)
    by_gain = {row["true_gain"]: row for row in reversed(verdict)}
    assert all(
        r["published"] <= 0.05 * r["runs"] for r in verdict if not r["true_gain"]
    )
    tenth = by_gain[0.1]
    assert tenth["published_within_60"] >= 0.9 * tenth["runs"]
    assert by_gain[0.3]["published"] == by_gain[0.3]["runs"]
    assert by_gain[0.3]["requests_p50"] <= 25


def test_a_dropped_candidate_never_leaves_more_evidence():
    for gains in ([0.5] * 20, [-0.5] * 20, [0.0] * 5, []):
        evidence = Evidence()
        evidence.add(gains)
        left = evidence.dropped()
        assert left.wealth == pytest.approx(min(1.0, evidence.wealth))
        assert left.gain == 0.0


def test_a_long_bad_candidate_is_published_soon_after_it_improves():
    evidence, rng = Evidence(), random.Random(0)
    for _ in range(200):
        evidence.add([rng.gauss(-0.1, 0.3) for _ in range(5)])
    requests = evidence.requests
    while evidence.wealth < 20:
        evidence.add([rng.gauss(0.3, 0.3) for _ in range(5)])
    assert evidence.requests - requests <= 75


def test_zero_and_infinite_gains_stay_numbers():
    evidence = Evidence()
    evidence.add([0.0] * 20_000)
    assert evidence.wealth == pytest.approx(1.0)
    evidence.add([2.0] * 20_000)
    assert 20 < evidence.wealth < 41
    evidence.add([-1.0] * 200)
    assert 0 < evidence.wealth < 20


def test_a_request_is_evidence_once():
    """True if its cycle is interrupted, or it is held out and scored every time."""
    trainer, rng = trainer_of(holdout_share=0.5), random.Random(1)
    set_gains(trainer, lambda _: rng.gauss(0.1, 0.15))
    trainer.add_samples(documents_of(rng, 40, 12))
    unscored = {s.key for s in trainer.unscored}
    calls = []

    def progress() -> bool:
        calls.append(1)
        return len(calls) <= 2  # both drafts on the fresh requests, then no more

    assert trainer.train_cycle(progress).reason == INTERRUPTED
    assert trainer.evidence.requests == len(unscored) > 10
    assert not trainer.unscored
    for _ in range(3):
        result = trainer.train_cycle()
        assert trainer.evidence.requests == 40
        assert "over 40 requests: evidence" in result.reason
    trainer.published()
    assert trainer.evidence.wealth == 1.0
    assert trainer.train_cycle().evidence == 1.0  # held-out ones were counted before


def test_requests_skipped_under_overload_are_counted_and_no_evidence(monkeypatch):
    monkeypatch.setattr("vllm_tide.train.trainer.MIN_SCORED_ROWS", 256)
    trainer = trainer_of()
    rng = random.Random(1)
    set_gains(trainer, lambda _: rng.gauss(0.1, 0.15))
    documents = documents_of(rng, 40, 12)
    trainer.add_samples(documents)
    result = trainer.train_cycle()
    assert (result.fresh_requests, trainer.unscored_requests) == (21, 19)
    assert trainer.evidence.requests == 21
    assert not trainer.unscored


def test_evidence_survives_a_checkpoint(tmp_path):
    trainer, rng = trainer_of(), random.Random(1)
    set_gains(trainer, lambda _: rng.gauss(0.1, 0.15))
    documents = documents_of(rng, 10, 12)
    trainer.add_samples(documents)
    trainer.train_cycle()
    path = trainer.save(tmp_path, 0)
    again = trainer_of()
    again.load(path)
    assert again.evidence == trainer.evidence
    assert again.evidence.requests == 10
    again.add_samples(documents)  # read once more: they are no new evidence
    assert not again.unscored


def test_insufficient_evidence_is_not_rounded_up():
    pair = judges.pair_of(dict.fromkeys(range(8), 0.1))
    evidence = Evidence(running=19.9, reserve=0.09, total=2.0, weight=20.0, requests=60)
    result = judge(1, 0.0, judges.pair_of({}), pair, TrainConfig(), "served", evidence)
    assert not result.publish and "evidence 19.9 of 20" in result.reason


# --------------------------------------------------------------------- not finite


def test_a_window_that_is_not_finite_is_left_out_and_hides_no_regression():
    trainer, rng = trainer_of(holdout_share=0.5), random.Random(1)
    trainer.add_samples(documents_of(rng, 40, 12))
    broken = trainer.buffer.holdout[3]
    broken.features[5] = float("nan")
    trainer.draft.take(TOY.draft(seed=3).named_tensors())
    trainer.live.take(taught(TOY.next_token).named_tensors())
    trainer._differs = True  # so that new requests are scored as well
    result = trainer.train_cycle()
    assert result.harmful and not result.publish, result.reason
    assert result.gain < -0.1 and result.gain_error < 1
    assert result.new.acceptance() < result.live.acceptance() < 5
    assert broken.key not in result.live.requests
    assert 0 < trainer.rows_skipped["not_finite"] < 12


def test_a_harmful_candidate_is_not_published_at_any_earlier_score():
    """It accepts less, or is not finite."""
    worse = judges.pair_of(dict.fromkeys(range(20), -0.2))
    broken = judges.pair_of(dict.fromkeys(range(9), 0.1))
    for row in broken.new.requests.values():
        row[1:] = [float("nan")] * (len(row) - 1)
    for pair in (worse, broken):
        evidence = Evidence(running=40.0, total=5.0, weight=20.0, requests=60)
        nothing = judges.pair_of({})
        verdict = judge(1, 0.0, nothing, pair, TrainConfig(), "served", evidence)
        assert verdict.harmful and not verdict.publish


def test_a_candidate_damaged_by_its_cycle_is_not_published():
    """Fresh requests scored it before the cycle, held-out ones after it."""
    good = judges.pair_of(dict.fromkeys(range(20), 0.2))
    spoilt = judges.pair_of(dict.fromkeys(range(30, 40), -0.2))
    for steps, publish in ((0, True), (8, False)):
        evidence = Evidence(running=40.0, total=5.0, weight=20.0, requests=60)
        verdict = judge(steps, 0.0, spoilt, good, TrainConfig(), "served", evidence)
        assert verdict.publish is publish
        assert ("held-out requests got worse" in verdict.reason) != publish


@pytest.mark.parametrize(
    ("gains", "harmful"),
    [
        ((-0.5,) * 3, False),  # too few requests
        ((-0.5,) * 4, True),
        ((-1.0, 0.2, -1.0, 0.2), False),  # within two standard errors
    ],
)
def test_few_requests_or_a_large_error_make_no_candidate_harmful(gains, harmful):
    nothing, pair = judges.pair_of({}), judges.pair_of(dict(enumerate(gains)))
    verdict = judge(1, 0.0, nothing, pair, TrainConfig(), "served", Evidence())
    assert verdict.harmful is harmful and verdict.gain < -0.3


# --------------------------------------------------------------------- form served


def taught(say) -> Eagle3Draft:
    """Return a draft trained to predict a function of the token."""
    knobs = TrainConfig(batch_tokens=512, learning_rate=1e-2, ttt_steps=3)
    trainer = Trainer(TOY.draft(), TOY.rows, knobs, stepper=None)
    rng = random.Random(0)
    documents = [
        replace(doc, teacher_hidden=TOY.head[say(doc.tokens.long())])
        for doc in (TOY.document(rng.randrange(VOCAB), 24, 1, 2 * k) for k in range(60))
    ]
    assert isinstance(trainer.stepper, OneRank)
    for _ in range(25):
        trainer.stepper.run(rng.sample(documents, 20), 1.0)
    return trainer.draft


def nearly_even(token: int) -> torch.Tensor:
    """Hidden state of a target: a token (0.52) or the next one (0.48)."""
    rows = TOY.head[[token, (token + 1) % VOCAB]]
    return rows.T @ torch.linalg.solve(rows @ rows.T, torch.tensor([30.1, 30.0]))


@pytest.fixture(scope="module")
def drafts() -> tuple[Eagle3Draft, Eagle3Draft]:
    """Of one, half of its tokens are the best; of the other all are second best."""

    def half(tokens):
        return TOY.next_token(tokens).where(tokens % 2 == 0, tokens)

    return taught(half), taught(lambda tokens: (TOY.next_token(tokens) + 1) % VOCAB)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("sampled", [True, False])
def test_a_candidate_is_scored_in_the_served_form(drafts, sampled, method):
    """As with reverse KL: more mass, fewer best tokens. Nearly even odds of two."""
    live, candidate = drafts
    knobs = TrainConfig(**KNOBS)
    trainer = Trainer(live.clone(), TOY.rows, knobs, draft_sample_method=method)
    trainer.draft.take(candidate.named_tensors())
    trainer._differs = True
    rng = random.Random(5)
    for document in documents_of(rng, 30, 12):
        best = TOY.next_token(document.tokens.long())
        both = torch.stack([nearly_even(int(token)) for token in best])
        changed = replace(document, teacher_hidden=both, sampled=sampled)
        trainer.add_samples([changed])
    result = trainer.train_cycle()
    assert result.fresh_requests == 30
    assert result.publish is sampled, result.reason
    assert result.gain > 0.1 if sampled else result.gain < -0.1
