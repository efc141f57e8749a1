"""Operations under load: commands, kills, a cleaned run directory.

Each event returns when the counters show its effect; :func:`plan_events` assigns events
to minutes.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess  # noqa: S404 - runs our own commands
from collections.abc import Awaitable, Callable

from .bad_drafts import ROLLBACKS, VERSION
from .counters import total
from .memory import ROWS, rows_flow, settled
from .processes import kill_trainer
from .requests import abort_requests
from .scene import ROOT, NotRecovered, Scene
from .trainer import order

TENANT = "hour"
COMMAND_S = 120.0
Event = Callable[[Scene, random.Random], Awaitable[None]]


async def command(scene: Scene, *args: str) -> str:
    """Run `vllm-tide` on the run directory and return its output.

    Raises:
        NotRecovered: Its exit status is not 0.
    """
    argv = [str(scene.places.venv / "bin" / "vllm-tide"), *args]
    argv += ["--run-dir", str(scene.run_dir)]
    done = await asyncio.to_thread(
        subprocess.run,
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_S,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        output = done.stdout.strip()
        raise NotRecovered(f"{' '.join(args)}: status {done.returncode}: {output}")
    return str(done.stdout)


async def _no_rows(scene: Scene) -> None:
    """Wait for requests in flight, then check that later ones bring no row."""
    rows = await settled(scene, ROWS)
    if await settled(scene, ROWS) != rows:
        raise NotRecovered("rows were captured after the switch")


async def switch_capture(scene: Scene, rng: random.Random) -> None:
    """Run `capture off`, then `capture on`."""
    await command(scene, "capture", "off")
    await asyncio.sleep(2)  # the engines follow within a second
    await _no_rows(scene)
    await command(scene, "capture", "on")
    await rows_flow(scene)


async def pause(scene: Scene, rng: random.Random) -> None:
    """Run `pause`, then `resume`."""
    await command(scene, "pause")
    await asyncio.sleep(2)
    await _no_rows(scene)
    await command(scene, "resume")
    await rows_flow(scene)


async def purge_all(scene: Scene, rng: random.Random) -> None:
    """Run `purge --all`."""
    await command(scene, "purge", "--all")
    await rows_flow(scene)


async def purge_tenant(scene: Scene, rng: random.Random) -> None:
    """Run `purge --tenant`."""
    await command(scene, "purge", "--tenant", TENANT)
    await rows_flow(scene)


async def roll_back(scene: Scene, rng: random.Random) -> None:
    """Run `rollback` of a bad draft, unless the canary rolled back before."""
    async with scene.ordering:
        await scene.until("carried out orders", lambda _: not _orders(scene))
        before = await scene.reading()
        order(scene.run_dir, "permuted", rng.getrandbits(30))
        await scene.until(
            "a bad draft",
            lambda r: not _orders(scene) and r.get(VERSION, 0) > before.get(VERSION, 0),
        )
        try:
            answer = await command(scene, "rollback")
        except NotRecovered:
            if total(await scene.reading(), ROLLBACKS) > total(before, ROLLBACKS):
                return
            raise
        number = re.search(r"served as version (\d+)", answer)
        version = int(number[1]) if number else 1 << 62
        await scene.until("the previous draft", lambda r: r.get(VERSION, 0) >= version)


def _orders(scene: Scene) -> bool:
    """Return True if an order waits for the trainer."""
    return any(scene.run_dir.glob("order-*.json"))


async def clean_run_dir(scene: Scene, rng: random.Random) -> None:
    """Remove everything in the run directory but the replacement of the home."""
    for path in scene.run_dir.iterdir():
        if path.is_dir():
            if path.name != "state":
                shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    await scene.until("an announced engine", lambda r: "ring:used_bytes" in r)
    await scene.until("a trainer's status", lambda r: "trainer:rows_read" in r)
    await command(scene, "status")
    await rows_flow(scene)


COMMANDS: tuple[Event, ...] = (
    roll_back,
    switch_capture,
    pause,
    purge_all,
    purge_tenant,
)


def plan_events(minutes: int) -> list[list[Event]]:
    """Plan the events of each minute: aborts and a command, two kills, one cleaning.

    The last third of a run has commands and aborts alone: processes in the compared
    minutes then have the age of the run.
    """
    plan: list[list[Event]] = [
        [abort_requests, COMMANDS[n % len(COMMANDS)]] for n in range(minutes)
    ]
    for place in (minutes // 4, minutes // 2):
        plan[place] = [abort_requests, kill_trainer]
    plan[3 * minutes // 8].append(clean_run_dir)
    return plan
