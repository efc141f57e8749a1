"""The suite and the soak detect damage, and pass without damage."""

import asyncio
import os
from types import SimpleNamespace

import psutil
import pytest
import torch

from bench.harness.client import RequestResult
from tests.faults import leaks, scene, suite
from tests.faults.fault import Fault
from tests.faults.flat import grown, growth
from tests.faults.leaks import LeakWatch, Usage, left_behind
from tests.faults.load import Ask, judged
from tests.faults.operating import COMMANDS, clean_run_dir, kill_trainer, plan_events
from tests.faults.scene import NotRecovered
from tests.faults.segments import RunSegments
from tests.faults.suite import FAULTS, OK, Suite, plan
from tests.faults.trainer import PASSED_ON, spoilt
from vllm_tide.transport.shm import Segment


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ((1, 2, 3), None, ""),
        ((1, 9, 3), None, "wrong token: number 1 of 3 is 9"),
        ((1, 2), None, "wrong length: 2 tokens of 3"),
        ((1, 2, 3, 4), None, "wrong length: 4 tokens of 3"),
        ((), "HTTP 400: no", "HTTP 400: no"),
    ],
)
def test_only_the_right_tokens_pass(tokens, error, message):
    result = RequestResult(1, "faults", 0.0, token_ids=list(tokens), error=error)
    assert judged(Ask(1, (5, 6), (1, 2, 3)), result) == message


def test_a_plan_has_every_kind_with_the_lasting_ones_late():
    kinds = [fault.kind for fault in FAULTS]
    assert len(set(kinds)) == len(kinds)
    long = plan(300, 7)
    first = long[: len(kinds)]
    assert {f.kind for f in first} == set(kinds)
    assert [f.lasting for f in first] == sorted(f.lasting for f in first)
    assert plan(50, 7) == long[:50] and plan(300, 8) != long


class Scene:
    """A scene without problems but those of its fault."""

    starts: list[str] = []

    def __init__(self, places, session, load):
        self.load, self.struck_at, self.counts = load, 0.0, {"faults": 0.0}
        self.segments = SimpleNamespace(made=frozenset())
        self.server = SimpleNamespace(processes=dict)
        self.trainer = psutil.Process()

    def struck(self):
        pass

    def note_segments(self):
        pass

    def manifest(self):
        return SimpleNamespace(ring="", weights="")

    async def start_server(self):
        self.starts.append("server")

    def start_trainer(self):
        pass

    async def trainer_reads(self):
        pass

    async def stop(self):
        return True

    async def reading(self):
        return dict(self.counts)

    async def until(self, what, check, timeout_s=0.0):
        if not check(self.counts):
            raise NotRecovered(what)
        return self.counts


class Load:
    """Right answers only, but for the problems that a fault adds."""

    def __init__(self, *_):
        self.problems = []

    async def run(self):
        await asyncio.sleep(60)

    async def settle(self):
        return ""

    def take_problems(self):
        problems, self.problems = self.problems, []
        return problems


def test_every_problem_is_in_its_row_and_the_server_is_restarted(monkeypatch):
    monkeypatch.setattr(scene, "Scene", Scene)
    monkeypatch.setattr(suite, "Load", Load)
    monkeypatch.setattr(suite, "WAIT_S", 0.0)
    monkeypatch.setattr(Scene, "starts", [])

    async def counted(scene, rng):
        scene.counts["faults"] += 1

    async def nothing(scene, rng):
        pass

    async def wrong(scene, rng):
        scene.load.problems.append("wrong token")
        await counted(scene, rng)

    async def never(scene, rng):
        raise NotRecovered("a token did not come")

    faults = [
        Fault("lasting", counted, "faults", lasting=True),
        Fault("counted", counted, "faults"),
        Fault("uncounted", nothing, "faults"),
        Fault("wrong", wrong, "faults"),
        Fault("never", never, "faults"),
    ]
    rows, tried = [], Suite(None, [], 0)
    asyncio.run(tried.run(faults, rows.append))
    assert [row.outcome for row in rows] == [
        OK, OK, "faults did not move", "wrong token", "a token did not come"
    ]  # fmt: skip
    assert len(Scene.starts) == 4  # after three of them, and none after the last
    assert tried.problems == []


