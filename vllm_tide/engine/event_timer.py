"""Where the time of one engine step goes on a GPU: events at the seams, read later.

The host only enqueues, so its clock says nothing. Events are recorded on the model's
stream where `RoundTimer` reads a clock, and asked for their times when the step has
landed, which is after the last of them has happened: nothing is waited for. The draft's
passes may be one captured graph, so only the end of its first pass is marked apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from vllm_tide.control.online_time import RoundSample
from vllm_tide.engine.round_timer import RoundTimer

NAN = math.nan
Reading = Callable[[], RoundSample | None]


class StepClock(Protocol):
    """Times the rounds of Model Runner V2."""

    def begin(self, continues: bool) -> None:
        """A step begins; `continues` as in `RoundTimer.begin`."""

    def planned(self, requests: int, context: int, verified: int, prefill: int) -> None:
        """The target's logits exist; the arguments are `RoundSample`'s."""

    def drafted(self) -> None:
        """A draft pass has its logits: on a GPU, inside its captured graph."""

    def first_drafted(self) -> None:
        """The draft's first pass was launched whole, outside of any graph."""

    def end(self, steps: int) -> Reading:
        """The step was launched whole.

        Args:
            steps: Draft steps of it.

        Returns:
            What gives its times once it has landed; None for a step without rows, or
            one that was read too late.
        """


class HostClock:
    """`StepClock` where the host is the device."""

    def __init__(self) -> None:
        self._timer = RoundTimer()
        self.begin = self._timer.begin
        self.planned = self._timer.planned
        self.drafted = self._timer.drafted

    def first_drafted(self) -> None:
        """See `StepClock`; `drafted` has seen it."""

    def end(self, steps: int) -> Reading:
        """See `StepClock`."""
        del steps
        sample = self._timer.end()
        return lambda: sample


class _Marks:
    """The events of one step."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.began, self.planned, self.first, self.ended = (make() for _ in range(4))
        self.number = 0
        self.before: tuple[_Marks, int] | None = None
        self.shape: tuple[int, int, int, int] | None = None
        self.has_first = False
        self.steps = 0


class EventTimer:
    """`StepClock` on a CUDA or ROCm device.

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
        """See `StepClock`."""
        self._number += 1
        marks = self._marks[self._number % len(self._marks)]
        marks.number = self._number
        marks.before = self._last if continues else None
        marks.shape, marks.has_first = None, False
        marks.began.record()
        self._open = marks

    def planned(self, requests: int, context: int, verified: int, prefill: int) -> None:
        """See `StepClock`."""
        if self._open is not None:
            self._open.shape = (requests, context, verified, prefill)
            self._open.planned.record()

    def drafted(self) -> None:
        """See `StepClock`; an event in a graph would be replayed, not recorded."""

    def first_drafted(self) -> None:
        """See `StepClock`."""
        if self._open is not None:
            self._open.has_first = True
            self._open.first.record()

    def end(self, steps: int) -> Reading:
        """See `StepClock`."""
        marks, self._open = self._open, None
        if marks is None:
            return lambda: None
        # The first pass runs in every step.
        marks.steps = max(steps, 1)
        marks.ended.record()
        self._last = (marks, marks.number)
        return partial(_read, marks, marks.number)


def _read(marks: _Marks, number: int) -> RoundSample | None:
    if marks.number != number or marks.shape is None or not marks.has_first:
        return None
    requests, context, verified, prefill = marks.shape
    gap = NAN
    if marks.before is not None and marks.before[0].number == marks.before[1]:
        gap = _seconds(marks.before[0].ended, marks.began)
    further = marks.steps > 1
    return RoundSample(
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
