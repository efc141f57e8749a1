"""Confidence becomes probability of acceptance, learnt from verification results.

AdaSpec multiplies raw confidences (eq. 7) and never learns whether they were right.
Here the conditional probability that draft token j is accepted, given that all before
it were, has three layers, all in log-odds:

1. a line a + b z + d (j - 1) of the confidence's log-odds z, one for greedy and one
   for sampled requests: few parameters, so it is right early and for confidences that
   are never verified;
2. counts of accepted and tried tokens per position and node of z, shrunk to that line:
   any other shape of the map;
3. an offset per request: some texts are easier than their confidences say.

All of it forgets, and labels come only from positions up to the first rejection: what
lies beyond was never judged.
"""

from __future__ import annotations

import numpy as np

NODES = np.linspace(-4.0, 8.0, 25)
"""Log-odds of confidence at which the map is kept; linear between them."""

_STEP = float(NODES[1] - NODES[0])
_TOP = len(NODES) - 1 - 1e-9
_LEAST = 1e-4  # confidences are kept this far from 0 and 1
_LINE = np.array([0.0, 1.0, 0.0])  # a, b, d of a confidence that tells the truth
_TRUST = np.array([4.0, 16.0, 16.0])  # prior precision of a, b, d
_SHRINK = 16.0  # tokens of evidence that the line is worth at each node
_ECE_BINS = 10
_BATCH_LABELS = 64  # learning costs as much for one label as for a hundred
_BATCH_ROUNDS = 8


