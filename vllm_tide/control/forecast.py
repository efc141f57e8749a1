"""Expected tokens and seconds of a step, before any confidence of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

import numpy as np

from vllm_tide.control.acceptance import Acceptance
from vllm_tide.control.batch import Batch
from vllm_tide.control.costs import Times

_PATHS = 32  # simulated drafts
_TOLERANCE = 0.1  # change of the log-odds' mean or spread that discards forecasts


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expectation of a step before any confidence.

    Attributes:
        plain: Seconds without drafting.
        draft: Seconds of 0, 1, ... draft passes.
        steps: For 1, 2, ... draft passes the step of most tokens per second: its
            tokens, its seconds, and the seconds of one more verified token there.
    """

    plain: float
    draft: list[float]
    steps: list[tuple[float, float, float]]

    def best(self, extra: float, limit: float) -> tuple[float, float, int]:
        """Tokens, seconds and draft passes of the best step within a limit.

        Args:
            extra: Further seconds that drafting costs.
        """
        tokens, seconds, length = 0.0, 1.0, 0
        for passes, (each, spent, _) in enumerate(self.steps, 1):
            if spent <= limit and each * seconds > tokens * (spent + extra):
                tokens, seconds, length = each, spent + extra, passes
        return tokens, seconds, length


class Forecaster:
    """Predicts steps, and keeps the forecasts until something was learnt.

    Args:
        most: Draft tokens of a request, at most (K).
        verify: The best of the drafted tokens are verified; False: all of them.
    """

    def __init__(
        self, times: Times, acceptance: Acceptance, most: int, *, verify: bool
    ) -> None:
        self._times, self._acceptance, self._verify = times, acceptance, verify
        half = np.random.default_rng(0).standard_normal((most, _PATHS // 2))
        self._normal = np.concatenate([half, -half], axis=1)  # antithetic
        # By step, used since the last `refresh`, and before it.
        self._known: dict[tuple[int, ...], Forecast] = {}
        self._before: dict[tuple[int, ...], Forecast] = {}
        self._sds: dict[int, float] = {}
        self._version = 0  # of the times
        self._used = np.zeros(most + 1)  # mean and spread that are of the forecasts

    def refresh(self) -> None:
        """Discard forecasts: all if drafts have changed by enough, else unused ones."""
        self._sds.clear()
        self._before, self._known = self._known, {}
        belief = np.append(self._acceptance.mean, self._acceptance.spread)
        if np.abs(belief - self._used).max() > _TOLERANCE:
            self._used = belief
            self._before.clear()

    def sd(self, requests: int, now: float) -> float:
        """As `StepTimes.ratio_sd`, at most as old as the last `refresh`."""
        if (known := self._sds.get(requests)) is None:
            known = self._sds[requests] = self._times.ratio_sd(requests, now)
        return known

    def predict(
        self,
        batch: Batch,
        most: int,
        drafting: int,
        context: int,
        better: float = 0.0,
        limit: float = inf,
    ) -> Forecast:
        """Return the forecast of about such a step.

        Args:
            most: Most draft passes.
            drafting: Requests that the draft is of use to.
            context: Tokens in the KV cache, of all requests.
            better: Log-odds that are added to those of `Acceptance`.
            limit: Seconds that it may take.
        """
        if self._version != (version := self._times.version):
            self._version = version
            self._known.clear()
            self._before.clear()
        n = len(batch)
        key = (
            n,
            most,
            drafting,
            int(4.0 * log(context + 64)),
            int(4.0 * log(batch.first_rows + batch.prefill + 1)),
            round(4.0 * better),
            0 if limit == inf else round(64.0 * log(limit)),
        )
        if (known := self._known.get(key) or self._before.get(key)) is not None:
            self._known[key] = known
            return known
        target = self._times.target_curve(n, context, n * most, batch.prefill)
        draft = self._times.draft_curve(n, context, batch.first_rows, most)
        belief = self._acceptance
        logits = belief.mean[:most, None] + better + belief.spread * self._normal[:most]
        survival = np.cumprod(1.0 / (1.0 + np.exp(-logits)), axis=0)
        share = drafting / _PATHS
        if self._verify:
            order = np.argsort(survival, axis=None)[::-1]
            there = order // _PATHS < np.arange(1, most + 1)[:, None]
            tokens = n + share * np.cumsum(survival.ravel()[order] * there, axis=1)
            rows = share * np.cumsum(there, axis=1)
        else:
            tokens = n + share * np.cumsum(survival.sum(axis=1))[:, None]
            rows = drafting * np.arange(1.0, most + 1)[:, None]
        seconds = np.interp(rows, np.arange(len(target)), target) + draft[1:, None]
        steps = []
        rate = np.where(seconds <= limit, tokens / seconds, 0.0)
        for passes, at in enumerate(rate.argmax(axis=1)):
            # Over some rows: a step of stairs is no price.
            high = min(int(rows[passes, at]) + max(n // 2, 1), n * most)
            low = max(high - max(n // 2, 1), 0)
            price = max(float(target[high] - target[low]), 0.0) / max(high - low, 1)
            steps.append((float(tokens[passes, at]), float(seconds[passes, at]), price))
        forecast = Forecast(float(target[0]), draft.tolist(), steps)
        self._known[key] = forecast
        return forecast
