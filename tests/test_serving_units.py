"""Small parts of the serving side: guard, consent, verification, ordering, metrics."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.torch import save_file

from tests.engine.idle_scheduler import idle_scheduler
from vllm_tide.capture.guard import LIMIT, Guard
from vllm_tide.capture.policy import CapturePolicy
from vllm_tide.config import TideConfig
from vllm_tide.draft.tensor_bytes import to_bytes
from vllm_tide.engine.scheduler import SchedulerTide, make_scheduler
from vllm_tide.engine.staged_draft import DraftContract, DraftRefused, Stager
from vllm_tide.engine.trainer_process import call_on, given_cores
from vllm_tide.metrics import TideProm, increments, make_prometheus
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.versions import first_version
from vllm_tide.transport.weights import WeightsSegment, WeightsWriter


def fail() -> None:
    raise RuntimeError("the text of a user")


def test_guard_contains_counts_and_trips(caplog):
    guard = Guard("capture")
    for _ in range(LIMIT + 3):
        assert guard.run("here", fail) is None
    assert guard.faults["here"] == LIMIT
    assert guard.tripped
    assert guard.run("there", lambda: 1) is None
    assert "the text of a user" not in caplog.text
    assert "RuntimeError" in caplog.text
    # Faults of an hour count.
    now = [0.0]
    rare = Guard("capture", lambda: now[0])
    for _ in range(4 * LIMIT):
        rare.run("here", fail)
        now[0] += 1000.0
    assert not rare.tripped and rare.faults["here"] == 4 * LIMIT


def test_a_guard_retries_after_1_2_4_minutes_and_at_least_each_hour():
    now = [0.0]
    guard, waits = Guard("capture", lambda: now[0]), []
    for _ in range(9):
        assert not guard.retry()
        for _ in range(LIMIT):
            guard.run("here", fail)
        assert guard.tripped and guard.run("there", lambda: 1) is None
        assert guard.always("there", lambda: 1) == 1
        waits.append(guard.suspension.left)
        now[0] += waits[-1] - 1.0
        assert not guard.retry()
        now[0] += 1.0
        assert guard.retry() and not guard.tripped and not guard.suspension.left
        assert guard.run("there", lambda: 1) == 1
    assert waits[:6] == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0]
    assert set(waits[6:]) == {3600.0}
    now[0] += 7200.0  # a long time without a fault
    for _ in range(LIMIT):
        guard.run("here", fail)
    assert guard.suspension.left == 60.0


@pytest.mark.parametrize("no", [False, 0, "false", "off"])
def test_opt_out_is_read_in_every_spelling(no):
    ticket = CapturePolicy(1.0).admit({"tide_capture": no}, supported=True)
    assert ticket.refusal == "opted_out"


@pytest.mark.parametrize("odd", ["maybe", 7, None, [0], "FALSE "])
def test_unreadable_consent_is_no_consent(odd):
    ticket = CapturePolicy(1.0).admit({"tide_capture": odd}, supported=True)
    assert ticket.refusal == "malformed_opt_out"


def test_sample_rate_is_a_share_of_requests():
    policy = CapturePolicy(0.25, seed=1)
    taken = [policy.admit(None, supported=True).refusal is None for _ in range(4000)]
    assert 0.22 < sum(taken) / 4000 < 0.28
    refused = policy.admit(None, supported=False)  # no plain tokens
    assert refused.refusal == "unsupported_input"
    keys = {policy.admit(None, supported=True).key for _ in range(100)}
    assert len(keys) == 100


def draft() -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.ones(4, 6), "d2t": torch.arange(4)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fc.weight": torch.ones(4, 5)}, "shape"),
        ({"fc.weight": torch.full((4, 6), float("nan"))}, "not_finite"),
        ({"fc.weight": torch.full((4, 6), float("inf"))}, "not_finite"),
        ({"fc.weight": torch.full((4, 6), 100.0)}, "norm"),
        ({"fc.weight": torch.ones(4, 6, dtype=torch.int64)}, "dtype"),
        ({"d2t": torch.arange(4).float()}, "dtype"),
        ({"other": torch.ones(1)}, "names"),
    ],
)
def test_unfit_publications_are_refused_by_reason(change, reason):
    contract = DraftContract(draft(), max_norm_ratio=4.0)
    contract.check(draft())
    with pytest.raises(DraftRefused) as refused:
        contract.check({**draft(), **change})
    assert refused.value.reason == reason
    assert "fc.weight" in str(refused.value) or reason in ("names", "dtype")


@pytest.mark.slow
def test_the_stager_of_an_engine_without_requests_calls_its_hook():
    segment, beats = WeightsSegment.create(1 << 16), []
    stager = Stager(segment, DraftContract(draft(), 4.0))
    stager.beat = lambda: beats.append(1)
    try:
        stager.start()
        end = time.monotonic() + 5
        while len(beats) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert stager.refused == {}
    finally:
        stager.close()
        segment.close()


def test_the_stager_has_the_newest_good_draft_and_counts_bad_ones():
    segment = WeightsSegment.create(1 << 16)
    try:
        stager = Stager(segment, DraftContract(draft(), 4.0))
        writer = WeightsWriter.attach(segment.name)
        stager.check_now()
        assert stager.staged_version == 0
        writer.publish(DraftWeights.encode(to_bytes(draft()), 1))
        stager.check_now()
        bad = draft() | {"fc.weight": torch.full((4, 6), float("nan"))}
        writer.publish(DraftWeights.encode(to_bytes(bad), 2))
        stager.check_now()
        stager.check_now()
        assert stager.refused == {"not_finite": 1}
        staged = stager.take(1)
        assert staged is not None
        assert torch.equal(staged.tensors["fc.weight"], torch.ones(4, 6))
        assert stager.take(2) is None
        stager.done(staged)
        assert stager.staged_version == 0
        writer.close()
    finally:
        segment.close()


class Failing:
    """Replaces vLLM's loader: fails on request, records what it loaded."""

    def __init__(self) -> None:
        self.loaded: list[float] = []
        self.failures: list[bool] = []

    def __call__(self, draft, config, tensors, shared) -> None:
        if self.failures and self.failures.pop(0):
            raise RuntimeError("half loaded")
        self.loaded.append(float(tensors["fc.weight"][0, 0]))


