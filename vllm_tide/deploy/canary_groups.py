"""Groups of similar requests, which the canary compares with their like.

Online clustering of requests by their token ids, without labels.

A request is a unit vector: square roots of the counts of its tokens and token pairs,
hashed with a sign (Weinberger et al. 2009), so a cosine estimates the Bhattacharyya
coefficient of two distributions and needs no document counts. Online spherical k-means
(Zhong 2005) updates the centres. A group is created in two cases:

* A request is far from every centre, relative to the spread of members.
* A group has two clusters. One request of a related domain is not far enough (200
  tokens are few), so a group's last members are split regularly: the split is fitted on
  half of them and applied if it separates the other half clearly.

Deterministic; no torch. Runs in the trainer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

UNKNOWN = -1
"""Group of a request that is too short to be assigned."""
SIZE = 1024
"""Size of a signature, half of it for token pairs."""
MIN_TOKENS = 16
"""Shortest request that is assigned to a group (tokens)."""
MIN_CREATE_TOKENS = 48
"""Shortest request that can create a group (tokens)."""

MAX_GROUPS = 8
"""Maximum number of groups at a time."""
_NOISE_TOKENS = 200.0  # tokens at which sampling about halves a squared cosine
_FAR, _FAR_MEMBERS = 4.0, 16  # standard deviations; members needed to estimate them
_PRIOR_SPREAD, _PRIOR_MEMBERS = 0.08, 4.0
_MIN_SHARE = 1 / 64  # minimum share of the newest member in a centre
_MEMBERS = 64  # last members stored for the split
_SPLIT_EVERY, _SPLIT_FROM = 8, 24
# Splitting one normal distribution gives a separation of at most 2.65.
_SPLIT_SEPARATION, _SPLIT_SIDE = 4.0, 4
_IDLE_REQUESTS = 16  # per member, after which an unused group may be removed

_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_SHIFTS = np.array([30, 27, 31, 40], np.uint64)
_CELL = np.uint64(SIZE // 2 - 1)


def _hash(values: np.ndarray) -> np.ndarray:
    """Hash uint64 [n] with SplitMix64."""
    z = values + _MIX[0]
    z = (z ^ (z >> _SHIFTS[0])) * _MIX[1]
    z = (z ^ (z >> _SHIFTS[1])) * _MIX[2]
    return z ^ (z >> _SHIFTS[2])


def _cells(hashes: np.ndarray) -> np.ndarray:
    """Return the unit vector [SIZE / 2] of square roots of counts."""
    kinds, counts = np.unique(hashes, return_counts=True)
    signs = 1.0 - 2.0 * ((kinds >> _SHIFTS[3]) & np.uint64(1)).astype(np.float64)
    cells = (kinds & _CELL).astype(np.int64)
    out = np.bincount(cells, signs * np.sqrt(counts), minlength=SIZE // 2)
    return _unit(out)


def _unit(vector: np.ndarray) -> np.ndarray:
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm else vector


def signature(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the unit vector float64 [SIZE] of a request; zeros without tokens."""
    tokens = np.asarray(token_ids, np.int64).astype(np.uint64)
    hashes = _hash(tokens)
    # The first token of a pair is hashed twice, so that order matters.
    pairs = _hash(hashes[:-1] ^ tokens[1:])
    return _unit(np.concatenate([_cells(hashes), _cells(pairs)]))


@dataclass
class _Group:
    id: int
    centre: np.ndarray
    tokens: float
    seen: int
    count: int = 0
    mean: float = 0.0
    square: float = 0.0
    weight: float = 0.0
    members: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=_MEMBERS))

    def score(self, vector: np.ndarray, tokens: int) -> float:
        """Return the cosine, corrected for the mean loss of short samples."""
        correction = (1.0 + _NOISE_TOKENS / tokens) * (
            1.0 + _NOISE_TOKENS / self.tokens
        )
        return float(self.centre @ vector) * math.sqrt(correction)

    def is_far(self, score: float, tokens: int) -> bool:
        """Return whether a request with this score does not belong to the group."""
        if self.count < _FAR_MEMBERS:
            return False
        squares = self.square + _PRIOR_MEMBERS * _PRIOR_SPREAD**2
        spread = math.sqrt(squares / (self.weight + _PRIOR_MEMBERS))
        return score < self.mean - _FAR * spread * math.sqrt(_NOISE_TOKENS / tokens)

    def take(self, vector: np.ndarray, tokens: int, score: float, clock: int) -> None:
        self.count += 1
        self.seen = clock
        self.members.append(vector.astype(np.float32))
        share = max(1.0 / self.count, _MIN_SHARE)
        if self.count > 1:
            error = score - self.mean
            self.mean += max(1.0 / (self.count - 1), _MIN_SHARE) * error
            keep = 1.0 - _MIN_SHARE
            self.square = keep * self.square + error**2 * tokens / _NOISE_TOKENS
            self.weight = keep * self.weight + 1.0
        self.centre = _unit((1.0 - share) * self.centre + share * vector)
        self.tokens = min(self.tokens + tokens, tokens / _MIN_SHARE)


