"""Times of a step on a device are those between its completed events."""

from __future__ import annotations

import math

import pytest

from vllm_tide.engine.timers import EventTimer


class Stream:
    """Events in recorded order, one millisecond apart."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self) -> Stamp:
        return Stamp(self)


class Stamp:
    def __init__(self, stream: Stream) -> None:
        self._stream, self.at = stream, None

    def record(self) -> None:
        self._stream.now += 1.0
        self.at = self._stream.now

    def elapsed_time(self, end: Stamp) -> float:
        return end.at - self.at


@pytest.fixture
def timer() -> EventTimer:
    return EventTimer(2, Stream().event)


def launch(timer: EventTimer, steps: int = 3, continues: bool = True):
    timer.begin(continues)
    timer.planned(2, 50, 4, 1)
    timer.drafted()
    timer.first_drafted()
    return timer.end(steps)


def test_parts_of_a_step_are_the_times_between_its_marks(timer):
    launch(timer)
    sample = launch(timer)()
    shape = (sample.requests, sample.context, sample.verified, sample.prefill)
    assert shape == (2, 50, 4, 1)
    assert (sample.steps, sample.first_rows) == (3, 7)
    parts = (sample.target_s, sample.draft_first_s, sample.draft_next_s, sample.host_s)
    assert parts == (1e-3,) * 4


def test_the_time_between_two_steps_is_unknown_after_idling(timer):
    launch(timer)
    assert math.isnan(launch(timer, continues=False)().host_s)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_first_pass_runs_in_every_step(timer, steps):
    sample = launch(timer, steps)()
    assert sample.steps == 1 and math.isnan(sample.draft_next_s)


def test_late_events_are_not_read(timer):
    readings = [launch(timer) for _ in range(5)]
    assert readings[0]() is None
    assert readings[1]() is not None  # its events, but not those of the step before
    assert math.isnan(readings[1]().host_s)
    assert not math.isnan(readings[2]().host_s)


def test_a_step_without_rows_and_marks_outside_of_a_step_give_nothing(timer):
    timer.begin(True)
    assert timer.end(3)() is None
    timer.first_drafted()
    timer.planned(1, 1, 1, 1)
    assert timer.end(3)() is None
