"""Whether control survives a draft that is sure and wrong, and uses the next good one.

    python scripts/bench/judge_calibration.py

`rows` drives the real classes, without a server, in half a minute of one core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from sim.published import table_model
from vllm_tide.control.batch import Batch, Outcome
from vllm_tide.control.calibration import Calibration
from vllm_tide.control.online_time import OnlineTime
from vllm_tide.control.policies import AdaSpecPolicy, ControlSettings
from vllm_tide.control.time_model import TimeModel

CONFIDENCES = (0.5, 0.9, 0.99, 0.9999, 1.0)
ACCEPTANCES = (0.0, 0.05, 0.3, 0.7, 1.0)
LABELS = 5000
DRAFT_TOKENS, REQUESTS = 7, 32
BAD_ROUNDS, GOOD_ROUNDS = 300, 1500
# Llama-3.3-70B on an H100 (TIDE, Table 5): tokens, milliseconds, of a draft pass.
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TARGET_MS = (15.5, 16.0, 16.11, 16.36, 17.1, 18.45, 19.0, 21.38, 27.54, 64.76)
DRAFT_MS = 0.843


def rows(seed: int = 0) -> list[dict]:
    """One row for each planted confidence and acceptance.

    Returns:
        Rows of `confidence`, `acceptance`, `finite`: every table is finite after 5,000
        labels, and `recovers`: after a bad phase and a swap to a good draft at least
        half of the last 100 of 1,500 rounds draft.
    """
    return [
        {
            "confidence": confidence,
            "acceptance": acceptance,
            "finite": finite(confidence, acceptance, seed),
            "recovers": recovers(confidence, acceptance, seed),
        }
        for confidence in CONFIDENCES
        for acceptance in ACCEPTANCES
    ]


def finite(confidence: float, acceptance: float, seed: int) -> bool:
    """Whether the map stays a map while it learns from one kind of token."""
    rng = np.random.default_rng(seed)
    calibration = Calibration(DRAFT_TOKENS)
    lot = 64
    kind = np.zeros(lot, np.int64)
    for _ in range(-(-LABELS // lot)):
        given = np.full(lot, confidence, np.float32), kind, np.zeros(lot)
        values = np.empty((3, 1, lot))
        calibration.predict(values, 1, *given)
        seen, _, chance = values[:, 0]
        accepted = (rng.random(lot) < acceptance).astype(float)
        calibration.learn(
            rng.integers(0, DRAFT_TOKENS, lot), kind, seen, chance, accepted
        )
    grid = np.linspace(0.0, 1.0, 101)
    values = np.empty((2, 3, DRAFT_TOKENS, len(grid)))
    for step in range(1, DRAFT_TOKENS + 1):
        for sampled in (0, 1):
            given = np.full(len(grid), sampled), np.zeros(len(grid))
            calibration.predict(values[sampled], step, grid, *given)
    return bool(np.isfinite(values).all() and np.isfinite(calibration.error()))


def recovers(confidence: float, acceptance: float, seed: int) -> bool:
    """Whether a good draft is used after one with that confidence and acceptance."""
    rng = np.random.default_rng(seed)
    milliseconds = tuple(1e-3 * value for value in TARGET_MS)
    model = table_model(KNOTS, milliseconds, 1e-3 * DRAFT_MS, 0.0)
    policy = AdaSpecPolicy(
        ControlSettings(k_max=DRAFT_TOKENS, max_requests=REQUESTS), OnlineTime(model)
    )
    for slot in range(REQUESTS):
        policy.add(slot, False, 0.0)
    try:
        now, _ = _serve(policy, model, rng, 0.0, BAD_ROUNDS, confidence, acceptance)
        policy.draft_swapped()
        _, drafted = _serve(policy, model, rng, now, GOOD_ROUNDS)
    except (ValueError, IndexError, FloatingPointError):
        return False
    return bool(np.mean(drafted[-100:]) > 0.5)


def _serve(
    policy: AdaSpecPolicy,
    model: TimeModel,
    rng: np.random.Generator,
    now: float,
    rounds: int,
    confidence: float | None = None,
    acceptance: float = 0.0,
) -> tuple[float, list[bool]]:
    """Run rounds of one draft; without a confidence it is a good and honest one.

    Returns:
        The time after them, and whether each of them drafted.
    """
    n, drafted = REQUESTS, []
    slots = np.arange(n)
    for turn in range(rounds):
        # As requests come and go.
        policy.drop(turn % n)
        policy.add(turn % n, False, now)
        batch = Batch(
            slots=slots,
            context=np.full(n, 500),
            room=np.full(n, DRAFT_TOKENS),
            sampled=np.zeros(n, bool),
            limit=np.full(n, np.inf),
            first_rows=n,
        )
        chance = 1.0 / (1.0 + np.exp(-rng.normal(1.5, 1.2, (DRAFT_TOKENS, n))))
        sure = chance
        if confidence is not None:
            chance = np.full_like(chance, acceptance)
            sure = np.full_like(chance, confidence)
        hit = rng.random((DRAFT_TOKENS, n)) < chance
        plan = policy.plan(batch, now)
        steps = 0
        while steps < plan.steps:
            steps += 1
            if not policy.go_on(steps, sure[steps - 1].astype(np.float32)):
                break
        lengths = policy.choose() if steps else np.zeros(n, np.int64)
        run = np.cumprod(hit, axis=0).sum(axis=0)
        accepted = np.minimum(run, lengths)
        verified = int(lengths.sum())
        now += float(model.target_curve(n, 500 * n, verified)[-1])
        now += float(model.draft_curve(n, 500 * n, n, max(steps, 1))[steps])
        probe = None
        if plan.probe and not plan.steps:
            few = slots[:4]
            probe = (few, sure[0, few], hit[0, few])
        policy.observe(
            Outcome(slots, lengths, accepted, accepted + 1, now, None, probe)
        )
        drafted.append(steps > 0)
    return now, drafted


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row))
