"""Runs of a staging ring never overlap, are reused in order, and refuse when full."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_tide.engine.staging import Run, RunRing


def test_runs_follow_each_other_and_wrap_around():
    ring = RunRing(100, align=10)
    first, second = ring.take(35), ring.take(40)
    assert (first.start, first.end, second.start) == (0, 40, 40)
    assert ring.take(21) is None
    ring.give_back(first)
    third = ring.take(30)  # the 20 bytes at the end are too few
    assert (third.start, third.end) == (0, 30)
    assert ring.take(11) is None
    ring.give_back(second)
    assert ring.take(70).start == 30


@given(st.lists(st.one_of(st.integers(1, 60), st.integers(-3, -1)), max_size=60))
def test_runs_never_overlap_and_stay_inside(moves):
    ring, out = RunRing(128, align=4), []
    for move in moves:
        if move > 0:
            run = ring.take(move)
            if run is not None:
                assert run.start >= 0 and run.end <= 128 and run.end - run.start >= move
                assert all(run.end <= o.start or o.end <= run.start for o in out)
                out.append(run)
        elif out:
            victim: Run = out.pop(min(-move, len(out)) - 1)
            ring.give_back(victim)
    for run in out:
        ring.give_back(run)
    assert ring.take(128) is not None
