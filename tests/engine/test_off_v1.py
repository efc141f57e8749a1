"""Cost of drafting that is off on Model Runner V1: calls are counted, not timed."""

from types import SimpleNamespace

import numpy as np
import pytest

import vllm_tide.engine.control_v1 as control_v1
from tests.control.toys import FixedTimes, published
from tests.engine.runner_v1 import Engine, K
from vllm_tide.control.adaspec import AdaSpecPolicy, ControlSettings

REQS = [f"r{i}" for i in range(16)]
SKIPPED_STEPS = 15


class Off(Engine):
    """An engine with drafts that never pay; its clock stops between the seams."""

    def __init__(self, monkeypatch, **config):
        super().__init__(reqs=REQS, policy="adaspec", **config)
        self.now, control = 100.0, self.control
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(control_v1, "time", clock)
        settings = ControlSettings(k_max=K, min_gain=10.0, probe_share=0.0)
        time = FixedTimes(published("Llama-3.3-70B"))
        self.policy = control.policy = AdaSpecPolicy(settings, time)
        self.asked, plan = 0, self.policy.plan
        self.new = 0

        def counted(*args):
            self.asked += 1
            return plan(*args)

        self.policy.plan = counted

    def decode_step(self, seconds=0.02, **xargs):
        """Replace a request and run a step."""
        self.new += 1
        self.replace(self.new % len(self.reqs), f"new{self.new}", **xargs)
        return self.go(seconds)

    def go(self, seconds=0.02):
        self.now += seconds
        before = self.asked
        assert self.step() == (0, [0] * len(self.reqs))
        return self.asked - before


@pytest.mark.parametrize("arrive", [False, True])
def test_one_step_in_sixteen_calls_the_policy_with_or_without_arrivals(
    arrive, monkeypatch
):
    engine = Off(monkeypatch)
    asked = [engine.decode_step() if arrive else engine.go() for _ in range(80)]
    assert asked == [1, *[0] * SKIPPED_STEPS] * 5
    stats = engine.control.stats()
    assert stats["steps"] == stats["steps_without_drafts"]["no_gain"] == 80
    assert not engine.control.faults


def test_no_step_is_skipped_where_a_request_that_waited_has_drafts(monkeypatch):
    """Its rows may be rejected, and the outcome of its drafts is to be observed."""
    engine = Off(monkeypatch)
    calls, keep = [], engine.control._backlog.keep
    engine.control._backlog.keep = lambda *a: (calls.append(a[3].copy()), keep(*a))
    engine.go()
    assert engine.control._skips_left == SKIPPED_STEPS
    engine.drafts["r3"] = [7, 1, 1]
    assert engine.go() == 1, "the policy was asked"
    assert calls[-1].tolist() == [1] * 3 + [2] + [1] * 12, "committed rows alone"
    assert engine.policy.stats()["verified_tokens"] == 3
    assert not engine.control.faults


def test_stored_rows_follow_a_step_equal_to_the_previous_one(monkeypatch):
    engine = Off(monkeypatch)
    calls, keep = [], engine.control._backlog.keep
    engine.control._backlog.keep = lambda *a: (calls.append(a[1:]), keep(*a))
    same = []
    for step in [engine.go] * 4 + [engine.decode_step] + [engine.go] * 3:
        step()
        same.append(engine.control.same)
    assert same == [False, False, True, True, False, False, True, True]
    n = len(engine.reqs)
    for slots, row, rows, start, num_rows in calls[1:4] + calls[5:]:
        assert (row.tolist(), rows.tolist(), num_rows) == ([*range(n)], [1] * n, n)
        assert sorted(slots.tolist()) == [*range(n)]
        assert start.dtype == np.int64
    assert calls[4][4] > n  # with the prompt of the request that came
    starts = np.array([step[3] for step in calls[5:]])
    assert (np.diff(starts, axis=0) == 1).all()
    assert not engine.control.faults


def test_rows_of_every_request_are_stored_for_the_draft(monkeypatch):
    engine = Off(monkeypatch)
    for _ in range(10):
        engine.decode_step()
    slots = engine.control._requests.slots(engine.reqs)
    computed = engine.batch.num_computed_tokens_cpu
    new = [i for i, name in enumerate(engine.reqs) if name.startswith("new")]
    missing = engine.control._backlog.missing[slots]
    assert len(new) == 10
    assert missing[new].tolist() == computed[new].tolist()
    first, rows = engine.control._backlog._span(int(slots[new[-1]]))
    assert (first, len(rows)) == (0, int(computed[new[-1]]))


def test_the_policy_is_called_at_once_when_its_decision_may_change(monkeypatch):
    engine = Off(monkeypatch)
    assert engine.go() == 1 and engine.go() == 0
    engine.remove()
    engine.remove()
    assert engine.go() == 0, "an eighth of the requests"
    engine.remove()
    assert engine.go() == 1 and engine.go() == 0
    engine.control.draft_swapped()
    assert engine.go() == 1 and engine.go() == 0
    for place in range(len(engine.reqs)):  # the engine may have idled
        engine.replace(place, f"later{place}")
    assert engine.go() == 1 and engine.go() == 0


def test_the_policy_is_called_in_every_step_with_a_limit(monkeypatch):
    engine = Off(monkeypatch, client_slo_tpot_ms=10)
    assert engine.go() == 1 and engine.go() == 0
    assert engine.decode_step(tide_slo_tpot_ms=40) == 1
    assert engine.go() == 1
    engine.replace(engine.new, "without")
    assert [engine.go() for _ in range(SKIPPED_STEPS + 1)] == [0] * SKIPPED_STEPS + [1]


def test_prefill_time_is_not_counted_as_plain_step_time(monkeypatch):
    engine = Off(monkeypatch)
    for _ in range(8):
        assert engine.go() == 1
        for place in range(SKIPPED_STEPS):
            assert (engine.decode_step(0.5) if place % 2 else engine.go()) == 0
    plain = 7 * (1 + SKIPPED_STEPS - SKIPPED_STEPS // 2)
    assert engine.policy.stats()["step_seconds"] == pytest.approx(plain * 0.02)
