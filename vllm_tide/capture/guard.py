"""Boundary that contains exceptions of TIDE, so that serving continues.

Only this module and calls marked "the serving boundary" catch all exceptions. A fault
is counted by place and logged once with its type, never with content. After `LIMIT`
faults the guarded part is suspended for a while.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.tide")

LIMIT = 8
FIRST_SECONDS, MOST_SECONDS = 60.0, 3600.0


class Suspension:
    """Suspension of a failed part: 1, 2, 4 ... minutes, at most 60."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = -math.inf
        self._next = FIRST_SECONDS

    def begin(self) -> float:
        """Begin a suspension after a fault; return its length (s)."""
        now = self._clock()
        if now - self._until > MOST_SECONDS:  # no fault in the last hour
            self._next = FIRST_SECONDS
        length, self._next = self._next, min(2.0 * self._next, MOST_SECONDS)
        self._until = now + length
        return length

    @property
    def left(self) -> float:
        """Seconds until the end of the suspension; 0 if there is none."""
        return max(self._until - self._clock(), 0.0)


class Guard:
    """Caller that contains all exceptions of its callables.

    Args:
        contains: False counts a fault and raises it. Work that decides the drafts is
            repeated on every rank; a rank without its result would verify other tokens
            than the others, and serve wrong ones.

    Attributes:
        tripped: True after `LIMIT` faults within an hour, until `retry`: calls of `run`
            are then skipped.
    """

    def __init__(
        self,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        contains: bool = True,
    ) -> None:
        self.what, self._contains = what, contains
        self.faults: Counter[str] = Counter()
        self.tripped = False
        self.suspension = Suspension(clock)
        self._clock = clock
        self._since = 0.0
        self._recent = 0

    def retry(self) -> bool:
        """End an expired suspension; return whether one has ended. Once per step."""
        if not self.tripped or self.suspension.left:
            return False
        self.tripped, self._recent = False, 0
        return True

    def run(self, where: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call `call(*args)`; on a fault count it and return None."""
        return None if self.tripped else self.always(where, call, *args)

    def always(self, where: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call `call(*args)` like `run`, even during a suspension."""
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - the serving boundary
            self._count(where, error)
            if not self._contains:
                raise
            return None

    def _count(self, where: str, error: Exception) -> None:
        self.faults[where] += 1
        if self.faults[where] == 1:
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            # Type and place only: the message may quote a request's content.
            logger.warning(
                "vllm_tide: %s failed in %s (%s at %s:%d); %s.",
                self.what,
                where,
                type(error).__name__,
                frame.f_code.co_filename,
                line,
                "serving is not affected"
                if self._contains
                else "this rank ends, because all ranks must have the same drafts",
            )
        if self.tripped:
            return
        if self._recent and self._clock() - self._since > MOST_SECONDS:
            self._recent = 0
        if not self._recent:
            self._since = self._clock()
        self._recent += 1
        if self._recent >= LIMIT:
            self.tripped = True
            logger.error(
                "vllm_tide: %s is suspended for %d s after %d faults; serving "
                "continues without it.",
                self.what,
                self.suspension.begin(),
                LIMIT,
            )