@pytest.fixture
def swapper(tmp_path, monkeypatch):
    from vllm_tide.engine import swapper as module

    loader = Failing()
    monkeypatch.setattr(module, "install", loader)
    monkeypatch.setattr(module, "verify_installed", lambda *_: None)
    monkeypatch.setattr(module, "overflow_check", lambda *_: None)
    save_file(draft(), tmp_path / "model.safetensors")
    segment = WeightsSegment.create(1 << 16)
    model = SimpleNamespace(get_vocab_size=lambda: 64)
    config = SimpleNamespace(model_config=model)
    made = module.Swapper(
        torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), config, tmp_path, segment
    )
    writer = WeightsWriter.attach(segment.name)

    def publish(number: int, value: float) -> None:
        tensors = draft() | {"fc.weight": torch.full((4, 6), value)}
        version = first_version(number)
        writer.publish(DraftWeights.encode(to_bytes(tensors), version))
        made.stager.check_now()
        made.install_ordered(version)

    yield made, loader, publish, writer
    writer.close()
    segment.close()


@pytest.mark.vllm
def test_a_failed_installation_restores_the_last_good_draft(swapper):
    made, loader, publish, writer = swapper
    sent = []
    assert made._tracing is None  # off unless an endpoint is configured
    made._tracing = SimpleNamespace(span=lambda *span: sent.append(span))
    publish(1, 2.0)
    assert (made.number, loader.loaded) == (1, [2.0])
    loader.failures = [True]
    publish(2, 3.0)
    # Version 1 again, which is reported to the trainer.
    assert (made.number, loader.loaded) == (1, [2.0, 2.0])
    assert made.stager.refused == {"install": 1}
    assert made.ready_version() == 0
    feedback = writer.feedback()
    assert feedback.installed_version == first_version(1)
    assert feedback.refused_version == first_version(2)
    assert [(name, facts) for name, _, facts in sent] == [
        ("swap", {"version": 1, "installed": True}),
        ("swap", {"version": 2, "installed": False}),
    ]
    assert all(0 < seconds < 60 for _, seconds, _ in sent)


