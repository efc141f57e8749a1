#!/usr/bin/env python
"""Error rates of canary and gate on simulated traffic with known true effects.

    scripts/bench/judges.py [--only canary|gate] [--seed 0] [--json FILE]

*Canary*: the real `StaticPolicy` or `AdaSpecPolicy` serves a batch of requests (64 to
256 tokens each, of different difficulty) on published step times. Each decode step
becomes records for the real `ServedRequests` and `Canary` (default `tide.deploy`).
After 96 requests the draft is swapped, for an equal one or for a worse one. The logits
of acceptance and confidence of the worse one are lower by an offset that costs 15 or
25 % of throughput at that policy and batch (calibrated by paired runs). In half of the
trials acceptance is logistic in the confidence logit, as the policy's estimator
assumes. In the other half it has a plateau: acceptance is at most 85 % at any
confidence.

*Gate*: the trainer's `judge` and `Evidence` with random evaluations.

There is no server and no model; only the decisions are tested.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.common import commit
from sim.published import published
from vllm_tide.config import DeployConfig, TrainConfig
from vllm_tide.control.adaspec import ControlSettings
from vllm_tide.control.batch import Batch, Outcome
from vllm_tide.control.policies import AdaSpecPolicy, Policy, StaticPolicy
from vllm_tide.control.step_times import StepSample, StepTimes
from vllm_tide.deploy.canary import Canary, Verdict
from vllm_tide.deploy.served import ServedRequest, ServedRequests
from vllm_tide.train.evaluate import FORMS, Evaluation
from vllm_tide.train.judgement import Evidence, Pair, judge
from vllm_tide.transport.versions import first_version

BEFORE = 96
"""Ended requests before a swap."""
LOSSES = (-0.15, -0.25)
LENGTHS = (64, 257)
SPREAD = 0.5
"""Standard deviation of requests, log-odds."""
EXPLORED = 0.02
"""Share of the fully cut drafts of which one token is verified as exploration."""
_PROMPT, _CONTEXT = 16, 500
_TOKENS = np.zeros(16, np.int32)
_POLL_S = 0.5  # simulated seconds between two evaluations of open requests


@dataclass(slots=True)
class Row:
    """Fields of a record that `ServedRequests` reads."""

    key: int
    start: int
    num_accepted: int
    token_ids: np.ndarray
    draft_version: int
    cost: float
    concurrency: int
    phase: int = 1
    num_prompt_tokens: int = _PROMPT
    finished: bool = False
    tenant: int = 0
    verify_chance: float = 1.0
    memory: bool = False


class Times(StepTimes):
    """Exact step times without online updates."""

    def __init__(self) -> None:
        super().__init__(published("Llama-3.3-70B-Instruct"))

    def observe(self, sample: StepSample, now: float) -> None:
        """Ignore the sample: the times are exact."""

    def ratio_sd(self, requests: int, now: float) -> float:
        return 0.0


@dataclass(frozen=True)
class Truth:
    """True acceptance and confidence of a draft."""

    plateau: bool
    worse: float = 0.0  # offset to the first draft, in logits
    level: float = 1.4  # logits of the first draft

    def draw(
        self, rng: np.random.Generator, ease: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return acceptance probabilities and confidences of drafts 1..k, [k, n]."""
        n = len(ease)
        noise = rng.standard_normal((2, k, n))
        for j in range(1, k):
            noise[0, j] = 0.5 * noise[0, j - 1] + 0.87 * noise[0, j]
        logit = self.level + ease + 1.2 * noise[0] - 0.1 * np.arange(k)[:, None]
        confidence = 0.5 + 1.25 * logit + 0.6 * noise[1] - self.worse
        logit -= self.worse
        if not self.plateau:
            return _sigmoid(logit), _sigmoid(confidence)
        return 0.1 + 0.75 * _sigmoid(2.5 * logit), _sigmoid(confidence)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


