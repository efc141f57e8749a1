"""A small closed simulation: constant batch, drawn acceptance, any time model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sim import published as tables
from vllm_tide.control.batch import Batch, Outcome, Plan
from vllm_tide.control.step_times import StepSample, StepTimes
from vllm_tide.control.time_model import TimeModel

NAMES = {
    "gpt-oss-120b": "gpt-oss-120b",
    "Qwen3-235B": "Qwen3-235B-A22B",
    "Llama-4-Scout": "Llama-4-Scout-17B-16E",
    "Llama-3.3-70B": "Llama-3.3-70B-Instruct",
}


def published(name: str, host: float = 0.0) -> TimeModel:
    """Return a model of TIDE's Table 5."""
    return replace(tables.published(NAMES[name]), host=host)


def batch_of(caps: Sequence[int] | np.ndarray, **changes: Any) -> Batch:
    """Return a batch of requests in the first slots, with given `caps`."""
    n = len(caps)
    fields = {
        "slots": np.arange(n),
        "context": np.full(n, 100),
        "caps": np.array(caps, np.int64),
        "sampled": np.zeros(n, bool),
        "limit": np.full(n, np.inf),
        "first_rows": n,
    }
    return Batch(**(fields | changes))


class FixedTimes(StepTimes):
    """Step times that are certain, and do not learn."""

    def observe(self, sample: StepSample, now: float) -> None:
        """Learn nothing."""

    def ratio_sd(self, requests: int, now: float) -> float:
        return 0.0


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


@dataclass
class Acceptance:
    """Acceptance and confidence as log-odds, all normal.

    Confidence log-odds = bias + slope * true log-odds + noise.
    """

    level: float = 1.0
    between: float = 0.7
    within: float = 1.2
    memory: float = 0.4
    fall: float = 0.1
    slope: float = 1.5
    bias: float = 0.5
    noise: float = 0.5

    def draw(
        self, rng: np.random.Generator, ease: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return true conditional acceptance and confidence, both [k, n]."""
        n = len(ease)
        noise = rng.standard_normal((k, n))
        for j in range(1, k):
            fresh = np.sqrt(1 - self.memory**2) * noise[j]
            noise[j] = self.memory * noise[j - 1] + fresh
        depth = np.arange(k)[:, None]
        logit = self.level + ease + self.within * noise - self.fall * depth
        seen = self.bias + self.slope * logit
        seen = seen + self.noise * rng.standard_normal((k, n))
        return sigmoid(logit), sigmoid(seen)


@dataclass
class Result:
    expected: float = 0.0
    seconds: float = 0.0
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Return the throughput of the choices at their true chances, without noise."""
        return self.expected / self.seconds


def expected(chance: np.ndarray, lengths: np.ndarray) -> float:
    sent = np.arange(len(chance))[:, None] < lengths
    return float((np.cumprod(chance, axis=0) * sent).sum()) + len(lengths)


class World:
    """n requests of `length` tokens each, replaced when done."""

    def __init__(
        self,
        n: int,
        time: TimeModel,
        acceptance: Acceptance,
        k: int = 7,
        seed: int = 0,
        length: int = 200,
        steps_each: int = 0,
    ) -> None:
        self.n, self.k, self.time, self.acceptance = n, k, time, acceptance
        self.rng = np.random.default_rng(seed)
        self.length = length
        self.now = 0.0
        self.steps_each = steps_each
        self.step_number = 0
        self.left = self.rng.integers(1, length + 1, n)
        if steps_each:
            self.left[:] = 1 << 30
        self.ease = self._eases(n)

    def _eases(self, n: int) -> np.ndarray:
        return self.acceptance.between * self.rng.standard_normal(n)

    def batch(self, limit: float = np.inf) -> Batch:
        n = self.n
        return batch_of(
            np.minimum(self.k, self.left - 1),
            context=np.full(n, 500),
            limit=np.full(n, limit),
        )

    def finish(self, emitted: np.ndarray, policy: object | None = None) -> bool:
        """Replace the requests that are done; return whether there were any."""
        if self.steps_each:  # Same requests in the same steps for every policy.
            self.step_number += 1
            due = self.step_number + np.arange(self.n) * self.steps_each // self.n
            done = np.flatnonzero(due % self.steps_each == 0)
        else:
            self.left -= emitted
            done = np.flatnonzero(self.left <= 0)
        for slot in done:
            if policy is not None:
                policy.add(slot, False, self.now)
        self.left[done] = self.length
        self.ease[done] = self._eases(len(done))
        return len(done) > 0

    def run(
        self, policy: object, num_steps: int, limit: float = np.inf, skips: bool = False
    ) -> Result:
        """Drive a policy; its own time model may be wrong, `self.time` is true.

        With `skips` steps are skipped as in the engine, by `Plan.unasked`.
        """
        result = Result()
        to_skip = waited = 0
        came = False
        for slot in range(self.n):
            policy.add(slot, False, self.now)
        for _ in range(num_steps):
            batch = self.batch(limit)
            chance, confidence = self.acceptance.draw(self.rng, self.ease, self.k)
            draws = self.rng.random((self.k, self.n))
            if hasattr(policy, "reveal"):  # true chances, not the draws
                survival = np.cumprod(chance, axis=0).T
                survival[np.arange(self.k) >= batch.caps[:, None]] = 0.0
                policy.reveal(survival, self.n)
            skipping = to_skip > 0
            if skipping:
                to_skip, plan = to_skip - 1, Plan(0)
            else:
                waited, plan = 0, policy.plan(batch, self.now)
                to_skip = plan.unasked if skips else 0
            step = 0
            while step < plan.passes:
                step += 1
                if not policy.go_on(step, confidence[step - 1]):
                    break
            lengths = policy.choose() if step else np.zeros(self.n, np.int64)
            assert (lengths <= np.minimum(batch.caps, step)).all()
            assert (lengths >= 0).all()
            passed = np.cumprod(draws < chance, axis=0)
            passed = passed * (np.arange(self.k)[:, None] < lengths)
            accepted = passed.sum(axis=0)
            seconds, sample = self.clock(batch, step, int(lengths.sum()))
            self.now += seconds
            emitted = accepted + 1
            if skipping and came:
                policy.leave_out(seconds)
            elif skipping:
                waited += 1
            outcome = Outcome(
                batch.slots, lengths, accepted, emitted, self.now, sample, 1 + waited
            )
            # As in the engine: observed before the next call of `plan`.
            if not to_skip:
                policy.observe(outcome)
            came = self.finish(emitted, policy)
            result.expected += expected(chance, lengths)
            result.seconds += seconds
            result.steps.append(step)
            result.times.append(seconds)
        return result

    def clock(
        self, batch: Batch, steps: int, verified: int
    ) -> tuple[float, StepSample]:
        context, n = int(batch.context.sum()), self.n
        draft = self.time.draft_curve(n, context, batch.first_rows, max(steps, 1))
        target = float(self.time.target_curve(n, context, verified)[-1])
        host = self.time.host
        first = float(draft[1]) if steps else np.nan
        further = float(draft[steps] - draft[1]) if steps > 1 else np.nan
        sample = StepSample(
            n, context, verified, 0, steps, n, target, first, further, host
        )
        return target + host + (float(draft[steps]) if steps else 0.0), sample
