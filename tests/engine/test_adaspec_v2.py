"""AdaSpec one step late, as on Model Runner V2, on a simulated engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from vllm_tide.capture.step import Step
from vllm_tide.config import ControlConfig
from vllm_tide.control.adaspec import ControlSettings
from vllm_tide.control.costs import FirstPassAlways
from vllm_tide.control.policies import AdaSpecPolicy
from vllm_tide.control.step_times import StepTimes
from vllm_tide.control.time_model import ForwardModel, TimeModel
from vllm_tide.engine import control_v2
from vllm_tide.engine.control_v2 import ControlV2

K, REQUESTS = 4, 3
DRAFT = ForwardModel((1, 64), (3e-4, 4e-4), 0.0)
FLAT = TimeModel(ForwardModel((1, 64), (1e-2, 1.02e-2), 0.0), DRAFT, DRAFT)
MIDDLE = TimeModel(ForwardModel((1, 64), (1e-2, 6e-2), 0.0), DRAFT, DRAFT)
STEEP = TimeModel(ForwardModel((1, 64), (1e-3, 64e-3), 0.0), DRAFT, DRAFT)


class Engine:
    """Drafts as deep as planned a step ago; accepts with the drafts' confidence."""

    def __init__(self, monkeypatch, model: TimeModel) -> None:
        self.now = 0.0
        monkeypatch.setattr(
            control_v2, "time", SimpleNamespace(monotonic=lambda: self.now)
        )
        self.random = np.random.default_rng(0)
        self.names = [str(i) for i in range(REQUESTS)]
        self.time = FirstPassAlways(model)
        settings = ControlSettings(k_max=K, max_requests=REQUESTS)
        self.control = ControlV2(REQUESTS, 10**6, ControlConfig(), K, trims=True)
        self.control.policy = AdaSpecPolicy(settings, FirstPassAlways(StepTimes(model)))
        params = SimpleNamespace(
            max_tokens=None, temperature=0.0, extra_args=None, structured_outputs=None
        )
        self.control.admit(
            SimpleNamespace(
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=n, prompt_len=9, sampling_params=params)
                    for n in self.names
                ],
                num_scheduled_tokens=dict.fromkeys(self.names, 1),
                preempted_req_ids=None,
            )
        )
        self.drafted = np.full((REQUESTS, 0), 0.5)  # chances of what is verified next
        self.newest = np.zeros(REQUESTS, np.int64)
        self.context = np.full(REQUESTS, 20)
        self.depths: list[int] = []
        self.verified = 0

    def run(self, num_steps: int, mean: float) -> None:
        """Run steps with drafts that are right with this mean chance."""
        for _ in range(num_steps):
            self._step(mean)

    def _step(self, mean: float) -> None:
        control, n = self.control, REQUESTS
        depth = control.depth
        drafts = np.array([len(row) for row in self.drafted])
        accepted = np.array(
            [_prefix(self.random.random(len(row)) < row) for row in self.drafted]
        )
        low, high = max(mean - 0.1, 0.01), min(mean + 0.1, 0.99)
        confidence = self.random.uniform(low, high, (n, K)).astype(np.float32)
        token = (self.random.random(n) < confidence[:, 0]).astype(np.int64)
        sampled = np.full((n, K + 1), -1)
        sampled[:, 0] = self.newest
        step = Step(
            req_ids=list(self.names),
            bounds=np.append(0, np.cumsum(1 + drafts)),
            drafts=drafts,
            padding=np.zeros(n, np.int32),
            logit_ends=np.cumsum(1 + drafts),
            num_prompt_tokens=np.full(n, 9),
            steps=depth,
            version=0,
            buffer=None,
            start=self.context,
            emitted=accepted + 1,
            sampled=sampled,
            token_ids=np.arange(n + drafts.sum()),
            confidence=confidence,
            drafted=np.ones(n, np.int64),
            reading=lambda: None,
        )
        total = int(drafts.sum())
        self.now += float(self.time.target_curve(n, 60, total)[total])
        self.now += float(self.time.draft_curve(n, 60, n + total, K)[depth])
        control.learn(step)
        self.context = self.context + accepted + 1
        self.newest = token
        cut = control.choose(step.req_ids, [[-1] * depth for _ in range(n)])
        self.drafted = [confidence[i, : len(tokens)] for i, tokens in enumerate(cut)]
        self.depths.append(depth)
        self.verified += total


def _prefix(right: np.ndarray) -> int:
    return int(np.argmin(np.append(right, False)))


def test_the_first_pass_is_part_of_the_plain_step():
    apart, always = FLAT, FirstPassAlways(StepTimes(FLAT))
    first = apart.draft_curve(3, 60, 3, 1)[1]
    np.testing.assert_allclose(
        always.target_curve(3, 60, 6), apart.target_curve(3, 60, 6) + first
    )
    beside = always.draft_curve(3, 60, 9, 4)
    assert beside[0] == beside[1] == 0.0
    np.testing.assert_allclose(
        np.diff(beside[1:]), np.diff(apart.draft_curve(3, 60, 9, 4))[1:]
    )
    assert always.draft_curve(3, 60, 9, 0).tolist() == [0.0]


def test_only_offered_lengths_and_the_last_position_have_finite_cost():
    all_of_them = FirstPassAlways(FLAT).draft_curve(3, 60, 9, 7)
    offered = FirstPassAlways(FLAT, [0, 1, 3, 7])
    there = [0, 1, 3, 7]
    curve = offered.draft_curve(3, 60, 9, 7)
    np.testing.assert_array_equal(curve[there], all_of_them[there])
    assert (curve[[2, 4, 5, 6]] > 1e3).all()
    little = offered.draft_curve(3, 60, 9, 5)
    np.testing.assert_array_equal(little[[0, 1, 3, 5]], all_of_them[[0, 1, 3, 5]])
    assert (little[[2, 4]] > 1e3).all()


def test_nothing_is_verified_where_drafting_does_not_pay(monkeypatch):
    engine = Engine(monkeypatch, STEEP)
    engine.run(300, 0.2)
    before = engine.verified
    engine.run(100, 0.2)
    assert engine.control.faults == {}
    assert min(engine.depths[300:]) == 0
    assert np.mean(engine.depths[300:]) < 0.5
    assert engine.verified - before < 0.05 * 100 * REQUESTS


def test_drafting_resumes_when_drafts_become_good(monkeypatch):
    engine = Engine(monkeypatch, MIDDLE)
    engine.run(300, 0.02)
    off = engine.verified
    engine.run(60, 0.02)
    assert engine.verified - off < 20
    assert engine.control.stats()["exploration_steps"] > 0
    engine.run(900, 0.95)
    assert engine.control.faults == {}
    assert np.mean(engine.depths[-100:]) > K - 1.5