class Calibration:
    """The map from confidence to probability, layers 1 and 2.

    Args:
        k_max: Number of draft positions.
        half_life_tokens: Labels after which a label counts half.
        enabled: False leaves probability equal to confidence (ablation); the
            calibration error is still measured.
    """

    def __init__(
        self, k_max: int, half_life_tokens: float = 2000.0, enabled: bool = True
    ) -> None:
        self.k_max = k_max
        self._half_life = half_life_tokens
        self._enabled = enabled
        # [tries, accepts] x [greedy, sampled] x position x node.
        self._counts = np.zeros((2, 2 * k_max * len(NODES)))
        self._line = np.stack([_LINE, _LINE])
        cells = np.broadcast_arrays(1.0, NODES, np.arange(k_max)[:, None])
        self._inputs = np.stack(cells).reshape(3, -1)  # of the line, at each cell
        self._pending: list[tuple[np.ndarray, ...]] = []
        self._waiting = 0
        self._ece = np.zeros((3, _ECE_BINS))  # tries, accepts, sum of predictions
        self._table = np.empty(0)
        self._rise = np.empty(0)
        self._refresh()

    def logits(
        self, step: int, confidence: np.ndarray, sampled: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-odds of confidence, and of acceptance before the request's offset.

        Args:
            step: Draft position, 1-based.
            confidence: float [n], highest probability of the draft at this step.
            sampled: int64 [n], 1 where temperature is above zero, else 0.

        Returns:
            Two float64 [n].
        """
        held = np.fmax(confidence, _LEAST, dtype=np.float64)  # nan: no confidence
        np.minimum(held, 1.0 - _LEAST, out=held)
        z = np.log(held / (1.0 - held))
        if not self._enabled:
            return z, z
        at = (z - NODES[0]) * (1.0 / _STEP)
        np.maximum(at, 0.0, out=at)
        np.minimum(at, _TOP, out=at)
        node = at.astype(np.intp)
        at -= node
        node += sampled * (self.k_max * len(NODES)) + (step - 1) * len(NODES)
        at *= self._rise[node]
        at += self._table[node]
        return z, at

    def learn(
        self,
        position: np.ndarray,
        sampled: np.ndarray,
        z: np.ndarray,
        predicted: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Take labels; small lots wait for each other for a few rounds.

        Args:
            position: int64 [l], draft positions, 0-based.
            sampled: int64 [l], 1 where temperature is above zero, else 0.
            z: float64 [l], log-odds of confidence.
            predicted: float64 [l], the probability that was predicted.
            accepted: float64 [l], 1 where the token was accepted, else 0.
        """
        self._pending.append((position, sampled, z, predicted, accepted))
        self._waiting += len(z)
        if self._waiting < _BATCH_LABELS and len(self._pending) < _BATCH_ROUNDS:
            return
        position, sampled, z, predicted, accepted = map(
            np.concatenate, zip(*self._pending, strict=True)
        )
        self._pending.clear()
        self._waiting = 0
        decay = 0.5 ** (len(z) / self._half_life)
        cell = (predicted * _ECE_BINS).astype(np.intp)
        np.minimum(cell, _ECE_BINS - 1, out=cell)
        self._ece *= decay
        for row, weights in enumerate((None, accepted, predicted)):
            self._ece[row] += np.bincount(cell, weights, _ECE_BINS)
        if not self._enabled:
            return
        at = (z - NODES[0]) * (1.0 / _STEP)
        np.maximum(at, 0.0, out=at)
        np.minimum(at, _TOP, out=at)
        low = at.astype(np.intp)
        high_share = at - low
        low += (sampled * self.k_max + position) * len(NODES)
        node = np.concatenate([low, low + 1])
        share = np.concatenate([1.0 - high_share, high_share])
        size = self._counts.shape[1]
        self._counts *= decay
        self._counts[0] += np.bincount(node, share, size)
        self._counts[1] += np.bincount(node, share * np.tile(accepted, 2), size)
        self._fit_line()
        self._refresh()

    def error(self) -> float:
        """Expected calibration error of recent predictions, 0..1 (nan without any).

        The mean over ten bins of predicted probability of |observed - predicted|,
        weighted by how often the bin was predicted; decayed like everything else.
        """
        tries, accepts, predicted = self._ece
        total = tries.sum()
        if not total > 0:
            return float("nan")
        return float(np.abs(accepts - predicted).sum() / total)

    def forget(self, keep: float) -> None:
        """Keep a share of the evidence: the draft has changed.

        Args:
            keep: 0 (forget all) to 1.
        """
        self._counts *= keep
        self._ece *= keep
        self._refresh()

    def _fit_line(self) -> None:
        """One Newton step of the logistic regression on the counts, for both kinds."""
        tries, accepts = self._counts.reshape(2, 2, -1)
        chance = 1.0 / (1.0 + np.exp(-(self._line @ self._inputs)))
        gradient = (accepts - tries * chance) @ self._inputs.T
        gradient -= _TRUST * (self._line - _LINE)
        weight = tries * chance * (1.0 - chance)
        curve = (self._inputs * weight[:, None]) @ self._inputs.T + np.diag(_TRUST)
        self._line += np.linalg.solve(curve, gradient[..., None])[..., 0]
        slope = self._line[:, 1]
        np.minimum(np.maximum(slope, 0.1, out=slope), 4.0, out=slope)

    def _refresh(self) -> None:
        """Recompute the table from the line and the counts."""
        shape = (2, self.k_max, len(NODES))
        line = (self._line @ self._inputs).reshape(shape)
        chance = 1.0 / (1.0 + np.exp(-line))
        tries, accepts = self._counts.reshape(2, *shape)
        # What all positions together say about a node corrects each of them...
        seen = tries.sum(axis=1) + 1e-9
        mean = (tries * chance).sum(axis=1) / seen
        mean += (chance[:, 0] - mean) * (seen < 1e-6)
        hits = accepts.sum(axis=1) + _SHRINK * mean
        misses = (tries - accepts).sum(axis=1) + _SHRINK * (1.0 - mean)
        line += (np.log(hits / misses) - np.log(mean / (1.0 - mean)))[:, None]
        # ... and then its own record does.
        chance = 1.0 / (1.0 + np.exp(-line))
        hits = accepts + _SHRINK * chance
        misses = tries - accepts + _SHRINK * (1.0 - chance)
        self._table = np.log(hits / misses).ravel()
        self._rise = np.empty_like(self._table)
        self._rise[:-1] = self._table[1:] - self._table[:-1]
        self._rise[-1] = 0.0


class RequestOffsets:
    """Layer 3: how much easier than its confidences a request is, in log-odds.

    A one-parameter logistic filter per request: each label moves the offset by its
    surprise over the precision gathered so far; a fresh request is at 0, the batch.

    Args:
        capacity: Number of request slots.
        spread: Standard deviation of the offset between requests, log-odds.
    """

    _KEEP = 0.99  # of the precision, per round with labels: texts drift
    _MOST = 3.0

    def __init__(self, capacity: int, spread: float = 0.5) -> None:
        self._prior = 1.0 / spread**2
        self.value = np.zeros(capacity)
        self._precision = np.full(capacity, self._prior)

    def add(self, slot: int) -> None:
        """A request begins."""
        self.value[slot] = 0.0
        self._precision[slot] = self._prior

    def learn(
        self, slots: np.ndarray, surprise: np.ndarray, weight: np.ndarray
    ) -> None:
        """Take a round's labels.

        Args:
            slots: int64 [n], each at most once.
            surprise: float64 [n], accepted minus predicted, summed over labels.
            weight: float64 [n], sum of predicted * (1 - predicted).
        """
        precision = self._precision[slots]
        precision *= self._KEEP
        np.maximum(precision, self._prior, out=precision)
        precision += weight
        self._precision[slots] = precision
        moved = self.value[slots] + surprise / precision
        np.minimum(moved, self._MOST, out=moved)
        self.value[slots] = np.maximum(moved, -self._MOST)

    def reset(self) -> None:
        """All requests back to the batch: the draft has changed."""
        self.value.fill(0.0)
        self._precision.fill(self._prior)
