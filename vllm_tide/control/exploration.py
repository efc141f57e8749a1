"""Verifying whole drafts now and then, so that tokens that do not pay are judged too.

Tokens are cut for their confidences, and what is cut has no label: how wrong its
probabilities are would never be known. So in a small share of rounds a request verifies
all that was drafted for it. Who does is drawn before the confidences of the round
exist and without regard to them: its labels are a fair sample of all drafted tokens.
"""

from __future__ import annotations

import numpy as np

_MOST, _LEAST = 0.25, 0.002  # chance of a request in a round
_SMOOTH = 0.05


class Exploration:
    """Draws requests within a share of time.

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
        """A round begins, nothing is known of its drafts.

        Args:
            requests: n.
            allowed: False draws none.
        """
        self._drawn = self.wanted = None
        self.chance = 0.0
        if not allowed or not self._share:
            return
        chance = _LEAST
        if self._credit >= 0.0:
            chance = self._share / max(self._price, self._share / _MOST)
        self.chance = min(max(chance, _LEAST), _MOST)
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
        self._price += _SMOOTH * (price - self._price)
        self._credit += self._share * before
        if self._drawn is None:
            return wanted
        self.wanted = wanted
        lengths = np.where(self._drawn, whole, wanted)
        self._credit -= float(seconds[int(lengths.sum())]) - before
        return lengths

    def verify_chance(self, lengths: np.ndarray) -> np.ndarray:
        """Chance that the first token of each verified draft was verified, [n]."""
        only = np.zeros(len(lengths), bool) if self.wanted is None else self.wanted == 0
        return np.where(only & (lengths > 0), self.chance, 1.0)

    def weight(self, position: np.ndarray, row: np.ndarray) -> np.ndarray | None:
        """Drafted tokens that each verified one stands for; None: one each.

        Args:
            position: int64 [l], draft positions, 0-based.
            row: int64 [l], places in the round.
        """
        if self.wanted is None:
            return None
        return np.where(position < self.wanted[row], 1.0, 1.0 / self.chance)
