"""The multi suite: two servers on two domains, one trainer for both.

Both streams run at the same time. In the middle the second server is stopped for some
seconds (SIGSTOP): the first must go on serving and being swapped meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from bench.harness.arm import (
    ArmRun,
    Hooks,
    LiveView,
    SegmentRun,
    drive,
    finish,
    owned_segments,
    stop,
    wait_for_trainer,
)
from bench.harness.common import BenchError, StoppedError, number, rounded
from bench.harness.options import SuiteOptions, option
from bench.harness.scrape import GENERATED, SWAPS, Scrape
from bench.harness.server import BROKEN, VllmServer, sentence
from bench.harness.session import (
    Session,
    draft_config,
    run_suite,
    server_options,
    trained_section,
)
from bench.harness.stream import (
    StreamRequest,
    read_domains,
    segment_name,
    shift_stream,
    stretches,
)
from bench.harness.summary import acceptance_length, learning_figures
from bench.harness.trainers import (
    Look,
    TrainerWatch,
    trainer_facts,
    trainer_process,
    trainer_statuses,
)
from vllm_tide.speculative import merged
from vllm_tide.transport.rendezvous import read_manifests


def before_first_swap(samples: Sequence[Scrape]) -> float | None:
    """Acceptance length of the first draft; None if nothing was drafted."""
    ordered = sorted(samples, key=lambda sample: sample.t_s)
    if not ordered:
        return None
    first = ordered[0].value(SWAPS)
    under = [sample for sample in ordered if sample.value(SWAPS) == first]
    return rounded(acceptance_length([(under[0], under[-1])]))


def install_lags(looks: Sequence[Look], engine: str) -> list[float]:
    """Seconds from publication to installation of each draft of an engine.

    Known to about a second, the period of the looks. A head that a newer one overtook
    counts as installed with it.
    """
    sent: dict[int, float] = {}
    lags: list[float] = []
    for look in looks:
        told = look.engines.get(engine, {})
        published, installed = (
            number(told.get(key)) for key in ("published", "installed")
        )
        if published:
            sent.setdefault(int(published), look.t_s)
        for version in [v for v in sent if installed is not None and v <= installed]:
            lags.append(round(look.t_s - sent.pop(version), 2))
    return lags


def stretch_figures(
    samples: Sequence[Scrape], start_s: float, end_s: float
) -> dict[str, Any]:
    """Figures of a server between two moments."""
    inside = sorted(
        (sample for sample in samples if start_s <= sample.t_s <= end_s),
        key=lambda sample: sample.t_s,
    )
    if len(inside) < 2:
        return {
            "seconds": None,
            "output_tokens_per_s": None,
            "swaps": None,
            "longest_pause_s": None,
        }
    first, last = inside[0], inside[-1]
    seconds = last.t_s - first.t_s
    longest = waited = 0.0
    for before, after in pairwise(inside):
        still = after.value(GENERATED) <= before.value(GENERATED)
        waited = waited + after.t_s - before.t_s if still else 0.0
        longest = max(longest, waited)
    generated = last.value(GENERATED) - first.value(GENERATED)
    return {
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(generated / seconds, 2) if seconds > 0 else None,
        "swaps": int(last.value(SWAPS) - first.value(SWAPS)),
        "longest_pause_s": round(longest, 2),
    }


PARTS = 4
"""Drained stretches of each stream."""
STALL_AT = 0.5
"""Share of the first server's requests after which the second one is stopped."""


@dataclass(frozen=True, kw_only=True)
class MultiOptions(SuiteOptions):
    """Options of the multi suite; engine i runs on the i-th of all cores."""

    model_sizes: tuple[str, ...] = ("90m",)
    domains: tuple[str, ...] = ("c", "charmaps")
    requests: tuple[int, ...] = (60, 44)
    concurrency: tuple[int, ...] = (2,)
    stall_s: float = option(8.0, "of the last server in the middle; 0 is none")
    window_s: float = option(10.0, "of curves over time")

    def check(self) -> None:
        super().check()
        if len(self.domains) < 2:
            raise BenchError("--domains: one for each server, at least two")
        if min(self.counts()) < PARTS:
            raise BenchError(f"--requests is at least {PARTS}")
        if self.stall_s < 0 or self.window_s <= 0:
            raise BenchError("--stall-s and --window-s are not negative")

    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted({*self.engine_cpus, *self.other_cpus}))


