"""Parts of the time of one engine step, from clocks read at the seams.

begin -> (target forward, logits, sampling) -> planned -> (draft passes) -> end. On CPU
a clock read is exact. On a GPU the host only enqueues, so its clock says nothing:
events are recorded at the same seams, and asked for their times when the step has
landed, which is after the last of them has happened: nothing is waited for. The draft's
passes may be one captured graph, so only the end of its first pass is marked apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm_tide.control.step_times import StepSample

NAN = math.nan


class RoundTimer:
    """Makes one `StepSample` per step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = self._planned = self._first = self._last = self._ended = NAN
        self._gap = NAN
        self._steps = 0
        self._asked, self._deciding = False, 0.0
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
        self._asked, self._deciding = False, 0.0

    def planned(self, requests: int, context: int, verified: int, prefill: int) -> None:
        """The step's tokens are known; the shape of its forward as in `StepSample`."""
        self._planned = self._last = self._clock()
        self._shape = (requests, context, verified, prefill)

    def asks(self) -> None:
        """Control decides about this step."""
        self._asked = True

    def begin_draft(self, caught_up_s: float = 0.0) -> None:
        """The draft begins now.

        Args:
            caught_up_s: Seconds since `planned` that went into catching up.
        """
        self._last = self._clock()
        self._deciding = self._last - self._planned - caught_up_s

    def drafted(self) -> None:
        now = self._clock()
        if self._steps == 0:
            self._first = now - self._last
            self._last = now
        self._steps += 1
        self._latest = now

    def end(self, wanted: bool = True) -> StepSample | None:
        """The step ends; None if not wanted, or without rows that were planned for."""
        now = self._clock()
        self._ended = now
        if not wanted or math.isnan(self._planned):
            return None
        requests, context, verified, prefill = self._shape
        done = self._latest if self._steps else self._planned
        host = now - done + self._gap + self._deciding
        if self._asked and not self._steps:
            # In most rounds that are not drafted in nobody asks, and some of those in
            # which somebody does are probes.
            host = NAN
        return StepSample(
            requests=requests,
            context=context,
            verified=verified,
            prefill=prefill,
            steps=self._steps,
            first_rows=requests + verified + prefill if self._steps else 0,
            target_s=self._planned - self._began,
            draft_first_s=self._first if self._steps else NAN,
            draft_next_s=self._latest - self._last if self._steps > 1 else NAN,
            host_s=host,
            asked=self._asked,
        )


Reading = Callable[[], StepSample | None]


class HostClock(RoundTimer):
    """Times the rounds of Model Runner V2 where the host is the device.

    `drafted` is called when a draft pass has its logits, on a GPU inside its captured
    graph.
    """

    def first_drafted(self) -> None:
        """The draft's first pass was launched whole, outside of any graph."""

    def end(self, steps: int) -> Reading:  # type: ignore[override]
        """The step was launched whole.

        Returns:
            What gives its times once it has landed; None for a step without rows, or
            one that was read too late.
        """
        del steps
        sample = super().end()
        return lambda: sample


class _Marks:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.began, self.planned, self.first, self.ended = (make() for _ in range(4))
        self.number = 0
        self.before: tuple[_Marks, int] | None = None
        self.shape: tuple[int, int, int, int] | None = None
        self.has_first = False
        self.steps = 0


class EventTimer:
    """`HostClock` for a CUDA or ROCm device.

    Args:
        steps: Steps under way, at most: events are used again after so many more.
        make: Makes an event that has a time; a device's if None.
    """

    def __init__(
        self,
        steps: int,
        make: Callable[[], Any] | None = None,
    ) -> None:
        make = make or partial(torch.cuda.Event, enable_timing=True)
        # One more for the step before the oldest, whose end begins its round, and one
        # for the step that is being launched.
        self._marks = [_Marks(make) for _ in range(steps + 2)]
        self._number = 0
        self._open: _Marks | None = None
        self._last: tuple[_Marks, int] | None = None

    def begin(self, continues: bool) -> None:
        self._number += 1
        marks = self._marks[self._number % len(self._marks)]
        marks.number = self._number
        marks.before = self._last if continues else None
        marks.shape, marks.has_first = None, False
        marks.began.record()
        self._open = marks

    def planned(self, requests: int, context: int, verified: int, prefill: int) -> None:
        if self._open is not None:
            self._open.shape = (requests, context, verified, prefill)
            self._open.planned.record()

    def drafted(self) -> None:
        """An event in a graph would be replayed, not recorded."""

    def first_drafted(self) -> None:
        if self._open is not None:
            self._open.has_first = True
            self._open.first.record()

    def end(self, steps: int) -> Reading:
        marks, self._open = self._open, None
        if marks is None:
            return lambda: None
        # The first pass runs in every step.
        marks.steps = max(steps, 1)
        marks.ended.record()
        self._last = (marks, marks.number)
        return partial(_read, marks, marks.number)


StepClock = HostClock | EventTimer


def _read(marks: _Marks, number: int) -> StepSample | None:
    if marks.number != number or marks.shape is None or not marks.has_first:
        return None
    requests, context, verified, prefill = marks.shape
    gap = NAN
    if marks.before is not None and marks.before[0].number == marks.before[1]:
        gap = _seconds(marks.before[0].ended, marks.began)
    further = marks.steps > 1
    return StepSample(
        requests=requests,
        context=context,
        verified=verified,
        prefill=prefill,
        steps=marks.steps,
        first_rows=requests + verified + prefill,
        target_s=_seconds(marks.began, marks.planned),
        draft_first_s=_seconds(marks.planned, marks.first),
        draft_next_s=_seconds(marks.first, marks.ended) if further else NAN,
        host_s=gap,
    )


def _seconds(start: Any, end: Any) -> float:
    return 1e-3 * float(start.elapsed_time(end))
