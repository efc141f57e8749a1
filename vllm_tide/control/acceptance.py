"""Chance that a draft token is accepted, those before it being accepted.

AdaSpec multiplies raw confidences (eq. 7) and never learns whether they were right.
Here the log-odds of acceptance are a smooth function of the confidence, plus a term of
the request, which is Bayesian logistic regression:

* a curve by kind of request (greedy, sampled), with a Gaussian process prior around
  "the confidence is true", from counts that fade;
* a random intercept for each request, from its own verdicts. How much requests differ
  is learnt from those that have ended (expectation maximisation).

Labels come from tokens up to the first rejected one: the rest was never judged.
"""

from __future__ import annotations

from math import inf, log, sqrt

import numpy as np

from vllm_tide._shm import survival

HALF_LIFE_TOKENS = 2000.0
"""Labels after which one counts half."""

NODES = np.linspace(-4.0, 8.0, 25)
"""Log-odds of confidence between which the curve is linear."""

_CURVE_SD, _CURVE_LENGTH = 1.0, 4.0  # Gaussian process around the identity, log-odds
_REQUEST_SD = 0.3  # random intercept of a request, before any has ended
_REQUEST_WEIGHT = 0.1  # of a request that ended, in the variance of the next
_PRIOR_MEAN, _PRIOR_TOKENS = 0.6, 20.0  # log-odds before any token; its weight
# Standard deviation of the log-odds of drafted tokens: at first, and at least.
_SPREAD, _LEAST_SPREAD = 1.5, 0.1
_DRIFT = 0.2  # random walk of the mean log-odds of drafts, per root second
_NEWTON = 1.0  # log-odds that a weight moves at most in one step of the fit


class RequestIntercepts:
    """Random intercepts: ease of each request beyond its confidences, in log-odds.

    Args:
        capacity: Slots of requests.
        spread: Standard deviation between requests, before any has ended.

    Attributes:
        value: float64 [capacity].
        variance: Of requests, so of a new one.
    """

    def __init__(self, capacity: int, spread: float = _REQUEST_SD) -> None:
        self.value = np.zeros(capacity)
        self.variance = spread**2
        self._precision = np.full(capacity, 1.0 / self.variance)

    def add(self, slot: int) -> None:
        """Another request has the slot."""
        second = float(self.value[slot]) ** 2 + 1.0 / float(self._precision[slot])
        self.variance += _REQUEST_WEIGHT * (second - self.variance)
        self.value[slot], self._precision[slot] = 0.0, 1.0 / self.variance

    def learn(
        self, slots: np.ndarray, residual: np.ndarray, weight: np.ndarray
    ) -> None:
        """Take verdicts: a Newton step of the posterior's mode.

        Args:
            slots: int64 [n], each at most once.
            residual: float64 [n], tokens accepted less those expected to be.
            weight: float64 [n], sum of p (1 - p) of the judged tokens.
        """
        precision = self._precision[slots] + weight
        self._precision[slots] = precision
        self.value[slots] += residual / precision

    def reset(self) -> None:
        """Forget all requests."""
        self.value.fill(0.0)
        self._precision.fill(1.0 / self.variance)


class Acceptance:
    """Beliefs about draft tokens.

    Args:
        most: Draft tokens of a request, at most (K).
        capacity: Slots of requests.

    Attributes:
        requests: Intercepts by slot; the one past the last is of no request.
        variance: Of the log-odds of a token, as tokens are.
        mean: float64 [K], log-odds of the tokens that were drafted lately.
        spread: Their standard deviation.
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
        self._drafted_at = inf  # seconds; inf: not yet

    def survival(
        self,
        confidence: np.ndarray,
        slots: np.ndarray,
        sampled: np.ndarray,
        caps: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-odds of each token, and the chance that it and all before are accepted.

        Args:
            confidence: float32 [s, n], highest probability of the draft at each token;
                nan: never accepted.
            slots: int64 [n].
            sampled: bool [n], temperature above zero.
            caps: int64 [n], tokens of each request; there are none beyond.

        Returns:
            float64 [s, n], nan where there is no token; float32 [s, n], -1 there.
        """
        logits, chances = np.empty(confidence.shape), np.empty_like(confidence)
        knots, curves, requests = self._confidence, self._curves, self.requests.value
        survival(
            confidence, slots, sampled, caps, knots, curves, requests, logits, chances
        )
        return logits, chances

    def accepted(self, slots: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """Tokens expected to be accepted of drafts of `caps` tokens, float64 [n]."""
        logits = self.mean[:, None] + self.requests.value[slots]
        alive = np.multiply.accumulate(1.0 / (1.0 + np.exp(-logits)), axis=0)
        inside = np.arange(len(logits))[:, None] < caps
        return np.asarray(alive.sum(axis=0, where=inside))

    def drafted(self, logits: np.ndarray, now: float) -> None:
        """Learn the distribution of drafts, verified or not.

        Args:
            logits: float64 [K, m]; nan where no token was drafted.
            now: Seconds; traffic may have changed since the drafts before.
        """
        drift = _DRIFT**2 * max(now - self._drafted_at, 0.0)
        self._drafted_at = now
        self._seen /= 1.0 + self._seen * drift / self.spread**2
        away = np.minimum(logits, 5.0) - self.mean[:, None]
        there = ~np.isnan(away)
        away[~there] = 0.0
        count = there.sum(axis=1)
        self._seen = np.minimum(self._seen + count, HALF_LIFE_TOKENS / log(2))
        if count[0] > 1:  # about their own mean: a jump of it is no spread
            own = float(away[0][there[0]].var(ddof=1))
            share = count[0] / self._seen[0]
            variance = self.spread**2 + share * (own - self.spread**2)
            self.spread = sqrt(max(variance, _LEAST_SPREAD**2))
        shift = away.sum(axis=1) / self._seen
        # Tokens too deep to be drafted lately shift with the deepest that were.
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
        """Learn from verdicts.

        Args:
            confidence, logits: float64 [K, m], of the columns' drafts.
            slots: int64 [m]; a request may have many columns.
            sampled: bool [m].
            judged: int64 [m], tokens up to the first rejected one.
            accepted: int64 [m], how many of them were accepted.
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
        """Take a Newton step of the regression."""
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
        """Return the expected calibration error of the curves; nan without a label."""
        tries, hits = self._counts[:, 0], self._counts[:, 1]
        chance = 1.0 / (1.0 + np.exp(-self._curves))
        total = float(tries.sum())
        if not total:
            return float("nan")
        return float(np.abs(hits - tries * chance).sum()) / total

    def forget(self, keep: float) -> None:
        """Keep a share of the evidence: the draft is another one."""
        self._counts *= keep
        self._seen *= keep
        self.requests.reset()
        self.variance = _CURVE_SD**2