def multi_streams(options: MultiOptions) -> dict[str, list[StreamRequest]]:
    """Each server's stream by domain, in `PARTS` stretches."""
    out = {}
    for domain, count in zip(options.domains, options.counts(), strict=True):
        stream = shift_stream(
            read_domains(options.prompts, (domain,)),
            [count],
            options.output_tokens,
            options.concurrency,
            options.seed,
        )
        size = -(-count // PARTS)
        out[domain] = [
            replace(request, phase=segment_name(request.index // size, domain))
            for request in stream
        ]
    return out


@dataclass
class _Member:
    """One server and its stream."""

    domain: str
    server: VllmServer
    stream: list[StreamRequest]
    watch: TrainerWatch
    engine_id: str
    at_start: dict[str, float]
    num_done: int = 0
    parts: list[SegmentRun] | None = None
    samples: list[Scrape] | None = None


def run(options: MultiOptions) -> int:
    options.check()
    streams = multi_streams(options)

    def measure(session: Session) -> None:
        with session.run_dir("multi") as run_dir:
            try:
                _measure(session, options, streams, run_dir)
            except TimeoutError:
                raise StoppedError("cut off: --max-minutes is over") from None
            except BROKEN as error:
                raise StoppedError(sentence(error)) from error

    return run_suite(options, measure)


def _measure(
    session: Session,
    options: MultiOptions,
    streams: dict[str, list[StreamRequest]],
    run_dir: Path,
) -> None:
    # Each server's engine has a core of its own; what drives them belongs to neither.
    os.sched_setaffinity(0, options.cpus())
    section = merged(
        trained_section(options, run_dir, {"train": {"cpus": list(options.cpus())}}),
        {"train": {"autostart": False}},
    )
    with contextlib.ExitStack() as stack:
        members: list[_Member] = []
        for place, (domain, stream) in enumerate(streams.items()):
            session.left_s()
            cpus = options.cpus()
            server = VllmServer(
                server_options(
                    options,
                    session.target.path,
                    f"multi-{domain}",
                    draft_config(options, str(options.draft), section),
                    engine_cpus=(cpus[place % len(cpus)],),
                    other_cpus=cpus,
                )
            )
            session.say(f"starting the server of {domain}")
            stack.enter_context(server)
            server.wait_ready(lambda _: None)
            known = {member.engine_id for member in members}
            found = [m for m in read_manifests(run_dir) if m.engine_id not in known]
            if not found:
                raise RuntimeError(f"the server of {domain} did not announce itself")
            members.append(
                _Member(
                    domain,
                    server,
                    stream,
                    TrainerWatch(run_dir),
                    found[-1].engine_id,
                    server.memory_mib().get("engine", {}),
                )
            )
        with trainer_process(options, "multi", section, run_dir) as trainer:
            waited_s = wait_for_trainer(run_dir, LiveView("train", 0, run_dir))
            stall = asyncio.run(_serve(session, options, members, run_dir))
            died = trainer.poll() is not None
        session.document.results["trainer"] = {
            "waited_for_s": round(waited_s, 1),
            "died": died,
            "last_status": trainer_facts(trainer_statuses(run_dir)),
            "events": members[0].watch.events(),
        }
        if died:
            session.document.problem("the trainer died")
        owned = owned_segments(run_dir)
        for member in members:
            _report(session, options, member, stall)
    left = [path.name for path in owned if path.exists()]
    if left:
        session.document.problem(f"shared memory left behind: {', '.join(left)}")
    session.document.write()
    print(table(session.document.section("servers")), flush=True)


async def _serve(
    session: Session, options: MultiOptions, members: list[_Member], run_dir: Path
) -> tuple[float, float] | None:
    stalled: list[tuple[float, float]] = []

    async def one(member: _Member) -> None:
        def done(_: object) -> None:
            member.num_done += 1

        hooks = Hooks(on_sample=member.watch.on_sample, on_result=done)
        view = LiveView(member.domain, len(member.stream), run_dir)
        member.parts, member.samples = await drive(
            member.server, member.stream, view, hooks
        )

    async def stall() -> None:
        first, last = members[0], members[-1]
        while first.num_done < STALL_AT * len(first.stream):
            await asyncio.sleep(0.2)
        session.say(f"stopping the server of {last.domain} for {options.stall_s:g} s")
        began = time.time()
        # Not in a thread: the processes are found before the first is stopped.
        processes = [p for part in last.server.processes().values() for p in part]
        try:
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            await asyncio.sleep(options.stall_s)
        finally:
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.resume()
        stalled.append((began, time.time()))

    async with asyncio.timeout(session.left_s()):
        beside = asyncio.create_task(stall()) if options.stall_s else None
        try:
            await asyncio.gather(*(one(member) for member in members))
        finally:
            if beside is not None:
                beside.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await beside
    return stalled[0] if stalled else None


def _report(
    session: Session,
    options: MultiOptions,
    member: _Member,
    stall: tuple[float, float] | None,
) -> None:
    parts, samples = member.parts or [], member.samples or []
    run = ArmRun(member.domain, parts, samples, member.server.startup_s)
    finish(member.server, run, member.at_start)
    stop(member.server, run, None)
    figures = learning_figures(
        run, member.stream, stretches(member.stream), member.watch, options.window_s
    )
    # The trainer's own are reported once.
    for key in ("events", "trainers", "training_s"):
        figures.pop(key)
    lags = install_lags(member.watch.looks, member.engine_id)
    last = figures["segments"][-1]["acceptance_length"] if parts else None
    first = before_first_swap(samples)
    figures |= {
        "engine_id": member.engine_id,
        "engine_cpus": list(member.server.options.engine_cpus),
        "acceptance_length_before_first_swap": first,
        "acceptance_length_last_part": last,
        "improved": None if first is None or last is None else last > first,
        "install_lag_s": {
            "heads": len(lags),
            "p50": statistics.median(lags) if lags else None,
            "max": max(lags, default=None),
        },
        "longest_gap_s": round(max((r.max_gap_s for r in run.results), default=0.0), 3),
        "while_last_server_stopped": None,
    }
    if stall is not None:
        start_s, end_s = (member.watch.seconds_of(unix) for unix in stall)
        if start_s is not None and end_s is not None:
            found = stretch_figures(samples, start_s, end_s)
            figures["while_last_server_stopped"] = found
    session.document.section("servers")[member.domain] = figures
    for problem in run.problems:
        session.document.problem(f"{member.domain}: {problem}")
    if figures["failed_requests"]:
        session.document.problem(
            f"{member.domain}: {figures['failed_requests']} requests failed"
        )


def table(servers: dict[str, Any]) -> str:
    lines = [
        f"{'server':12}{'tokens/s':>10}{'first':>8}{'last':>8}{'swaps':>7}"
        f"{'lag p50':>9}{'while other stopped':>22}"
    ]
    for name, figures in servers.items():
        stopped = (figures["while_last_server_stopped"] or {}).get(
            "output_tokens_per_s"
        )
        cells = (
            figures["output_tokens_per_s"],
            figures["acceptance_length_before_first_swap"],
            figures["acceptance_length_last_part"],
            figures["swaps"]["count"],
            figures["install_lag_s"]["p50"],
            stopped,
        )
        widths = (10, 8, 8, 7, 9, 22)
        text = "".join(
            ("-" if cell is None else f"{cell:g}").rjust(width)
            for cell, width in zip(cells, widths, strict=True)
        )
        lines.append(f"{name:12}{text}")
    return "\n".join(lines)