class Loop:
    """Closed loop with a constant batch of `n` requests.

    `policy` is "static" (K = 3) or "adaspec" (K = 5). `tokens` is the expected number,
    without sampling noise; `seconds` are simulated.
    """

    def __init__(self, policy: str, n: int, truth: Truth, seed: int) -> None:
        self.k = 3 if policy == "static" else 5
        self.static, self.n, self.truth = policy == "static", n, truth
        self.rng = np.random.default_rng(seed)
        self.time = Times()
        self.policy: Policy = StaticPolicy(self.k)
        if not self.static:
            settings = ControlSettings(k_max=self.k, max_requests=n)
            self.policy = AdaSpecPolicy(settings, self.time)
        self.served, self.version = ServedRequests(max_open=1 << 20), 1
        self.tokens = self.seconds = 0.0
        self._slots = np.arange(n)
        self._context, self._limit = np.full(n, _CONTEXT), np.full(n, np.inf)
        self._greedy = np.zeros(n, bool)
        # A separate generator, so that paired runs serve the same requests.
        self.request_rng = np.random.default_rng([seed, 1])
        self.ease = SPREAD * self.request_rng.standard_normal(n)
        self.left = self.request_rng.integers(1, LENGTHS[1], n)
        self.done = np.zeros(n, np.int64)
        self.key = np.arange(n)
        self._next = n
        for slot in range(n):
            self.policy.add(slot, False, 0.0)

    def swap(self, truth: Truth) -> None:
        """Install another draft."""
        self.truth, self.version = truth, self.version + 1
        self.policy.draft_swapped()

    def step(self, *, records: bool = True) -> list[ServedRequest]:
        """Run a decode step; return its finished requests (none without `records`)."""
        n, model = self.n, self.time.prior
        caps = np.minimum(self.k, self.left - 1)
        plan = self.policy.plan(
            Batch(self._slots, self._context, caps, self._greedy, self._limit, n),
            self.seconds,
        )
        chance, confidence = self.truth.draw(self.rng, self.ease, self.k)
        passed = self.rng.random((self.k, n)) < chance
        step, lengths = 0, np.zeros(n, np.int64)
        more = plan.passes > 0
        while more and step < plan.passes:
            step += 1
            more = self.policy.go_on(step, confidence[step - 1])
        if step:
            lengths = np.minimum(self.policy.choose(), caps)
        chances = np.ones(n)
        if step and not self.static:
            explored = (lengths == 0) & (caps > 0) & (self.rng.random(n) < EXPLORED)
            lengths, chances[explored] = lengths + explored, EXPLORED
        sent = np.arange(self.k)[:, None] < lengths
        accepted = np.cumprod(passed & sent, axis=0).sum(axis=0)
        total = int(lengths.sum())
        context = n * _CONTEXT
        target = model.target(n + total, context)
        draft = float(model.draft_curve(n, context, n, step)[step]) if step else 0.0
        plain = model.target(n, context)
        self.seconds += target + draft
        self.tokens += float((np.cumprod(chance, axis=0) * sent).sum()) + n
        emitted = np.minimum(accepted + 1, self.left)
        self.policy.observe(
            Outcome(self._slots, lengths, accepted, emitted, self.seconds)
        )
        cost = 1.0 if self.static else (target + draft) / plain
        ended = self._write(cost, lengths, accepted, chances) if records else []
        self.left -= emitted
        self.done += emitted
        for slot in np.flatnonzero(self.left <= 0):
            if records:
                row = Row(int(self.key[slot]), 0, 0, _TOKENS[:0], 0, 1.0, n)
                row.finished = True
                ended += self.served.add(row, "", self.seconds)
            self._begin(int(slot))
        return ended

    def _write(self, cost: float, *columns: np.ndarray) -> list[ServedRequest]:
        """Add a step's records: lengths, accepted tokens, verification chances."""
        ended: list[ServedRequest] = []
        columns = (self.key, self.done, *columns)
        for key, done, length, taken, chance in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            start, ids = _PROMPT + done, _TOKENS[: length + 1]
            version = first_version(self.version)
            row = Row(key, start, taken, ids, version, cost, self.n)
            row.verify_chance = chance
            ended += self.served.add(row, "", self.seconds)
        return ended

    def _begin(self, slot: int) -> None:
        self.ease[slot] = SPREAD * self.request_rng.standard_normal()
        self.left[slot] = self.request_rng.integers(*LENGTHS)
        self.done[slot] = 0
        self.key[slot] = self._next
        self._next += 1
        self.policy.add(slot, False, self.seconds)


