"""Run of one arm: server, request stream, counters, and a live view."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from bench.harness.client import RequestResult, make_session, replay, send
from bench.harness.scrape import (
    ACCEPTED,
    DRAFT_VERSION,
    DRAFTS,
    GENERATED,
    SWAPS,
    Scrape,
    Scraper,
)
from bench.harness.server import SERVED_NAME, ServerOptions, VllmServer
from bench.harness.stream import StreamRequest, segments
from bench.harness.trainers import TrainerWatch, trainer_statuses
from vllm_tide.transport.rendezvous import read_manifests

PLAIN_PERIOD_S = 5.0
# Rates are taken over this many of the latest samples.
WINDOW_SAMPLES = 6


@dataclass(slots=True)
class LiveView:
    """Progress display of one arm."""

    arm: str
    num_requests: int
    run_dir: Path | None = None
    out: TextIO = field(default_factory=lambda: sys.stdout)
    num_done: int = 0
    num_failed: int = 0
    phase: str = "start"
    _recent: list[Scrape] = field(default_factory=list)
    _drawn_lines: int = 0
    _last_plain: float = -PLAIN_PERIOD_S

    def message(self, text: str) -> None:
        self._drawn_lines = 0
        self.out.write(f"[{self.arm:>6}] {text}\n")
        self.out.flush()

    def starting(self, elapsed_s: float) -> None:
        now = time.monotonic()
        if now - self._last_plain >= 2 * PLAIN_PERIOD_S:
            self._last_plain = now
            self.message(f"server starting, {elapsed_s:.0f} s")

    def count(self, result: RequestResult) -> None:
        self.num_done += 1
        if result.error is not None:
            self.num_failed += 1
            self.message(f"request {result.index} failed: {result.error}")

    def sample(self, scrape: Scrape) -> None:
        self._recent = [*self._recent, scrape][-WINDOW_SAMPLES:]
        row = self.row()
        if self.out.isatty():
            self._draw(row)
        elif time.monotonic() - self._last_plain >= PLAIN_PERIOD_S:
            self._last_plain = time.monotonic()
            self.message("  ".join(f"{k} {v}" for k, v in row.items()))

    def row(self) -> Mapping[str, str]:
        last, first = self._recent[-1], self._recent[0]
        seconds = last.t_s - first.t_s
        tokens = last.value(GENERATED) - first.value(GENERATED)
        drafts = last.value(DRAFTS) - first.value(DRAFTS)
        accepted = last.value(ACCEPTED) - first.value(ACCEPTED)
        capacity = last.value("vllm_tide:ring_capacity_bytes")
        used = last.value("vllm_tide:ring_used_bytes")
        cells = {
            "t": f"{last.t_s:.0f}s",
            "phase": self.phase,
            "requests": f"{self.num_done}/{self.num_requests}",
            "tokens/s": f"{tokens / seconds:.1f}" if seconds > 0 else "-",
            "accept": f"{1 + accepted / drafts:.2f}" if drafts > 0 else "-",
        }
        if last.has(DRAFT_VERSION):
            cells["draft"] = f"v{last.value(DRAFT_VERSION):.0f}"
            cells["swaps"] = f"{last.value(SWAPS):.0f}"
            cells["ring"] = f"{100 * used / capacity:.1f}%" if capacity else "-"
        for status in trainer_statuses(self.run_dir):
            loss = status.get("loss")
            cells["trainer"] = str(status.get("state", "-"))
            cells["loss"] = f"{loss:.3f}" if isinstance(loss, int | float) else "-"
        if self.num_failed:
            cells["FAILED"] = str(self.num_failed)
        return cells

    def _draw(self, row: Mapping[str, str]) -> None:
        widths = [max(len(k), len(v), 8) for k, v in row.items()]
        names = "  ".join(k.rjust(w) for k, w in zip(row, widths, strict=True))
        body = "  ".join(v.rjust(w) for v, w in zip(row.values(), widths, strict=True))
        if self._drawn_lines:
            self.out.write(f"\x1b[{self._drawn_lines}A")
        lines = [f"arm {self.arm}", names, body]
        self.out.write("".join(f"\x1b[2K{line}\n" for line in lines))
        self.out.flush()
        self._drawn_lines = len(lines)


# The API server updates its counters after it has sent the step's tokens.
SETTLE_S = 0.5
TRAINER_TIMEOUT_S = 180.0
WARM_UP_TOKENS = 48
WARM_UP_PROMPTS = ("The quick brown fox", "import os\n", "int main(", "<html>")


@dataclass(frozen=True, slots=True)
class ArmOptions:
    """An arm to run, and its time limit."""

    name: str
    server: ServerOptions
    run_dir: Path | None = None  # where the trainer writes its status
    time_limit_s: float = 900.0
    expect_trainer: bool = False


@dataclass(frozen=True, slots=True)
class Hooks:
    """A suite's callbacks while an arm runs."""

    # Called with every periodic reading of the metrics.
    on_sample: Callable[[Scrape], None] = lambda _: None
    # Called with every finished request.
    on_result: Callable[[RequestResult], None] = lambda _: None
    # Called after each segment, while nothing is in flight.
    between: Callable[[SegmentRun], None] = lambda _: None


NO_HOOKS = Hooks()


async def warm_up(session: aiohttp.ClientSession, url: str) -> None:
    tasks = [
        send(
            session,
            url,
            SERVED_NAME,
            StreamRequest(i, "warm_up", "", prompt, WARM_UP_TOKENS, 4),
            time.perf_counter(),
        )
        for i, prompt in enumerate(WARM_UP_PROMPTS)
    ]
    for result in await asyncio.gather(*tasks):
        if result.error is not None:
            raise RuntimeError(f"warm-up request failed: {result.error}")


