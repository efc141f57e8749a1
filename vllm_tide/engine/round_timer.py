"""Where the time of one engine step goes, from clocks read at the seams.

begin -> (target forward, logits, sampling) -> planned -> (draft passes) -> end. On CPU
a clock read is exact; on a GPU the same seams need events (`event_timer.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from vllm_tide.control.online_time import RoundSample

NAN = math.nan


class RoundTimer:
    """Makes one `RoundSample` per step.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = self._planned = self._first = self._last = self._ended = NAN
        self._gap = NAN
        self._steps = 0
        self._shape = (0, 0, 0, 0)

    def begin(self, continues: bool) -> None:
        """A step begins.

        Args:
            continues: Whether the engine cannot have idled since the last step, so
                that the time between the two belongs to the round.
        """
        now = self._clock()
        self._gap = now - self._ended if continues else NAN
        self._began = now
        self._planned = self._first = self._last = NAN
        self._steps = 0

    def planned(self, requests: int, context: int, verified: int, prefill: int) -> None:
        """The step's tokens are known; the shape of its forward as in `RoundSample`."""
        self._planned = self._last = self._clock()
        self._shape = (requests, context, verified, prefill)

    def restart_draft(self) -> None:
        """The draft begins now: what came since `planned` was catching up."""
        self._last = self._clock()

    def drafted(self) -> None:
        """A draft pass has its logits."""
        now = self._clock()
        if self._steps == 0:
            self._first = now - self._last
            self._last = now
        self._steps += 1
        self._latest = now

    def end(self) -> RoundSample | None:
        """The step ends; None when it had no rows that were planned for."""
        now = self._clock()
        self._ended = now
        if math.isnan(self._planned):
            return None
        requests, context, verified, prefill = self._shape
        done = self._latest if self._steps else self._planned
        return RoundSample(
            requests=requests,
            context=context,
            verified=verified,
            prefill=prefill,
            steps=self._steps,
            first_rows=requests + verified + prefill if self._steps else 0,
            target_s=self._planned - self._began,
            draft_first_s=self._first if self._steps else NAN,
            draft_next_s=self._latest - self._last if self._steps > 1 else NAN,
            host_s=(now - done) + self._gap,
        )