@pytest.mark.parametrize("what", PASSED_ON)
def test_a_bad_draft_differs_in_its_tokens(what):
    good = {"fc.weight": torch.ones(4, 3), "norm.weight": torch.ones(3)}
    bad = spoilt(good, what, 5)
    assert good["fc.weight"].shape == (4, 3) and len(good) == 2
    same = set(bad) == set(good) and all(
        bad[n].dtype == good[n].dtype and torch.equal(bad[n], good[n]) for n in good
    )
    assert not same


def test_growth_is_a_leak_once_a_process_is_warm(monkeypatch):
    usage = Usage(100.0, 10)
    monkeypatch.setattr(leaks, "usage_of", lambda _: usage)
    watch, young, me = LeakWatch(warm_s=0.0), LeakWatch(warm_s=1e9), psutil.Process()
    assert watch.check("engine", me) == young.check("engine", me) == ""
    usage = Usage(260.0, 10)
    assert watch.check("engine", me) == "engine has 260.0 MiB, 100.0 at first"
    usage = Usage(100.0, 80)
    assert watch.check("engine", me) == "engine has 80 file descriptors, 10 at first"
    assert young.check("engine", me) == ""


def test_remaining_segments_of_the_run_are_reported(monkeypatch):
    run = RunSegments()
    segment = Segment.create("toy", b"VTIDETST", 1, {}, 4096)
    try:
        run.note([])
        assert segment.name not in run.made
        run.note([os.getpid()])
        assert left_behind(run.made, set()).count(segment.name) == 1
        assert segment.name not in left_behind(run.made, {segment.name})
    finally:
        segment.close()
    assert segment.name in run.made
    assert segment.name not in left_behind(run.made, set())


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("engine_rss_mib", lambda n: 100 if n < 3 else 300, None),  # warming up
        ("engine_rss_mib", lambda n: 300 + 6 * n, "engine_rss_mib grew from "),
        ("engine_fds", lambda n: 40 + n, "engine_fds grew from "),
        ("shm_bytes", lambda n: 1e6 + n, "shm_bytes grew from "),
        ("latency_ms_p95", lambda n: 100 + 10 * n, "latency_ms_p95 grew from "),
        ("swaps", lambda n: n != 7, "no swap in minute 8"),
    ],
)
def test_a_soak_that_is_not_flat_names_what_grew(name, values, message):
    flat = {"engine_rss_mib": 300.0, "engine_fds": 40.0, "shm_bytes": 1e6}
    flat |= {"latency_ms_p95": 100.0, "swaps": 20.0}
    problems = grown([flat | {name: float(values(n))} for n in range(12)])
    assert len(problems) == (message is not None)
    assert not problems or problems[0].startswith(message)


def test_a_restarted_process_is_compared_with_itself():
    minutes = [
        {"trainer_fds": fds, "trainer_started": started, "api_fds": 30.0 + n / 4}
        for n, (fds, started) in enumerate(
            [*[(90.0, 0)] * 3, (90.0, 1), *[(8.0, 0)] * 8]
        )
    ]
    problems = growth(minutes)
    assert (problems["trainer_fds"].first, problems["trainer_fds"].minutes) == (8.0, 6)
    assert problems["api_fds"].slope_per_hour == 15.0
    assert growth(minutes[:5]).keys() == {"api_fds"}  # its trainer is too young


def test_an_hour_has_every_command_two_kills_and_one_cleaning():
    plan = plan_events(60)
    every = [event for minute in plan for event in minute]
    assert [every.count(e) for e in (kill_trainer, clean_run_dir)] == [2, 1]
    assert all(every.count(event) > 9 for event in COMMANDS)
    assert not any(kill_trainer in minute for minute in plan[40:])
