"""Probability that a draft token is accepted, given that all before it are.

AdaSpec multiplies raw confidences (eq. 7) without calibrating them. Here the log-odds
of acceptance are a smooth function of the confidence plus an intercept per request
(Bayesian logistic regression):

* a curve per kind of request (greedy, sampled), fitted to exponentially decayed counts
  with a Gaussian process prior around the identity (calibrated confidences);
* a random intercept per request, fitted to its own tokens. The variance between
  requests is estimated from finished requests (expectation maximisation).

Only tokens up to and including the first rejected one have labels.
"""

from __future__ import annotations

from math import inf, log, sqrt

import numpy as np

from vllm_tide._shm import survival

HALF_LIFE_TOKENS = 2000.0
"""Number of newer labels after which a label has half its weight."""

NODES = np.linspace(-4.0, 8.0, 25)
"""Knots of the piecewise linear curve: log-odds of the confidence."""

_CURVE_SD, _CURVE_LENGTH = 1.0, 4.0  # Gaussian process around the identity, log-odds
_REQUEST_SD = 0.3  # initial standard deviation of the requests' intercepts
_REQUEST_WEIGHT = 0.1  # of a finished request in the update of their variance
_PRIOR_MEAN, _PRIOR_TOKENS = 0.6, 20.0  # prior log-odds, and their weight in tokens
# Initial and minimum standard deviation of the log-odds of drafted tokens.
_SPREAD, _LEAST_SPREAD = 1.5, 0.1
_DRIFT = 0.2  # random walk of the mean log-odds, per square root of a second
_NEWTON = 1.0  # maximum change of a weight in one Newton step, log-odds


class RequestIntercepts:
    """Random intercept of each request in the log-odds of acceptance.

    Args:
        capacity: Number of request slots.
        spread: Initial standard deviation between requests.

    Attributes:
        value: float64 [capacity], log-odds.
        variance: Estimated variance between requests; prior variance of a new one.
    """

    def __init__(self, capacity: int, spread: float = _REQUEST_SD) -> None:
        self.value = np.zeros(capacity)
        self.variance = spread**2
        self._precision = np.full(capacity, 1.0 / self.variance)

    def add(self, slot: int) -> None:
        """Assign the slot to a new request; its last one updates the variance."""
        second = float(self.value[slot]) ** 2 + 1.0 / float(self._precision[slot])
        self.variance += _REQUEST_WEIGHT * (second - self.variance)
        self.value[slot], self._precision[slot] = 0.0, 1.0 / self.variance

    def learn(
        self, slots: np.ndarray, residual: np.ndarray, weight: np.ndarray
    ) -> None:
        """Update intercepts by one Newton step towards the posterior mode.

        Args:
            slots: int64 [n], each at most once.
            residual: float64 [n], accepted tokens minus their expected number.
            weight: float64 [n], sum of p (1 - p) over the judged tokens.
        """
        precision = self._precision[slots] + weight
        self._precision[slots] = precision
        self.value[slots] += residual / precision

    def reset(self) -> None:
        """Reset the intercepts of all slots."""
        self.value.fill(0.0)
        self._precision.fill(1.0 / self.variance)


