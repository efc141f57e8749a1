"""Expected confidences of tokens not drafted yet.

AdaSpec extends every request by one lifetime average. Two things it misses decide
lengths: requests differ, and the *spread* of the next confidences has value of its own,
because the verifier keeps the good ones only. So a request has a level, the filtered
mean log-odds of its recent draft tokens, and for each class of level and each draft
position a decayed histogram of conditional acceptance is kept. Products over positions
are convolutions on a grid of -log(probability).

A workload that changes moves the levels, and with them at once everything predicted;
the histograms change slowly.
"""

from __future__ import annotations

import numpy as np

from vllm_tide._shm import convolve, learn_levels

GRID = 48
"""Bins of -log(survival)."""
GRID_STEP = 0.1
"""Width of a bin; survival below exp(-4.7), under 1%, is not worth a token."""
CHANCE = np.exp(-GRID_STEP * np.arange(GRID))
"""Survival at each bin, float64 [GRID], descending from 1."""
HALF_LIFE_TOKENS = 4000.0
"""Drafted tokens after which what was learnt counts half."""

CENTRES = np.linspace(-2.0, 4.25, 6)
"""Levels (log-odds) of the classes; a request belongs to the two around its own."""
_WIDTH = float(CENTRES[1] - CENTRES[0])
_SURE = 5.0  # log-odds, 99.3%
_START = 0.6  # log-odds; mean acceptance of a draft nobody has seen yet
_PRIOR_SPREAD = 1.5  # log-odds, of tokens around their request's level
_PRIOR_TOKENS = 8.0  # worth of the prior, per class
_POOL_TOKENS = 16.0  # worth of the class's other positions, per position
_BETWEEN = 1.0  # variance of levels between requests
_WITHIN = 2.5  # variance of one token's log-odds around its request's level
_DRIFT = 0.02  # variance a level gains per round
_MEAN_TOKENS = 32.0  # tokens of one round that move the workload's level halfway
_FALL_TOKENS = 500.0  # worth of what is known of how much lower a position is
# As `Filter` of csrc/control.h has them.
_FILTER = (
    _SURE,
    _MEAN_TOKENS,
    _BETWEEN,
    _WITHIN,
    _DRIFT,
    _FALL_TOKENS,
    float(CENTRES[0]),
    1.0 / _WIDTH,
    1.0 / GRID_STEP,
)
_STALE_ROUNDS = 64.0  # without observation, after which a level is 1/e its own


