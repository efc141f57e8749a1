"""Budget of exploration."""

from __future__ import annotations

_SAVED_SECONDS = 10.0  # whose share the allowance begins with, and holds at most
_HOPELESS = 4.0  # times its price for which a trial without hope is waited


class Allowance:
    """Seconds that exploration may lose: a share of all time, some of it saved.

    Args:
        share: Of time; 0: nothing is explored.
    """

    def __init__(self, share: float) -> None:
        self._share, self._at, self._paid_at = share, 0.0, 0.0
        self.refill()

    def refill(self) -> None:
        """Something has changed: as much as can be saved."""
        self._seconds = self._most = self._share * _SAVED_SECONDS

    def earn(self, now: float) -> None:
        earned = self._share * max(now - self._at, 0.0)
        self._seconds = min(self._seconds + earned, self._most)
        self._at = now

    def is_due(self, seconds: float, now: float) -> bool:
        """True if a quarter of what was earned since the last payment is so much.

        Then something is tried that nobody hopes for: traffic may have changed.
        """
        return (now - self._paid_at) * self._share >= _HOPELESS * seconds

    def pay(self, seconds: float, now: float) -> bool:
        """True if so many could be paid, and were."""
        if not self._share:
            return False
        if self._seconds < seconds:
            self._most = max(self._most, seconds)  # it is saved for
            return False
        self._seconds -= max(seconds, 0.0)
        self._most, self._paid_at = self._share * _SAVED_SECONDS, now
        return True
