"""Steady load with a swap every few seconds: `python -m tests.faults.soak`.

The same scene as the faults' without the faults: server, trainer, known outputs. Each
minute it reads memory, file descriptors, shared memory and latency; whether they are
flat is decided in `flat.py`. With `--everything` each minute has events of
`operating.py`, and latency is reported but not checked.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp

from bench.harness.common import environment

from .command import add_places, run_command, say_since
from .counters import total
from .flat import CRITERION, grown, growth
from .leaks import usage_of
from .load import Load
from .operating import TENANT, Event, plan_events
from .reference import Known
from .report import write
from .scene import NotRecovered, Places, Scene, serving
from .trainer import AGAIN, order

TOKENS = (24, 24)
"""Output tokens of every request: latencies of all minutes are of the same work."""
MIXED_TOKENS = (24, 160)
EVERYTHING: dict[str, dict[str, object]] = {
    "capture": {"ring_mib": 32},  # a second of a real model's rows
    "test_time": {
        "memory": "ngram",
        "adapt": "shared",
        "min_tokens": 64,  # some of `MIXED_TOKENS` are long
        "stride": 32,
    },
}
EVERYTHING_KV_BYTES = 256 << 20
XARGS = {"tide_tenant": TENANT, "tide_slo_tpot_ms": 500.0}
FAULTS = "vllm_tide:faults_total"
COUNTERS = {
    "swaps": "vllm_tide:swaps_total",
    "tokens": "vllm:generation_tokens_total",
    "rows": "vllm_tide:captured_rows_total",
}
SETTINGS = ("minutes", "swap_s", "clients", "seed", "everything", "num_prompts")


async def soak(
    places: Places,
    known: Sequence[Known],
    args: argparse.Namespace,
    on_minute: Callable[[dict[str, float]], None],
    events: Counter[str],
) -> list[str]:
    """Run the load and return what went wrong.

    Args:
        places: Folders.
        known: What is asked.
        args: Of the command line.
        on_minute: Called with each minute's figures.
        events: Counts the events that had their effect, by name.

    Raises:
        ServerError: The server does not start.
    """
    problems: list[str] = []
    loads: list[Load] = []
    everything: bool = args.everything
    plan = plan_events(args.minutes) if everything else [[]] * args.minutes
    more = {"knobs": EVERYTHING, "kv_bytes": EVERYTHING_KV_BYTES} if everything else {}
    rng = random.Random(args.seed)  # noqa: S311 - not cryptographic

    def load(session: aiohttp.ClientSession) -> Load:
        tokens = MIXED_TOKENS if everything else TOKENS
        loads.append(Load(session, known, args.seed, args.clients, tokens))
        loads[0].extra = {"vllm_xargs": XARGS} if everything else None
        return loads[0]

    try:
        async with serving(places, load, **more) as scene:
            swaps = asyncio.create_task(_swap(scene, args.swap_s))
            try:
                for some in plan:
                    acts = asyncio.create_task(_events(scene, some, rng, events))
                    figures = await _minute(scene, acts)
                    problems += acts.result()
                    on_minute(figures)
                    wrong = scene.load.take_problems()
                    print("".join(f"problem: {one}\n" for one in wrong), end="")
                    problems += wrong
            finally:
                swaps.cancel()
    except NotRecovered as error:
        problems += [*loads[0].take_problems(), str(error)]
    return problems


async def _swap(scene: Scene, period_s: float) -> None:
    """Publish the good draft again and again; an engine installs it as any other."""
    while True:
        async with scene.ordering:
            order(scene.run_dir, AGAIN, 0)
        await asyncio.sleep(period_s)


async def _events(
    scene: Scene, some: Sequence[Event], rng: random.Random, done: Counter[str]
) -> list[str]:
    """Run a minute's events; return messages about those without their effect."""
    problems = []
    for event in some:
        try:
            await event(scene, rng)
            done[event.__name__] += 1
        except NotRecovered as error:
            problems.append(f"{event.__name__}: {error}")
            print(f"problem: {problems[-1]}", flush=True)
    return problems


