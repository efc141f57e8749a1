"""Durations of the parts of one engine step.

begin -> (target forward, logits, sampling) -> planned -> (draft passes) -> end. On a
CPU the host's clock is exact. On a GPU the host only enqueues work, so events are
recorded at the same places. They are read when the step has landed, that is after the
last event, so reading does not block. The draft's passes may be one captured graph, so
only the end of its first pass has an event.
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


class StepTimer:
    """Timer that makes one `StepSample` per step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = self._planned = self._first = self._last = self._ended = NAN
        self._gap = NAN
        self._steps = 0
        self._asked, self._deciding = False, 0.0
        self._shape = (0, 0, 0, 0)

    def begin(self, continues: bool) -> None:
        """Begin a step.

        Args:
            continues: Whether the engine was busy since the last step. Then the time
                between the two steps is part of the step time.
        """
        now = self._clock()
        self._gap = now - self._ended if continues else NAN
        self._began = now
        self._planned = self._first = self._last = NAN
        self._steps = 0
        self._asked, self._deciding = False, 0.0

    def planned(self, requests: int, context: int, verified: int, prefill: int) -> None:
        """Mark the end of sampling; takes the forward's shape (`StepSample`)."""
        self._planned = self._last = self._clock()
        self._shape = (requests, context, verified, prefill)

    def mark_decision(self) -> None:
        """Mark this step as one in which the policy is called."""
        self._asked = True

    def begin_draft(self, caught_up_s: float = 0.0) -> None:
        """Mark the start of the draft.

        Args:
            caught_up_s: Seconds since `planned` spent on the feature backlog.
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

    def end(self, timed: bool = True) -> StepSample | None:
        """End the step; return None if not `timed`, or if `planned` was not called."""
        now = self._clock()
        self._ended = now
        if not timed or math.isnan(self._planned):
            return None
        requests, context, verified, prefill = self._shape
        done = self._latest if self._steps else self._planned
        host = now - done + self._gap + self._deciding
        if self._asked and not self._steps:
            # Most steps without drafts skip the policy, and some of the others are
            # probes, so the host time of such a step is not representative.
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


class HostClock(StepTimer):
    """Timer of the steps of Model Runner V2 on a CPU.

    `drafted` is called when the logits of a draft pass exist; on a GPU that is inside
    its captured graph.
    """

    def first_drafted(self) -> None:
        """Mark the launch of the draft's first pass, outside of any graph."""

    def end(self, steps: int) -> Reading:  # type: ignore[override]
        """End a step that has been launched completely.

        Returns:
            A function that returns the step's times once it has landed; None for a step
            without rows, or if its events have been reused.
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
        steps: Most steps in flight; events are reused after that many more.
        make: Creates an event with timing; an event of the device if None.
    """

    def __init__(
        self,
        steps: int,
        make: Callable[[], Any] | None = None,
    ) -> None:
        make = make or partial(torch.cuda.Event, enable_timing=True)
        # One more for the predecessor of the oldest step, as a step time starts at its
        # predecessor's end, and one for the step that is being launched.
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
        """Do nothing: an event inside a graph would be replayed, not recorded."""

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
