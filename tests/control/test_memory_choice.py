"""The choice of AdaSpec between the draft and proposals without a draft pass."""

import numpy as np
import pytest

from tests.control.toys import batch_of, published
from vllm_tide.control.batch import Outcome, Proposals
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings, StaticPolicy
from vllm_tide.control.step_times import StepTimes

K, N = 5, 4


def policy(model="Llama-3.3-70B", **knobs):
    settings = ControlSettings(k_max=K, max_requests=N, **{"probe_share": 0.0} | knobs)
    made = AdaSpecPolicy(settings, StepTimes(published(model)))
    for slot in range(N):
        made.add(slot, False, 0.0)
    return made


def proposals(*chances, force=False):
    """Return proposals: the probability of each token; None: no proposal."""
    survival = np.full((K, N), -1.0, np.float32)
    for i, chance in enumerate(chances):
        if chance is not None:
            survival[:, i] = chance ** np.arange(1, K + 1)
    drafted = (0.5 ** np.arange(1, K + 1))[:, None] * np.ones(N)
    return Proposals(survival, drafted.astype(np.float32), force)


def batch(memory=None):
    return batch_of([K] * N, memory=memory)


def drafted(made, confidence, plan, steps=K):
    step = 0
    while step < min(plan.passes, steps):
        step += 1
        if not made.go_on(step, np.full(N, confidence)):
            break
    return step


def test_each_request_gets_the_source_of_more_value():
    made = policy()
    plan = made.plan(batch(proposals(0.99, 0.05, None, 0.97)), 1.0)
    assert plan.passes == K, "two requests need the draft"
    step = drafted(made, 0.9, plan)
    lengths = made.choose()
    assert made.remembered.tolist() == [True, False, False, True]
    assert step and (lengths[[1, 2]] <= step).all() and (lengths[[0, 3]] == K).all()
    own = np.where(made.remembered, 0, lengths)
    made.observe(Outcome(np.arange(N), own, 0 * own, own * 0 + 1, 1.1))
    stats = made.stats()
    assert stats["drafted_tokens"] == N * step
    assert stats["verified_tokens"] == own.sum()
    assert stats["trimmed_tokens"] == N * step - lengths[[1, 2]].sum()


@pytest.mark.parametrize("kind", [policy, lambda: StaticPolicy(K)])
def test_the_draft_is_skipped_where_no_request_needs_it(kind):
    made = kind()
    plan = made.plan(batch(proposals(0.99, 0.98, 0.97, 0.99)), 1.0)
    assert (plan.passes, plan.reason) == (0, "memory")
    assert made.choose().tolist() == [K] * N
    assert made.remembered.all()
    made = kind()
    plan = made.plan(batch(proposals(0.99, 0.98, 0.97, 0.99, force=True)), 1.0)
    assert plan.passes == K, "it is looked at"
    made = kind()
    assert made.plan(batch(proposals(0.99, 0.98, 0.97, None)), 1.0).passes == K


def test_proposals_are_trimmed_by_their_cost():
    """The expensive half of a proposal is not verified, its first tokens are."""
    made = policy("gpt-oss-120b")
    memory = proposals(0.5, 0.5, 0.5, 0.5)
    made.acceptance.accepted = lambda *_: np.zeros(N)
    assert made.plan(batch(memory), 1.0).reason == "memory"
    lengths = made.choose()
    assert (lengths < K).all()
    chooser = policy("gpt-oss-120b", verify=False)
    chooser.acceptance.accepted = lambda *_: np.zeros(N)
    chooser.plan(batch(memory), 1.0)
    assert chooser.choose().tolist() == [K] * N


def test_steps_of_the_memory_are_counted():
    made = policy()
    for number in range(50):
        made.plan(batch(proposals(0.99, 0.99, 0.99, 0.99)), 0.1 * number)
        lengths = made.choose()
        none = np.zeros(N, np.int64)
        made.observe(
            Outcome(np.arange(N), none, none, lengths + 1, 0.1 * number + 0.09)
        )
    stats = made.stats()
    assert stats["steps_without_drafts"] == {"memory": 50}
    assert stats["verified_tokens"] == stats["accepted_tokens"] == 0
    # It counts for the speedup over plain decoding, as served tokens.
    assert stats["plain_step_seconds"] / stats["step_seconds"] > 0.5
