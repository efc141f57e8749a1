"""Time budget of exploration."""

from __future__ import annotations

from math import inf

_SAVED_SECONDS = 20.0  # the initial and maximum budget is the share of this time
_DUE = 4.0  # income, in multiples of the loss, after which exploration is due


class Allowance:
    """Seconds that exploration may lose: a share of all time, saved up to a maximum.

    Args:
        share: Share of time; 0 disables exploration.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._at = self._paid_at = inf  # seconds; inf: never
        self.refill()

    def refill(self) -> None:
        """Fill the budget after the traffic or the draft has changed."""
        self._seconds = self._most = self._share * _SAVED_SECONDS

    def earn(self, now: float) -> None:
        earned = self._share * max(now - self._at, 0.0)
        self._seconds = min(self._seconds + earned, self._most)
        self._at = now
        self._paid_at = min(self._paid_at, now)

    def is_due(self, seconds: float, now: float) -> bool:
        """Return whether 1/4 of the income since the last payment covers `seconds`.

        Exploration is then due whatever is predicted: traffic may have changed.
        """
        return (now - self._paid_at) * self._share >= _DUE * seconds

    @property
    def may_borrow(self) -> bool:
        """True if exploration is enabled and the budget is not negative."""
        return self._share > 0.0 and self._seconds >= 0.0

    def borrow(self, seconds: float) -> None:
        """Subtract seconds; the budget may become negative (see `may_borrow`)."""
        self._seconds -= max(seconds, 0.0)

    def pay(self, seconds: float, now: float) -> bool:
        """Subtract seconds and return True if the budget covers them.

        If not, the maximum of the budget is raised so that it can cover them later.
        """
        if not self._share:
            return False
        if self._seconds < seconds:
            self._most = max(self._most, seconds)
            return False
        self._seconds -= max(seconds, 0.0)
        self._most, self._paid_at = self._share * _SAVED_SECONDS, now
        return True
