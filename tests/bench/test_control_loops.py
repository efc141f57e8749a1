import asyncio
import json
import math
import time

import pytest
from aiohttp import web

from bench.harness.client import make_session
from bench.harness.measure import (
    ClosedPlan,
    dispatch,
    first_wave_tokens,
    in_flight,
    replay_open,
    run_closed,
)
from bench.harness.scrape import parse_metrics
from bench.harness.server import sentence
from bench.harness.stream import BenchRequest


class OverSleeper:
    """A clock that only sleeping and launching move; every sleep is too long."""

    def __init__(self, too_long_s, launch_s):
        self.now, self.too_long_s, self.launch_s = 100.0, too_long_s, launch_s
        self.sent = []

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds + self.too_long_s

    def launch(self, place):
        self.sent.append((place, self.now))
        self.now += self.launch_s


def test_a_late_send_delays_no_other_one():
    fake = OverSleeper(too_long_s=0.004, launch_s=0.001)
    arrivals = [0.1 * i for i in range(1, 1001)]
    late = asyncio.run(
        dispatch(
            arrivals, fake.launch, origin_s=100.0, clock=fake.clock, sleep=fake.sleep
        )
    )
    assert [place for place, _ in fake.sent] == list(range(1000))
    assert max(late) < 0.0045  # sleep-based pacing would be 5 s late by the end
    assert late[-1] == pytest.approx(late[0], abs=1e-9)


def test_requests_due_at_the_same_time_are_sent_at_the_same_time():
    fake = OverSleeper(too_long_s=0.0, launch_s=0.0)
    asyncio.run(
        dispatch(
            [0.0, 3.0, 3.0, 3.0],
            fake.launch,
            origin_s=100.0,
            clock=fake.clock,
            sleep=fake.sleep,
        )
    )
    assert [t for _, t in fake.sent] == [100.0, 103.0, 103.0, 103.0]


def test_the_first_wave_is_spread_and_ends_full():
    assert [first_wave_tokens(i, 4, 32) for i in range(4)] == [8, 16, 24, 32]
    assert first_wave_tokens(0, 1, 32) == 32
    assert first_wave_tokens(0, 48, 8) == 1


class FakeServer:
    """Streams a token every `step_s` and watches how many requests are in flight."""

    def __init__(self, step_s):
        self.step_s = step_s
        self.now, self.most, self.bodies = 0, 0, []

    async def completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            reply = web.StreamResponse()
            await reply.prepare(request)
            for token in range(body["max_tokens"]):
                await asyncio.sleep(self.step_s)
                event = json.dumps({"choices": [{"token_ids": [token]}]})
                await reply.write(f"data: {event}\n\n".encode())
            return reply
        finally:
            self.now -= 1


