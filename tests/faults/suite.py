"""Inject faults one after another, at random times, and check each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from bench.harness.common import ServerError

from . import bad_drafts, memory, processes, requests
from .counters import total
from .fault import Fault
from .leaks import LeakWatch, left_behind
from .load import Load
from .reference import Known
from .scene import NotRecovered, Places, Scene, serving

FAULTS: tuple[Fault, ...] = (
    *processes.FAULTS,
    *memory.FAULTS,
    *bad_drafts.FAULTS,
    *requests.FAULTS,
)
STRIKE_S = 900.0
"""Longest time from a fault to recovery (s), a new server's start included."""
COUNTED_S = 30.0
"""A counter has to move in this time after recovery (s)."""
WAIT_S = 0.3
"""Longest time between two faults (s)."""
OK = "ok"


@dataclass(frozen=True, slots=True)
class Row:
    """One fault.

    Attributes:
        kind: Its name.
        outcome: `ok`, or a sentence.
        recovery_s: From the fault until all works again (s).
    """

    kind: str
    outcome: str
    recovery_s: float


def plan(count: int, seed: int, faults: Sequence[Fault] = FAULTS) -> list[Fault]:
    """Return the faults to inject: every kind once, if so many, then by weight.

    The lasting kinds are the last of their first pass: the last needs no restart.

    Args:
        count: How many.
        seed: Of the order; a longer plan begins as a shorter one does.
        faults: Kinds to choose from.
    """
    rng = random.Random(seed)  # noqa: S311 - not cryptographic
    first = rng.sample(list(faults), len(faults))
    first.sort(key=lambda fault: fault.lasting)
    more = rng.choices(faults, [f.weight for f in faults], k=max(0, count - len(first)))
    return [*first, *more][:count]


class Suite:
    """One run.

    Args:
        places: Folders.
        known: Prompts of the load and their outputs.
        seed: Of everything random.

    Attributes:
        load: Its counts.
        leaks: Of every process.
        problems: Errors outside a fault.
    """

    def __init__(self, places: Places, known: Sequence[Known], seed: int) -> None:
        self._places, self._known = places, known
        self._seed = seed
        self._rng = random.Random(f"times:{seed}")  # noqa: S311 - not cryptographic
        self.leaks = LeakWatch()
        self.load: Load | None = None
        self.problems: list[str] = []

    async def run(self, faults: Sequence[Fault], on_row: Callable[[Row], None]) -> None:
        """Inject all of them.

        Args:
            faults: In this order.
            on_row: Called with each outcome.

        Raises:
            ServerError: A server does not start.
        """
        try:
            async with serving(self._places, self._new_load) as scene:
                for number, fault in enumerate(faults, 1):
                    row = await self._inject(scene, fault)
                    on_row(row)
                    damaged = fault.lasting or row.outcome != OK
                    if damaged and number < len(faults):
                        await self._restart(scene)
        except NotRecovered as error:
            self.problems.append(str(error))

    def _new_load(self, session: aiohttp.ClientSession) -> Load:
        self.load = Load(session, self._known, self._seed)
        return self.load

    async def _inject(self, scene: Scene, fault: Fault) -> Row:
        rng, load = self._rng, scene.load
        strike_rng = random.Random(rng.getrandbits(64))  # noqa: S311
        await asyncio.sleep(rng.uniform(0.0, WAIT_S))
        before = await scene.reading()
        scene.struck()
        outcome = ""
        try:
            async with asyncio.timeout(STRIKE_S):
                await fault.strike(scene, strike_rng)
        except NotRecovered as error:
            outcome = str(error)
        except TimeoutError:
            outcome = f"no recovery in {STRIKE_S:.0f} s"
        except ServerError as error:
            outcome = f"the next server did not start: {str(error).splitlines()[0]}"
        seconds = time.monotonic() - scene.struck_at
        outcome = outcome or await load.settle()
        if not outcome and not fault.gauge and fault.counter is not None:
            outcome = await self._uncounted(scene, fault.counter, before)
        outcome = "; ".join([outcome] * bool(outcome) + load.take_problems())
        outcome = outcome or self._leaks(scene)
        return Row(fault.kind, outcome or OK, round(seconds, 2))

    async def _uncounted(
        self, scene: Scene, counter: str, before: dict[str, float]
    ) -> str:
        start = total(before, counter)
        try:
            await scene.until(counter, lambda r: total(r, counter) != start, COUNTED_S)
        except NotRecovered:
            return f"{counter} did not move"
        return ""

    def _leaks(self, scene: Scene) -> str:
        scene.note_segments()
        manifest = scene.manifest()
        left = left_behind(scene.segments.made, {manifest.ring, manifest.weights})
        problems = [f"segments left behind: {', '.join(left)}"] if left else []
        for role, some in scene.server.processes().items():
            problems += [self.leaks.check(role, process) for process in some]
        problems.append(self.leaks.check("trainer", scene.trainer))
        return "; ".join(filter(None, problems))

    async def _restart(self, scene: Scene) -> None:
        """Restart, so that the next fault is checked alone."""
        if not await scene.stop():
            self.problems.append("the server or the trainer had to be killed")
        await scene.start_server()
        scene.start_trainer()
        await scene.trainer_reads()
        scene.load.take_problems()
