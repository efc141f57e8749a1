"""A visit: a set of requests sent to a ready server until all have finished."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.harness.client import RequestResult, make_session, send
from bench.harness.common import rounded
from bench.harness.scrape import RUNNING, WAITING, Scrape, Scraper
from bench.harness.server import SERVED_NAME, VllmServer
from bench.harness.stream import BenchRequest
from bench.harness.summary import acceptance_length

# The API server updates its counters after it has sent the step's tokens.
SETTLE_S = 0.3
IDLE_LIMIT_S = 20.0
WARM_UP_TOKENS = 24
CLIENT_NICE = -10


@dataclass(slots=True)
class Measured:
    """A visit's record for the JSON, and the outputs for the comparison."""

    record: dict[str, Any]
    results: list[RequestResult]


@contextlib.contextmanager
def _raised_priority() -> Iterator[None]:
    """Raise the client's priority while it measures, where that is permitted.

    The client needs a few percent of a core, but a chunk is timed late if the client
    waits for the engine's time slice to end.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, CLIENT_NICE)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


async def _until_idle(session: aiohttp.ClientSession, scraper: Scraper) -> None:
    """Wait until the requests of an earlier visit have ended."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while time.monotonic() < deadline:
        sample = await scraper.read(session)
        if sample.value(RUNNING) + sample.value(WAITING) == 0:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the server is not idle after {IDLE_LIMIT_S:g} s")


def measure_all(
    server: VllmServer,
    requests: Sequence[BenchRequest],
    concurrency: int,
    extra: Mapping[str, Any] | None = None,
    timeout_s: float = 3600.0,
) -> Measured:
    """Serve a set of requests until all have finished, `concurrency` at a time.

    Raises:
        TimeoutError: The visit took longer than `timeout_s`.
    """

    async def visit() -> tuple[list[RequestResult], Scrape, Scrape]:
        async with make_session(timeout_s) as session, asyncio.timeout(timeout_s):
            scraper = Scraper(server.url, time.perf_counter())
            await _until_idle(session, scraper)
            before, slots = await scraper.read(session), asyncio.Semaphore(concurrency)

            async def one(request: BenchRequest) -> RequestResult:
                async with slots:
                    origin_s = scraper.origin_s
                    return await send(
                        session, server.url, SERVED_NAME, request, origin_s, extra
                    )

            results = await asyncio.gather(*map(one, requests))
            await asyncio.sleep(SETTLE_S)
            return results, before, await scraper.read(session)

    with _raised_priority():
        results, before, after = asyncio.run(visit())
    ok = [result for result in results if result.ok]
    tokens = sum(len(result.token_ids) for result in ok)
    ends = [result.end_s for result in ok if result.end_s is not None]
    duration_s = max(ends) - min(r.start_s for r in ok) if ok else 0.0
    record = {
        "output_tokens_per_s": round(tokens / duration_s, 3) if duration_s else None,
        "failed": len(results) - len(ok),
        "duration": round(duration_s, 4),
        "completed": len(ok),
        "total_output_tokens": tokens,
        "acceptance_length": rounded(acceptance_length([(before, after)])),
    }
    return Measured(record, results)


def warm_up(server: VllmServer, request_at: Callable[[int], BenchRequest]) -> None:
    """Send bursts of growing size that are not measured."""

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
