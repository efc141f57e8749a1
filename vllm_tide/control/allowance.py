"""Budget of exploration."""

from __future__ import annotations

from math import inf

_SAVED_SECONDS = 20.0  # the budget begins with, and holds, its share of so many
_DUE = 4.0  # times its price has been earned: an exploration that nothing speaks for


class Allowance:
    """Seconds that exploration may lose: a share of all time, some of it saved.

    Args:
        share: Of time; 0: nothing is explored.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._at = self._paid_at = inf  # seconds; inf: not yet
        self.refill()

    def refill(self) -> None:
        """Fill the budget: traffic or draft have changed."""
        self._seconds = self._most = self._share * _SAVED_SECONDS

    def earn(self, now: float) -> None:
        earned = self._share * max(now - self._at, 0.0)
        self._seconds = min(self._seconds + earned, self._most)
        self._at = now
        self._paid_at = min(self._paid_at, now)

    def is_due(self, seconds: float, now: float) -> bool:
        """Return whether a quarter of the income since the last payment is so much.

        Then exploration is due that no belief speaks for: traffic may have changed.
        """
        return (now - self._paid_at) * self._share >= _DUE * seconds

    @property
    def may_borrow(self) -> bool:
        """True while nothing is owed."""
        return self._share > 0.0 and self._seconds >= 0.0

    def borrow(self, seconds: float) -> None:
        """Take seconds that the budget may not have: nothing is spent until it has."""
        self._seconds -= max(seconds, 0.0)

    def pay(self, seconds: float, now: float) -> bool:
        """Take seconds from the budget; returns whether it had so many.

        A sum that it does not have is saved for.
        """
        if not self._share:
            return False
        if self._seconds < seconds:
            self._most = max(self._most, seconds)
            return False
        self._seconds -= max(seconds, 0.0)
        self._most, self._paid_at = self._share * _SAVED_SECONDS, now
        return True
