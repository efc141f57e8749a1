"""Slots: a small integer for each request the runner holds, so state can be arrays."""

from __future__ import annotations

import numpy as np


class RequestTable:
    """Gives slots to requests.

    Args:
        capacity: Most requests of one step.

    Attributes:
        slot_of: Request id to slot.
        most_tokens: int64 [capacity] prompt and output tokens the request may have.
        sampled: bool [capacity] temperature > 0.
        constrained: bool [capacity] its output follows a grammar.
        k_max: int64 [capacity] draft tokens it wants at most.
    """

    def __init__(self, capacity: int) -> None:
        self.slot_of: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self.most_tokens = np.zeros(capacity, np.int64)
        self.sampled = np.zeros(capacity, bool)
        self.constrained = np.zeros(capacity, bool)
        self.k_max = np.zeros(capacity, np.int64)

    def begin(self, req_id: str, running: set[str]) -> tuple[int, int | None]:
        """Give a slot to a request.

        Args:
            req_id: The request.
            running: Requests of this step; any other may lose its slot.

        Returns:
            The slot, and the slot again if a waiting (preempted) request lost it.
        """
        given_up = None
        if not self._free:
            waiting = next(name for name in self.slot_of if name not in running)
            given_up = self.slot_of.pop(waiting)
            self._free.append(given_up)
        slot = self._free.pop()
        self.slot_of[req_id] = slot
        return slot, given_up

    def end(self, req_id: str) -> int | None:
        """Take a request's slot back; None if it had none."""
        slot = self.slot_of.pop(req_id, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    def slots(self, req_ids: list[str]) -> np.ndarray:
        """int64 [n] slots of requests that have one."""
        slot_of = self.slot_of
        return np.fromiter((slot_of[name] for name in req_ids), np.int64, len(req_ids))
