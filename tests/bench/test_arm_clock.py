"""An arm is timed by a clock that stops while the arm waits."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest

from bench.harness import client, interleave, scrape, trainers
from bench.harness.arm import ArmOptions
from bench.harness.interleave import InterleavedArm
from bench.harness.server import ServerOptions, VllmServer
from bench.harness.stream import StreamRequest
from tests.bench.fake_processes import demo, fake_quickstart_venv

WAIT_S = 1000.0


@pytest.fixture
def clock(monkeypatch):
    """The clocks, ahead by `ahead` seconds."""
    made = SimpleNamespace(ahead=0.0)
    made.perf_counter = lambda: time.perf_counter() + made.ahead
    made.time = lambda: time.time() + made.ahead
    for module in (client, interleave, scrape, trainers):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def taker(tmp_path):
    target, _ = demo(tmp_path / "demo")
    cpu = min(os.sched_getaffinity(0))
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    server = ServerOptions(
        fake_quickstart_venv(tmp_path / "venv"),
        target,
        tmp_path / "log",
        engine_cpus=(cpu,),
        other_cpus=(cpu,),
    )
    with VllmServer(server) as started:
        yield InterleavedArm(started, ArmOptions("none", server, run_dir), 4)


def part(first, name="1 sql"):
    return [StreamRequest(first + i, name, "sql", f"sql {i}", 3, 2) for i in range(2)]


def event(unix):
    return json.dumps({"unix": unix, "event": "cycle"})


@pytest.mark.slow
def test_an_arms_clock_stops_while_it_waits(taker, clock):
    taker.ready()
    clock.ahead += WAIT_S
    began = clock.time()
    taker.serve(part(0), ends=False)
    clock.ahead += WAIT_S
    taker.serve(part(2), ends=True)
    after = taker._stopped[1]
    lines = [event(began), event(after)]
    path = taker.options.run_dir / "events-1.jsonl"
    path.write_text("\n".join(lines))
    clock.ahead += WAIT_S
    run = taker.end()
    first, second = run.segments
    assert [r.index for r in run.results] == [0, 1, 2, 3] and second.start is first.end
    starts = [r.start_s for r in run.results]
    assert starts[0] >= 0.0 and starts == sorted(starts)
    ends = [r.end_s for r in run.results]
    assert starts[2] > max(ends[:2]) and ends[3] < WAIT_S / 2
    times = [sample.t_s for sample in run.samples]
    assert max(times) < WAIT_S / 2
    one, two = run.events
    assert one["t_s"] + 0.01 >= 0.0 and ends[3] <= two["t_s"] + 0.01 < WAIT_S / 2


def test_a_segment_ends_after_its_time():
    now = [0.0]
    stream = part(0, "0 math") * 8 + part(16, "1 sql") * 8
    seen = []
    for requests, ends in interleave.slices(stream, {"1 sql": 20.0}, lambda: now[0]):
        seen.append((requests[0].segment, len(requests), ends))
        now[0] += 6.0
    math = [("0 math", 4, False)] * 3 + [("0 math", 4, True)]
    assert seen == [*math, *[("1 sql", 4, False)] * 2, ("1 sql", 4, True)]
