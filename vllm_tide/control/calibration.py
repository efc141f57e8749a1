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

from vllm_tide._shm import judge, table_chances

NODES = np.linspace(-4.0, 8.0, 25)
"""Log-odds of confidence at which the map is kept; linear between them."""

HALF_LIFE_TOKENS = 2000.0
"""Verified tokens after which what was learnt counts half."""
_STEP = float(NODES[1] - NODES[0])
_TOP = len(NODES) - 1 - 1e-9
_LEAST = 1e-4  # confidences are kept this far from 0 and 1
_LINE = np.array([0.0, 1.0, 0.0])  # a, b, d of a confidence that tells the truth
_TRUST = np.array([4.0, 16.0, 16.0])  # prior precision of a, b, d
_LOW, _HIGH = np.array([-16.0, 0.1, -2.0]), np.array([16.0, 4.0, 2.0])  # a, b, d
_MOST = 12.0  # log-odds of any table
_HALVINGS = 6  # of one step of the fit
_SHRINK = 16.0  # tokens of evidence that the line is worth at each node
_ECE_BINS = 10
_ECE_EXPLORED = 512.0  # labels of cut tokens after which one counts half in the error
_MOST_WEIGHT = 4.0  # of a label in the map: beyond it one label is mostly noise
# Learning costs as much for one label as for a hundred; more are waited for once there
# are many.
_BATCH_LABELS, _BATCH_ROUNDS = 64, 8
_BATCH_MORE = 4


