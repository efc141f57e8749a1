"""TIDE's gate (its equation 5): a fixed length while the speed-up is above 1.

Speed-up = (1 - a^(k+1)) / ((1 - a) (c k + beta)), c = D0 / T(b),
beta = T(b (k + 1)) / T(b), a the measured acceptance rate, b the batch. The paper has
no rule for updating a while drafting is off; here one step in a hundred drafts.
"""

from __future__ import annotations

import numpy as np

from vllm_tide.control.acceptance import HALF_LIFE_TOKENS
from vllm_tide.control.batch import Batch, Outcome
from vllm_tide.control.policies import StaticPolicy
from vllm_tide.control.step_times import StepTimes

_TRIAL_STEPS = 100
_START, _START_TOKENS = 0.7, 20.0


class TideGatePolicy(StaticPolicy):
    """A static length with the gate; `times` is the gate's time model."""

    def __init__(self, k: int, times: StepTimes) -> None:
        super().__init__(k, times)
        self._times = times
        self._accepted, self._tried = _START * _START_TOKENS, _START_TOKENS
        self._waited = 0

    @property
    def acceptance(self) -> float:
        return self._accepted / self._tried

    def speedup(self, requests: int, context: int, rows: int, k: int) -> float:
        """Return TIDE's practical speed-up.

        Args:
            context: Tokens in the KV cache, summed over the requests.
        """
        target = self._times.target_curve(requests, context, requests * k)
        plain = float(target[0])
        draft = float(self._times.draft_curve(requests, context, rows, k)[k])
        a = min(self.acceptance, 1.0 - 1e-6)
        tokens = (1.0 - a ** (k + 1)) / (1.0 - a)
        return tokens / (draft / plain + float(target[-1]) / plain)

    def draft_swapped(self) -> None:
        keep = max(0.2, min(1.0, _START_TOKENS / self._tried))
        self._accepted *= keep
        self._tried *= keep
        self._waited = _TRIAL_STEPS

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
        if self._waited > _TRIAL_STEPS:
            self._waited = 0
            self._count["exploration_steps"] += 1
            return ""
        return "no_gain"
