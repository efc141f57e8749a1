"""Steady load with a swap every few seconds: `python -m tests.faults.soak`.

The same scene as the faults' without the faults: server, trainer, known outputs. Each
minute it looks at memory, file descriptors, shared memory and latency; whether they are
flat is decided in `flat.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from bench.harness.common import environment

from .command import add_places, run_command, say_since
from .flat import CRITERION, grown, growth
from .leaks import usage_of
from .load import Load
from .reference import Known
from .report import write
from .scene import NotRecovered, Places, Scene, serving
from .trainer import AGAIN, order

TOKENS = (24, 24)
"""Output tokens of every request: latencies of all minutes are of the same work."""


async def soak(
    places: Places,
    known: Sequence[Known],
    args: argparse.Namespace,
    on_minute: Callable[[dict[str, float]], None],
) -> list[str]:
    """Run the load; what went wrong.

    Args:
        places: Folders.
        known: What is asked.
        args: Of the command line.
        on_minute: Told of each minute's figures.

    Raises:
        ServerError: The server does not start.
    """
    problems: list[str] = []
    loads: list[Load] = []

    def load(session: aiohttp.ClientSession) -> Load:
        loads.append(Load(session, known, args.seed, args.clients, TOKENS))
        return loads[0]

    try:
        async with serving(places, load) as scene:
            swaps = asyncio.create_task(_swap(scene, args.swap_s))
            try:
                for _ in range(args.minutes):
                    on_minute(await _minute(scene))
                    problems += scene.load.take_problems()
            finally:
                swaps.cancel()
    except NotRecovered as error:
        problems += [*loads[0].take_problems(), str(error)]
    return problems


async def _swap(scene: Scene, period_s: float) -> None:
    """Publish the good head again and again; an engine installs it as any other."""
    while True:
        order(scene.run_dir, AGAIN, 0)
        await asyncio.sleep(period_s)


async def _minute(scene: Scene) -> dict[str, float]:
    load = scene.load
    began, right = time.monotonic(), load.right
    before = await scene.reading()
    load.latencies.clear()
    await asyncio.sleep(max(0.0, 60 - (time.monotonic() - began)))
    after = await scene.reading()
    roles = scene.server.processes() | {"trainer": [scene.trainer]}
    found: dict[str, float] = {}
    for role, some in roles.items():
        used = [usage for usage in map(usage_of, some) if usage is not None]
        found[f"{role}_rss_mib"] = round(sum(u.rss_mib for u in used), 1)
        found[f"{role}_fds"] = sum(u.fds for u in used)
    scene.note_segments()
    found["shm_bytes"] = scene.segments.num_bytes()
    name = "vllm_tide:swaps_total"
    found["swaps"] = after.get(name, 0) - before.get(name, 0)
    found["right"] = load.right - right
    return found | latencies(load.latencies)


def latencies(ended: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Percentiles of request latency (ms); empty where nothing ended."""
    if len(ended) < 2:
        return {}
    cuts = statistics.quantiles([s for _, s in ended], n=100, method="inclusive")
    return {f"latency_ms_p{p}": round(1e3 * cuts[p - 1], 1) for p in (50, 95, 99)}


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="scripts/soak.sh",
        description="Serves a steady load with swaps and says whether all stays flat.",
        epilog=f"Flat means: {CRITERION}. Exit status: 0 flat, 1 not, 2 not run.",
    )
    p.add_argument("--minutes", type=int, default=30)
    p.add_argument("--swap-s", type=float, default=3.0, help="seconds between swaps")
    p.add_argument("--clients", type=int, default=3, help="requests at a time")
    add_places(p)
    return p


def _run(args: argparse.Namespace, places: Places, known: Sequence[Known]) -> int:
    say, minutes = say_since(time.monotonic()), list[dict[str, float]]()

    def on_minute(figures: dict[str, float]) -> None:
        minutes.append(figures)
        said = ", ".join(f"{k} {v:g}" for k, v in figures.items())
        say(f"minute {len(minutes)}/{args.minutes}: {said}")
        _write(args, minutes, ["cut off before its end"])  # if it is

    problems = asyncio.run(soak(places, known, args, on_minute))
    problems += grown(minutes)
    if not growth(minutes):
        problems.append("too short for a verdict: give --minutes 4 or more")
    _write(args, minutes, problems)
    for name, (first, last) in growth(minutes).items():
        print(f"{name:20}{first:>14g}{last:>14g}")
    for problem in problems:
        print(f"problem: {problem}")
    swaps = sum(m["swaps"] for m in minutes)
    print(f"{'not flat' if problems else 'flat'}: {swaps:.0f} swaps")
    return int(bool(problems))


def _write(
    args: argparse.Namespace, minutes: list[dict[str, float]], problems: list[str]
) -> None:
    """Write the report, the minutes one a line."""
    if args.json is None:
        return
    document: dict[str, Any] = {
        "what": "steady load with swaps: memory, descriptors, latency per minute",
        "verdict": "not flat" if problems else "flat",
        "criterion": CRITERION,
        "problems": problems,
        "first_and_last": growth(minutes),
        "swaps": sum(m["swaps"] for m in minutes),
        "right_answers": sum(m["right"] for m in minutes),
        "settings": {k: vars(args)[k] for k in ("minutes", "swap_s", "clients")},
        "environment": environment({}),
    }
    write(args.json, document, "per_minute", minutes)


def main() -> int:
    """Run the command."""
    return run_command(_parser().parse_args(), _run)


if __name__ == "__main__":
    sys.exit(main())
