"""One arm: a server, the whole stream, and the counters around it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from vllm_tide.transport.rendezvous import read_manifests

from .client import RequestResult, make_session, replay, send
from .live import LiveView, trainer_statuses
from .scrape import Scrape, Scraper
from .server import SERVED_NAME, ServerOptions, VllmServer
from .stream import StreamRequest, segments
from .summary import ArmRun, SegmentRun

# The API server adds a step's counts after it has handed out the step's tokens.
SETTLE_S = 0.5
TRAINER_TIMEOUT_S = 180.0
WARM_UP_TOKENS = 48
WARM_UP_PROMPTS = ("The quick brown fox", "import os\n", "int main(", "<html>")


@dataclass(frozen=True, slots=True)
class ArmOptions:
    """What to run and for how long at most."""

    name: str
    server: ServerOptions
    run_dir: Path | None = None  # where the trainer writes its status
    time_limit_s: float = 900.0
    expect_trainer: bool = False


async def _warm_up(session: aiohttp.ClientSession, url: str) -> None:
    """Send a few requests that are not measured."""
    tasks = [
        send(
            session,
            url,
            SERVED_NAME,
            StreamRequest(i, "warm_up", False, "", prompt, WARM_UP_TOKENS, 4),
            time.perf_counter(),
        )
        for i, prompt in enumerate(WARM_UP_PROMPTS)
    ]
    for result in await asyncio.gather(*tasks):
        if result.error is not None:
            raise RuntimeError(f"warm-up request failed: {result.error}")


def wait_for_trainer(
    run_dir: Path, view: LiveView, timeout_s: float = TRAINER_TIMEOUT_S
) -> float:
    """Wait until the trainer has attached to the ring; return the seconds it took.

    The stream measures adaptation, not the import of torch on a busy core.  A trainer
    that never comes is found by the checks at the end.
    """
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < timeout_s:
        states = [status.get("state") for status in trainer_statuses(run_dir)]
        if any(state not in (None, "starting") for state in states):
            break
        view.starting(waited_s)
        time.sleep(0.5)
    view.message(f"trainer waited for {waited_s:.1f} s")
    return waited_s


async def _run_segment(
    session: aiohttp.ClientSession,
    part: Sequence[StreamRequest],
    scraper: Scraper,
    view: LiveView,
) -> SegmentRun:
    """Replay one segment and read the counters at its two edges."""
    view.phase = part[0].segment

    def on_result(result: RequestResult) -> None:
        view.num_done += 1
        if result.error is not None:
            view.num_failed += 1
            view.message(f"request {result.index} failed: {result.error}")

    start = await scraper.read(session)
    results = await replay(
        session, scraper.url, SERVED_NAME, part, scraper.origin_s, on_result
    )
    await asyncio.sleep(SETTLE_S)
    end = await scraper.read(session)
    return SegmentRun(part[0].segment, start, end, results)


async def _drive(
    server: VllmServer, stream: Sequence[StreamRequest], view: LiveView
) -> tuple[list[SegmentRun], list[Scrape]]:
    async with make_session() as session:
        await _warm_up(session, server.url)
        await asyncio.sleep(SETTLE_S)
        scraper = Scraper(server.url, time.perf_counter())

        def on_sample(sample: Scrape) -> None:
            server.memory_mib()
            view.sample(sample)

        watcher = asyncio.create_task(scraper.run(session, on_sample))
        try:
            runs = [
                await _run_segment(session, part, scraper, view)
                for part in segments(stream)
            ]
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        return runs, sorted(scraper.samples, key=lambda sample: sample.t_s)


async def _drive_limited(
    server: VllmServer,
    stream: Sequence[StreamRequest],
    view: LiveView,
    time_limit_s: float,
) -> tuple[list[SegmentRun], list[Scrape]]:
    async with asyncio.timeout(time_limit_s):
        return await _drive(server, stream, view)


def _check_trainer(server: VllmServer, run: ArmRun, expected: bool) -> None:
    num_trainers = len(server.processes().get("trainer", []))
    if expected and num_trainers == 0:
        run.problems.append("the trainer did not run at the end of the stream")
    if not expected and num_trainers:
        run.problems.append("a trainer ran in an arm that has none")


def _segments(run_dir: Path | None) -> list[Path]:
    """Return the shared-memory segments that the run's engines own."""
    manifests = read_manifests(run_dir) if run_dir and run_dir.exists() else []
    names = [name for m in manifests for name in (m.ring, m.weights)]
    return [Path("/dev/shm") / name for name in names]  # noqa: S108 - where POSIX puts them


def run_arm(options: ArmOptions, stream: Sequence[StreamRequest]) -> ArmRun:
    """Start a server, replay the stream, stop the server.

    Raises:
        ServerError: The server did not start.
        TimeoutError: The stream took longer than ``time_limit_s``.
    """
    view = LiveView(options.name, len(stream), options.run_dir)
    with VllmServer(options.server) as server:
        server.wait_ready(view.starting)
        view.message(f"server ready after {server.startup_s:.1f} s")
        if options.expect_trainer and options.run_dir is not None:
            wait_for_trainer(options.run_dir, view)
        memory = {"at_start": server.memory_mib().get("engine", {})}
        parts, samples = asyncio.run(
            _drive_limited(server, stream, view, options.time_limit_s)
        )
        run = ArmRun(options.name, parts, samples, server.startup_s)
        run.problems += [
            f"not pinned: {thread}" for thread in server.misplaced_threads()
        ]
        _check_trainer(server, run, options.expect_trainer)
        memory["at_end"] = server.memory_mib().get("engine", {})
        memory |= {f"peak_{role}": peak for role, peak in server.peak_mib.items()}
        run.memory = {
            part: {f"{name}_mib": round(mib, 1) for name, mib in values.items()}
            for part, values in memory.items()
        }
        run.trainers = trainer_statuses(options.run_dir)
        if not server.alive():
            run.problems.append("the server died")
        segments_owned = _segments(options.run_dir)
        if not server.stop():
            run.problems.append("the server had to be killed")
        left = [path.name for path in segments_owned if path.exists()]
        if left:
            run.problems.append(f"shared memory left behind: {', '.join(left)}")
    view.message(f"done, {len(run.results)} requests, {view.num_failed} failed")
    return run