@pytest.mark.vllm
def test_a_failed_first_installation_restores_the_checkpoint(swapper):
    made, loader, publish, _ = swapper
    loader.failures = [True]
    publish(1, 2.0)
    assert (made.version, loader.loaded) == (0, [1.0])
    # If even that fails, serving continues and the counters show it.
    loader.failures = [True, True]
    publish(2, 2.0)
    assert made.stager.refused == {"install": 2, "restore": 1}
    assert made.version == 0


def test_the_scheduler_orders_each_version_once_and_again_if_still_staged():
    tide = SchedulerTide(3, idle_scheduler(), TideConfig())
    assert tide.control() is None
    tide.observe(None)
    tide.observe({"staged": 3})
    assert tide.control() == {"install": 3}
    assert tide.control() is None
    # A rank did not have it at that step: it is still staged, so it is ordered again.
    tide.observe({"staged": 3})
    assert tide.control() == {"install": 3}
    tide.observe({"staged": 0, "swap_seconds": [0.1]})
    assert tide.control() is None
    assert tide.stats() == {
        "staged": 0,
        "malformed_limits": 0,
        "swap_seconds": [0.1],
        "prefix_verified": {},
        "prefix_accepted": {},
        "step_accepted": {},
    }
    assert tide.stats() is None


def test_accepted_tokens_of_a_step_count_once_by_the_requests_length():
    tide = SchedulerTide(3, idle_scheduler(), TideConfig())
    short, long = SimpleNamespace(num_tokens=1023), SimpleNamespace(num_tokens=1024)
    longest = SimpleNamespace(num_tokens=1 << 20)
    for request, accepted in ((short, 0), (short, 3), (short, 3), (long, 2)):
        tide.verified(request, 3, accepted)
    reports = []
    for more in (), ((longest, 1),), ():
        for request, accepted in more:
            tide.verified(request, 3, accepted)
        tide.observe({"staged": 0})
        reports.append(tide.stats())
    # A reported value is not reported again: values are added up as they come.
    assert [one["step_accepted"] for one in reports] == [
        {"0-1k": {0: 1, 3: 2}, "1k-4k": {2: 1}},
        {"64k-": {1: 1}},
        {},
    ]
    made = TideProm({0: ["m", "0"]})
    for one in reports:
        made.observe(one)
    name = "vllm_tide:step_accepted_tokens"
    assert sample(f"{name}_sum", context="0-1k") == 6
    assert sample(f"{name}_count", context="0-1k") == 3
    assert sample(f"{name}_bucket", context="0-1k", le="2.0") == 1
    assert sample(f"{name}_bucket", context="64k-", le="1.0") == 1
    assert sample(f"{name}_bucket", context="64k-", le="0.0") == 0


def test_drafts_of_a_report_are_returned_once_and_never_as_a_number():
    tide = SchedulerTide(3, idle_scheduler(), TideConfig())
    drafts = (["a"], [[1, 2]])
    tide.observe({"staged": 0, "drafts": drafts})
    assert tide.take_drafts() is drafts and tide.take_drafts() is None
    assert "drafts" not in tide.stats()
    tide.observe({"drafts": drafts})
    tide.observe(None)  # a step without a report: vLLM calls the worker
    assert tide.take_drafts() is None


