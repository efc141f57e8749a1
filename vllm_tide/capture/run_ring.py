"""Runs of bytes in one fixed piece of memory, handed out in a circle.

A step takes one run for all its rows, long for a prefill and short for a decode, so the
memory holds many short steps or few long ones. Only places are kept here: the memory
itself may be a device's, its mirror on the host, or both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Run:
    """A run that was handed out.

    Attributes:
        start: First byte.
        end: One past its last byte.
        free: Whether it was given back; it is reused once all before it were.
    """

    start: int
    end: int
    free: bool = False


class RunRing:
    """Who has which bytes.

    Args:
        num_bytes: Size of the memory.
        align: Each run starts at a multiple of this.
    """

    def __init__(self, num_bytes: int, align: int = 256) -> None:
        self.num_bytes = num_bytes
        self._align = align
        self._out: deque[Run] = deque()

    def take(self, num_bytes: int) -> Run | None:
        """A run of `num_bytes`, in one piece; None if there is no such room now."""
        size = -(-num_bytes // self._align) * self._align
        start = self._room(size)
        if start is None:
            return None
        run = Run(start, start + size)
        self._out.append(run)
        return run

    def give_back(self, run: Run) -> None:
        """The run's bytes are nobody's any more. Idempotent."""
        run.free = True
        while self._out and self._out[0].free:
            self._out.popleft()

    def _room(self, size: int) -> int | None:
        if not self._out:
            return 0 if size <= self.num_bytes else None
        tail, head = self._out[0].start, self._out[-1].end
        if self._out[-1].start < tail:  # it has come round
            return head if size <= tail - head else None
        if size <= self.num_bytes - head:
            return head
        return 0 if size <= tail else None
