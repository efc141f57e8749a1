"""The policies that the engine and the simulator drive: AdaSpec and two baselines.

A static length is vLLM's own setting; the confidence threshold is AdaSpec's "threshold"
arm (stop when the batch's mean confidence is below 0.6).
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
"""Mean confidence below which the threshold policy stops (AdaSpec's arm)."""


class StaticPolicy:
    """A fixed number of draft tokens, all verified; calls as of `AdaSpecPolicy`.

    Args:
        k_max: Most draft tokens.
        times: Step times to keep refined, for their error; None: none.
    """

    def __init__(self, k_max: int, times: Times | None = None) -> None:
        self._k, self._refined = k_max, times
        self._room = np.zeros(0, np.int64)
        self._memory: Proposals | None = None
        self.remembered: np.ndarray | None = None
        self._step, self._open = 0, False
        self._count, self._off = Counter[str](), Counter[str]()
        self._lengths = np.zeros(k_max + 1, np.int64)

    def add(self, slot: int, sampled: bool, now: float) -> None:
        """A request begins."""

    def drop(self, slot: int) -> None:
        """A request ends."""

    def draft_swapped(self) -> None:
        """The draft has new weights."""

    def plan(self, batch: Batch, now: float) -> Plan:
        self._room, self._memory, self.remembered = batch.room, batch.memory, None
        self._step, self._open = 0, True
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
        """Why nothing is drafted in this step; empty: it is."""
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
        if self._refined is not None and outcome.sample is not None:
            self._refined.observe(outcome.sample, outcome.now)
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
            "time_error": nan if self._refined is None else self._refined.error,
            "plain_seconds": 0.0,
            "round_seconds": 0.0,
        }


class ThresholdPolicy(StaticPolicy):
    """Drafts while the batch's mean confidence is at least the threshold."""

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        self._step = step
        drafted = self._room >= step
        mean = float(confidence[drafted].mean()) if drafted.any() else 0.0
        return step < self._k and mean >= THRESHOLD


def _drafted(memory: Proposals) -> np.ndarray:
    assert memory.drafted is not None  # noqa: S101 (given to who has no confidences)
    return memory.drafted


Policy = AdaSpecPolicy | StaticPolicy
"""Decides the draft steps and the verified set of every step."""
