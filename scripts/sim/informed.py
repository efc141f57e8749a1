"""Control that is told the true probability of every token that it has drafted.

What it loses against the clairvoyant policy is what no estimate can win: that policy
knows tokens before they are drafted, and catches up for nothing. What `adaspec` loses
against it is the price of confidences that tell too little or are read wrongly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_tide.control.adaspec import AdaSpecPolicy, ControlSettings
from vllm_tide.control.batch import Batch, Plan
from vllm_tide.control.calibration import Calibration, RequestOffsets
from vllm_tide.control.costs import Times

_LEAST = 1e-4


class _Told(Calibration):
    """The map from confidence to probability, which is known; nothing is learnt.

    Attributes:
        survival: float [n, K], true probability that drafts 1..j+1 are all accepted.
    """

    survival: np.ndarray

    def predict(
        self,
        values: np.ndarray,
        step: int,
        confidence: np.ndarray,
        sampled: np.ndarray,
        offset: np.ndarray,
    ) -> None:
        chance = self.survival[:, step - 1].astype(np.float64)
        if step > 1:
            chance /= np.maximum(self.survival[:, step - 2], _LEAST)
        chance = np.clip(chance, _LEAST, 1.0 - _LEAST)
        logit = np.log(chance / (1.0 - chance))
        values[:, step - 1] = logit, logit, chance

    def learn(self, *labels: object) -> None:
        """Nothing to learn."""


class _NoOffsets(RequestOffsets):
    def learn(self, *labels: object) -> None:
        """Nothing to learn."""

    def judge(self, *given: Any) -> tuple[np.ndarray, np.ndarray, float]:
        found = super().judge(*given)
        self.reset()
        return found


class InformedPolicy(AdaSpecPolicy):
    """`AdaSpecPolicy` with the truth in the place of its estimate."""

    def __init__(self, settings: ControlSettings, time: Times) -> None:
        super().__init__(settings, time)
        self.calibration: _Told = _Told(settings.k_max)
        self.offsets = _NoOffsets(settings.max_requests)
        self._first = np.zeros((settings.max_requests, 1))  # survival by slot

    def reveal(self, survival: np.ndarray, emitting: int) -> None:
        """Show the step's truth; see `sim.clairvoyant.candidates`."""
        self._truth = survival

    def plan(self, batch: Batch, now: float) -> Plan:
        self._first[batch.slots] = self._truth[:, :1]
        return super().plan(batch, now)

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        self.calibration.survival = self._truth
        return super().go_on(step, confidence)

    def _observe_probe(
        self, slots: np.ndarray, confidence: np.ndarray, hit: np.ndarray
    ) -> None:
        self.calibration.survival = self._first[slots]
        super()._observe_probe(slots, confidence, hit)
