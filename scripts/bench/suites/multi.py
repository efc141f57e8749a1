"""The multi suite: two concurrent servers on two domains with one trainer."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.arm import (
    ArmRun,
    Hooks,
    LiveView,
    SegmentRun,
    drive,
    finish,
    segment_paths,
    stop,
    wait_for_trainer,
)
from bench.harness.common import BenchError, StoppedError, columns_text, rounded
from bench.harness.options import SuiteOptions
from bench.harness.scrape import SWAPS, Scrape
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
)
from bench.harness.summary import acceptance_length, learning_figures
from bench.harness.trainers import (
    TrainerWatch,
    trainer_facts,
    trainer_process,
    trainer_statuses,
)
from vllm_tide.speculative import merged
from vllm_tide.transport.rendezvous import read_manifests


def before_first_swap(samples: Sequence[Scrape]) -> float | None:
    """Return the acceptance length of the first draft; None without drafts."""
    ordered = sorted(samples, key=lambda sample: sample.t_s)
    if not ordered:
        return None
    first = ordered[0].value(SWAPS)
    served = [sample for sample in ordered if sample.value(SWAPS) == first]
    return rounded(acceptance_length([(served[0], served[-1])]))


PARTS = 4
"""Drained segments of each stream."""


@dataclass(frozen=True, kw_only=True)
class MultiOptions(SuiteOptions):
    """Options of the multi suite; engine i runs on the i-th of all cores."""

    model_sizes: tuple[str, ...] = ("90m",)
    domains: tuple[str, ...] = ("c", "charmaps")
    requests: tuple[int, ...] = (60, 44)
    concurrency: tuple[int, ...] = (2,)

    def check(self) -> None:
        super().check()
        if len(self.domains) < 2:
            raise BenchError("--domains: give one per server, at least two")
        if min(self.counts()) < PARTS:
            raise BenchError(f"--requests must be at least {PARTS}")

    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted({*self.engine_cpus, *self.other_cpus}))


def multi_streams(options: MultiOptions) -> dict[str, list[StreamRequest]]:
    """Return each server's stream by domain, in `PARTS` segments."""
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
            replace(request, segment=segment_name(request.index // size, domain))
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
                raise StoppedError("stopped: --max-minutes is over") from None
            except BROKEN as error:
                raise StoppedError(sentence(error)) from error

    return run_suite(options, measure)


def _measure(
    session: Session,
    options: MultiOptions,
    streams: dict[str, list[StreamRequest]],
    run_dir: Path,
) -> None:
    # Each server's engine has a separate core; the client may use all of them.
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
            session.progress.log(f"starting the server of {domain}")
            stack.enter_context(server)
            server.wait_ready(lambda _: None)
            known = {member.engine_id for member in members}
            new = [m for m in read_manifests(run_dir) if m.engine_id not in known]
            if not new:
                raise RuntimeError(f"the server of {domain} wrote no manifest")
            members.append(
                _Member(
                    domain,
                    server,
                    stream,
                    TrainerWatch(run_dir),
                    new[-1].engine_id,
                    server.memory_mib().get("engine", {}),
                )
            )
        with trainer_process(options, "multi", section, run_dir) as trainer:
            waited_s = wait_for_trainer(run_dir, LiveView("train", 0, run_dir))
            asyncio.run(_serve(session, members, run_dir))
            died = trainer.poll() is not None
        session.document.data["results"]["trainer"] = {
            "waited_for_s": round(waited_s, 1),
            "died": died,
            "last_status": trainer_facts(trainer_statuses(run_dir)),
            "events": members[0].watch.events(),
        }
        if died:
            session.document.problem("the trainer died")
        owned = segment_paths(run_dir)
        for member in members:
            _report(session, member)
    left = [path.name for path in owned if path.exists()]
    if left:
        session.document.problem(f"shared memory left behind: {', '.join(left)}")
    session.document.write()
    print(table(session.document.section("servers")), flush=True)


async def _serve(session: Session, members: list[_Member], run_dir: Path) -> None:
    async def one(member: _Member) -> None:
        hooks = Hooks(on_sample=member.watch.on_sample)
        view = LiveView(member.domain, len(member.stream), run_dir)
        member.parts, member.samples = await drive(
            member.server, member.stream, view, hooks
        )

    async with asyncio.timeout(session.left_s()):
        await asyncio.gather(*(one(member) for member in members))


def _report(session: Session, member: _Member) -> None:
    parts, samples = member.parts or [], member.samples or []
    run = ArmRun(member.domain, parts, samples, member.server.startup_s)
    finish(member.server, run, member.at_start)
    stop(member.server, run, None)
    figures = learning_figures(run, member.stream, member.watch)
    # The trainer's figures are reported once.
    for key in ("events", "trainers", "training_s"):
        figures.pop(key)
    last = figures["segments"][-1]["acceptance_length"] if parts else None
    first = before_first_swap(samples)
    figures |= {
        "engine_id": member.engine_id,
        "engine_cpus": list(member.server.options.engine_cpus),
        "acceptance_length_before_first_swap": first,
        "acceptance_length_last_part": last,
        "improved": None if first is None or last is None else last > first,
        "longest_gap_s": round(max((r.max_gap_s for r in run.results), default=0.0), 3),
    }
    session.document.section("servers")[member.domain] = figures
    for problem in run.problems:
        session.document.problem(f"{member.domain}: {problem}")
    if figures["failed_requests"]:
        session.document.problem(
            f"{member.domain}: {figures['failed_requests']} requests failed"
        )


def table(servers: dict[str, Any]) -> str:
    figures = list(servers.values())
    rows = {
        "tokens/s": [f["output_tokens_per_s"] for f in figures],
        "first": [f["acceptance_length_before_first_swap"] for f in figures],
        "last": [f["acceptance_length_last_part"] for f in figures],
        "swaps": [f["swaps"]["count"] for f in figures],
    }
    return columns_text(12, list(servers), rows)
