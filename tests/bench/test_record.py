import itertools

import numpy as np
import pytest

from bench.harness.hindsight import Recording, analyse
from bench.record import RecordedPolicy
from sim.published import table_model
from vllm_tide.control.batch import Batch, Outcome
from vllm_tide.control.online_time import OnlineTime, RoundSample
from vllm_tide.control.policies import ControlSettings

N, K = 4, 3
KNOTS = (1, 8, 64, 512, 4096)


def make(forced):
    model = table_model(KNOTS, tuple(0.01 + 1e-5 * k for k in KNOTS), 0.001)
    policy = RecordedPolicy(ControlSettings(k_max=K, max_requests=N), OnlineTime(model))
    policy.recording = Recording(N, K)
    policy.forced = itertools.cycle(forced) if forced else None
    for slot in range(N):
        policy.add(slot, sampled=False, now=0.0)
    return policy


def serve(policy, steps, now=0.0):
    """Steps of a batch whose requests accept 0, 1, 2, ... of what they are sent."""
    slots, verified = np.arange(N), np.zeros(N, np.int64)
    for _ in range(steps):
        accepted = np.minimum(verified, slots)
        sample = RoundSample(
            N, 100, int(verified.sum()), 0, 1, N, 0.01, 0.001, 0.0, 0.0
        )
        policy.observe(
            Outcome(slots, verified, accepted, accepted + 1, now, sample=sample)
        )
        room, free = np.full(N, K), np.full(N, np.inf)
        batch = Batch(slots, np.full(N, 50), room, np.zeros(N, bool), free, N)
        plan, verified = policy.plan(batch, now), np.zeros(N, np.int64)
        for step in range(1, plan.steps + 1):
            if not policy.go_on(step, np.full(N, 0.9)) or step == plan.steps:
                break
        if plan.steps:
            verified = policy.choose()
        now += 0.02
    return now


def test_set_lengths_are_drafted_whole_and_their_verdicts_kept():
    policy = make([K, 0, 1])
    serve(policy, 31)
    found = policy.recording
    assert len(found.steps) == 10
    assert found.steps[0].accepted.tolist() == [0, 1, 2, 3]
    assert found.steps[0].confidence.shape == found.steps[0].survival.shape == (K, N)
    assert {m for m, _, _, _ in found.times} == {0, N, N * K}
    assert found.tokens == 0
    # What it would have done by itself: the others accept less than they are sent.
    assert all(0 <= s.depth <= K and s.lengths.shape == (N,) for s in found.steps)
    assert any(s.depth for s in found.steps)
    assert all((s.lengths <= s.depth).all() for s in found.steps)
    assert {drafted for drafted, _ in found.decisions} == {1, K}


def test_waves_without_set_lengths_are_what_is_realised():
    policy = make(None)
    serve(policy, 20)
    assert not policy.recording.steps and policy.recording.seconds > 0.3
    now = policy.recording.seconds
    policy.forced, policy.since = itertools.cycle([K, 0, 1]), None
    serve(policy, 40, now)
    assert policy.recording.seconds == now
    left = analyse(policy.recording)
    assert left["best_per_request"] >= left["best_uniform"] > 0
    wanted = policy.recording.tokens / policy.recording.seconds
    assert left["realised"] == pytest.approx(wanted, rel=1e-3)
    assert policy.gate.decide.__self__ is policy.gate  # decides again
