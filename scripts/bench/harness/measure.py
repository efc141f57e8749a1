"""Visits to a ready server: a closed loop with a window, or a trace in an open loop.

Closed: exactly B requests in flight. The lengths of the first B are spread from short
to full, so that requests neither start nor end together. The window opens when each of
them has a token and a share of the window's tokens has passed, and closes when as many
tokens as asked for have arrived in it, so that every arm does the same work. Its edges
lie in the pauses between the tokens of two steps. Where requests are of several kinds,
each kind has its share of the requests in flight. In a ramp the number of requests in
flight follows the tokens: from 1 to B and back to 1.

Open: every request is sent at its own time, whatever the server does. Send times are
computed from the start of the run, so an oversleep delays one request and is not handed
on. Latencies count from the time a request was due: a client that is late must not
flatter the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.harness.client import RequestResult, make_session, send
from bench.harness.common import percentile, rounded
from bench.harness.scrape import (
    RUNNING,
    WAITING,
    Scrape,
    Scraper,
    speculation,
    tide_values,
    time_series,
)
from bench.harness.server import SERVED_NAME, VllmServer
from bench.harness.stream import BenchRequest
from bench.harness.summary import request_figures, tpots_ms

Extra = Mapping[str, Any] | None
# Gives the request of a place, of a length or of its own.
RequestAt = Callable[[int, int | None], BenchRequest]
# asyncio's timers have the resolution of the selector, a millisecond; what is due
# within half of it is sent at once.
EARLY_S = 0.0005
# The API server adds a step's counts after it has handed out the step's tokens.
SETTLE_S = 0.3
IDLE_LIMIT_S = 20.0
SAMPLE_PERIOD_S = 0.5
WARM_UP_TOKENS = 24
# Of a window's tokens, before it opens.
WARM_UP_SHARE = 0.15
POLL_S = 0.01
# No token for so long: a step's are all there. Looked for no longer than the next.
QUIET_S = 0.01
MOST_QUIET_S = 0.25
CLIENT_NICE = -10


@dataclass(frozen=True, slots=True)
class ClosedPlan:
    """`batch` requests in flight until `tokens` or `seconds` have passed."""

    batch: int
    tokens: float = math.inf
    seconds: float = math.inf
    kinds: int = 1  # of requests: index modulo this
    ramp: bool = False
    limit_s: float = 600.0  # a visit longer than this has failed


@dataclass(slots=True)
class ClosedRun:
    """Outcome of a visit; times in seconds since the visit's start."""

    finished: list[RequestResult]  # in order of the sequence
    open_s: float
    close_s: float
    tokens: int  # that arrived inside the window
    cpu_s: float  # of the engine, inside the window
    before: Scrape
    after: Scrape
    failed: int  # of all requests of the visit, cancelled ones apart

    @property
    def duration_s(self) -> float:
        return self.close_s - self.open_s


