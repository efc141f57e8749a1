"""Arms that alternate on one machine, so that other load does not bias the ratios.

All servers are resident and one of them runs; the others and their trainers are stopped
with SIGSTOP. An arm's clock excludes its pauses, so all its times, including those of
swaps and trainer events, count only seconds in which its processes ran.

Code that reads CLOCK_MONOTONIC includes the pauses: the heartbeats of trainer and
engine are stale for a moment (both also check process ids), and seconds in the
trainer's status contain pauses. Requests do not, since every slice is drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.harness.arm import (
    SETTLE_S,
    ArmOptions,
    ArmRun,
    LiveView,
    SegmentRun,
    close_arm,
    wait_for_trainer,
    warm_up,
)
from bench.harness.client import make_session, replay
from bench.harness.scrape import SWAPS, Scrape, Scraper
from bench.harness.server import SERVED_NAME, VllmServer
from bench.harness.stream import StreamRequest, segments
from bench.harness.summary import throughput
from bench.harness.trainers import TrainerWatch

SLICE_REQUESTS = 4
"""A slice with 96 tokens each takes about 6 s on two cores."""
RECENT_SLICES = 4
"""Slices of the rate that is printed while arms run."""


def slices(
    stream: Sequence[StreamRequest],
    limits: Mapping[str, float],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[list[StreamRequest], bool]]:
    """Yield parts of a stream in order, and whether each one ends its segment.

    Args:
        stream: The requests; a segment is cut when its time is over.
        limits: Seconds of each segment, measured between the yields.
        clock: Clock of the limits.
    """
    for part in segments(stream):
        began, longest = clock(), 0.0
        limit = limits.get(part[0].segment, math.inf)
        for first in range(0, len(part), SLICE_REQUESTS):
            end = first + SLICE_REQUESTS
            start = clock()
            ends = end >= len(part) or start - began + 2 * longest > limit
            yield part[first:end], ends
            if ends:
                break
            longest = max(longest, clock() - start)


class InterleavedArm:
    """An arm with a started server, which is stopped between its slices."""

    def __init__(
        self, server: VllmServer, options: ArmOptions, num_requests: int
    ) -> None:
        self.server, self.options = server, options
        self.view = LiveView(options.name, num_requests, options.run_dir)
        self._watch = TrainerWatch(options.run_dir)
        self._scraper = Scraper(server.url, 0.0)
        self._parts: list[SegmentRun] = []
        self._at_start: dict[str, float] = {}
        self._stopped = 0.0, 0.0  # time.perf_counter() and Unix time

    def ready(self) -> None:
        """Wait for the server and its trainer, warm up, and stop them.

        Raises:
            ServerError: The server ended, or is not ready in time.
            RuntimeError: A warm-up request failed.
        """
        self.server.wait_ready(self.view.starting)
        self.view.message(f"server ready after {self.server.startup_s:.1f} s")
        if self.options.expect_trainer and self.options.run_dir is not None:
            wait_for_trainer(self.options.run_dir, self.view)
        asyncio.run(self._warm_up())
        self._at_start = self.server.memory_mib().get("engine", {})
        self._stop()
        self._scraper.origin_s = self._stopped[0]

    async def _warm_up(self) -> None:
        async with make_session() as session:
            await warm_up(session, self.server.url)

    def serve(self, part: Sequence[StreamRequest], ends: bool) -> None:
        """Serve the requests of a slice; `ends`: they are the last of their segment.

        Raises:
            TimeoutError: The arm has run for longer than its limit.
        """
        self._resume()
        try:
            self._parts.append(asyncio.run(self._serve(part, ends)))
        finally:
            self._stop()

    def recent(self) -> str:
        """Return tokens/s of the latest slices of a domain, and the number of swaps."""
        last = self._parts[-RECENT_SLICES:]
        rate = throughput([part for part in last if part.name == last[-1].name])
        swaps = last[-1].end.value(SWAPS)
        return f"{rate or 0.0:.1f}" + (f" ({swaps:.0f} swaps)" if swaps else "")

    def _stop(self) -> None:
        self.server.pause()
        self._stopped = time.perf_counter(), time.time()

    def _resume(self) -> None:
        since, unix = self._stopped
        waited = time.perf_counter() - since
        self._scraper.origin_s += waited
        self._watch.waits.append((unix, waited))
        self.server.resume()

    async def _serve(self, part: Sequence[StreamRequest], ends: bool) -> SegmentRun:
        scraper, name = self._scraper, part[0].segment
        self.view.phase = name
        ran_s = time.perf_counter() - scraper.origin_s
        # The server closes a connection that is idle for some seconds.
        async with (
            asyncio.timeout(self.options.time_limit_s - ran_s),
            make_session() as session,
        ):
            # Start at the end of the previous slice: its last counts may be late.
            start = self._parts[-1].end if self._parts else await scraper.read(session)
            watcher = asyncio.create_task(scraper.run(session, self._on_sample))
            try:
                results = await replay(
                    session,
                    scraper.url,
                    SERVED_NAME,
                    part,
                    scraper.origin_s,
                    self.view.count,
                )
            finally:
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher
            await asyncio.sleep(SETTLE_S if ends else 0.0)
            return SegmentRun(name, start, await scraper.read(session), results)

    def _on_sample(self, sample: Scrape) -> None:
        self.server.memory_mib()
        self._watch.on_sample(sample)

    def end(self) -> ArmRun:
        """Stop the server for good; return the results of all slices."""
        self._resume()
        samples = sorted(self._scraper.samples, key=lambda sample: sample.t_s)
        name, startup_s = self.options.name, self.server.startup_s
        run = ArmRun(name, self._parts, samples, startup_s)
        close_arm(self.server, self.options, run, self._watch, self._at_start)
        failed = self.view.num_failed
        self.view.message(f"done, {len(run.results)} requests, {failed} failed")
        return run