class Calibration:
    """The map from confidence to probability, layers 1 and 2.

    Args:
        k_max: Number of draft positions.
        half_life_tokens: Labels after which a label counts half.
    """

    def __init__(self, k_max: int, half_life_tokens: float = HALF_LIFE_TOKENS) -> None:
        self.k_max = k_max
        self._half_life = half_life_tokens
        # [tries, accepts] x [greedy, sampled] x position x node.
        self._counts = np.zeros((2, 2 * k_max * len(NODES)))
        self._line = np.stack([_LINE, _LINE])
        cells = np.broadcast_arrays(1.0, NODES, np.arange(k_max)[:, None])
        self._inputs = np.stack(cells).reshape(3, -1)  # of the line, at each cell
        self._pending: list[tuple[np.ndarray, ...]] = []
        self._waiting = self._learnt = 0
        # [verified for their worth, explored] x [tries, accepted - predicted, its
        # variance] x bin, and the labels of which each is a sum.
        self._ece = np.zeros((2, 3, _ECE_BINS))
        self._ece_labels = np.zeros((2, 1, 1))
        self._table = np.empty(0)
        self._rise = np.empty(0)
        self._refresh()

    def predict(
        self,
        values: np.ndarray,
        step: int,
        confidence: np.ndarray,
        sampled: np.ndarray,
        offset: np.ndarray,
    ) -> None:
        """Log-odds of confidence, and of acceptance, and its probability.

        Args:
            values: float64 [3, steps, n]; row `step - 1` of each is written.
            step: Draft position, 1-based.
            confidence: float [n], highest probability of the draft at this step.
            sampled: int64 [n], 1 where temperature is above zero, else 0.
            offset: float64 [n], of the requests, in log-odds of acceptance.
        """
        nodes = len(NODES)
        table_chances(
            values,
            step,
            np.ascontiguousarray(confidence, np.float64),
            sampled,
            offset,
            self._table,
            self._rise,
            nodes,
            self.k_max * nodes,
            float(NODES[0]),
            1.0 / _STEP,
            _LEAST,
        )

    def learn(
        self,
        position: np.ndarray,
        sampled: np.ndarray,
        z: np.ndarray,
        predicted: np.ndarray,
        accepted: np.ndarray,
        weight: np.ndarray | None = None,
    ) -> None:
        """Take labels; small lots wait for each other for a few rounds.

        Args:
            position: int64 [l], draft positions, 0-based.
            sampled: int64 [l], 1 where temperature is above zero, else 0.
            z: float64 [l], log-odds of confidence.
            predicted: float64 [l], the probability that was predicted.
            accepted: float64 [l], 1 where the token was accepted, else 0.
            weight: float64 [l], drafted tokens that a label stands for in the
                calibration error, those never verified included; None: one each.
        """
        if weight is None:
            weight = np.ones(len(z))
        self._pending.append((position, sampled, z, predicted, accepted, weight))
        self._waiting += len(z)
        more = _BATCH_MORE if self._learnt > self._half_life else 1
        few = len(self._pending) < more * _BATCH_ROUNDS
        if few and self._waiting < more * _BATCH_LABELS:
            return
        position, sampled, z, predicted, accepted, weight = map(
            np.concatenate, zip(*self._pending, strict=True)
        )
        self._pending.clear()
        self._waiting = 0
        self._learnt += len(z)
        decay = 0.5 ** (len(z) / self._half_life)
        self._measure(predicted, accepted, weight, decay)
        at = (z - NODES[0]) * (1.0 / _STEP)
        np.maximum(at, 0.0, out=at)
        np.minimum(at, _TOP, out=at)
        low = at.astype(np.intp)
        high_share = at - low
        low += (sampled * self.k_max + position) * len(NODES)
        node = np.concatenate([low, low + 1])
        share = np.concatenate([1.0 - high_share, high_share])
        share *= np.tile(np.minimum(weight, _MOST_WEIGHT), 2)
        size = self._counts.shape[1]
        self._counts *= decay
        self._counts[0] += np.bincount(node, share, size)
        self._counts[1] += np.bincount(node, share * np.tile(accepted, 2), size)
        self._fit_line()
        self._refresh()

    def _measure(
        self,
        predicted: np.ndarray,
        accepted: np.ndarray,
        weight: np.ndarray,
        decay: float,
    ) -> None:
        """Take labels for the calibration error; explored ones are few and last."""
        explored = weight > 1.0
        keep = np.array([decay, 0.5 ** (explored.sum() / _ECE_EXPLORED)])[:, None, None]
        surprise = weight * (accepted - predicted)
        cell = np.minimum((predicted * _ECE_BINS).astype(np.intp), _ECE_BINS - 1)
        cell += explored * _ECE_BINS
        sums = [
            np.bincount(cell, values, 2 * _ECE_BINS).reshape(2, _ECE_BINS)
            for values in (weight, surprise, surprise**2)
        ]
        self._ece *= keep
        self._ece[:, 2] *= keep[:, 0]
        self._ece += np.stack(sums, axis=1)
        self._ece_labels *= keep
        self._ece_labels += len(predicted)

    def error(self) -> float:
        """Expected calibration error of recent predictions, 0..1 (nan without any).

        Over all drafted tokens up to the first rejection, those that were cut before
        verification included: the few of them that were explored stand for the rest.
        The mean over ten bins of predicted probability of |observed - predicted|, less
        what is chance, weighted by how often the bin was predicted; decayed.
        """
        if not self._ece_labels.all():
            return float("nan")
        rates = self._ece / self._ece_labels
        tries, gap = rates[:, :2].sum(axis=0)
        noise = (rates[:, 2] / self._ece_labels[:, 0]).sum(axis=0)
        real = np.sqrt(np.maximum(gap**2 - noise, 0.0))
        return float(real.sum() / tries.sum())

    def forget(self, keep: float) -> None:
        """Keep a share of the evidence: the draft has changed.

        Args:
            keep: 0 (forget all) to 1.
        """
        self._pending.clear()  # labels of the draft before
        self._waiting = 0
        self._counts *= keep
        self._learnt = int(keep * self._learnt)
        self._ece *= keep
        self._ece_labels *= keep
        self._refresh()

    def _fit_line(self) -> None:
        """One damped Newton step of the logistic regression on the counts, per kind.

        Where all confidences are saturated and wrong the curvature at hand is that of a
        flat place far from the maximum: a whole step overshoots, and the next one more.
        """
        tries, accepts = self._counts.reshape(2, 2, -1)
        chance = 1.0 / (1.0 + np.exp(-(self._line @ self._inputs)))
        gradient = (accepts - tries * chance) @ self._inputs.T
        gradient -= _TRUST * (self._line - _LINE)
        weight = tries * chance * (1.0 - chance)
        curve = (self._inputs * weight[:, None]) @ self._inputs.T + np.diag(_TRUST)
        step = np.linalg.solve(curve, gradient[..., None])[..., 0]
        before = self._likelihood(self._line)
        for _ in range(_HALVINGS):
            line = np.minimum(np.maximum(self._line + step, _LOW), _HIGH)
            worse = self._likelihood(line) < before
            if not worse.any():
                break
            step[worse] *= 0.5
        self._line = line

    def _likelihood(self, line: np.ndarray) -> np.ndarray:
        """Penalised log-likelihood of the counts, [2], which the fit maximises."""
        tries, accepts = self._counts.reshape(2, 2, -1)
        logit = line @ self._inputs
        likely = accepts * logit - tries * np.logaddexp(0.0, logit)
        prior = 0.5 * (_TRUST * (line - _LINE) ** 2).sum(axis=1)
        return np.asarray(likely.sum(axis=1) - prior)

    def _refresh(self) -> None:
        shape = (2, self.k_max, len(NODES))
        line = _bounded((self._line @ self._inputs).reshape(shape))
        chance = 1.0 / (1.0 + np.exp(-line))
        tries, accepts = self._counts.reshape(2, *shape)
        # What all positions together say about a node corrects each of them...
        seen = tries.sum(axis=1) + 1e-9
        mean = (tries * chance).sum(axis=1) / seen
        mean += (chance[:, 0] - mean) * (seen < 1e-6)
        hits = accepts.sum(axis=1) + _SHRINK * mean
        misses = (tries - accepts).sum(axis=1) + _SHRINK * (1.0 - mean)
        line += (np.log(hits / misses) - np.log(mean / (1.0 - mean)))[:, None]
        line = _bounded(line)
        # ... and then its own record does.
        chance = 1.0 / (1.0 + np.exp(-line))
        hits = accepts + _SHRINK * chance
        misses = tries - accepts + _SHRINK * (1.0 - chance)
        self._table = _bounded(np.log(hits / misses).ravel())
        self._rise = np.empty_like(self._table)
        self._rise[:-1] = self._table[1:] - self._table[:-1]
        self._rise[-1] = 0.0


