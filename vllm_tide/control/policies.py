"""The policies that the engine and the simulator drive: AdaSpec and the baselines.

Source of the baselines: a static length is vLLM's own setting; the confidence threshold
is AdaSpec's "threshold" arm (stop when the batch's mean confidence is below 0.6); the
TIDE gate is the TIDE paper's equation 5.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from vllm_tide.control.adaspec import AdaSpecPolicy, ControlSettings
from vllm_tide.control.batch import Batch, Outcome, Plan, Proposals, totals
from vllm_tide.control.calibration import HALF_LIFE_TOKENS
from vllm_tide.control.costs import Times

__all__ = [
    "AdaSpecPolicy",
    "ControlSettings",
    "Policy",
    "StaticPolicy",
    "ThresholdPolicy",
    "TideGatePolicy",
    "make_policy",
]

THRESHOLD = 0.6
"""Mean confidence below which the threshold policy stops (AdaSpec's arm)."""
_TRIAL_ROUNDS = 100
_TIDE_START = 0.7


class _Baseline:
    """Counting and bookkeeping that the baselines share; calls as in `AdaSpecPolicy`.

    Args:
        k_max: Most draft tokens.
        time: Time model to keep refined, for its error; None: none.
    """

    def __init__(self, k_max: int, time: Times | None = None) -> None:
        self._k = k_max
        self._time = time
        self._room = np.zeros(0, np.int64)
        self._memory: Proposals | None = None
        self.remembered: np.ndarray | None = None
        self._step = 0
        self._open = False
        self._count: Counter[str] = Counter()
        self._off: Counter[str] = Counter()
        self._lengths = np.zeros(k_max + 1, np.int64)

    def add(self, slot: int, sampled: bool, now: float) -> None:
        """A request begins."""

    def drop(self, slot: int) -> None:
        """A request ends."""

    def draft_swapped(self) -> None:
        """The draft has new weights."""

    def plan(self, batch: Batch, now: float) -> Plan:
        self._room, self._memory, self.remembered = batch.room, batch.memory, None
        self._step = 0
        self._open = True
        self._count["rounds"] += 1
        most = min(int(batch.room.max()), self._k) if len(batch) else 0
        reason = "" if most else "no_room"
        if most and batch.memory is not None:
            gains = np.maximum(_drafted(batch.memory)[:most], 0.0).sum(axis=0)
            left = batch.memory.left_to_draft(batch.room, gains)
            reason = "" if left.any() else "memory"
        if not reason:
            reason = self._gate(batch, most)
        if reason:
            self._off[reason] += 1
            return Plan(0, reason)
        return Plan(most)

    def _gate(self, batch: Batch, most: int) -> str:
        return ""

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        self._step = step
        return step < self._k

    def choose(self) -> np.ndarray:
        lengths = np.minimum(self._room, self._step)
        self._count["drafted_tokens"] += int(lengths.sum())
        if self._memory is not None:
            drafted = _drafted(self._memory)[: self._step]
            _, lengths, self.remembered = self._memory.merge(drafted, lengths)
        return lengths

    def observe(self, outcome: Outcome) -> None:
        if self._time is not None and outcome.sample is not None:
            self._time.observe(outcome.sample)
        self._count["verified_tokens"] += int(outcome.verified.sum())
        self._count["accepted_tokens"] += int(outcome.accepted.sum())
        if self._open:
            self._open = False
            self._lengths[self._step] += 1
            self._count["draft_steps"] += self._step

    def stats(self) -> dict[str, Any]:
        nan = float("nan")
        unknown = "predicted_step_s", "measured_step_s", "calibration_error"
        return {
            **totals(self._count, self._off, self._lengths),
            **dict.fromkeys((*unknown, "throughput_ratio"), nan),
            "time_error": nan if self._time is None else self._time.error,
            "plain_seconds": 0.0,
            "round_seconds": 0.0,
        }


def _drafted(memory: Proposals) -> np.ndarray:
    assert memory.drafted is not None  # noqa: S101 (given to who has no confidences)
    return memory.drafted


Policy = AdaSpecPolicy | _Baseline
"""Decides the draft steps and the verified set of every round."""


class StaticPolicy(_Baseline):
    """A fixed number of draft tokens, all verified."""


class ThresholdPolicy(_Baseline):
    """Drafts while the batch's mean confidence is at least the threshold."""

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        self._step = step
        drafted = self._room >= step
        mean = float(confidence[drafted].mean()) if drafted.any() else 0.0
        return step < self._k and mean >= THRESHOLD


class TideGatePolicy(_Baseline):
    """Static length behind TIDE's gate: on while the practical speed-up is above 1.

    Speed-up (TIDE eq. 5) = (1 - a^(k+1)) / ((1 - a) (c k + beta)), c = D0 / T(b),
    beta = T(b (k + 1)) / T(b), a the measured acceptance rate, b the batch. The paper
    does not say how a is kept fresh while off; here one round in a hundred drafts.

    Its `time` is what the gate predicts with.
    """

    def __init__(self, k: int, time: Times) -> None:
        super().__init__(k, time)
        self._source = time
        self._accepted = 20.0 * _TIDE_START
        self._tried = 20.0
        self._waited = 0

    @property
    def acceptance(self) -> float:
        return self._accepted / self._tried

    def speedup(self, requests: int, context: int, rows: int, k: int) -> float:
        """TIDE's practical speed-up.

        Args:
            context: Tokens in the KV cache, summed over the requests.
        """
        model = self._source.model
        target = model.target_curve(requests, context, requests * k)
        plain = float(target[0])
        draft = float(model.draft_curve(requests, context, rows, k)[k])
        a = min(self.acceptance, 1.0 - 1e-6)
        tokens = (1.0 - a ** (k + 1)) / (1.0 - a)
        return tokens / (draft / plain + float(target[-1]) / plain)

    def draft_swapped(self) -> None:
        keep = max(0.2, min(1.0, 20.0 / self._tried))
        self._accepted *= keep
        self._tried *= keep
        self._waited = _TRIAL_ROUNDS

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        accepted = int(outcome.accepted.sum())
        rejected = int(np.count_nonzero(outcome.accepted < outcome.verified))
        keep = 0.5 ** ((accepted + rejected) / HALF_LIFE_TOKENS)
        self._accepted = self._accepted * keep + accepted
        self._tried = self._tried * keep + accepted + rejected

    def _gate(self, batch: Batch, most: int) -> str:
        context = int(batch.context.sum())
        if self.speedup(len(batch), context, batch.first_rows, most) > 1.0:
            self._waited = 0
            return ""
        self._waited += 1
        if self._waited > _TRIAL_ROUNDS:
            self._waited = 0
            self._count["probes"] += 1
            return ""
        return "no_gain"


def make_policy(name: str, settings: ControlSettings, time: Times) -> Policy:
    """The policy of that name that predicts times.

    Args:
        settings: Knobs; `k_max` is the length of "tide_gate".

    Raises:
        ValueError: For an unknown name.
    """
    k = settings.k_max
    if name == "adaspec":
        return AdaSpecPolicy(settings, time)
    if name == "threshold":
        return ThresholdPolicy(k, time)
    if name == "tide_gate":
        return TideGatePolicy(k, time)
    raise ValueError(f"unknown policy {name!r}: adaspec, threshold or tide_gate")