class Acceptance:
    """Estimated acceptance probabilities of draft tokens.

    Args:
        most: Maximum number of draft tokens of a request (K).
        capacity: Number of request slots.

    Attributes:
        requests: Intercepts by slot; the additional last slot has no request.
        variance: Posterior variance of a token's log-odds, mean over observed tokens.
        mean: float64 [K], mean log-odds of recently drafted tokens by position.
        spread: Standard deviation of those log-odds.
    """

    def __init__(self, most: int, capacity: int) -> None:
        self._confidence = 1.0 / (1.0 + np.exp(-NODES))
        away = np.abs(np.subtract.outer(NODES, NODES))
        curve = _CURVE_SD**2 * np.exp(-away / _CURVE_LENGTH)
        self._prior = np.linalg.inv(curve + 1e-6 * np.eye(len(NODES)))
        self._curves = np.stack([NODES] * 2)  # [kind, cell], log-odds
        self._counts = np.zeros((2, 2, len(NODES)))  # [kind, (tries, hits), cell]
        self.requests = RequestIntercepts(capacity + 1)
        self.variance = _CURVE_SD**2
        self.mean = _PRIOR_MEAN - 0.1 * np.arange(most)
        self._seen = np.full(most, _PRIOR_TOKENS)
        self.spread = _SPREAD
        self._drafted_at = inf  # seconds; inf: never

    def survival(
        self,
        confidence: np.ndarray,
        slots: np.ndarray,
        sampled: np.ndarray,
        caps: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return log-odds and survival probabilities of draft tokens.

        Args:
            confidence: float32 [s, n], highest probability of the draft at each token;
                nan: never accepted.
            slots: int64 [n].
            sampled: bool [n], temperature above zero.
            caps: int64 [n], maximum number of tokens of each request.

        Returns:
            float64 [s, n] log-odds, nan without a token; float32 [s, n] probability
            that the token and all before it are accepted, -1 without a token.
        """
        logits, chances = np.empty(confidence.shape), np.empty_like(confidence)
        knots, curves, requests = self._confidence, self._curves, self.requests.value
        survival(
            confidence, slots, sampled, caps, knots, curves, requests, logits, chances
        )
        return logits, chances

    def accepted(self, slots: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """Return expected accepted tokens of drafts of `caps` tokens, float64 [n]."""
        logits = self.mean[:, None] + self.requests.value[slots]
        alive = np.multiply.accumulate(1.0 / (1.0 + np.exp(-logits)), axis=0)
        inside = np.arange(len(logits))[:, None] < caps
        return np.asarray(alive.sum(axis=0, where=inside))

    def drafted(self, logits: np.ndarray, now: float) -> None:
        """Update the distribution of log-odds with drafts, verified or not.

        Args:
            logits: float64 [K, m]; nan where no token was drafted.
            now: Seconds. Older drafts lose weight with the time since the last call.
        """
        drift = _DRIFT**2 * max(now - self._drafted_at, 0.0)
        self._drafted_at = now
        self._seen /= 1.0 + self._seen * drift / self.spread**2
        deviation = np.minimum(logits, 5.0) - self.mean[:, None]
        present = ~np.isnan(deviation)
        deviation[~present] = 0.0
        count = present.sum(axis=1)
        self._seen = np.minimum(self._seen + count, HALF_LIFE_TOKENS / log(2))
        if count[0] > 1:  # around their own mean: a shift is not spread
            own = float(deviation[0][present[0]].var(ddof=1))
            share = count[0] / self._seen[0]
            variance = self.spread**2 + share * (own - self.spread**2)
            self.spread = sqrt(max(variance, _LEAST_SPREAD**2))
        shift = deviation.sum(axis=1) / self._seen
        # Positions that were not drafted shift like the deepest drafted one.
        deepest = np.count_nonzero(count)
        if deepest:
            shift[deepest:] = shift[deepest - 1]
        self.mean += shift

    def judged(
        self,
        confidence: np.ndarray,
        logits: np.ndarray,
        slots: np.ndarray,
        sampled: np.ndarray,
        judged: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Update curves and intercepts with the results of verification.

        Args:
            confidence, logits: float64 [K, m], one column per draft.
            slots: int64 [m]; a request may have several columns.
            sampled: bool [m].
            judged: int64 [m], tokens up to and including the first rejected one.
            accepted: int64 [m], number of accepted tokens among them.
        """
        inside = np.arange(len(logits))[:, None] < judged
        chance = np.where(inside, 1.0 / (1.0 + np.exp(-logits)), 0.0)
        size = len(self.requests.value)
        residual = np.bincount(slots, accepted - chance.sum(axis=0), size)
        weight = np.bincount(slots, (chance * (1.0 - chance)).sum(axis=0), size)
        seen = np.flatnonzero(weight)
        self.requests.learn(seen, residual[seen], weight[seen])
        at, who = np.nonzero(inside)
        cells = len(NODES)
        place = np.interp(confidence[at, who], self._confidence, np.arange(cells))
        low = np.minimum(place.astype(np.intp), cells - 2)
        upper = place - low
        low += sampled[who] * cells
        index, share = np.append(low, low + 1), np.append(1.0 - upper, upper)
        self._counts *= 0.5 ** (len(at) / HALF_LIFE_TOKENS)
        hit = at < accepted[who]
        for part, each in enumerate((share, share * np.append(hit, hit))):
            self._counts[:, part] += np.bincount(index, each, 2 * cells).reshape(2, -1)
        self._fit(0)
        if sampled.any():
            self._fit(1)

    def _fit(self, kind: int) -> None:
        """Update one curve by a Newton step of the logistic regression."""
        (tries, hits), curve = self._counts[kind], self._curves[kind]
        chance = 1.0 / (1.0 + np.exp(-curve))
        slope = hits - tries * chance - self._prior @ (curve - NODES)
        curvature = self._prior.copy()
        curvature.flat[:: len(curve) + 1] += tries * chance * (1.0 - chance)
        usual = tries / max(float(tries.sum()), 1e-9)
        step, blur = np.linalg.solve(curvature, np.stack([slope, usual], axis=1)).T
        curve += np.clip(step, -_NEWTON, _NEWTON)
        self.variance = float(usual @ blur)

    def error(self) -> float:
        """Return the expected calibration error of the curves; nan without labels."""
        tries, hits = self._counts[:, 0], self._counts[:, 1]
        chance = 1.0 / (1.0 + np.exp(-self._curves))
        total = float(tries.sum())
        if not total:
            return float("nan")
        return float(np.abs(hits - tries * chance).sum()) / total

    def forget(self, keep: float) -> None:
        """Reduce the evidence to the share `keep`, after the draft was replaced."""
        self._counts *= keep
        self._seen *= keep
        self.requests.reset()
        self.variance = _CURVE_SD**2
