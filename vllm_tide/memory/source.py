"""Proposals of the n-gram memory, and acceptance statistics of each source of drafts.

Every proposal is compared with the tokens that the target then emitted, verified or
not. A token is accepted with the probability that the target samples it, so equality is
an unbiased label of acceptance. The draft's tokens are labelled in the same way, by the
length of the match at the same position, because repeated text is easier to draft too.
"""

from __future__ import annotations

import numpy as np

from vllm_tide.control.acceptance import HALF_LIFE_TOKENS, RequestIntercepts
from vllm_tide.control.batch import Proposals
from vllm_tide.memory.ngram import NgramIndex, Text

DRAFT, MEMORY = 0, 1
"""Sources of drafts."""
MATCHES = (2, 3, 4, 5, 8)
"""Match lengths at which the next bucket begins; bucket 0 is no match."""
PRIOR = np.array([0.6, 0.4])  # prior acceptance of a token, by source
SHRINK = 8.0  # prior weight (tokens) for shrinking depths to buckets, these to `PRIOR`
_SPREAD = 1.0  # standard deviation between requests, log-odds
_GROWTH = 32  # recompute a table when 1/32 of its counts are new
SWAP_KEEP = 0.2  # share of the counts that a new draft inherits


class SourceRecord:
    """Acceptance of each source by match length, depth and request.

    Counts per (source, bucket, depth) with half-life `HALF_LIFE_TOKENS`; Beta means
    shrunk to the bucket's, and that to a prior; a random intercept of each request.
    """

    def __init__(self, capacity: int, most: int) -> None:
        # [source] x [tries, hits] x bucket x depth
        self._counts = np.zeros((2, 2, len(MATCHES) + 1, most))
        self._levels = [RequestIntercepts(capacity, _SPREAD) for _ in PRIOR]
        self._logits = [self._table(source) for source in (DRAFT, MEMORY)]
        self._fresh = [0, 0]  # labels since the table was computed
        self._depth = np.arange(most)

    def begin(self, slot: int) -> None:
        """Clear a slot for another request."""
        for level in self._levels:
            level.add(slot)

    def draft_swapped(self) -> None:
        """Discount the statistics of the old draft after a swap."""
        self._counts[DRAFT] *= SWAP_KEEP
        self._levels[DRAFT].reset()
        self._logits[DRAFT] = self._table(DRAFT)

    def learn(
        self,
        source: int,
        slots: np.ndarray,
        bucket: np.ndarray,
        judged: np.ndarray,
        right: np.ndarray,
    ) -> None:
        """Update the statistics with a step's labels.

        Args:
            slots, bucket: int64 [n], distinct slots.
            judged: int64 [n], labelled tokens: up to the first mismatch.
            right: int64 [n], accepted tokens among them.
        """
        if not judged.all():
            rows = judged > 0
            if not rows.any():
                return
            slots, bucket, judged, right = (
                a[rows] for a in (slots, bucket, judged, right)
            )
        counts, chance = self._counts[source], self._chance(source, slots, bucket)
        labels, hits = (self._depth < n[:, None] for n in (judged, right))
        expected, weight = chance * labels, chance * (1.0 - chance) * labels
        residual = right - expected.sum(axis=1)
        self._levels[source].learn(slots, residual, weight.sum(axis=1))
        cell = bucket[:, None] * len(self._depth) + self._depth
        counts *= 0.5 ** (int(judged.sum()) / HALF_LIFE_TOKENS)
        for total, mask in zip(counts, (labels, hits), strict=True):
            total += np.bincount(cell[mask], None, total.size).reshape(total.shape)
        self._fresh[source] += int(judged.sum())
        if _GROWTH * self._fresh[source] >= counts[0].sum():
            self._logits[source], self._fresh[source] = self._table(source), 0

    def survival(
        self, source: int, slots: np.ndarray, bucket: np.ndarray
    ) -> np.ndarray:
        """Return the probability that tokens 0 to j are accepted, float32 [K, n]."""
        chance = self._chance(source, slots, bucket)
        return np.cumprod(chance, axis=1).T.astype(np.float32)

    def _chance(self, source: int, slots: np.ndarray, bucket: np.ndarray) -> np.ndarray:
        logit = self._logits[source][bucket]
        logit = logit + self._levels[source].value[slots][:, None]
        return np.asarray(1.0 / (1.0 + np.exp(-logit)))

    def _table(self, source: int) -> np.ndarray:
        """Compute the log-odds of acceptance, float64 [bucket, depth]."""
        tries, hits = self._counts[source]
        mean = hits.sum(axis=1) + SHRINK * PRIOR[source]
        mean = (mean / (tries.sum(axis=1) + SHRINK))[:, None]
        hits = hits + SHRINK * mean
        return np.asarray(np.log(hits / (tries + SHRINK * 1.0 - hits)))


