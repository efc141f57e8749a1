"""Deficit round robin over engines, by rows (Shreedhar and Varghese, 1995).

With one change: what an engine sends next is not known before it is taken, so an engine
may overdraw its credit by one record and then waits until it has paid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from vllm_tide.transport.record import Record

QUANTUM_ROWS = 256
"""Rows an engine may send before it is the next one's turn."""

Take = Callable[[str, int, int], list[Record] | None]
"""Engine, most records, rows to stop after; None if the engine is lost."""


class FairTurns:
    """Whose turn it is, and how much each may send."""

    def __init__(self) -> None:
        self._turns: deque[str] = deque()
        self._credit: dict[str, int] = {}

    def join(self, engine_id: str) -> None:
        """Take an engine in; its turn comes last."""
        self._turns.append(engine_id)
        self._credit[engine_id] = 0

    def leave(self, engine_id: str) -> None:
        """Forget an engine."""
        self._turns.remove(engine_id)
        del self._credit[engine_id]

    def read(
        self, take: Take, limit: int, max_rows: int | None = None
    ) -> dict[str, list[Record]]:
        """Take records in turns until there are no more or enough.

        The next call goes on where this one stopped.

        Args:
            take: Takes records of one engine; it may make engines :meth:`leave`.
            limit: Most records.
            max_rows: Most rows, about: a record is never split.

        Returns:
            Records by engine, in each engine's order.
        """
        found: dict[str, list[Record]] = {}
        waiting = set(self._turns)
        rows = 0
        while waiting and limit > 0 and (max_rows is None or rows < max_rows):
            engine_id = self._turns[0]
            if engine_id not in waiting:
                self._turns.rotate(-1)
                continue
            if self._credit[engine_id] <= 0:
                self._credit[engine_id] += QUANTUM_ROWS
            credit = self._credit[engine_id]
            if credit <= 0:  # still paying for a large record
                self._turns.rotate(-1)
                continue
            asked = credit if max_rows is None else min(credit, max_rows - rows)
            records = take(engine_id, limit, asked)
            if records is None:
                waiting.intersection_update(self._turns)
                waiting.discard(engine_id)
                continue
            found.setdefault(engine_id, []).extend(records)
            size = sum(max(record.num_rows, 1) for record in records)
            limit -= len(records)
            rows += size
            credit -= size
            if size < asked and limit > 0:  # it has no more, and saves nothing up
                credit = 0
                waiting.discard(engine_id)
            self._credit[engine_id] = credit
            if credit <= 0:
                self._turns.rotate(-1)
        return found
