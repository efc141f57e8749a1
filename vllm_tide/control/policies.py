"""Control policies of the engine and the simulator: AdaSpec and two baselines.

A static length is vLLM's built-in behaviour; the confidence threshold is AdaSpec's
"threshold" baseline (stop when the batch's mean confidence is below 0.6).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from vllm_tide.control.adaspec import AdaSpecPolicy, ControlSettings
from vllm_tide.control.batch import Batch, Outcome, Plan, Proposals, totals
from vllm_tide.control.costs import Times

__all__ = [
    "AdaSpecPolicy",
    "ControlSettings",
    "Policy",
    "StaticPolicy",
    "ThresholdPolicy",
]

THRESHOLD = 0.6
"""Mean confidence below which the threshold policy stops (AdaSpec's baseline)."""


class StaticPolicy:
    """A fixed number of draft tokens, all verified; same calls as `AdaSpecPolicy`.

    Args:
        k_max: Maximum draft tokens.
        times: Step times to update, so that `stats` has their error; None: none.
    """

    def __init__(self, k_max: int, times: Times | None = None) -> None:
        self._k, self._times = k_max, times
        self._caps = np.zeros(0, np.int64)
        self._memory: Proposals | None = None
        self.remembered: np.ndarray | None = None
        self._depth, self._open = 0, False
        self._count, self._undrafted = Counter[str](), Counter[str]()
        self._by_depth = np.zeros(k_max + 1, np.int64)

    def add(self, slot: int, sampled: bool, now: float) -> None:
        """Do nothing: a static policy has no state of requests."""

    def draft_swapped(self) -> None:
        """Do nothing: a static policy has no estimates of the draft."""

    def plan(self, batch: Batch, now: float) -> Plan:
        self._caps, self._memory, self.remembered = batch.caps, batch.memory, None
        self._depth, self._open = 0, True
        self._count["steps"] += 1
        most = min(int(batch.caps.max()), self._k) if len(batch) else 0
        reason = "" if most else "no_room"
        if most and batch.memory is not None:
            gains = np.maximum(_drafted(batch.memory)[:most], 0.0).sum(axis=0)
            left = batch.memory.left_to_draft(batch.caps, gains)
            reason = "" if left.any() else "memory"
        reason = reason or self._gate(batch, most)
        if reason:
            self._undrafted[reason] += 1
            return Plan(0, reason)
        return Plan(most)

    def _gate(self, batch: Batch, most: int) -> str:
        """Return the reason not to draft in this step; empty: draft."""
        return ""

    def go_on(self, depth: int, confidence: np.ndarray) -> bool:
        self._depth = depth
        return depth < self._k

    def take_block(self, confidences: np.ndarray) -> None:
        """See `AdaSpecPolicy`."""
        for depth, confidence in enumerate(confidences, start=1):
            if not self.go_on(depth, confidence):
                break

    def choose(self) -> np.ndarray:
        lengths = np.minimum(self._caps, self._depth)
        self._count["drafted_tokens"] += int(lengths.sum())
        if self._memory is not None:
            drafted = _drafted(self._memory)[: self._depth]
            _, lengths, self.remembered = self._memory.merge(drafted, lengths)
        return lengths

    def observe(self, outcome: Outcome) -> None:
        if self._times is not None and outcome.sample is not None:
            self._times.observe(outcome.sample, outcome.now)
        self._count["verified_tokens"] += int(outcome.verified.sum())
        self._count["accepted_tokens"] += int(outcome.accepted.sum())
        if self._open:
            self._open = False
            self._by_depth[self._depth] += 1
            self._count["draft_passes"] += self._depth

    def stats(self) -> dict[str, Any]:
        nan = float("nan")
        return {
            **totals(self._count, self._undrafted, self._by_depth),
            "time_error": nan if self._times is None else self._times.error,
            "calibration_error": nan,
            "plain_step_seconds": 0.0,
            "step_seconds": 0.0,
        }


class ThresholdPolicy(StaticPolicy):
    """Drafting as long as the batch's mean confidence is at least the threshold."""

    def go_on(self, depth: int, confidence: np.ndarray) -> bool:
        self._depth = depth
        drafted = self._caps >= depth
        mean = float(confidence[drafted].mean()) if drafted.any() else 0.0
        return depth < self._k and mean >= THRESHOLD


def _drafted(memory: Proposals) -> np.ndarray:
    assert memory.drafted is not None  # noqa: S101 (set for these policies)
    return memory.drafted


Policy = AdaSpecPolicy | StaticPolicy
"""Policy that decides the draft passes and the verified tokens of every step."""
