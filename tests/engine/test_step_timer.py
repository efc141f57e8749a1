"""The timer's parts of a step, and the slots of requests."""

from __future__ import annotations

import math

import pytest

from vllm_tide.config import ControlConfig
from vllm_tide.engine.requests import Requests
from vllm_tide.engine.timers import StepTimer


class Clock:
    """Returns the time that a test sets."""

    def __init__(self) -> None:
        """Start at zero."""
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_a_step_is_split_into_target_draft_and_host():
    clock = Clock()
    timer = StepTimer(clock)
    timer.begin(continues=False)
    clock.now = 1.0
    timer.planned(requests=3, context=300, verified=4, prefill=2)
    for now in (1.2, 1.25, 1.3):
        clock.now = now
        timer.drafted()
    clock.now = 1.4
    first = timer.end()
    assert first is not None and first.first_rows == 9 and first.steps == 3
    assert (first.requests, first.context, first.verified, first.prefill) == (
        3,
        300,
        4,
        2,
    )
    assert first.target_s == pytest.approx(1.0)
    assert first.draft_first_s == pytest.approx(0.2)
    assert first.draft_next_s == pytest.approx(0.1)
    assert math.isnan(first.host_s)  # the engine may have idled before
    clock.now = 1.5
    timer.begin(continues=True)
    clock.now = 2.0
    timer.planned(3, 309, 0, 0)
    clock.now = 2.1
    second = timer.end()
    assert second is not None and second.steps == 0 and second.first_rows == 0
    assert math.isnan(second.draft_first_s) and math.isnan(second.draft_next_s)
    assert second.host_s == pytest.approx(0.2)


def test_decisions_before_drafting_are_host_time():
    clock = Clock()
    timer = StepTimer(clock)
    timer.begin(continues=True)
    timer.planned(1, 10, 0, 0)
    timer.end()
    timer.begin(continues=True)
    timer.planned(1, 10, 0, 0)
    timer.mark_decision()
    clock.now = 3.0
    timer.begin_draft(caught_up_s=2.0)
    clock.now = 3.5
    timer.drafted()
    clock.now = 3.75
    sample = timer.end()
    assert sample is not None and sample.asked
    assert sample.host_s == pytest.approx(1.0 + 0.25)
    assert sample.draft_first_s == pytest.approx(0.5)


def test_slots_are_reused_and_a_waiting_request_releases_its_own():
    requests = Requests(2, 4096, ControlConfig())
    assert requests.add("a", {"a"}, 1, None) == (0, None)
    assert requests.add("b", {"a", "b"}, 1, None) == (1, None)
    assert requests.slots(["b", "a"]).tolist() == [1, 0]
    # "a" was preempted and waits while "c" runs.
    assert requests.add("c", {"b", "c"}, 1, None) == (0, 0)
    assert requests.remove("a") is None and requests.remove("b") == 1
    assert requests.add("d", {"c", "d"}, 1, None) == (1, None)
