"""Traffic that comes back to what the first draft knew."""

from __future__ import annotations

import random

import pytest
import torch

from tests.train.toys import TOY, add_requests, small, toy_trainer

BACK = "the first draft serves better again"


pytestmark = pytest.mark.usefixtures("small")
__all__ = ["small"]


@pytest.fixture(scope="module")
def able():
    """A draft that knows the target."""
    trainer, rng = toy_trainer(0), random.Random(0)
    for _ in range(12):
        add_requests(trainer, 8, rng)
        trainer.train_cycle()
    return trainer.draft


def trainer_with(first, live, **changes):
    """A trainer that began with `first` and has published `live`; none learns fast."""
    trainer = toy_trainer(0, first.clone(), **{"learning_rate": 1e-6, **changes})
    trainer.draft.take(live.named_tensors())
    trainer.published()
    return trainer


def same(one, other):
    return all(
        torch.equal(a, b)
        for a, b in zip(
            one.named_tensors().values(), other.named_tensors().values(), strict=True
        )
    )


def cycles(trainer, count, seed=3):
    rng, results = random.Random(seed), []
    for _ in range(count):
        add_requests(trainer, 6, rng)
        results.append(trainer.train_cycle())
        if results[-1].publish:
            break
    return results


def test_the_first_draft_is_published_again_when_it_serves_better(able):
    trainer = trainer_with(able, TOY.draft(seed=5))
    results = cycles(trainer, 12)
    assert results[-1].publish and results[-1].reason.startswith(BACK)
    assert results[-1].gain > 0 and results[-1].steps == 0
    assert len(results) > 1, "one cycle's requests are not enough"
    assert same(trainer.draft, able) and not same(trainer.live, able)
    trainer.published()
    assert same(trainer.live, able) and trainer.returning is None
    # While it is live nothing is scored for it.
    assert not any(r.reason.startswith(BACK) for r in cycles(trainer, 4, seed=4))


def test_a_first_draft_that_is_worse_stays_away(able):
    trainer = trainer_with(TOY.draft(seed=5), able)
    assert not any(r.publish for r in cycles(trainer, 10))
    assert trainer.returning.wealth <= 1


def test_it_returns_after_long_service_of_a_better_one(able):
    """What spoke against it while other traffic was there does not bury it."""
    trainer = trainer_with(able, TOY.draft(seed=5))
    for _ in range(30):
        trainer.returning.add([-1.0, -1.0, -1.0])
    assert cycles(trainer, 12)[-1].reason.startswith(BACK)


def test_before_a_publication_there_is_none():
    trainer = toy_trainer(0)
    cycles(trainer, 2)
    assert trainer.first is None and trainer.returning is None


def test_a_harmful_cycle_forgets_nothing_of_it(able):
    trainer = trainer_with(TOY.draft(seed=5), able, learning_rate=0.5)
    first, results = trainer.first, cycles(trainer, 4)
    assert any(r.harmful for r in results)
    assert trainer.first is first and trainer.returning is not None
    assert trainer.returning.requests or trainer.returning.total == 0


def test_after_a_rollback_it_waits_for_the_next_publication(able):
    trainer = trainer_with(able, TOY.draft(seed=5))
    other = TOY.draft(seed=6)
    trainer.restore({n: t.detach() for n, t in other.named_tensors().items()})
    assert trainer.returning is None
    assert not any(r.reason.startswith(BACK) for r in cycles(trainer, 6))
    trainer.published()
    assert trainer.returning is not None


def test_a_request_speaks_once_and_a_return_that_has_to_wait_does_not_loop(able):
    trainer = trainer_with(able, TOY.draft(seed=5))
    add_requests(trainer, 14, random.Random(3))
    for _ in range(2):  # each is broken off at its first step, and the rest comes again
        before, steps = trainer.returning.requests, trainer.steps
        trainer.train_cycle(lambda steps=steps: trainer.steps == steps)
        counted = trainer.returning.requests
        assert trainer.steps == steps + 1
        assert trainer.unscored if before == 0 else before == counted, "asked twice"
    assert cycles(trainer, 12)[-1].reason.startswith(BACK)
    # Not published: the next cycle trains on, and counts nothing twice. No second time.
    assert trainer.returning is None and trainer.first is None
    counted = trainer.evidence.requests
    result = trainer.train_cycle()
    assert result.steps > 0 and not result.reason.startswith(BACK)
    assert trainer.evidence.requests - counted <= len(trainer.buffer.holdout)