def test_several_api_servers_count_every_step_once():
    """Each report goes to one of them, and Prometheus adds up their counters."""
    tide = SchedulerTide(3, idle_scheduler(), TideConfig())
    sent = [{"rows": 10, "dropped": {"ring_full": 1}}]
    sent += [{"rows": 30, "dropped": {"ring_full": 1, "salted": 2}}, {"rows": 31}]
    reports = []
    for totals in sent:
        tide.observe({"staged": 0, **totals})
        reports.append(tide.stats())
    assert [report["rows"] for report in reports] == [10, 20, 1]
    assert reports[0]["dropped"] == {"ring_full": 1}
    assert reports[1]["dropped"] == {"ring_full": 0, "salted": 2}


def test_a_disabled_section_makes_nothing():
    class Plain:
        tide = None

    assert make_scheduler(None, None) is None
    assert make_scheduler(Plain(), None) is None
    assert make_prometheus(Plain(), {0: ["m", "0"]}) is None


def sample(name: str, **labels: str) -> float | None:
    labels = {"model_name": "m", "engine": "0"} | labels
    return REGISTRY.get_sample_value(name, labels)


def test_totals_become_counters_and_a_restart_counts_on():
    prom, seen = TideProm({0: ["m", "0"]}), {}

    def observe(**totals: Any) -> None:
        prom.observe(increments(totals, seen))

    observe(rows=10, dropped={"ring_full": 2}, draft_version=4)
    observe(rows=25, dropped={"ring_full": 2}, swap_seconds=[0.02])
    assert sample("vllm_tide:captured_rows_total") == 25
    assert sample("vllm_tide:dropped_rows_total", reason="ring_full") == 2
    assert sample("vllm_tide:draft_version") == 4
    assert sample("vllm_tide:swap_seconds_count") == 1
    assert sample("vllm_tide:longest_swap_seconds") == 0.02
    observe(rows=3)
    observe(rows=5)
    assert sample("vllm_tide:captured_rows_total") == 30
    observe(rows=-5, dropped={"ring_full": -9})  # a counter never falls
    assert sample("vllm_tide:captured_rows_total") == 30
    assert sample("vllm_tide:dropped_rows_total", reason="ring_full") == 2
    # A second logger in the process replaces the first one's metrics.
    TideProm({0: ["m", "0"]})
    assert sample("vllm_tide:captured_rows_total") == 0


def test_children_start_on_the_operators_cores():
    given = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(given)})
        assert given_cores() >= os.sched_getaffinity(os.getppid())
        assert call_on(given, lambda: os.sched_getaffinity(0)) == given
        assert os.sched_getaffinity(0) == {min(given)}
    finally:
        os.sched_setaffinity(0, given)


BOUND = """
import os, sys, threading
from vllm_tide.engine.trainer_process import free_cores, given_cores

given = sorted(os.sched_getaffinity(0))
bound, done = threading.Event(), threading.Event()

def model(core):
    os.sched_setaffinity(0, {core})
    bound.set()
    done.wait()

for core in given[: int(sys.argv[1])]:
    bound.clear()
    threading.Thread(target=model, args=(core,)).start()
    bound.wait()
print(sorted(given_cores()) == given, sorted(free_cores(given_cores())))
done.set()
"""


@pytest.mark.slow
def test_a_trainer_gets_the_cores_without_a_bound_engine_thread():
    given = sorted(os.sched_getaffinity(0))

    def free(bound: int) -> str:
        command = [sys.executable, "-c", BOUND, str(bound)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert free(0) == f"True {given}"
    assert free(1) == f"True {given[1:] or given}"
    # None is left: all, where its niceness keeps it behind.
    assert free(len(given)) == f"True {given}"


def test_a_fault_that_would_part_the_ranks_is_raised(caplog):
    guard = Guard("the n-gram memory", contains=False)
    with pytest.raises(ZeroDivisionError):
        guard.run("propose", lambda: 1 / 0)
    assert guard.faults == {"propose": 1}
    assert "this rank ends, because all ranks must have the same drafts" in caplog.text
