"""Open loop: every request is sent at its own time, whatever the server does.

Each send time is computed from the start of the run, never from the previous send, so
an oversleep delays one request and is not handed on.  Latencies count from the time
the request was due: a client that is late must not flatter the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .client import RequestResult, send
from .prompt_pool import BenchRequest

# asyncio's timers have the resolution of the selector, a millisecond; what is due
# within half of it is sent at once.
EARLY_S = 0.0005


@dataclass(slots=True)
class OpenRun:
    """What a replay produced; times in seconds since ``origin_s``."""

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
    """Launch each request at ``origin_s`` + its arrival; return the lateness of each.

    Args:
        arrivals_s: Ascending seconds after the origin.
        launch: Called with the request's place; must not block.
        origin_s: Time of the trace's start, on ``clock``.
        clock: Monotonic clock in seconds.
        sleep: Sleeps for at least the seconds given.
    """
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
    extra: Mapping[str, Any] | None = None,
) -> OpenRun:
    """Replay requests in an open loop and wait for all of them.

    Args:
        session: Open client session.
        url: Address of the server.
        model: Served model name.
        requests: Ascending by arrival.
        origin_s: ``time.perf_counter()`` of the trace's start.
        drain_s: How long to wait after the last arrival; what is not done by then
            has failed.
        on_result: Told of every result.
        extra: Keys added to every request's body.
    """
    tasks: list[asyncio.Task[RequestResult]] = []
    started: dict[int, RequestResult] = {}

    async def one(request: BenchRequest) -> RequestResult:
        def note(result: RequestResult) -> None:
            result.start_s = request.arrival_s  # due, not sent
            started[request.index] = result

        result = await send(session, url, model, request, origin_s, extra, note)
        if result.ttft_s is not None and result.chunks:
            result.ttft_s = result.chunks[0][0] - request.arrival_s
        on_result(result)
        return result

    def launch(place: int) -> None:
        tasks.append(asyncio.create_task(one(requests[place])))

    arrivals = [request.arrival_s for request in requests]
    try:
        late = await dispatch(arrivals, launch, origin_s=origin_s)
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s)
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for request in requests:
        result = started.setdefault(
            request.index,
            RequestResult(request.index, request.segment, request.arrival_s),
        )
        if result.end_s is None:
            result.error = f"not done {drain_s:g} s after the last arrival"
            result.end_s = time.perf_counter() - origin_s
    results = [started[request.index] for request in requests]
    ends = [result.end_s for result in results if result.end_s is not None]
    duration_s = max(ends) - arrivals[0] if ends else 0.0
    return OpenRun(results, late, duration_s)