async def with_server(fake, job):
    app = web.Application()
    app.router.add_post("/v1/completions", fake.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with make_session() as session:
            return await job(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


async def no_counters():
    return parse_metrics("", 0.0)


def closed(fake, plan):
    def request_at(index, max_tokens):
        return BenchRequest(index, f"kind {index % 2}", (1, 2), max_tokens or 6)

    def job(session, url):
        origin_s = time.perf_counter()
        return run_closed(
            session,
            url,
            "demo",
            request_at,
            plan,
            no_counters,
            origin_s=origin_s,
            cpu_s=time.monotonic,
            extra={"vllm_xargs": {"tide_slo_tpot_ms": 30.0}},
        )

    return asyncio.run(with_server(fake, job))


def test_a_closed_loop_keeps_the_batch_in_flight_and_counts_the_work_asked_for():
    fake = FakeServer(0.02)
    run = closed(fake, ClosedPlan(batch=3, tokens=30))
    assert fake.most == 3
    indices = [result.index for result in run.finished]
    assert indices == sorted(indices) and len(indices) >= 4
    assert run.tokens >= 30
    assert run.failed == 0 and 0 < run.open_s < run.close_s
    assert run.cpu_s > 0
    assert fake.bodies[0]["prompt"] == [1, 2]
    assert fake.bodies[0]["vllm_xargs"] == {"tide_slo_tpot_ms": 30.0}
    assert sorted(body["max_tokens"] for body in fake.bodies[:3]) == [2, 4, 6]


def test_a_visit_may_be_ended_by_time():
    run = closed(FakeServer(0.02), ClosedPlan(batch=2, seconds=0.2))
    assert run.duration_s >= 0.15 and run.tokens > 2
    # However slow, there is a step in it.
    run = closed(FakeServer(0.3), ClosedPlan(batch=1, seconds=0.01))
    assert run.duration_s > 0 and run.tokens >= 1


class TwoKinds(FakeServer):
    """Serves one kind of requests much faster; notes how many of each are there."""

    def __init__(self):
        super().__init__(0.001)
        self.flying, self.uneven, self.kinds = [0, 0], 0, []

    async def completions(self, request):
        place = len(self.bodies)
        kind = (await request.json())["prompt"][0]
        self.kinds.append(kind)
        self.flying[kind] += 1
        if place >= 4:
            self.uneven += max(self.flying) > 2
        self.step_s = 0.03 if kind else 0.003
        try:
            return await super().completions(request)
        finally:
            self.flying[kind] -= 1


def test_of_mixed_requests_each_kind_has_its_share_in_flight():
    fake = TwoKinds()

    def request_at(index, max_tokens):
        return BenchRequest(index, "m", (index % 2,), max_tokens or 6)

    def job(session, url):
        plan, begin = ClosedPlan(batch=4, tokens=200, kinds=2), time.perf_counter()
        return run_closed(
            session, url, "demo", request_at, plan, no_counters, origin_s=begin
        )

    asyncio.run(with_server(fake, job))
    assert fake.uneven == 0 and fake.most <= 4
    assert {0, 1} == set(fake.kinds)


def test_a_ramp_goes_up_to_the_batch_and_back():
    plan = ClosedPlan(batch=9, tokens=100, ramp=True)
    shares = [-math.inf, 0.0, 0.25, 0.5, 0.75, 1.0, 1.2]
    assert [in_flight(plan, share) for share in shares] == [1, 1, 5, 9, 5, 1, 1]
    assert in_flight(ClosedPlan(batch=9), 0.0) == 9
    fake = FakeServer(0.01)
    run = closed(fake, ClosedPlan(batch=6, tokens=150, ramp=True))
    assert fake.most >= 4 and run.tokens >= 150


def test_a_visit_that_hangs_or_fails_is_given_up():
    with pytest.raises(TimeoutError):
        closed(FakeServer(5.0), ClosedPlan(1, tokens=1, limit_s=0.2))

    class Broken(FakeServer):
        async def completions(self, request):
            raise web.HTTPInternalServerError

    with pytest.raises(ExceptionGroup, match="TaskGroup") as caught:
        closed(Broken(0.0), ClosedPlan(1, tokens=1))
    assert "requests fail: HTTP 500" in sentence(caught.value)


def replay(fake, arrivals, drain_s):
    requests = [BenchRequest(i, "m", (1,), 4, t) for i, t in enumerate(arrivals)]

    def job(session, url):
        return replay_open(
            session,
            url,
            "demo",
            requests,
            origin_s=time.perf_counter() + 0.05,
            drain_s=drain_s,
            on_result=lambda _: None,
        )

    return asyncio.run(with_server(fake, job))


def test_an_open_loop_sends_on_time_whatever_is_in_flight():
    fake = FakeServer(0.2)
    run = replay(fake, [0.0, 0.01, 0.02, 0.1], 30.0)
    assert fake.most >= 3
    assert [result.start_s for result in run.results] == [0.0, 0.01, 0.02, 0.1]
    assert all(result.ok for result in run.results)
    assert max(run.lateness_s) < 0.5  # the machine may be busy
    assert all(0.04 < result.ttft_s < result.e2e_s for result in run.results)


def test_what_is_not_done_in_time_has_failed():
    run = replay(FakeServer(0.5), [0.0, 0.01], 0.2)
    assert [result.ok for result in run.results] == [False, False]
    assert run.results[1].error.startswith("not done 0.2 s after")