def throughput(policy: str, n: int, truth: Truth, tokens: int = 20_000) -> float:
    """Return the expected tokens per second in steady state."""
    loop = Loop(policy, n, truth, 12345)
    steps = tokens // (2 * n)
    for i in range(steps):
        if i == steps // 5:
            loop.tokens, began = 0.0, loop.seconds
        loop.step(records=False)
    return loop.tokens / (loop.seconds - began)


def worse_by(policy: str, n: int, plateau: bool) -> dict[float, float]:
    """Return logits that cost each of `LOSSES`: a cubic fitted to paired runs."""
    grid = np.array([0.4, 0.8, 1.2, 1.6, 2.2])
    first = throughput(policy, n, Truth(plateau))
    lost = [throughput(policy, n, Truth(plateau, w)) / first - 1.0 for w in grid]
    powers = np.stack([grid, grid**2, grid**3], axis=1)
    curve = np.linalg.lstsq(powers, np.array(lost), rcond=None)[0]
    fine = np.linspace(0.05, 2.2, 400)
    change = np.stack([fine, fine**2, fine**3], axis=1) @ curve
    return {loss: float(fine[np.abs(change - loss).argmin()]) for loss in LOSSES}


def trial(loop: Loop, window: list[ServedRequest], least: int = 0) -> Verdict | None:
    """Return the verdict on a swap that has just been made.

    `window` has all finished requests that began after some time; more are appended.
    At least `least` requests finish, even if the verdict is earlier.
    """
    canary = Canary(DeployConfig())
    oldest = min(request.began for request in window)
    for request in window:
        canary.observe(request)
    canary.begin("", loop.version)
    verdict, next_poll, ended = None, 0.0, 0
    while verdict is None or ended < least:
        done = loop.step()
        ended += len(done)
        window += done
        if verdict is not None:
            continue
        for request in done:
            if request.began >= oldest:
                canary.observe(request)
        if done or loop.seconds >= next_poll:
            next_poll = loop.seconds + _POLL_S
            opened = loop.served.open_requests()
            canary.evaluate([r for r in opened if r.began >= oldest])
            verdict = canary.poll()
    return verdict


def cell(
    policy: str, n: int, *, plateau: bool, trials: int, quiet: int, seed: int
) -> dict[float, list[Verdict]]:
    """Return verdicts by true change of throughput, of a policy, batch and draft."""
    worse = worse_by(policy, n, plateau)
    loop = Loop(policy, n, Truth(plateau), seed)
    ended: list[ServedRequest] = []
    while len(ended) < BEFORE + 2 * n:
        ended += loop.step()
    verdicts: dict[float, list[Verdict]] = {change: [] for change in (0.0, *LOSSES)}
    for index in range(max(trials, quiet)):
        window = _window(ended)
        if index < trials:
            for change in LOSSES:
                branch = copy.deepcopy(loop)
                branch.rng, branch.request_rng = np.random.default_rng(
                    [seed, index, 2]
                ).spawn(2)
                branch.swap(Truth(plateau, worse[change]))
                verdicts[change].append(trial(branch, [*window]))
        if index < quiet:
            loop.swap(loop.truth)
            window = [*window]
            before = len(window)
            verdicts[0.0].append(trial(loop, window, 48))
            ended += window[before:]
            del ended[: -4 * BEFORE - 4 * n]
    return verdicts


def _window(ended: list[ServedRequest]) -> list[ServedRequest]:
    """Return the last finished requests that began after all others had ended."""
    size = BEFORE
    while True:
        oldest = max((r.began for r in ended[:-size]), default=0)
        window = [r for r in ended[-size:] if r.began > oldest]
        if len(window) >= BEFORE or size >= len(ended):
            return window
        size += 8