async def _minute(scene: Scene, events: asyncio.Task[list[str]]) -> dict[str, float]:
    """Return figures of a minute, which is longer if its events are."""
    load = scene.load
    began, right = time.monotonic(), load.right
    trainer = scene.trainer.pid  # before the events begin
    before = await scene.reading()
    load.latencies.clear()
    await asyncio.sleep(max(0.0, 60 - (time.monotonic() - began)))
    await asyncio.wait([events])
    after = await scene.reading()
    roles = scene.server.processes() | {"trainer": [scene.trainer]}
    figures: dict[str, float] = {}
    for role, some in roles.items():
        used = [usage for usage in map(usage_of, some) if usage is not None]
        figures[f"{role}_rss_mib"] = round(sum(u.rss_mib for u in used), 1)
        figures[f"{role}_fds"] = sum(u.fds for u in used)
    scene.note_segments()
    figures["shm_bytes"] = scene.segments.num_bytes()
    for figure, name in COUNTERS.items():
        figures[figure] = after.get(name, 0) - before.get(name, 0)
    figures["right"] = load.right - right
    figures["faults"] = total(after, FAULTS)
    figures["trainer_started"] = int(scene.trainer.pid != trainer)
    return figures | latencies(load.latencies)


def latencies(ended: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return percentiles of request latency (ms); empty if none ended."""
    if len(ended) < 2:
        return {}
    cuts = statistics.quantiles([s for _, s in ended], n=100, method="inclusive")
    return {f"latency_ms_p{p}": round(1e3 * cuts[p - 1], 1) for p in (50, 95, 99)}


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="scripts/soak.sh",
        description="Serves a steady load with swaps; checks that figures stay flat.",
        epilog=f"Flat means: {CRITERION}. Exit status: 0 flat, 1 not, 2 not run.",
    )
    p.add_argument("--minutes", type=int, default=30)
    p.add_argument("--swap-s", type=float, default=3.0, help="seconds between swaps")
    p.add_argument("--clients", type=int, default=3, help="requests at a time")
    p.add_argument(
        "--everything",
        action="store_true",
        help="memory and adaptation in a generation; aborts and commands each minute, "
        "two trainer kills, one cleaned run directory; latency is not judged",
    )
    add_places(p)
    return p


def _run(args: argparse.Namespace, places: Places, known: Sequence[Known]) -> int:
    say, minutes = say_since(time.monotonic()), list[dict[str, float]]()
    events = Counter[str]()

    def on_minute(figures: dict[str, float]) -> None:
        minutes.append(figures)
        text = ", ".join(f"{k} {v:g}" for k, v in figures.items())
        say(f"minute {len(minutes)}/{args.minutes}: {text}")
        _write(args, minutes, ["cut off before its end"], events)  # if it is

    problems = asyncio.run(soak(places, known, args, on_minute, events))
    judged = [_judged(args, minute) for minute in minutes]
    problems += grown(judged)
    if not growth(judged):
        problems.append("too short for a verdict: give --minutes 4 or more")
    _write(args, minutes, problems, events)
    print(f"{'':20}{'first':>14}{'last':>14}{'limit':>14}{'slope per hour':>16}")
    for name, one in growth(judged).items():
        print(
            f"{name:20}{one.first:>14g}{one.last:>14g}{one.limit:>14g}"
            f"{one.slope_per_hour:>16g}"
        )
    for name, count in sorted(events.items()):
        print(f"event: {name} {count}")
    for problem in problems:
        print(f"problem: {problem}")
    swaps = sum(m["swaps"] for m in minutes)
    print(f"{'not flat' if problems else 'flat'}: {swaps:.0f} swaps")
    return int(bool(problems))


def _judged(args: argparse.Namespace, minute: dict[str, float]) -> dict[str, float]:
    """Return the figures that have to be flat."""
    free = ("latency_ms",) if args.everything else ()
    return {k: v for k, v in minute.items() if not k.startswith(free)}


def _write(
    args: argparse.Namespace,
    minutes: list[dict[str, float]],
    problems: list[str],
    events: Counter[str],
) -> None:
    """Write the report, one minute a line."""
    if args.json is None:
        return
    document: dict[str, Any] = {
        "what": "steady load with swaps: memory, descriptors, latency per minute",
        "verdict": "not flat" if problems else "flat",
        "criterion": CRITERION,
        "problems": problems,
        "growth": {
            name: asdict(one)
            for name, one in growth([_judged(args, m) for m in minutes]).items()
        },
        "events": dict(events),
        "swaps": sum(m["swaps"] for m in minutes),
        "right_answers": sum(m["right"] for m in minutes),
        "settings": {k: vars(args)[k] for k in SETTINGS},
        "environment": environment({}),
    }
    write(args.json, document, "per_minute", minutes)


def main() -> int:
    """Run the command."""
    return run_command(_parser().parse_args(), _run)


if __name__ == "__main__":
    sys.exit(main())
