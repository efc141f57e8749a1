"""Control keeps the target's distribution with sampled drafts.

The policy that Model Runner V1 starts, called as in the runner, with NumPy for the
models and for rejection sampling. The cost has a stair, and the draft is confident only
after one of its tokens.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sim.published import table_model
from tests.control.toys import batch_of
from vllm_tide.config import ControlConfig
from vllm_tide.control.acceptance import Acceptance, RequestIntercepts
from vllm_tide.control.batch import Outcome
from vllm_tide.control.step_times import StepTimes
from vllm_tide.control.time_model import TimeModel

P = np.array([0.9, 0.05, 0.03, 0.02])  # the target's, of every token
Q = np.array([0.5, 0.5, 0.0, 0.0])  # the draft's, of the first token
SURE, UNSURE = np.array([0.98, 0.02, 0.0, 0.0]), np.full(4, 0.25)  # after token 0, 1
K = 2
ALARM = 4.9  # normal deviations: one false alarm in a million tests, both sides


def started(
    monkeypatch: pytest.MonkeyPatch, method: str, model: TimeModel, **knobs: Any
) -> Any:
    """Return the policy of `start_policy` on a server with these times."""
    policy_start = pytest.importorskip("vllm_tide.engine.policy_start")
    monkeypatch.setattr(policy_start, "first_guess", lambda _: model)
    known = lambda prior, guessed: StepTimes(prior)  # noqa: E731
    monkeypatch.setattr(policy_start, "StepTimes", known)
    control = SimpleNamespace(
        leader=True,
        agree=lambda value: value,
        num_speculative_tokens=K,
        capacity=8,
        policy=None,
    )
    speculative = SimpleNamespace(draft_sample_method=method)
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculative)
    )
    config = ControlConfig(**{"policy": "adaspec", **knobs})
    policy_start.start_policy(worker, control, config)
    return control.policy


def verdict(
    rng: np.random.Generator, tokens: np.ndarray, q: np.ndarray, length: int
) -> list[int]:
    """Reject samples (arXiv 2211.17192) of one request's first `length` drafts."""
    out = []
    for j in range(length):
        x = int(tokens[j])
        if rng.random() * q[j, x] < P[x]:
            out.append(x)
            continue
        residual = np.maximum(P - q[j], 0.0)
        return [*out, int(rng.choice(4, p=residual / residual.sum()))]
    return [*out, int(rng.choice(4, p=P))]


def serve(policy: Any, n: int, tries: int, stair: float) -> tuple[float, float, int]:
    """First tokens of many steps: share of token 0, its deviations, tokens cut."""
    rng = np.random.default_rng(0)
    slots = np.arange(n)
    for slot in slots:
        policy.add(int(slot), True, 0.0)
    now, zeros, cut = 0.0, 0, 0
    verified = accepted = emitted = None
    for _ in range(tries // n):
        if emitted is not None:
            policy.observe(Outcome(slots, verified, accepted, emitted, now))
        plan = policy.plan(batch_of([K] * n, sampled=np.ones(n, bool)), now)
        first = (rng.random(n) >= Q[0]).astype(np.int64)
        after = np.where(first[:, None] == 0, SURE, UNSURE)
        second = (rng.random((n, 1)) >= after.cumsum(1)[:, :-1]).sum(1)
        tokens = np.stack([first, second], 1)
        q = np.stack([np.tile(Q, (n, 1)), after], 1)  # [n, K, 4]
        step = 0
        while step < plan.passes:
            step += 1
            if not policy.go_on(step, q[:, step - 1].max(-1)):
                break
        verified = policy.choose() if step else np.zeros(n, np.int64)
        cut += n * step - int(verified.sum())
        answers = [verdict(rng, tokens[i], q[i], int(verified[i])) for i in range(n)]
        emitted = np.array([len(answer) for answer in answers])
        accepted = np.minimum(emitted - 1, verified)
        zeros += sum(answer[0] == 0 for answer in answers)
        now += stair if verified.any() else 1.0
    share = zeros / tries
    return share, (share - P[0]) / math.sqrt(P[0] * (1 - P[0]) / tries), cut


def staircase(n: int, stair: float = 1.6) -> TimeModel:
    """Cost one second if nothing is verified, else `stair` seconds."""
    knots = tuple(range(n, n * (K + 1) + 1))
    seconds = tuple(1.0 if tokens == n else stair for tokens in knots)
    return table_model(knots, seconds, 0.001)


@pytest.mark.parametrize(("n", "stair"), [(1, 1.6), (4, 1.7)])
def test_the_policy_keeps_the_targets_distribution(monkeypatch, n, stair):
    # The confidence is taken for the probability.
    monkeypatch.setattr(Acceptance, "_fit", lambda *_: None)
    monkeypatch.setattr(RequestIntercepts, "learn", lambda *_: None)
    policy = started(monkeypatch, "probabilistic", staircase(n, stair), min_gain=0.0)
    share, deviations, cut = serve(policy, n, 2_000 * n, stair)
    assert abs(deviations) < ALARM, share
    assert policy.stats()["drafted_tokens"] > 2_000 * n
    assert cut == 0


def test_greedy_drafts_are_still_cut(monkeypatch, caplog):
    assert started(monkeypatch, "greedy", staircase(1))._settings.verify
    assert not caplog.records
    assert not started(monkeypatch, "probabilistic", staircase(1))._settings.verify
    (record,) = caplog.records
    assert "tide.control.verify is off" in record.getMessage()


@pytest.mark.parametrize("policy", ["adaspec", "threshold"])
def test_a_tokens_verification_is_independent_of_its_own_step(monkeypatch, policy):
    """Confidences after the last decision change nothing, with unequal caps too."""
    caps, n = np.array([2, 1]), 2
    lengths = []
    for last in (0.01, 0.99):
        asked = started(monkeypatch, "probabilistic", staircase(n), policy=policy)
        for slot in range(n):
            asked.add(slot, True, 0.0)
        plan = asked.plan(batch_of(caps, sampled=np.ones(n, bool)), 0.0)
        assert plan.passes == 2
        assert asked.go_on(1, np.array([0.9, 0.8]))
        # The last step is followed by no call, but its confidences are passed.
        asked.go_on(2, np.full(n, last))
        lengths.append(asked.choose().tolist())
    assert lengths == [[2, 1], [2, 1]]