def first_wave_tokens(place: int, batch: int, max_tokens: int) -> int:
    """Length of a request of the first wave: evenly spread, the last one is full."""
    return max(1, -(-max_tokens * (place + 1) // batch))


def in_flight(plan: ClosedPlan, share: float) -> int:
    """Requests in flight when a share of the window's tokens has arrived."""
    if not plan.ramp:
        return plan.batch
    return 1 + round((plan.batch - 1) * max(0.0, 1 - abs(2 * share - 1)))


async def run_closed(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    request_at: RequestAt,
    plan: ClosedPlan,
    read: Callable[[], Awaitable[Scrape]],
    *,
    origin_s: float,
    cpu_s: Callable[[], float] = lambda: 0.0,
    extra: Extra = None,
) -> ClosedRun:
    """Runs a visit; `read` reads the counters, `cpu_s` the clock of the engine.

    Raises:
        TimeoutError: It took too long.
        RuntimeError: Requests fail.
    """
    started: dict[int, RequestResult] = {}
    kinds = min(plan.kinds, plan.batch)
    places = [itertools.count(kind, kinds) for kind in range(kinds)]
    opened = math.inf  # tokens that had arrived when the window opened

    def arrived() -> int:
        return sum(len(result.token_ids) for result in started.values())

    async def worker(slot: int) -> None:
        while True:
            while slot >= in_flight(plan, (arrived() - opened) / plan.tokens):
                await asyncio.sleep(POLL_S)
            index = next(places[slot % kinds])
            request = request_at(index, None)
            if index < plan.batch and not plan.ramp:
                length = first_wave_tokens(index, plan.batch, request.max_tokens)
                request = request_at(index, length)

            def note(result: RequestResult, index: int = index) -> None:
                started[index] = result

            result = await send(session, url, model, request, origin_s, extra, note)
            if result.error is not None:
                await asyncio.sleep(0.2)  # a dead server is not asked in a tight loop

    async def until(reached: Callable[[], bool]) -> None:
        while not reached():
            failed = [r.error for r in started.values() if r.error is not None]
            if len(failed) > plan.batch:
                raise RuntimeError(f"requests fail: {failed[-1]}")
            await asyncio.sleep(POLL_S)

    async def step_end() -> float:
        last, deadline = -1, time.perf_counter() + MOST_QUIET_S
        while arrived() != last and time.perf_counter() < deadline:
            last = arrived()
            await asyncio.sleep(QUIET_S)
        return max(r.chunks[-1][0] for r in started.values() if r.chunks)

    async def watch() -> ClosedRun:
        nonlocal opened
        first = 1 if plan.ramp else plan.batch
        await until(lambda: sum(bool(r.token_ids) for r in started.values()) >= first)
        if math.isfinite(plan.tokens) and not plan.ramp:
            warm = arrived() + WARM_UP_SHARE * plan.tokens
            await until(lambda: arrived() >= warm)
        before = await read()
        open_s = await step_end()
        opened, cpu = arrived(), cpu_s()
        end = time.perf_counter() + plan.seconds
        # On a slow machine a step may take longer than the seconds.
        await until(
            lambda: (
                arrived() >= opened + plan.tokens
                or (arrived() > opened and time.perf_counter() >= end)
            )
        )
        close_s = await step_end()
        tokens, cpu = arrived() - int(opened), cpu_s() - cpu
        after = await read()
        everything = [started[index] for index in sorted(started)]
        return ClosedRun(
            finished=[r for r in everything if r.end_s is not None],
            open_s=open_s,
            close_s=close_s,
            tokens=tokens,
            cpu_s=cpu,
            before=before,
            after=after,
            failed=sum(not result.ok for result in everything),
        )

    # The group ends the visit when a worker breaks.
    async with asyncio.timeout(plan.limit_s), asyncio.TaskGroup() as group:
        tasks = [group.create_task(worker(slot)) for slot in range(plan.batch)]
        run = await watch()
        for task in tasks:
            task.cancel()
    return run


@dataclass(slots=True)
class OpenRun:
    """Outcome of a replay; times in seconds since the trace's start."""

    results: list[RequestResult]
    lateness_s: list[float] = field(default_factory=list)  # by request, >= -EARLY_S
    duration_s: float = 0.0  # from the first due time to the last end


async def dispatch(
    arrivals_s: Sequence[float],
    launch: Callable[[int], None],
    *,
    origin_s: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[float]:
    """Launches each request at `origin_s` + its arrival; returns how late each was."""
    late = []
    for place, arrival_s in enumerate(arrivals_s):
        while (wait_s := origin_s + arrival_s - clock()) > EARLY_S:
            await sleep(wait_s)
        late.append(clock() - (origin_s + arrival_s))
        launch(place)
    return late


async def replay_open(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    requests: Sequence[BenchRequest],
    *,
    origin_s: float,
    drain_s: float,
    on_result: Callable[[RequestResult], None],
    extra: Extra = None,
) -> OpenRun:
    """Replays requests; one not done `drain_s` after the last arrival has failed."""
    tasks: list[asyncio.Task[RequestResult]] = []
    started = {
        r.index: RequestResult(r.index, r.segment, r.arrival_s) for r in requests
    }

    async def one(request: BenchRequest) -> RequestResult:
        def note(result: RequestResult) -> None:
            result.start_s = request.arrival_s  # due, not sent
            started[request.index] = result

        result = await send(session, url, model, request, origin_s, extra, note)
        if result.ttft_s is not None and result.chunks:
            result.ttft_s = result.chunks[0][0] - request.arrival_s
        on_result(result)
        return result

    arrivals = [request.arrival_s for request in requests]
    try:
        late = await dispatch(
            arrivals,
            lambda place: tasks.append(asyncio.create_task(one(requests[place]))),
            origin_s=origin_s,
        )
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    results = [started[request.index] for request in requests]
    for result in results:
        if result.end_s is None:
            result.error = f"not done {drain_s:g} s after the last arrival"
            result.end_s = time.perf_counter() - origin_s
    ends = [result.end_s for result in results if result.end_s is not None]
    duration_s = max(ends) - arrivals[0] if ends else 0.0
    return OpenRun(results, late, duration_s)


@dataclass(slots=True)
class Measured:
    """A visit's record for the JSON, and the outputs to be compared."""

    record: dict[str, Any]
    results: list[RequestResult]


@contextlib.contextmanager
def _prompt_client() -> Iterator[None]:
    """Lets the client go first while it measures, where that is permitted.

    It needs a few percent of a core, but an arrival that waits for the engine's time
    slice to end is late.
    """
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, CLIENT_NICE)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, usual)


async def _until_idle(session: aiohttp.ClientSession, scraper: Scraper) -> None:
    """Waits until the server has nothing left of an earlier visit."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while time.monotonic() < deadline:
        sample = await scraper.read(session)
        if sample.value(RUNNING) + sample.value(WAITING) == 0:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the server is not idle after {IDLE_LIMIT_S:g} s")


def measure_closed(
    server: VllmServer, request_at: RequestAt, plan: ClosedPlan, extra: Extra = None
) -> Measured:
    """Runs a closed-loop visit.

    Raises:
        TimeoutError: It took too long.
        RuntimeError: Requests fail.
    """
    engine = server.processes().get("engine", [])

    async def visit() -> ClosedRun:
        async with make_session() as session:
            scraper = Scraper(server.url, time.perf_counter())
            await _until_idle(session, scraper)
            run = await run_closed(
                session,
                server.url,
                SERVED_NAME,
                request_at,
                plan,
                lambda: scraper.read(session),
                origin_s=scraper.origin_s,
                cpu_s=lambda: sum(sum(p.cpu_times()[:2]) for p in engine),
                extra=extra,
            )
            await _until_idle(session, scraper)
            return run

    with _prompt_client():
        run = asyncio.run(visit())
    record = {
        "output_tokens_per_s": round(run.tokens / run.duration_s, 3),
        "tokens": run.tokens,
        "duration_s": round(run.duration_s, 4),
        "cpu_s": round(run.cpu_s, 3),
        "failed": run.failed,
        **speculation(run.before, run.after),
        "tide": tide_values(run.before, run.after),
    }
    return Measured(record, run.finished)


def measure_all(
    server: VllmServer,
    requests: Sequence[BenchRequest],
    concurrency: int,
    extra: Extra = None,
    timeout_s: float = 3600.0,
) -> Measured:
    """Serves a set of requests to their ends, so many at once.

    Raises:
        TimeoutError: It took too long.
    """

    async def visit() -> tuple[list[RequestResult], Scrape, Scrape]:
        async with make_session(timeout_s) as session, asyncio.timeout(timeout_s):
            scraper = Scraper(server.url, time.perf_counter())
            await _until_idle(session, scraper)
            before, place = await scraper.read(session), asyncio.Semaphore(concurrency)

            async def one(request: BenchRequest) -> RequestResult:
                async with place:
                    origin_s = scraper.origin_s
                    return await send(
                        session, server.url, SERVED_NAME, request, origin_s, extra
                    )

            results = await asyncio.gather(*map(one, requests))
            await asyncio.sleep(SETTLE_S)
            return results, before, await scraper.read(session)

    with _prompt_client():
        results, before, after = asyncio.run(visit())
    ok = [result for result in results if result.ok]
    tokens = sum(len(result.token_ids) for result in ok)
    ends = [result.end_s for result in ok if result.end_s is not None]
    duration_s = max(ends) - min(r.start_s for r in ok) if ok else 0.0
    record = {
        **request_figures(results, duration_s, tokens, len(results) - len(ok)),
        **speculation(before, after),
        "tide": tide_values(before, after),
    }
    return Measured(record, results)


def measure_open(
    server: VllmServer,
    requests: Sequence[BenchRequest],
    drain_s: float,
    on_progress: Callable[[int], None],
    extra: Extra = None,
) -> Measured:
    """Replays a trace; `on_progress` is told how many requests have ended."""
    ended: list[RequestResult] = []

    def on_result(result: RequestResult) -> None:
        ended.append(result)
        on_progress(len(ended))

    async def visit() -> tuple[OpenRun, Scrape, Scrape, Scraper]:
        async with make_session() as session:
            idle = Scraper(server.url, time.perf_counter())
            await _until_idle(session, idle)
            # A moment ahead, so that the first request is not late.
            origin_s = time.perf_counter() + 0.5
            scraper = Scraper(server.url, origin_s, period_s=SAMPLE_PERIOD_S)
            before = await scraper.read(session)
            watcher = asyncio.create_task(scraper.run(session, lambda _: None))
            try:
                run = await replay_open(
                    session,
                    server.url,
                    SERVED_NAME,
                    requests,
                    origin_s=origin_s,
                    drain_s=drain_s,
                    on_result=on_result,
                    extra=extra,
                )
            finally:
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher
            await asyncio.sleep(SETTLE_S)
            after = await scraper.read(session)
            await _until_idle(session, idle)
            return run, before, after, scraper

    with _prompt_client():
        run, before, after, scraper = asyncio.run(visit())
    failed = sum(not result.ok for result in run.results)
    tokens = sum(len(result.token_ids) for result in run.results)
    late_ms = [1e3 * late for late in run.lateness_s]
    record = {
        **request_figures(run.results, run.duration_s, tokens, failed),
        **speculation(before, after),
        "num_measured": len(run.results),
        "tide": tide_values(before, after),
        "send_late_ms_p50": rounded(percentile(late_ms, 50), 3),
        "send_late_ms_p99": rounded(percentile(late_ms, 99), 3),
        "send_late_ms_max": rounded(max(late_ms, default=math.nan), 3),
        "tpots_ms": [round(t, 3) for t in tpots_ms(run.results)],
        "series": time_series(scraper.samples),
    }
    return Measured(record, run.results)


def warm_up(server: VllmServer, request_at: Callable[[int], BenchRequest]) -> None:
    """Sends bursts of growing size that are not measured."""

    async def bursts() -> None:
        async with make_session() as session:
            origin_s, place = time.perf_counter(), 0
            for burst in (1, 2, 4, 8, 16):
                sends = [
                    send(session, server.url, SERVED_NAME, request_at(i), origin_s)
                    for i in range(place, place + burst)
                ]
                place += burst
                for result in await asyncio.gather(*sends):
                    if result.error is not None:
                        raise RuntimeError(f"warm-up request failed: {result.error}")

    asyncio.run(bursts())