class Groups:
    """The groups of one request stream; ids count up and are not reused.

    Args:
        max_groups: Maximum number of groups. A new one replaces the smallest idle
            group; without an idle group, a far request joins the nearest.
    """

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self.max_groups = max_groups
        self.num_created = 0
        self._clock = 0
        self._groups: list[_Group] = []

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(group.id for group in self._groups)

    def assign(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """Assign a finished request (prompt and output) and update its group."""
        tokens = len(token_ids)
        if tokens < MIN_TOKENS:
            return UNKNOWN
        self._clock += 1
        vector = signature(token_ids)
        nearest = self._nearest(vector, tokens)
        far = nearest is not None and nearest[0].is_far(nearest[1], tokens)
        if nearest is None or (
            far and tokens >= MIN_CREATE_TOKENS and self._can_create(nearest[0])
        ):
            nearest = self._create(vector, float(tokens)), 1.0
        group, score = nearest
        group.take(vector, tokens, score, self._clock)
        if group.count >= _SPLIT_FROM and group.count % _SPLIT_EVERY == 0:
            group = self._split(group)
        return group.id

    def nearest(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """Return the group of a request without updates; `UNKNOWN` if it is far."""
        if len(token_ids) < MIN_TOKENS:
            return UNKNOWN
        nearest = self._nearest(signature(token_ids), len(token_ids))
        if nearest is None:
            return UNKNOWN
        group, score = nearest
        return UNKNOWN if group.is_far(score, len(token_ids)) else group.id

    def _nearest(self, vector: np.ndarray, tokens: int) -> tuple[_Group, float] | None:
        scored = [(group, group.score(vector, tokens)) for group in self._groups]
        return max(scored, key=lambda pair: pair[1], default=None)

    def _create(self, vector: np.ndarray, tokens: float) -> _Group:
        group = _Group(self.num_created, vector, tokens, self._clock)
        self._groups.append(group)
        self.num_created += 1
        return group

    def _can_create(self, keep: _Group) -> bool:
        """Return whether a group can be added; remove an idle one except `keep`."""
        if len(self._groups) < self.max_groups:
            return True
        idle = [
            g
            for g in self._groups
            if g is not keep and self._clock - g.seen > _IDLE_REQUESTS * g.count
        ]
        if idle:
            self._groups.remove(min(idle, key=lambda g: (g.count, g.seen)))
        return bool(idle)

    def _split(self, group: _Group) -> _Group:
        """Split a group of two clusters; return the group of its newest member.

        The larger part keeps the id.
        """
        members = np.stack(group.members).astype(np.float64)
        sides = split_clusters(members)
        if sides is None or not self._can_create(group):
            return group
        small = sides if 2 * sides.sum() <= len(sides) else ~sides
        tokens = group.tokens / min(group.count, 1.0 / _MIN_SHARE)
        new = self._create(_unit(members[small].sum(axis=0)), tokens * small.sum())
        for part, mask in ((group, ~small), (new, small)):
            rows = members[mask]
            total = rows.sum(axis=0)
            part.centre = _unit(total)
            part.tokens = tokens * len(rows)
            part.count, part.seen = len(rows), self._clock
            others = total - rows  # a member biases its own centre
            scores = (rows * others).sum(axis=1) / np.linalg.norm(others, axis=1)
            correction = 1.0 + _NOISE_TOKENS / tokens
            correction *= 1.0 + _NOISE_TOKENS / part.tokens
            scores *= math.sqrt(correction)
            part.mean = float(scores.mean())
            part.square = float(((scores - part.mean) ** 2).sum())
            part.square *= tokens / _NOISE_TOKENS
            part.weight = float(len(rows))
            part.members = deque(rows.astype(np.float32), maxlen=_MEMBERS)
        return new if small[-1] else group


def split_clusters(members: np.ndarray) -> np.ndarray | None:
    """Split unit vectors into two clusters, if there are two.

    Two centres are fitted on every second row (spherical 2-means) and tested on the
    other rows, along the line between them: an axis fitted on the same rows would
    separate pure noise. Separation is the distance of the means over the spread within.

    Returns:
        Bool [n], rows on one side; None if the separation is too small.
    """
    axis = _axis(members[::2])
    if axis is None:
        return None
    line, middle = axis
    along = members[1::2] @ line - middle
    left, right = along[along < 0], along[along >= 0]
    if min(len(left), len(right)) < _SPLIT_SIDE:
        return None
    within = math.sqrt((left.var() * len(left) + right.var() * len(right)) / len(along))
    if right.mean() - left.mean() < _SPLIT_SEPARATION * max(within, 1e-9):
        return None
    return np.asarray(members @ line - middle >= 0)


def _axis(rows: np.ndarray) -> tuple[np.ndarray, float] | None:
    centre = rows.sum(axis=0)
    first = rows[int(np.argmin(rows @ centre))]
    pair = np.stack([first, rows[int(np.argmin(rows @ first))]])
    for _ in range(8):
        near = np.argmax(rows @ pair.T, axis=1)
        if near.min() == near.max():
            return None
        pair = np.stack([_unit(rows[near == side].sum(axis=0)) for side in (0, 1)])
    line = pair[1] - pair[0]
    # Halfway between the means on the line, not between the centres: the centre of the
    # smaller cluster has more noise.
    along = rows @ line
    return line, 0.5 * float(along[near == 0].mean() + along[near == 1].mean())
