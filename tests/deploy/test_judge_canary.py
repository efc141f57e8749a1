"""The canary and the schedule on simulated serving, under both kinds of control.

`scripts/bench/judges.py` in small: real policies, real canary, known truth.
"""

from __future__ import annotations

import pytest

from scripts.bench.judges import Loop, Truth, trial
from vllm_tide.config import ScheduleConfig
from vllm_tide.deploy.schedule import Schedule
from vllm_tide.deploy.served import ServedRequest

BOTH = pytest.mark.parametrize("policy", ["static", "adaspec"])


@BOTH
@pytest.mark.parametrize(("worse", "decision"), [(0.0, "keep"), (1.6, "rollback")])
def test_a_swap_is_judged_by_what_it_does_to_throughput(policy, worse, decision):
    loop = Loop(policy, 16, Truth(False), 0)
    ended: list[ServedRequest] = []
    while len(ended) < 128:
        ended += loop.step()
    loop.swap(Truth(False, worse))
    verdict = trial(loop, ended)
    assert verdict.decision == decision, verdict
    assert verdict.requests <= 48


def shifts(requests: list[ServedRequest]) -> list[int]:
    """Places of the requests at which training would have begun."""
    schedule = Schedule(ScheduleConfig(mode="tide"), 1)
    found = []
    for place, request in enumerate(requests):
        before = schedule.shifts
        schedule.observe(request)
        if schedule.shifts > before:
            found.append(place)
        while schedule.collecting:
            schedule.cycle_done(False)
    return found


def stream(policy: str, seed: int, calm: int, more: int) -> list[ServedRequest]:
    """Requests as they end; after `calm` of them the text is harder by one logit."""
    loop = Loop(policy, 64, Truth(plateau=seed % 2 == 1), seed)
    found: list[ServedRequest] = []
    while len(found) < calm + more:
        found += loop.step()
        if len(found) >= calm:
            loop.truth = Truth(loop.truth.plateau, 1.0)
    return found


@BOTH
def test_a_shift_is_seen_whatever_lengths_control_chooses(policy):
    """At commit 9d3d4e7 control hid two of four: it drafts less where it is harder."""
    for seed in range(2):
        found = shifts(stream(policy, seed, 250, 100))
        seen = [place - 250 for place in found if place >= 250]
        # 64 requests were under way at the shift: they began in the easier text.
        assert seen and seen[0] <= 96, (seed, found)
