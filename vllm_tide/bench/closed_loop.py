"""Closed loop: exactly B requests in flight, and a window of measured work.

Sequence of a visit:

1. A first wave of B requests whose lengths are spread from short to full, so that
   requests neither start nor end together afterwards; it is the warm-up.
2. The window opens when the wave has ended.  The B requests then in flight, and those
   that follow, are the measured ones.
3. The first visit of a cell lasts for the seconds asked for and settles how many
   requests are measured; every other arm and repeat then measures the same number, so
   that arms do the same work.  The window closes when the last of them ends; until
   then requests beyond keep B in flight.

Throughput counts the tokens that arrived inside the window, whoever's they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from .client import RequestResult, send
from .prompt_pool import BenchRequest
from .scrape import Scrape


@dataclass(frozen=True, slots=True)
class ClosedPlan:
    """How a visit is run.

    Attributes:
        batch: Requests in flight.
        seconds: Least length of the window where ``num_measured`` is None.
        num_measured: Requests measured; None: settled by ``seconds``.
        limit_s: A visit longer than this has failed.
    """

    batch: int
    seconds: float
    num_measured: int | None = None
    limit_s: float = 600.0


@dataclass(slots=True)
class ClosedRun:
    """What a visit produced; times in seconds since the visit's start."""

    measured: list[RequestResult]  # in order of the sequence
    open_s: float
    close_s: float
    tokens: int  # that arrived inside the window
    before: Scrape
    after: Scrape
    failed: int  # of all requests of the visit, cancelled ones apart

    @property
    def duration_s(self) -> float:
        """Length of the window."""
        return self.close_s - self.open_s


def first_wave_tokens(place: int, batch: int, max_tokens: int) -> int:
    """Return the output length of a first-wave request: spread up to the full one."""
    return max(1, -(-max_tokens * (place + 1) // batch))


class _Visit:
    """State shared by the B workers of one visit."""

    def __init__(self, plan: ClosedPlan) -> None:
        self.plan = plan
        self.next_index = 0
        self.started: dict[int, RequestResult] = {}
        self.ended: set[int] = set()
        self.changed = asyncio.Event()

    def wave_done(self) -> bool:
        return all(index in self.ended for index in range(self.plan.batch))

    def num_done_in_order(self) -> int:
        """Number of requests after the wave that ended with none missing between."""
        count = 0
        while self.plan.batch + count in self.ended:
            count += 1
        return count

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


async def run_closed(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    request_at: Callable[[int, int | None], BenchRequest],
    plan: ClosedPlan,
    read: Callable[[], Awaitable[Scrape]],
    *,
    origin_s: float,
    extra: Mapping[str, Any] | None = None,
) -> ClosedRun:
    """Run one visit.

    Args:
        session: Open client session.
        url: Address of the server.
        model: Served model name.
        request_at: The request of a place, with another output length if given.
        plan: Batch and window.
        read: Reads the server's counters.
        origin_s: ``time.perf_counter()`` at the visit's start.
        extra: Keys added to every request's body.

    Raises:
        TimeoutError: The visit took longer than ``plan.limit_s``.
    """
    visit = _Visit(plan)
    # The group ends the visit when a worker breaks.
    async with asyncio.timeout(plan.limit_s), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                _worker(visit, session, url, model, request_at, origin_s, extra)
            )
            for _ in range(plan.batch)
        ]
        run = await _watch(visit, read, origin_s)
        for task in tasks:
            task.cancel()
    return run


async def _worker(
    visit: _Visit,
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    request_at: Callable[[int, int | None], BenchRequest],
    origin_s: float,
    extra: Mapping[str, Any] | None,
) -> None:
    batch = visit.plan.batch
    while True:
        index = visit.next_index
        visit.next_index += 1
        request = request_at(index, None)
        if index < batch:
            length = first_wave_tokens(index, batch, request.max_tokens)
            request = request_at(index, length)

        def note(result: RequestResult, index: int = index) -> None:
            visit.started[index] = result

        result = await send(session, url, model, request, origin_s, extra, note)
        visit.ended.add(index)
        visit.changed.set()
        if result.error is not None:
            await asyncio.sleep(0.2)  # a dead server must not be asked in a tight loop


async def _watch(
    visit: _Visit, read: Callable[[], Awaitable[Scrape]], origin_s: float
) -> ClosedRun:
    plan = visit.plan
    await visit.until(visit.wave_done)
    before = await read()
    open_s = time.perf_counter() - origin_s
    wanted = plan.num_measured
    if wanted is None:
        await asyncio.sleep(plan.seconds)
        # A full generation per place in the batch at least; the window ends when a
        # request does, as it will in the visits that are given the number.
        wanted = max(plan.batch, visit.num_done_in_order() + 1)
    last = plan.batch + wanted
    await visit.until(lambda: all(i in visit.ended for i in range(plan.batch, last)))
    close_s = time.perf_counter() - origin_s
    after = await read()
    everything = list(visit.started.values())
    return ClosedRun(
        measured=[visit.started[i] for i in range(plan.batch, last)],
        open_s=open_s,
        close_s=close_s,
        tokens=sum(
            count
            for result in everything
            for t_s, count in result.chunks
            if open_s < t_s <= close_s
        ),
        before=before,
        after=after,
        failed=sum(not result.ok for result in everything),
    )