def _bounded(logit: np.ndarray) -> np.ndarray:
    return np.asarray(np.minimum(np.maximum(logit, -_MOST), _MOST))


class RequestOffsets:
    """Layer 3: how much easier than its confidences a request is, in log-odds.

    A one-parameter logistic filter per request: each label moves the offset by its
    surprise over the precision gathered so far; a fresh request is at 0, the batch.

    Args:
        spread: Standard deviation of the offset between requests, log-odds.
    """

    _KEEP = 0.99  # of the precision, per round with labels: texts drift
    _MOST = 3.0

    def __init__(self, capacity: int, spread: float = 0.5) -> None:
        self._prior = 1.0 / spread**2
        self.value = np.zeros(capacity)
        self._precision = np.full(capacity, self._prior)

    def add(self, slot: int) -> None:
        self.value[slot] = 0.0
        self._precision[slot] = self._prior

    def judge(
        self,
        slots: np.ndarray,
        values: np.ndarray,
        survival: np.ndarray,
        steps: int,
        answers: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Learn from a round, and give its labels to others.

        Args:
            slots: int64 [n], each at most once.
            values: float64 [3, most, n]: z, log-odds and probability of acceptance.
            survival: float32 [most, n].
            answers: int64 [m] each: places among the n, tokens verified and accepted.

        Returns:
            int64 [2, l], positions (from 0) and places of the l tokens judged; float64
            [3, l], their z, what was predicted and 1 where one was accepted; tokens
            that were expected of the round.
        """
        size = steps * len(slots)
        where, labels = np.empty((2, size), np.int64), np.empty((3, size))
        rows, verified, accepted = (
            np.ascontiguousarray(answer, np.int64) for answer in answers
        )
        count, tokens = judge(
            values,
            survival,
            steps,
            rows,
            verified,
            accepted,
            np.ascontiguousarray(slots, np.int64),
            self.value,
            self._precision,
            self._KEEP,
            self._prior,
            self._MOST,
            where,
            labels,
        )
        return where[:, :count], labels[:, :count], tokens

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
        self.value.fill(0.0)
        self._precision.fill(self._prior)


_MOST_CHANCE, _LEAST_CHANCE = 0.25, 0.002  # chance of a request in a round
_PRICE_SMOOTH = 0.05


class Exploration:
    """Requests that verify whole drafts now and then, within a share of time.

    What is cut for its confidence has no label: how wrong its probability is would
    never be known. Who verifies all is drawn before the confidences of the round exist
    and without regard to them: its labels are a fair sample of all drafted tokens.

    Args:
        share: Most share of time for tokens that only exploration verifies, but for
            what the least chance takes; 0: none is drawn.

    Attributes:
        chance: With which each request of this round is drawn, 0 to 1.
        wanted: int64 [n], lengths that pay; None where no request was drawn.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._random = np.random.default_rng(0)
        self._drawn: np.ndarray | None = None
        self._price = 0.0  # of verifying everything, in rounds
        self._credit = 0.0  # seconds
        self.chance = 0.0
        self.wanted: np.ndarray | None = None

    def draw(self, requests: int, allowed: bool) -> None:
        """A round begins, nothing is known of its drafts."""
        self._drawn = self.wanted = None
        self.chance = 0.0
        if not allowed or not self._share:
            return
        chance = _LEAST_CHANCE
        if self._credit >= 0.0:
            chance = self._share / max(self._price, self._share / _MOST_CHANCE)
        self.chance = min(max(chance, _LEAST_CHANCE), _MOST_CHANCE)
        drawn = self._random.random(requests) < self.chance
        self._drawn = drawn if drawn.any() else None

    def widen(
        self, wanted: np.ndarray, whole: np.ndarray, seconds: np.ndarray
    ) -> np.ndarray:
        """Lengths to verify, int64 [n].

        Args:
            wanted: int64 [n], lengths that pay.
            whole: int64 [n], all that was drafted.
            seconds: float64, of the round when 0, 1, ... tokens are verified.
        """
        before = float(seconds[int(wanted.sum())])
        price = float(seconds[int(whole.sum())]) / before - 1.0
        self._price += _PRICE_SMOOTH * (price - self._price)
        self._credit += self._share * before
        if self._drawn is None:
            return wanted
        self.wanted = wanted
        lengths = np.where(self._drawn, whole, wanted)
        self._credit -= float(seconds[int(lengths.sum())]) - before
        return lengths

    def verify_chance(self, lengths: np.ndarray) -> np.ndarray | None:
        """Chance with which each draft's first token is verified, [n]; None: 1."""
        if self.wanted is None:
            return None
        return np.where((self.wanted == 0) & (lengths > 0), self.chance, 1.0)

    @staticmethod
    def weight(
        position: np.ndarray, row: np.ndarray, wanted: np.ndarray | None, chance: float
    ) -> np.ndarray | None:
        """Drafted tokens that each verified one stands for; None: one each.

        Args:
            position: int64 [l], draft positions, 0-based.
            row: int64 [l], places in the round.
            wanted, chance: What they were in that round.
        """
        if wanted is None:
            return None
        return np.where(position < wanted[row], 1.0, 1.0 / chance)
