"""Limits on time per output token, with credit for requests ahead of their budget.

The limit is on the average: (time since the first token) / (tokens after it). A request
ahead of its budget can afford a longer step. For a request that is behind, no step that
emits one token restores the average. The step with the most tokens per second recovers
it fastest, so this request does not limit the step (`costs.step_limit`). A limit of one
token's budget would prevent the drafting that restores the average.
"""

from __future__ import annotations

import numpy as np


class SloBook:
    """Budgets of the running requests.

    Attributes:
        met: Finished requests, with a budget and at least two tokens, that met it.
        missed: Such requests that exceeded it.
    """

    def __init__(self, capacity: int) -> None:
        self._slo = np.full(capacity, np.inf)
        self._asked = np.full(capacity, np.inf)  # by the client
        self._first = np.full(capacity, np.nan)
        self._last = np.full(capacity, np.nan)
        self._tokens = np.zeros(capacity)
        self.met = 0
        self.missed = 0
        self._used = False  # whether any request has had a limit
        self._any_asked = False

    def add(self, slot: int, slo: float | None, asked: float | None = None) -> None:
        """Add a request.

        Args:
            slo, asked: Seconds per token after the first (server, client); None: none.
        """
        self._slo[slot] = np.inf if slo is None else slo
        self._asked[slot] = np.inf if asked is None else asked
        self._any_asked |= asked is not None
        self._used |= slo is not None or self._any_asked
        self._first[slot] = self._last[slot] = np.nan
        self._tokens[slot] = 0.0

    def advance(self, slots: np.ndarray, emitted: np.ndarray, now: float) -> None:
        """Record emitted tokens.

        Args:
            slots: int64 [n]. The time of a slot starts at its first token.
            emitted: int64 [n], tokens of this step; may be 0.
        """
        if not self._used:
            return
        some = emitted > 0
        count = emitted.astype(np.float64)
        fresh = some & np.isnan(self._first[slots])
        if fresh.any():
            self._first[slots[fresh]] = now
            count[fresh] -= 1.0
        self._tokens[slots] += count
        self._last[slots[some]] = now

    def binds(self, slots: np.ndarray) -> bool:
        """Return whether any of these requests has a limit, its own or the server's."""
        if not self._used:
            return False
        return bool(np.minimum(self._slo[slots], self._asked[slots]).min() < np.inf)

    def limits(self, slots: np.ndarray, now: float) -> np.ndarray:
        """Return the seconds of a step that may emit one token, for each request.

        limit = slo * (tokens + 1) - elapsed, tokens counted after the first.

        Args:
            slots: int64 [n].

        Returns:
            float64 [n]; inf without a budget or before the first token; less than the
            time of the shortest step for a request that is behind.
        """
        if not self._used:
            return np.full(len(slots), np.inf)
        return self._budgets(self._slo[slots], slots, now)

    def asked(self, slots: np.ndarray, now: float) -> np.ndarray | None:
        """Return `limits` including the clients' limits; None if there are none."""
        if not self._any_asked or np.isinf(asked := self._asked[slots]).all():
            return None
        return self._budgets(np.minimum(self._slo[slots], asked), slots, now)

    def _budgets(self, slo: np.ndarray, slots: np.ndarray, now: float) -> np.ndarray:
        elapsed = now - self._first[slots]
        limits: np.ndarray = slo * (self._tokens[slots] + 1.0) - elapsed
        limits[np.isnan(self._first[slots])] = np.inf
        return limits

    def finish(self, slot: int) -> bool | None:
        """Remove a request and count it.

        Returns:
            Whether its average met the budget; None without a budget or second token.
        """
        slo, tokens = min(self._slo[slot], self._asked[slot]), self._tokens[slot]
        if np.isinf(slo) or tokens < 1:
            return None
        met = bool((self._last[slot] - self._first[slot]) <= slo * tokens * (1 + 1e-9))
        self.met += met
        self.missed += not met
        return met