def has_trainer(run_dir: Path) -> bool:
    """Return whether a trainer has attached to its engine."""
    states = [status.get("state") for status in trainer_statuses(run_dir)]
    return any(state not in (None, "starting") for state in states)


def wait_for_trainer(
    run_dir: Path, view: LiveView, timeout_s: float = TRAINER_TIMEOUT_S
) -> float:
    """Wait until the trainer has attached to the ring; return the seconds."""
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < timeout_s:
        if has_trainer(run_dir):
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
    view.phase = part[0].segment

    def on_result(result: RequestResult) -> None:
        hooks.on_result(result)
        view.count(result)

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
    limit_s: float | None = None,
) -> tuple[list[SegmentRun], list[Scrape]]:
    """Warm up the server and replay the stream; return segments and readings.

    Raises:
        TimeoutError: The replay took longer than `limit_s`.
    """
    async with asyncio.timeout(limit_s), make_session() as session:
        await warm_up(session, server.url)
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
        replayed = asyncio.create_task(replay_all())
        try:
            # Report a failure of the watcher at once, not at the end of the stream.
            done, _ = await asyncio.wait(
                {watcher, replayed}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            runs = replayed.result()
        finally:
            for task in (watcher, replayed):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        return runs, sorted(scraper.samples, key=lambda sample: sample.t_s)


def _check_trainer(server: VllmServer, run: ArmRun, expected: bool) -> None:
    num_trainers = len(server.processes().get("trainer", []))
    if expected and num_trainers == 0:
        run.problems.append("the trainer did not run at the end of the stream")
    if not expected and num_trainers:
        run.problems.append("a trainer ran in an arm that has none")


def segment_paths(run_dir: Path | None) -> list[Path]:
    """Return the shared-memory segments of the run's engines."""
    manifests = read_manifests(run_dir) if run_dir and run_dir.exists() else []
    names = [name for m in manifests for name in (m.ring, m.weights)]
    # An engine without capture or swaps has no segment for it.
    return [Path("/dev/shm") / name for name in names if name]


def run_arm(options: ArmOptions, stream: Sequence[StreamRequest]) -> ArmRun:
    """Start a server, replay the stream, stop the server."""
    view = LiveView(options.name, len(stream), options.run_dir)
    watch = TrainerWatch(options.run_dir)

    with VllmServer(options.server) as server:
        server.wait_ready(view.starting)
        view.message(f"server ready after {server.startup_s:.1f} s")
        at_start = server.memory_mib().get("engine", {})
        hooks = Hooks(on_sample=watch.on_sample)
        parts, samples = asyncio.run(
            drive(server, stream, view, hooks, options.time_limit_s)
        )
        run = ArmRun(options.name, parts, samples, server.startup_s)
        close_arm(server, options, run, watch, at_start)
    view.message(f"done, {len(run.results)} requests, {view.num_failed} failed")
    return run


def close_arm(
    server: VllmServer,
    options: ArmOptions,
    run: ArmRun,
    watch: TrainerWatch,
    at_start: dict[str, float],
) -> None:
    """Record the final state of server and trainer in the run; stop the server."""
    finish(server, run, at_start)
    _check_trainer(server, run, options.expect_trainer)
    run.trainers = trainer_statuses(options.run_dir)
    run.events = watch.events()
    stop(server, run, options.run_dir)


def finish(server: VllmServer, run: ArmRun, at_start: dict[str, float]) -> None:
    """Record misplaced threads and memory use at the end of the run."""
    run.problems += [f"not pinned: {thread}" for thread in server.misplaced_threads()]
    memory = {"at_start": at_start, "at_end": server.memory_mib().get("engine", {})}
    memory |= {f"peak_{role}": peak for role, peak in server.peak_mib.items()}
    run.memory = {
        part: {f"{name}_mib": round(mib, 1) for name, mib in values.items()}
        for part, values in memory.items()
    }


def stop(server: VllmServer, run: ArmRun, run_dir: Path | None) -> None:
    """Stop the server and record leaked shared memory in the run."""
    if not server.alive():
        run.problems.append("the server died")
    owned = segment_paths(run_dir)
    if not server.stop():
        run.problems.append("the server had to be killed")
    left = [path.name for path in owned if path.exists()]
    if left:
        run.problems.append(f"shared memory left behind: {', '.join(left)}")


@dataclass(slots=True)
class SegmentRun:
    """One drained segment: its requests, and the counters before and after."""

    name: str
    start: Scrape
    end: Scrape
    results: list[RequestResult]

    @property
    def duration_s(self) -> float:
        ends = [r.end_s for r in self.results if r.end_s is not None]
        return max(ends) - min(r.start_s for r in self.results)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.results)


@dataclass(slots=True)
class ArmRun:
    """Outcome of one arm."""

    name: str
    segments: list[SegmentRun]
    samples: list[Scrape]
    startup_s: float
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # Last status file of each trainer.
    trainers: list[dict[str, object]] = field(default_factory=list)
    # Events of all trainers; `t_s` is seconds since the run's start.
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def results(self) -> list[RequestResult]:
        return [r for segment in self.segments for r in segment.results]

    @property
    def rollbacks(self) -> list[dict[str, Any]]:
        keys = "unix", "version", "to", "reason"
        events = [event for event in self.events if event["event"] == "rollback"]
        return [{key: event.get(key) for key in keys} for event in events]
