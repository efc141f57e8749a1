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

GRID = 48
"""Bins of -log(survival)."""
GRID_STEP = 0.1
"""Width of a bin; survival below exp(-4.7), under 1%, is not worth a token."""
CHANCE = np.exp(-GRID_STEP * np.arange(GRID))
"""Survival at each bin, float64 [GRID], descending from 1."""
HALF_LIFE_TOKENS = 4000.0
"""Drafted tokens after which what was learnt counts half."""
_LENGTH = 2 * GRID  # of the transforms: products of two survivals do not wrap
# max(0, survival - price), survivals down, prices CHANCE and at last 0 across
_EXCESS = np.maximum(CHANCE[:, None] - np.append(CHANCE, 0.0), 0.0)

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
_STALE_ROUNDS = 64.0  # without observation, after which a level is 1/e its own


class History:
    """Levels of requests and the distribution of acceptance given a level.

    Attributes:
        mean: Level of the workload: what a new request is expected to be.
        survival: float64 [classes, K, GRID], distribution of the survival p_ij of
            draft position j = 1..K before drafting, per class.
        sets: float64 [classes, 2 * K * GRID], the same cumulated over bins: tokens of
            at least that survival per position, and expected survivors among them.
        gains: gains[s] float64 [classes, K - s], expected survivors among the tokens of
            positions s+1..j, for one request that survived s.
        excess: excess[s] float64 [classes, K - s, GRID + 1]: the same for what exceeds
            a price: sums of max(0, survival - price), prices CHANCE and, last, 0.
        spectra: spectra[s] complex [classes, K - s, GRID + 1]: transforms of the
            distributions of the survival gained over positions s+1..j, j = s+1..K.
    """

    def __init__(
        self, k_max: int, capacity: int, half_life_tokens: float = HALF_LIFE_TOKENS
    ) -> None:
        self.k_max = k_max
        self._half_life = half_life_tokens
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
        self.gains: list[np.ndarray] = []
        self.excess: list[np.ndarray] = []
        self.spectra: list[np.ndarray] = []
        self.refresh()

    def add(self, slot: int) -> None:
        self._level[slot] = self.mean
        self._place[slot] = _place(self.mean)
        self._variance[slot] = _BETWEEN

    def idle(self) -> None:
        """A round passes without drafting: levels grow stale."""
        self._idle += 1

    def classes(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The classes that requests belong to.

        Args:
            slots: int64 [n].

        Returns:
            intp [2n], the lower class of each request and then the upper ones;
            float64 [2n], their shares, which sum to 1 for each request.
        """
        n = len(slots)
        at = self._place[slots]
        if self._idle:
            at -= _place(self.mean)
            at *= np.exp(-self._idle / _STALE_ROUNDS)
            at += _place(self.mean)
        both = np.empty(2 * n, np.intp)
        share = np.empty(2 * n)
        both[:n] = at
        both[n:] = both[:n]
        both[n:] += 1
        np.subtract(at, both[:n], out=share[n:])
        np.subtract(1.0, share[n:], out=share[:n])
        return both, share

    def accepted(self, slots: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Tokens expected to be accepted of the first `length` drafted ones, [n]."""
        both, share = self.classes(slots)
        last = np.tile(np.maximum(length, 1) - 1, 2)
        gains = (self.gains[0][both, last] * share).reshape(2, -1).sum(axis=0)
        return np.asarray(np.where(length > 0, gains, 0.0))

    def expected(self) -> np.ndarray:
        """Mean conditional acceptance of positions 1..K at the workload's level."""
        survival = self.survival @ CHANCE
        mixed = [np.interp(self.mean, CENTRES, column) for column in survival.T]
        return np.asarray(np.divide(mixed, [1.0, *mixed[:-1]]))

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
        steps, n = chance.shape
        tokens = drafted.sum(axis=0)
        total = int(tokens.sum())
        if not total:
            return
        self._learn_falls(logits, drafted)
        # Sure tokens are sure enough: how sure must not hide the unsure ones.
        kept = np.minimum(logits, _SURE)
        kept -= self._fall[:steps, None]
        np.multiply(kept, drafted, out=kept)
        sums = kept.sum(axis=0)
        self.mean += (sums.sum() / total - self.mean) * total / (total + _MEAN_TOKENS)
        self._filter(slots, sums, tokens)
        nearest = (self._place[slots] + 0.5).astype(np.intp)
        row = nearest * (self.k_max * GRID) + np.arange(steps)[:, None] * GRID
        self._counts *= 0.5 ** (total / self._half_life)
        self._add(row, chance, drafted)

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
        single = np.fft.rfft(dist, _LENGTH)
        # gained[:, s, j]: from after position s to after position j + 1.
        gained: np.ndarray = np.zeros((classes, k, k, GRID))
        spectra = np.empty((classes, k, k, GRID + 1), complex)
        for j in range(k):
            gained[:, j, j] = dist[:, j]
            if j:
                product = spectra[:, :j, j - 1] * single[:, None, j]
                # What falls off the grid survives with under 1%: left out.
                gained[:, :j, j] = np.fft.irfft(product, _LENGTH)[..., :GRID]
            spectra[:, : j + 1, j] = np.fft.rfft(gained[:, : j + 1, j], _LENGTH)
        self.survival = gained[:, 0]
        both = np.stack([self.survival, self.survival * CHANCE], axis=1)
        self.sets = both.cumsum(axis=3).reshape(classes, 2 * k * GRID)
        excess = gained @ _EXCESS
        self.excess = [excess[:, start, start:].cumsum(axis=1) for start in range(k)]
        self.gains = [np.ascontiguousarray(table[..., -1]) for table in self.excess]
        self.spectra = [
            np.ascontiguousarray(spectra[:, start, start:]) for start in range(k)
        ]

    def _learn_falls(self, logits: np.ndarray, drafted: np.ndarray) -> None:
        """How much lower later positions are, within the same rounds and requests."""
        count = drafted.sum(axis=1)
        below = ((logits - logits[0]) * drafted).sum(axis=1)
        fall = self._fall[: len(logits)]
        fall += (below - count * fall) / (count + 500.0)

    def _filter(self, slots: np.ndarray, sums: np.ndarray, tokens: np.ndarray) -> None:
        """Kalman filter of the levels: `sums` over `tokens` observations each."""
        if self._idle:
            self._approach(float(np.exp(-self._idle / _STALE_ROUNDS)))
            self._idle = 0
        variance = np.minimum(self._variance[slots] + _DRIFT, _BETWEEN)
        spread = variance * tokens + _WITHIN
        gain = variance / spread
        level = self._level[slots]
        level += gain * (sums - tokens * level)
        self._level[slots] = level
        self._place[slots] = _places(level)
        self._variance[slots] = variance * _WITHIN / spread

    def _approach(self, keep: float) -> None:
        self._level += (self.mean - self._level) * (1.0 - keep)
        self._place = _places(self._level)

    def _add(self, row: np.ndarray, chance: np.ndarray, drafted: np.ndarray) -> None:
        """Add tokens to the histograms, split so that the mean survival is kept."""
        low = np.log(chance)
        low *= -1.0 / GRID_STEP
        bins = low.astype(np.intp)
        np.minimum(bins, GRID - 2, out=bins)
        upper, lower = CHANCE[bins], CHANCE[bins + 1]
        part = (chance - lower) / (upper - lower)
        np.maximum(part, 0.0, out=part)
        part *= drafted
        rest = drafted - part
        bins += row
        cells = np.concatenate([bins.ravel(), bins.ravel() + 1])
        share = np.concatenate([part.ravel(), rest.ravel()])
        added = np.bincount(cells, share, self._counts.size)
        self._counts += added.reshape(self._counts.shape)


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
