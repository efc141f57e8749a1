"""Which requests are captured: arguments of a request, salts, counted refusals."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness.summary import REQUEST_REASONS
from tests.engine.idle_scheduler import idle_scheduler
from vllm_tide.capture.guard import LIMIT, Guard
from vllm_tide.capture.policy import REFUSALS, CapturePolicy, Consent
from vllm_tide.capture.recorder import Recorder
from vllm_tide.config import CaptureConfig, TideConfig
from vllm_tide.engine.capture import Capture
from vllm_tide.engine.scheduler import SchedulerTide, make_scheduler
from vllm_tide.engine.worker_v1 import WorkerTideV1
from vllm_tide.engine.worker_v2 import DUMMY_REQUEST_PREFIXES, WorkerTideV2
from vllm_tide.metrics import ENGINE
from vllm_tide.transport.ring import RingSpec, RingWriter

YES, NO, ODD = {"tide_capture": True}, {"tide_capture": 0}, {"tide_capture": "maybe"}


@pytest.mark.parametrize(
    ("consent", "xargs", "refusal"),
    [
        ("opt_out", {}, None),
        ("opt_out", YES, None),
        ("opt_out", NO, "opted_out"),
        ("opt_out", ODD, "malformed_opt_out"),
        ("opt_in", {}, "not_opted_in"),
        ("opt_in", YES, None),
        ("opt_in", NO, "opted_out"),
        ("opt_in", ODD, "malformed_opt_out"),
        ("opt_in", {"tide_capture": None}, "malformed_opt_out"),
        ("off", {}, "consent_off"),
        ("off", YES, "consent_off"),
        ("off", NO, "consent_off"),
    ],
)
def test_consent(consent: Consent, xargs: dict[str, Any], refusal: str | None) -> None:
    policy = CapturePolicy(1.0, consent=consent)
    assert policy.admit(xargs, supported=True).refusal == refusal


@pytest.mark.parametrize("xargs", [{}, YES])
def test_a_salted_request_is_never_captured(xargs: dict[str, Any]) -> None:
    ticket = CapturePolicy(1.0).admit(xargs, supported=True, salted=True)
    assert ticket.refusal == "salted"
    ticket = CapturePolicy(1.0).admit(NO, supported=True, salted=True)
    assert ticket.refusal == "opted_out"


def test_a_request_that_is_not_sampled_is_not_captured() -> None:
    assert CapturePolicy(0.0).admit(YES, supported=True).refusal == "not_sampled"


def test_a_request_with_a_draft_cap_is_marked() -> None:
    """Three of them with no drafts at all had a good draft rolled back."""
    admit = CapturePolicy(1.0).admit
    assert admit({"tide_k_max": 0}, supported=True).capped
    assert not admit(YES, supported=True).capped


def test_every_reason_is_reported_and_counts_requests() -> None:
    (text,) = [metric.text for metric in ENGINE if metric.name == "dropped_rows"]
    assert [reason for reason in REFUSALS if reason not in text] == []
    assert frozenset(REFUSALS) == REQUEST_REASONS
    assert len(set(REFUSALS)) == len(REFUSALS)


def salted(**salts: str | None) -> Any:
    """Return a scheduler with requests that have these salts."""
    return idle_scheduler(
        {
            name: SimpleNamespace(cache_salt=salt, num_prompt_tokens=1)
            for name, salt in salts.items()
        }
    )


def new(*req_ids: str) -> list[Any]:
    params = SimpleNamespace(extra_args=None, temperature=0.0)
    return [
        SimpleNamespace(
            req_id=req_id,
            sampling_params=params,
            mm_features=[],
            prompt_embeds=None,
            num_computed_tokens=0,
        )
        for req_id in req_ids
    ]


def test_the_scheduler_names_the_new_requests_with_a_salt() -> None:
    new_requests = salted(a=None, b="pepper", c="", d="salt")
    tide = SchedulerTide(3, new_requests, TideConfig())
    assert tide.control(new("a", "b", "c", "gone")) == {"salted": ["b"]}
    assert tide.control(new("a")) is None
    tide.observe({"staged": 2})
    assert tide.control(new("d")) == {"install": 2, "salted": ["d"]}


@pytest.mark.parametrize(
    ("capture", "order"), [({}, {"salted": ["b"]}), ({"salted": True}, None)]
)
def test_the_knob_lets_salted_requests_in(
    capture: dict[str, Any], order: dict[str, Any] | None
) -> None:
    config = SimpleNamespace(num_speculative_tokens=3, tide={"capture": capture})
    tide = make_scheduler(config, salted(b="pepper"))
    assert tide is not None
    assert tide.control(new("b")) == order


class Admission(Recorder):
    """Capture without its staging memory."""

    admit = Capture.admit


@pytest.fixture
def ring() -> Iterator[RingWriter]:
    made = RingWriter.create(
        RingSpec("e", 4, (1,), 50, "float32", "hidden", 1), capacity_bytes=1 << 16
    )
    yield made
    made.close()


def made(kind: type[Any], ring: RingWriter, consent: Consent = "opt_out") -> Any:
    """The worker's part of TIDE with capture alone."""
    tide = object.__new__(kind)
    tide.capture = Admission(ring, CaptureConfig(consent=consent))
    tide.control = tide.swapper = tide._verification = None
    tide._guard, tide._steps = Guard("capture"), Guard("steps")
    tide._log = SimpleNamespace(begin=lambda ended: False)
    return tide


