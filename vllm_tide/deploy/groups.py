"""Groups of similar requests, found online and without labels from token ids alone.

A request is a unit vector: square roots of the counts of its tokens and token pairs,
hashed with a sign (Weinberger et al. 2009), so a cosine estimates the Bhattacharyya
coefficient of two distributions and needs no document counts. Online spherical k-means
(Zhong 2005) moves the centres. Groups come about in two ways:

* a request far from every centre, against what is usual there, founds one at once;
* one request of a related domain is not that far (two hundred tokens are few), but many
  are two clusters: every few requests a group's last members are cut in two, on one
  half of them, and the cut is kept if it parts the other half clearly.

Deterministic; no torch. Runs in the trainer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

UNKNOWN = -1
"""Group of a request that is too short to tell."""
SIZE = 1024
"""Cells of a signature, half of them for pairs."""
MIN_TOKENS = 16
"""Shortest request that is put into a group (tokens)."""
FOUNDING_TOKENS = 48
"""Shortest request that can found one (tokens)."""

MAX_GROUPS = 8
"""Groups of similar requests held at once."""
_NOISE_TOKENS = 200.0  # tokens at which sampling halves a squared cosine, about
_FAR, _FAR_MEMBERS = 4.0, 16  # standard deviations; members that make them known
_PRIOR_SPREAD, _PRIOR_MEMBERS = 0.08, 4.0
_SLOWEST = 1 / 64  # share of the newest member in a centre, at least
_MEMBERS = 64  # last members kept for the cut
_CUT_EVERY, _CUT_FROM = 8, 24
# Cutting one normal distribution gives a separation of 2.65 at most.
_CUT_SEPARATION, _CUT_SIDE = 4.0, 4
_PATIENCE = 16  # requests without one, per member, after which a group may be dropped

_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_SHIFTS = np.array([30, 27, 31, 40], np.uint64)
_CELL = np.uint64(SIZE // 2 - 1)


def _hash(values: np.ndarray) -> np.ndarray:
    """SplitMix64 of uint64 [n]."""
    z = values + _MIX[0]
    z = (z ^ (z >> _SHIFTS[0])) * _MIX[1]
    z = (z ^ (z >> _SHIFTS[1])) * _MIX[2]
    return z ^ (z >> _SHIFTS[2])


def _cells(hashes: np.ndarray) -> np.ndarray:
    """Unit vector [SIZE / 2] of the roots of counts."""
    kinds, counts = np.unique(hashes, return_counts=True)
    signs = 1.0 - 2.0 * ((kinds >> _SHIFTS[3]) & np.uint64(1)).astype(np.float64)
    cells = (kinds & _CELL).astype(np.int64)
    out = np.bincount(cells, signs * np.sqrt(counts), minlength=SIZE // 2)
    return _unit(out)


def _unit(vector: np.ndarray) -> np.ndarray:
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm else vector


def signature(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Unit vector float64 [SIZE] of a request; zeros without tokens."""
    tokens = np.asarray(token_ids, np.int64).astype(np.uint64)
    hashes = _hash(tokens)
    # The first of a pair is hashed again before the two are joined: order matters.
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
        """Cosine, made up for what short samples lose on average."""
        lost = (1.0 + _NOISE_TOKENS / tokens) * (1.0 + _NOISE_TOKENS / self.tokens)
        return float(self.centre @ vector) * math.sqrt(lost)

    def is_far(self, score: float, tokens: int) -> bool:
        """True if a request of this score is none of ours."""
        if self.count < _FAR_MEMBERS:
            return False
        squares = self.square + _PRIOR_MEMBERS * _PRIOR_SPREAD**2
        spread = math.sqrt(squares / (self.weight + _PRIOR_MEMBERS))
        return score < self.mean - _FAR * spread * math.sqrt(_NOISE_TOKENS / tokens)

    def take(self, vector: np.ndarray, tokens: int, score: float, clock: int) -> None:
        self.count += 1
        self.seen = clock
        self.members.append(vector.astype(np.float32))
        share = max(1.0 / self.count, _SLOWEST)
        if self.count > 1:
            error = score - self.mean
            self.mean += max(1.0 / (self.count - 1), _SLOWEST) * error
            keep = 1.0 - _SLOWEST
            self.square = keep * self.square + error**2 * tokens / _NOISE_TOKENS
            self.weight = keep * self.weight + 1.0
        self.centre = _unit((1.0 - share) * self.centre + share * vector)
        self.tokens = min(self.tokens + tokens, tokens / _SLOWEST)


