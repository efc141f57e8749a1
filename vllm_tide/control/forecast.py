"""Expected tokens and seconds of a step before its confidences are known."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

import numpy as np

from vllm_tide.control.acceptance import Acceptance
from vllm_tide.control.batch import Batch
from vllm_tide.control.costs import Times

_PATHS = 32  # simulated drafts
_TOLERANCE = 0.1  # change of the log-odds' mean or spread that clears the cache


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected tokens and seconds of a step, by number of draft passes.

    Attributes:
        plain: Seconds without drafting.
        draft: Seconds of 0, 1, ... draft passes.
        steps: For 1, 2, ... draft passes, the step with the most tokens per second:
            its tokens, its seconds, and the seconds of one more verified token.
    """

    plain: float
    draft: list[float]
    steps: list[tuple[float, float, float]]

    def best(self, extra: float, limit: float) -> tuple[float, float, int]:
        """Return tokens, seconds and draft passes of the best step within a limit.

        Args:
            extra: Additional seconds of a step that drafts.
        """
        tokens, seconds, length = 0.0, 1.0, 0
        for passes, (each, spent, _) in enumerate(self.steps, 1):
            if spent <= limit and each * seconds > tokens * (spent + extra):
                tokens, seconds, length = each, spent + extra, passes
        return tokens, seconds, length


class Forecaster:
    """Forecasts of steps, cached until the models change.

    Args:
        most: Maximum number of draft tokens of a request (K).
        verify: Whether only the best draft tokens are verified; False: all of them.
    """

    def __init__(
        self, times: Times, acceptance: Acceptance, most: int, *, verify: bool
    ) -> None:
        self._times, self._acceptance, self._verify = times, acceptance, verify
        half = np.random.default_rng(0).standard_normal((most, _PATHS // 2))
        self._normal = np.concatenate([half, -half], axis=1)  # antithetic
        # Caches: forecasts used since the last `refresh`, and those of before.
        self._known: dict[tuple[int, ...], Forecast] = {}
        self._before: dict[tuple[int, ...], Forecast] = {}
        self._sds: dict[int, float] = {}
        self._version = 0  # of the step times
        self._used = np.zeros(most + 1)  # mean and spread of the cached forecasts

    def refresh(self) -> None:
        """Discard unused forecasts, or all if the log-odds have changed enough."""
        self._sds.clear()
        self._before, self._known = self._known, {}
        belief = np.append(self._acceptance.mean, self._acceptance.spread)
        if np.abs(belief - self._used).max() > _TOLERANCE:
            self._used = belief
            self._before.clear()

    def sd(self, requests: int, now: float) -> float:
        """Return `StepTimes.ratio_sd`, cached until the next `refresh`."""
        if (cached := self._sds.get(requests)) is None:
            cached = self._sds[requests] = self._times.ratio_sd(requests, now)
        return cached

    def predict(
        self,
        batch: Batch,
        most: int,
        drafting: int,
        context: int,
        better: float = 0.0,
        limit: float = inf,
    ) -> Forecast:
        """Return the forecast of a step, cached for similar steps.

        Args:
            most: Maximum number of draft passes.
            drafting: Number of requests for which a draft is useful.
            context: Tokens in the KV cache, summed over the requests.
            better: Log-odds added to those of `Acceptance`.
            limit: Time limit of the step (s).
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
        if (match := self._known.get(key) or self._before.get(key)) is not None:
            self._known[key] = match
            return match
        target = self._times.target_curve(n, context, n * most, batch.prefill)
        draft = self._times.draft_curve(n, context, batch.first_rows, most)
        belief = self._acceptance
        logits = belief.mean[:most, None] + better + belief.spread * self._normal[:most]
        survival = np.cumprod(1.0 / (1.0 + np.exp(-logits)), axis=0)
        share = drafting / _PATHS
        if self._verify:
            order = np.argsort(survival, axis=None)[::-1]
            inside = order // _PATHS < np.arange(1, most + 1)[:, None]
            tokens = n + share * np.cumsum(survival.ravel()[order] * inside, axis=1)
            rows = share * np.cumsum(inside, axis=1)
        else:
            tokens = n + share * np.cumsum(survival.sum(axis=1))[:, None]
            rows = drafting * np.arange(1.0, most + 1)[:, None]
        seconds = np.interp(rows, np.arange(len(target)), target) + draft[1:, None]
        steps = []
        rate = np.where(seconds <= limit, tokens / seconds, 0.0)
        for passes, at in enumerate(rate.argmax(axis=1)):
            # Averaged over several rows, because the curve may have steps.
            high = min(int(rows[passes, at]) + max(n // 2, 1), n * most)
            low = max(high - max(n // 2, 1), 0)
            price = max(float(target[high] - target[low]), 0.0) / max(high - low, 1)
            steps.append((float(tokens[passes, at]), float(seconds[passes, at]), price))
        forecast = Forecast(float(target[0]), draft.tolist(), steps)
        self._known[key] = forecast
        return forecast
