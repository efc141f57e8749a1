"""One arm: a server, the whole stream, and the counters around it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from vllm_tide.transport.rendezvous import read_manifests

from .client import RequestResult, make_session, replay, send
from .learning_events import read_events
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


async def _nothing_beside(_server: VllmServer, _scraper: Scraper) -> None:
    return


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a suite does while an arm runs.

    Attributes:
        on_sample: Given every periodic reading of the metrics.
        on_result: Given every request that ended.
        beside: Runs beside the stream, after the warm-up; cancelled at its end. What
            it raises ends the arm.
        between: Called after each segment, while nothing is in flight.
        before_stop: Called when the stream is over and the server still up.
    """

    on_sample: Callable[[Scrape], None] = lambda _: None
    on_result: Callable[[RequestResult], None] = lambda _: None
    beside: Callable[[VllmServer, Scraper], Coroutine[None, None, None]] = (
        _nothing_beside
    )
    between: Callable[[SegmentRun], None] = lambda _: None
    before_stop: Callable[[VllmServer], None] = lambda _: None


NO_HOOKS = Hooks()


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
    hooks: Hooks,
) -> SegmentRun:
    """Replay one segment and read the counters at its two edges."""
    view.phase = part[0].segment

    def on_result(result: RequestResult) -> None:
        hooks.on_result(result)
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


async def drive(
    server: VllmServer,
    stream: Sequence[StreamRequest],
    view: LiveView,
    hooks: Hooks = NO_HOOKS,
) -> tuple[list[SegmentRun], list[Scrape]]:
    """Warm the server up and replay the stream; return its segments and readings."""
    async with make_session() as session:
        await _warm_up(session, server.url)
        await asyncio.sleep(SETTLE_S)
        scraper = Scraper(server.url, time.perf_counter())

        def on_sample(sample: Scrape) -> None:
            server.memory_mib()
            view.sample(sample)
            hooks.on_sample(sample)

        async def replay_all() -> list[SegmentRun]:
            runs = []
            for part in segments(stream):
                runs.append(await _run_segment(session, part, scraper, view, hooks))
                hooks.between(runs[-1])
            return runs

        watcher = asyncio.create_task(scraper.run(session, on_sample))
        beside = asyncio.create_task(hooks.beside(server, scraper))
        replayed = asyncio.create_task(replay_all())
        tasks = {watcher, beside, replayed}
        try:
            # A task that fails beside the stream must not be found out at its end.
            waiting: set[asyncio.Task[Any]] = set(tasks)
            while replayed in waiting:
                done, waiting = await asyncio.wait(
                    waiting, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
            runs = replayed.result()
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        return runs, sorted(scraper.samples, key=lambda sample: sample.t_s)


async def _drive_limited(
    server: VllmServer,
    stream: Sequence[StreamRequest],
    view: LiveView,
    time_limit_s: float,
    hooks: Hooks,
) -> tuple[list[SegmentRun], list[Scrape]]:
    async with asyncio.timeout(time_limit_s):
        return await drive(server, stream, view, hooks)


def _check_trainer(server: VllmServer, run: ArmRun, expected: bool) -> None:
    num_trainers = len(server.processes().get("trainer", []))
    if expected and num_trainers == 0:
        run.problems.append("the trainer did not run at the end of the stream")
    if not expected and num_trainers:
        run.problems.append("a trainer ran in an arm that has none")


def owned_segments(run_dir: Path | None) -> list[Path]:
    """Return the shared-memory segments that the run's engines own."""
    manifests = read_manifests(run_dir) if run_dir and run_dir.exists() else []
    names = [name for m in manifests for name in (m.ring, m.weights)]
    # An engine that captures or swaps nothing has no segment for it.
    return [Path("/dev/shm") / name for name in names if name]  # noqa: S108 - where POSIX puts them


def run_arm(
    options: ArmOptions, stream: Sequence[StreamRequest], hooks: Hooks = NO_HOOKS
) -> ArmRun:
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
        at_start = server.memory_mib().get("engine", {})
        parts, samples = asyncio.run(
            _drive_limited(server, stream, view, options.time_limit_s, hooks)
        )
        hooks.before_stop(server)
        run = ArmRun(options.name, parts, samples, server.startup_s)
        finish(server, run, at_start)
        _check_trainer(server, run, options.expect_trainer)
        run.trainers = trainer_statuses(options.run_dir)
        run.rollbacks = [
            {key: event.get(key) for key in ("unix", "version", "to", "reason")}
            for event in (read_events(options.run_dir) if options.run_dir else ())
            if event["event"] == "rollback"
        ]
        stop(server, run, options.run_dir)
    view.message(f"done, {len(run.results)} requests, {view.num_failed} failed")
    return run


def finish(server: VllmServer, run: ArmRun, at_start: dict[str, float]) -> None:
    """Note in the run where the server's threads and memory are at the end."""
    run.problems += [f"not pinned: {thread}" for thread in server.misplaced_threads()]
    memory = {"at_start": at_start, "at_end": server.memory_mib().get("engine", {})}
    memory |= {f"peak_{role}": peak for role, peak in server.peak_mib.items()}
    run.memory = {
        part: {f"{name}_mib": round(mib, 1) for name, mib in values.items()}
        for part, values in memory.items()
    }


def stop(server: VllmServer, run: ArmRun, run_dir: Path | None) -> None:
    """Stop the server and note in the run what it left behind."""
    if not server.alive():
        run.problems.append("the server died")
    owned = owned_segments(run_dir)
    if not server.stop():
        run.problems.append("the server had to be killed")
    left = [path.name for path in owned if path.exists()]
    if left:
        run.problems.append(f"shared memory left behind: {', '.join(left)}")
