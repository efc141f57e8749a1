"""One visit: drive a ready server and return the cell's record."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from .client import RequestResult, make_session, send
from .closed_loop import ClosedPlan, run_closed
from .counters import speculation, tide_values, time_series
from .open_loop import replay_open
from .prompt_pool import BenchRequest
from .request_figures import percentile, request_figures, tpots_ms
from .scrape import RUNNING, WAITING, Scraper
from .server import SERVED_NAME, VllmServer

# The API server adds a step's counts after it has handed out the step's tokens.
SETTLE_S = 0.3
IDLE_LIMIT_S = 20.0
SAMPLE_PERIOD_S = 0.5
WARM_UP_TOKENS = 24
CLIENT_NICE = -10


@contextlib.contextmanager
def _prompt_client() -> Iterator[None]:
    """Let the client go first while it measures, where that is permitted.

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


@dataclass(slots=True)
class Measured:
    """A visit's record for the JSON, and the outputs to be compared."""

    record: dict[str, Any]
    results: list[RequestResult]


async def _until_idle(session: aiohttp.ClientSession, scraper: Scraper) -> None:
    """Wait until the server has nothing left of an earlier visit."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while time.monotonic() < deadline:
        sample = await scraper.read(session)
        if sample.value(RUNNING) + sample.value(WAITING) == 0:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the server is not idle after {IDLE_LIMIT_S:g} s")


def measure_closed(
    server: VllmServer,
    request_at: Callable[[int, int | None], BenchRequest],
    plan: ClosedPlan,
    extra: Mapping[str, Any] | None = None,
) -> Measured:
    """Run a closed-loop visit.

    Raises:
        TimeoutError: It took too long.
    """
    with _prompt_client():
        return asyncio.run(_closed(server, request_at, plan, extra))


async def _closed(
    server: VllmServer,
    request_at: Callable[[int, int | None], BenchRequest],
    plan: ClosedPlan,
    extra: Mapping[str, Any] | None,
) -> Measured:
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
            extra=extra,
        )
        await _until_idle(session, scraper)
    figures = request_figures(run.measured, run.duration_s, run.tokens, run.failed)
    record = {
        **figures,
        **speculation(run.before, run.after),
        "num_measured": len(run.measured),
        "tide": tide_values(run.before, run.after),
    }
    return Measured(record, run.measured)


def measure_open(
    server: VllmServer,
    requests: Sequence[BenchRequest],
    drain_s: float,
    on_progress: Callable[[int], None],
    extra: Mapping[str, Any] | None = None,
) -> Measured:
    """Replay a trace."""
    with _prompt_client():
        return asyncio.run(_open(server, requests, drain_s, on_progress, extra))


async def _open(
    server: VllmServer,
    requests: Sequence[BenchRequest],
    drain_s: float,
    on_progress: Callable[[int], None],
    extra: Mapping[str, Any] | None,
) -> Measured:
    done = 0

    def on_result(_: RequestResult) -> None:
        nonlocal done
        done += 1
        on_progress(done)

    async with make_session() as session:
        idle = Scraper(server.url, time.perf_counter())
        await _until_idle(session, idle)
        # A moment ahead, so that the first request is not late.
        scraper = Scraper(
            server.url, time.perf_counter() + 0.5, period_s=SAMPLE_PERIOD_S
        )
        before = await scraper.read(session)
        watcher = asyncio.create_task(scraper.run(session, lambda _: None))
        try:
            run = await replay_open(
                session,
                server.url,
                SERVED_NAME,
                requests,
                origin_s=scraper.origin_s,
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
    failed = sum(not result.ok for result in run.results)
    tokens = sum(len(result.token_ids) for result in run.results)
    late_ms = [1e3 * late for late in run.lateness_s]
    record = {
        **request_figures(run.results, run.duration_s, tokens, failed),
        **speculation(before, after),
        "num_measured": len(run.results),
        "tide": tide_values(before, after),
        "send_late_ms_p50": _rounded(percentile(late_ms, 50)),
        "send_late_ms_p99": _rounded(percentile(late_ms, 99)),
        "send_late_ms_max": _rounded(max(late_ms, default=math.nan)),
        "tpots_ms": [round(t, 3) for t in tpots_ms(run.results)],
        "series": time_series(scraper.samples),
    }
    return Measured(record, run.results)


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def warm_up(server: VllmServer, request_at: Callable[[int], BenchRequest]) -> None:
    """Send bursts of growing size that are not measured.

    Raises:
        RuntimeError: A request failed.
    """
    asyncio.run(_warm_up(server, request_at))


async def _warm_up(
    server: VllmServer, request_at: Callable[[int], BenchRequest]
) -> None:
    async with make_session() as session:
        origin_s = time.perf_counter()
        place = 0
        for burst in (1, 2, 4, 8, 16):
            requests = [request_at(place + i) for i in range(burst)]
            place += burst
            results = await asyncio.gather(
                *(
                    send(session, server.url, SERVED_NAME, request, origin_s)
                    for request in requests
                )
            )
            for result in results:
                if result.error is not None:
                    raise RuntimeError(f"warm-up request failed: {result.error}")