def canary_rows(
    seed: int = 0,
    *,
    trials: int = 40,
    quiet: int = 100,
    policies: tuple[str, ...] = ("static", "adaspec"),
    batches: tuple[int, ...] = (4, 16, 64),
) -> list[dict[str, Any]]:
    """Return how often a swap was rolled back: `trials` per loss, `quiet` without."""
    rows = []
    for policy in policies:
        for n in batches:
            each = {"trials": trials // 2, "quiet": quiet // 2}
            halves = [
                cell(policy, n, plateau=plateau, seed=2 * seed + plateau, **each)
                for plateau in (False, True)
            ]
            for change in (0.0, *LOSSES):
                verdicts = [v for half in halves for v in half[change]]
                back = [v for v in verdicts if v.decision == "rollback"]
                counted = back if change else verdicts
                changes = [v.comparison.change for v in verdicts if v.comparison]
                rows.append(
                    {
                        "policy": policy,
                        "batch": n,
                        "true_throughput_change": change,
                        "trials": len(verdicts),
                        "rolled_back": len(back),
                        "requests_p50": median([v.requests for v in counted] or [0]),
                        "requests_max": max([v.requests for v in counted] or [0]),
                        "change_mean": round(float(np.mean(changes)), 4),
                    }
                )
    return rows


CONFIG = TrainConfig()
DEPTH = 3
ROWS = 100
SMALL = (3, 8)
"""Least and greatest number of requests of a cycle."""


def pair_of(gains: dict[int, float]) -> Pair:
    """Return evaluations in which the candidate accepts `gains` more tokens per row."""

    def evaluation(by_key: dict[int, float]) -> Evaluation:
        result = Evaluation(DEPTH)
        for key, more in by_key.items():
            accepted = ROWS * (DEPTH + more)
            result.requests[key] = [float(ROWS)] + [accepted] * len(FORMS)
        return result

    return Pair(evaluation(gains), evaluation(dict.fromkeys(gains, 0.0)))


def run(
    gain: float,
    cycles: int,
    random_: random.Random,
    *,
    spread: float = 0.15,
    requests: tuple[int, int] = SMALL,
) -> int | None:
    """Return the requests scored until the first publication; None without one."""
    evidence, nothing = Evidence(), pair_of({})
    for cycle in range(cycles):
        count = random_.randint(*requests)
        gains = {
            1000 * cycle + i: max(-DEPTH, min(DEPTH, gain + random_.gauss(0, spread)))
            for i in range(count)
        }
        pair = pair_of(gains)
        evidence.add(list(pair.gains("served").values()))
        if judge(1, 0.0, nothing, pair, CONFIG, "served", evidence).publish:
            return evidence.requests
    return None


def gate_row(
    gain: float, runs: int, seed: int, cycles: int = 20, **how: Any
) -> dict[str, Any]:
    """Return the figures of many runs."""
    random_ = random.Random(f"{seed} {gain} {sorted(how.items())}")  # noqa: S311
    results = [run(gain, cycles, random_, **how) for _ in range(runs)]
    published = [n for n in results if n is not None]
    return {
        "true_gain": gain,
        "cycles": cycles,
        "runs": runs,
        "published": len(published),
        "requests_p50": median(published) if published else None,
        "published_within_60": sum(n <= 60 for n in published),
        "spread": how.get("spread", 0.15),
        "requests_per_cycle": list(how.get("requests", SMALL)),
    }


def gate_rows(seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of gains with spread 0.15, a shift (+0.3, spread 0.3) and others."""
    return [
        gate_row(0.0, 1000, seed),
        gate_row(0.05, 200, seed),
        gate_row(0.10, 400, seed),
        gate_row(0.30, 200, seed),
        gate_row(0.30, 200, seed, spread=0.3),
        *(gate_row(0.0, 200, seed, spread=s) for s in (0.05, 0.3, 0.6)),
    ]


PARTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "canary": canary_rows,
    "gate": gate_rows,
}


def main() -> int:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=PARTS, help="default: both")
    args = parser.parse_args()
    report: dict[str, Any] = {**commit(), "seed": args.seed}
    for part in [args.only] if args.only else PARTS:
        report[part] = PARTS[part](args.seed)
        for row in report[part]:
            print(part, *(f"{name} {value}" for name, value in row.items()), sep="  ")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