def step(brought: list[Any], order: Any, ended: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=brought,
        num_scheduled_tokens={new.req_id: 1 for new in brought},
        tide=order,
        finished_req_ids=ended,
    )


@pytest.mark.parametrize("kind", [WorkerTideV1, WorkerTideV2])
def test_a_salt_counts_before_the_admission_of_the_request(
    kind: type[Any], ring: RingWriter
) -> None:
    tide = made(kind, ring)
    tide.begin_step(step(new("a", "b"), {"salted": ["b"]}))
    tickets = [tide.capture._tickets[req_id] for req_id in "ab"]
    assert [ticket.refusal for ticket in tickets] == [None, "salted"]
    assert tide.capture.dropped == {"salted": 1}
    assert tide._guard.faults == {}
    # Nothing is stored about a request that ended.
    tide.begin_step(step([], None, ("a", "b")))
    assert not tide.capture._tickets and not tide.capture._salted


@pytest.mark.parametrize("brought", [("a",), ()])
def test_nothing_is_written_before_a_step_is_launched(
    ring: RingWriter, brought: tuple[str, ...]
) -> None:
    """At the end of a step, if there is one. An empty step has nothing to wait for."""
    tide, done = made(WorkerTideV2, ring), []
    landed = SimpleNamespace(ended=("x",), req_ids=["x"])

    def write(of: Any, overrun: Any) -> None:
        done.append("write")

    tide.capture.write, tide._async = write, True
    tide._log = SimpleNamespace(
        begin=lambda ended: True, landed=lambda: [], done=lambda wait_for_next: [landed]
    )
    tide.begin_step(step(new(*brought), None))
    done.append("launch")
    tide._step = None
    tide._record(None, None, 0, None)
    order = ["launch", "write"] if brought else ["write", "launch", "write"]
    assert done == order and not tide._guard.faults


def test_dummy_requests_of_vllm_are_recognized() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    prefixes = set()
    folder = Path(spec.origin).parent
    files = [folder / "v1/worker/gpu/warmup.py", *folder.glob("**/warmup/*.py")]
    for file in files:
        text = file.read_text()
        prefixes |= set(re.findall(r'req_id_prefix(?:: str)? ?= ?"([^"]+)"', text))
        prefixes |= set(re.findall(r'req_ids? = \[?f"([^"{]+)', text))
    assert prefixes == set(DUMMY_REQUEST_PREFIXES)


@pytest.mark.parametrize(
    ("consent", "dropped"),
    [("opt_in", {"not_opted_in": 1}), ("off", {"consent_off": 1}), ("opt_out", {})],
)
def test_the_recorder_follows_the_knob(
    ring: RingWriter, consent: Consent, dropped: dict[str, int]
) -> None:
    tide = made(WorkerTideV2, ring, consent)
    tide.begin_step(step(new("a"), None))
    assert tide.capture.dropped == dropped


@pytest.mark.parametrize("kind", [WorkerTideV1, WorkerTideV2])
def test_excluded_requests_stay_excluded_when_capture_resumes(
    kind: type[Any], ring: RingWriter
) -> None:
    tide, now = made(kind, ring), [0.0]
    tide._guard = Guard("capture", lambda: now[0])
    tide.capture._drafted_by = 1
    brought = new("a", "b", "c")
    for _ in range(LIMIT):
        tide._guard.run("here", None)
    tide.begin_step(step(brought[:2], {"salted": ["b"]}))
    tide.begin_step(step([], None, ("z",)))
    now[0] += 60.0
    tide.begin_step(step(brought[2:], None))
    assert not tide._guard.tripped and tide.capture._drafted_by is None
    refusals = {name: t.refusal for name, t in tide.capture._tickets.items()}
    assert refusals == {"a": None, "b": "salted", "c": None}
    assert tide.capture.dropped == {"salted": 1}