class History:
    """Levels of requests and the distribution of acceptance given a level.

    Attributes:
        mean: Level of the workload: what a new request is expected to be.
        survival: float64 [classes, K, GRID], distribution of the survival p_ij of
            draft position j = 1..K before drafting, per class.
        sets: float64 [classes, 2 * K * GRID], the same cumulated over bins: tokens of
            at least that survival per position, and expected survivors among them.
        gains: float64 [classes, K], expected survivors among positions 1..j.
        gained: gained[s] float64 [classes, K - s, GRID], distributions of the survival
            gained over positions s+1..j, j = s+1..K.
    """

    def __init__(self, k_max: int, capacity: int) -> None:
        self.k_max = k_max
        self._knobs = np.array([HALF_LIFE_TOKENS, *_FILTER])
        self.mean = _START
        self._level = np.full(capacity, _START)
        self._place = np.full(capacity, _place(_START))
        self._variance = np.full(capacity, _BETWEEN)
        self._fall = np.zeros(k_max)  # level of position j below that of position 1
        self._idle = 0
        self._prior = _prior()
        self._counts: np.ndarray = np.zeros((len(CENTRES), k_max, GRID))
        self.survival: np.ndarray = np.empty(0)
        self.sets: np.ndarray = np.empty(0)
        self.gains: np.ndarray = np.empty(0)
        self.gained: list[np.ndarray] = []
        self.refresh()

    def add(self, slot: int) -> None:
        self._level[slot] = self.mean
        self._place[slot] = _place(self.mean)
        self._variance[slot] = _BETWEEN

    def idle(self) -> None:
        """A round passes without drafting: levels grow stale."""
        self._idle += 1

    def levels(self) -> tuple[np.ndarray, float, float]:
        """Places of requests among the classes, by slot; that of the workload.

        And what is left of a request's distance to it: its level grows stale.
        """
        keep = float(np.exp(-self._idle / _STALE_ROUNDS)) if self._idle else 1.0
        return self._place, _place(self.mean), keep

    def accepted(self, slots: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Tokens expected to be accepted of the first `length` drafted ones, [n]."""
        place, mean, keep = self.levels()
        at = mean + (place[slots] - mean) * keep
        low, last = at.astype(np.intp), np.maximum(length, 1) - 1
        below, above = self.gains[low, last], self.gains[low + 1, last]
        return np.where(length > 0, below + (at - low) * (above - below), 0.0)

    def learn(
        self,
        slots: np.ndarray,
        logits: np.ndarray,
        chance: np.ndarray,
        drafted: np.ndarray,
    ) -> None:
        """Take a round's draft tokens, verified or not; or a shadow probe's.

        Args:
            slots: int64 [n], each at most once.
            logits: float64 [s, n], log-odds of conditional acceptance.
            chance: float64 [s, n], the same as probability.
            drafted: bool [s, n], False where a request had no such token of use.
        """
        _, _, keep = self.levels()
        self.mean, learnt = learn_levels(
            slots,
            logits,
            chance,
            drafted,
            self._level,
            self._place,
            self._variance,
            self._fall,
            self._counts,
            CHANCE,
            self.mean,
            keep,
            self._knobs,
        )
        if learnt:
            self._idle = 0

    def forget(self, keep: float) -> None:
        """Keep a share of the evidence: the draft has changed.

        Args:
            keep: 0 (forget all) to 1.
        """
        self._counts *= keep
        self._approach(keep)
        self._variance.fill(_BETWEEN)
        self.refresh()

    def refresh(self) -> None:
        k, classes = self.k_max, len(CENTRES)
        pooled = self._counts.sum(axis=1) + _PRIOR_TOKENS * self._prior
        pooled /= pooled.sum(axis=1, keepdims=True)
        dist = self._counts + _POOL_TOKENS * pooled[:, None]
        dist /= dist.sum(axis=2, keepdims=True)
        sizes = [classes * (k - start) * GRID for start in range(k)]
        gained = np.empty(sum(sizes))
        convolve(dist, gained, k, GRID)
        parts = np.split(gained, np.cumsum(sizes)[:-1])
        self.gained = [part.reshape(classes, -1, GRID) for part in parts]
        self.survival = self.gained[0]
        both = np.stack([self.survival, self.survival * CHANCE], axis=1)
        both = both.cumsum(axis=3)
        self.gains = both[:, 1, :, -1].cumsum(axis=1)
        self.sets = both.reshape(classes, 2 * k * GRID)

    def _approach(self, keep: float) -> None:
        self._level += (self.mean - self._level) * (1.0 - keep)
        self._place = _places(self._level)


def _places(level: np.ndarray) -> np.ndarray:
    """Where levels lie among the classes: float64, from 0 to below the last one."""
    at = (level - CENTRES[0]) * (1.0 / _WIDTH)
    np.maximum(at, 0.0, out=at)
    return np.asarray(np.minimum(at, len(CENTRES) - 1 - 1e-9))


def _place(level: float) -> float:
    at = (level - float(CENTRES[0])) / _WIDTH
    return min(max(at, 0.0), len(CENTRES) - 1 - 1e-9)


def _prior() -> np.ndarray:
    """Distributions to begin with: log-odds normal around the class's level."""
    normal = np.linspace(-2.5, 2.5, 41)
    weight = np.exp(-0.5 * normal**2)
    weight /= weight.sum()
    chance = 1.0 / (1.0 + np.exp(-(CENTRES[:, None] + _PRIOR_SPREAD * normal)))
    bins = np.minimum((-np.log(chance) / GRID_STEP).astype(np.intp), GRID - 2)
    part = (chance - CHANCE[bins + 1]) / (CHANCE[bins] - CHANCE[bins + 1])
    part = np.maximum(part, 0.0)
    prior = np.zeros((len(CENTRES), GRID))
    for row in range(len(CENTRES)):
        prior[row] += np.bincount(bins[row], weight * part[row], GRID)
        prior[row] += np.bincount(bins[row] + 1, weight * (1 - part[row]), GRID)
    return prior