class Groups:
    """The groups of one stream.

    Args:
        max_groups: Groups held at once. When all are taken, the smallest one unseen for
            long gives way; if there is none, a far request joins the nearest.

    Ids are handed out in order of founding and never used again.
    """

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self.max_groups = max_groups
        self.num_founded = 0
        self._clock = 0
        self._groups: list[_Group] = []

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(group.id for group in self._groups)

    def assign(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """Group of a finished request, prompt and output; moves the group's centre."""
        tokens = len(token_ids)
        if tokens < MIN_TOKENS:
            return UNKNOWN
        self._clock += 1
        vector = signature(token_ids)
        found = self._nearest(vector, tokens)
        far = found is not None and found[0].is_far(found[1], tokens)
        if found is None or (
            far and tokens >= FOUNDING_TOKENS and self._make_room(found[0])
        ):
            found = self._found(vector, float(tokens)), 1.0
        group, score = found
        group.take(vector, tokens, score, self._clock)
        if group.count >= _CUT_FROM and group.count % _CUT_EVERY == 0:
            group = self._cut(group)
        return group.id

    def nearest(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """Group a request would join, `UNKNOWN` if it is far from it; no change."""
        if len(token_ids) < MIN_TOKENS:
            return UNKNOWN
        found = self._nearest(signature(token_ids), len(token_ids))
        if found is None:
            return UNKNOWN
        group, score = found
        return UNKNOWN if group.is_far(score, len(token_ids)) else group.id

    def _nearest(self, vector: np.ndarray, tokens: int) -> tuple[_Group, float] | None:
        scored = [(group, group.score(vector, tokens)) for group in self._groups]
        return max(scored, key=lambda pair: pair[1], default=None)

    def _found(self, vector: np.ndarray, tokens: float) -> _Group:
        group = _Group(self.num_founded, vector, tokens, self._clock)
        self._groups.append(group)
        self.num_founded += 1
        return group

    def _make_room(self, but: _Group) -> bool:
        """True if one more fits, after dropping an idle group other than `but`."""
        if len(self._groups) < self.max_groups:
            return True
        idle = [
            g
            for g in self._groups
            if g is not but and self._clock - g.seen > _PATIENCE * g.count
        ]
        if idle:
            self._groups.remove(min(idle, key=lambda g: (g.count, g.seen)))
        return bool(idle)

    def _cut(self, group: _Group) -> _Group:
        """Part a group that is two; returns the one its newest member is in.

        The larger part goes on as the old group.
        """
        members = np.stack(group.members).astype(np.float64)
        sides = clear_cut(members)
        if sides is None or not self._make_room(group):
            return group
        small = sides if 2 * sides.sum() <= len(sides) else ~sides
        tokens = group.tokens / min(group.count, 1.0 / _SLOWEST)
        new = self._found(_unit(members[small].sum(axis=0)), tokens * small.sum())
        for part, mask in ((group, ~small), (new, small)):
            rows = members[mask]
            total = rows.sum(axis=0)
            part.centre = _unit(total)
            part.tokens = tokens * len(rows)
            part.count, part.seen = len(rows), self._clock
            others = total - rows  # a member is nearer to a centre it is part of
            scores = (rows * others).sum(axis=1) / np.linalg.norm(others, axis=1)
            made_up = (1.0 + _NOISE_TOKENS / tokens) * (
                1.0 + _NOISE_TOKENS / part.tokens
            )
            scores *= math.sqrt(made_up)
            part.mean = float(scores.mean())
            part.square = float(((scores - part.mean) ** 2).sum())
            part.square *= tokens / _NOISE_TOKENS
            part.weight = float(len(rows))
            part.members = deque(rows.astype(np.float32), maxlen=_MEMBERS)
        return new if small[-1] else group


def clear_cut(members: np.ndarray) -> np.ndarray | None:
    """Part unit vectors in two, if they are two clusters.

    Two centres are fitted on every second row (spherical 2-means) and judged on the
    others, along the line between them: an axis fitted on the same rows would part pure
    noise. Separation is the distance of the two means over the spread within.

    Returns:
        Bool [n], rows on one side; None if the cut is not clear.
    """
    axis = _axis(members[::2])
    if axis is None:
        return None
    line, middle = axis
    along = members[1::2] @ line - middle
    left, right = along[along < 0], along[along >= 0]
    if min(len(left), len(right)) < _CUT_SIDE:
        return None
    within = math.sqrt((left.var() * len(left) + right.var() * len(right)) / len(along))
    if right.mean() - left.mean() < _CUT_SEPARATION * max(within, 1e-9):
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
    # Halfway between the means on the line, not between the centres: the smaller
    # cluster's centre is the noisier one.
    along = rows @ line
    return line, 0.5 * float(along[near == 0].mean() + along[near == 1].mean())