class Memory:
    """The n-gram memory of all running requests.

    Attributes:
        record: Acceptance statistics of the sources.
    """

    def __init__(self, capacity: int, longest: int, most: int) -> None:
        self.record = SourceRecord(capacity, most)
        self.index = NgramIndex(capacity, longest, most)
        # Last proposals by [source, slot], and the text's length at that time.
        self._tokens = np.full((2, capacity, most), -1)
        self._bucket = np.zeros(capacity, np.int64)
        self._at = np.zeros(capacity, np.int64)
        self._has_drafts = False

    def begin(self, slot: int) -> None:
        """Clear a slot for another request."""
        self.record.begin(slot)
        self.index.begin(slot)
        self._tokens[:, slot], self._at[slot] = -1, 0

    def recall(
        self, slots: np.ndarray, text: Text, caps: np.ndarray, *, counts: bool = True
    ) -> tuple[np.ndarray, Proposals] | None:
        """Update the statistics with the last proposals, and make new ones.

        Args:
            slots: int64 [n].
            caps: int64 [n], most draft tokens of each request.
            counts: Whether to estimate the acceptance of the draft's tokens too.

        Returns:
            Tokens int64 [n, K] and survival probabilities; None without a proposal.
        """
        self._grade(slots, text)
        tokens, match = self.index.propose(slots, text)
        self._tokens[MEMORY, slots] = tokens
        self._bucket[slots] = bucket = np.searchsorted(MATCHES, match, side="right")
        self._at[slots] = text.length
        if not (caps[match > 0] > 0).any():
            return None
        survival = self.record.survival(MEMORY, slots, bucket)
        beyond = np.arange(len(survival))[:, None] >= caps
        survival[beyond | (match == 0)] = -1.0
        if not counts:
            return tokens, Proposals(survival)
        drafted = self.record.survival(DRAFT, slots, bucket)
        drafted[beyond] = -1.0
        return tokens, Proposals(survival, drafted)

    def drafted(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Store the draft's tokens of this step for `_grade`.

        Args:
            slots: int64 [n].
            tokens: int64 [n, s], s <= K.
        """
        self._tokens[DRAFT, slots] = -1
        self._tokens[DRAFT, slots, : tokens.shape[1]] = tokens
        self._has_drafts = True

    def _grade(self, slots: np.ndarray, text: Text) -> None:
        """Compare the proposals of the last step with the emitted tokens."""
        follows = (self._at[slots] == text.known) & (text.count > 0)
        most = self._tokens.shape[2]
        known = np.minimum(text.count, most) * follows
        width = min(text.new.shape[1], most)
        sources = (MEMORY, DRAFT)[: 1 + self._has_drafts]
        self._has_drafts = False
        for source in sources:
            tokens = self._tokens[source, slots]
            same = tokens[:, :width] == text.new[:, :width]
            # Missing proposals and missing emitted tokens are both -1.
            right = np.logical_and.accumulate(same, axis=1).sum(axis=1)
            right = np.minimum(right, known)
            judged = np.minimum(np.minimum(right + 1, known), (tokens >= 0).sum(axis=1))
            right = np.minimum(right, judged)
            self.record.learn(source, slots, self._bucket[slots], judged, right)
