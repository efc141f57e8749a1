r"""Does each alert fire on its fault, and stop when that is mended?

Starts two servers on the demo models, one after the other, each with a trainer, a load
of HTTP requests and a Prometheus, puts real faults in (no metric is written) and reads
Prometheus' list of alerts. Ten minutes: a minute of the rules is a second (`scaled`)::

    .venv/bin/python scripts/bench/alerts_check.py --json alerts.json

`--alerts A,B` plants only what makes these fire and keeps the rest of `--json`. Exit
status 1: not every alert fired on its fault and stopped, or an answer was not right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import yaml
from prometheus_check import prometheus

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.common import BenchError, environment
from bench.harness.models import targets_of
from bench.harness.server import free_port
from vllm_tide.dashboards import ALERTS, contents

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.faults import heads, memory  # noqa: E402
from tests.faults.command import add_places, run_command, say_since  # noqa: E402
from tests.faults.counters import total  # noqa: E402
from tests.faults.load import Load  # noqa: E402
from tests.faults.scene import NotRecovered, serving  # noqa: E402
from tests.faults.trainer import AGAIN, POISON, SWAPPED, order  # noqa: E402

WATCHED_S = 15.0  # before the first fault
MOST_S = 150.0  # until an alert fires, or stops
TRAIN = {"min_gain": 10.0, "min_new_tokens": 512, "steps_per_cycle": 16}
# `tide.control`, clients, size of the target (for a small one drafting never pays).
SERVERS = (
    ({}, 3, []),
    (
        {"policy": "adaspec", "client_slo_tpot_ms": 0.01},
        1,
        ["90m"],
    ),
)
LEARNING, CONTROLLED = range(2)
PLANTS = []  # server, function, names of the alerts, further knobs of `_plant`
# Other work on a core: busy for a part of every 0.75 s, gone with its parent.
SPIN = """
import os, sys, time
busy, parent = float(sys.argv[1]), os.getppid()
while os.getppid() == parent:
    if time.time() % 0.75 >= busy:
        time.sleep(0.002)
"""
# A vLLM plugin: nothing from outside was found that makes capture raise, or control
# take confidences for probabilities (only on one server).
BUG = """
import os
def plant():
    from vllm_tide.engine.staging import RunLayout
    fill = RunLayout.fill
    def broken(*args):
        if os.path.exists(__file__ + ".on"):
            raise RuntimeError("planted")
        return fill(*args)
    RunLayout.fill = broken
    if os.environ.get("PLANT_UNCALIBRATED") != "1":
        return
    from vllm_tide.control.calibration import Calibration, RequestOffsets
    inner = Calibration.predict
    def predict(self, values, step, *given):
        inner(self, values, step, *given)
        z, logit, chance = values[:, step - 1]
        logit[:] = z
        chance[:] = 1.0 / (1.0 + 2.718281828 ** -z)
    Calibration.predict = predict
    judge = RequestOffsets.judge
    RequestOffsets.learn = lambda *args: None
    RequestOffsets.judge = lambda self, *given: (judge(self, *given), self.reset())[0]
"""


def scaled(text: str) -> str:
    """Rules in which a minute is a second: ranges, offsets, `for`.

    Amounts that grow with the window (rows, seconds: a thousand and more of an
    `increase`) shrink with it; numbers of events do not.
    """
    amount = re.compile(r"(increase\([^)]*\) > )(\d{4,})")
    document = yaml.safe_load(text)
    for rule in (rule for group in document["groups"] for rule in group["rules"]):
        for key in {"expr", "for"} & rule.keys():
            new = re.sub(r"\b(\d+)([mhd])\b", _short, rule[key])
            rule[key] = amount.sub(lambda m: f"{m[1]}{int(m[2]) / 60}", new)
    return str(yaml.safe_dump(document))


def _short(span):
    return f"{int(span[1]) * {'m': 1, 'h': 60, 'd': 1440}[span[2]]}s"


def _plant(server, alerts, stops=True, beside=False):
    """Register a generator of a `Scene`: puts a fault in, yields, mends it.

    `stops`: whether the alerts do so in this run. `beside`: the next one follows at
    once.
    """

    def register(strike):
        PLANTS.append((server, strike, set(alerts.split()), stops, beside))

    return register


async def _pass_on(scene, what):
    counter = heads.REFUSED if what == "norm" else "vllm_tide:swaps_total"
    before = total(await scene.reading(), counter)
    path = order(scene.run_dir, what, 1)
    await scene.until(what, lambda r: not path.exists() and total(r, counter) > before)


@contextmanager
def _crowd(scene, count, busy_s):
    command = [sys.executable, "-SE", "-c", SPIN, str(busy_s)]
    # Sessions of their own: the kernel may share a core out by session.
    made = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        for process in made:
            os.sched_setaffinity(process.pid, scene.engine_cpus)
        yield
    finally:
        for process in made:
            process.kill()
            process.wait()


@_plant(LEARNING, "TideTrainingWithoutPublication", beside=True)
async def _min_gain(scene):
    """tide.train.min_gain is 10, until something is published all the same."""
    yield


@_plant(LEARNING, "TideDraftRefused")
async def _refused(scene):
    """A published tensor is 1e4 times too large."""
    await _pass_on(scene, "norm")
    yield


@_plant(LEARNING, "TideFaultContained")
async def _shrunk(scene):
    """A segment loses its end."""
    await memory.shrink_ring(scene, random.Random(0))
    yield


@_plant(LEARNING, "TideTrainerCannotWrite")
async def _full_disk(scene):
    """The trainer's files may not grow."""
    trainer = scene.trainer
    trainer.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
    yield
    trainer.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY,) * 2)


@_plant(LEARNING, "TideAcceptanceFell TideDraftsWasted TideHeldOutOptimistic")
async def _swapped(scene):
    """A permuted head is served instead of the trainer's."""
    await _pass_on(scene, SWAPPED)
    yield
    await _pass_on(scene, "whole")


@_plant(LEARNING, "TideRingNearlyFull TideRowsDropped")
async def _hung_trainer(scene):
    """Trainer: SIGSTOP."""
    scene.trainer.send_signal(signal.SIGSTOP)
    yield
    scene.trainer.send_signal(signal.SIGCONT)


@_plant(LEARNING, "TideTrainerDiverged TideTrainerStalled")
async def _poisoned(scene):
    """NaN in the trainer's candidate, until another trainer starts."""
    order(scene.run_dir, POISON, 0)
    yield
    async for _ in _no_trainer(scene):
        pass


async def _no_trainer(scene):
    """Trainer: SIGKILL."""
    scene.kill_trainer()
    yield
    scene.start_trainer()
    await scene.trainer_reads()


_plant(LEARNING, "TideTrainerGone")(_no_trainer)


@_plant(LEARNING, "TideDraftNotInstalled")
async def _lost_word(scene):
    """A segment's newest version is overwritten with the one before."""
    engine, latest = scene.engine(), (scene.manifest().weights, 0)
    engine.send_signal(signal.SIGSTOP)
    try:
        served = memory.word(*latest)
        path = order(scene.run_dir, AGAIN, 0)
        await scene.until("a publication", lambda _: not path.exists())
        memory.set_word(*latest, served)
    finally:
        engine.send_signal(signal.SIGCONT)
    yield
    await scene.good_head()


@_plant(LEARNING, "TideDraftRolledBack")
async def _worse_head(scene):
    """A permuted head passes the held-out gate."""
    await heads.permuted_head(scene, random.Random(0))
    yield


@_plant(LEARNING, "TideRollbacksRepeat", stops=False)
async def _worse_heads(scene):
    """Two more do (the window is longer than the run)."""
    await heads.permuted_head(scene, random.Random(1))
    await heads.permuted_head(scene, random.Random(2))
    yield


@_plant(LEARNING, "TideCaptureStopped", stops=False)
async def _broken_capture(scene):
    """A vLLM plugin makes capture raise, which switches it off for good."""
    (scene.places.work / "planted.py.on").touch()
    yield


@_plant(CONTROLLED, "TideThroughputBelowPrediction")
async def _sure(scene):
    """A head eight times as sure of the same, and nothing learns that it is not."""
    await _pass_on(scene, "sure")
    yield
    await _pass_on(scene, "whole")


@_plant(CONTROLLED, "TideDraftingOff", beside=True)
async def _unsure(scene):
    """A head an eighth as sure of the same, and nothing learns that it is not."""
    await _pass_on(scene, "unsure")
    yield
    await _pass_on(scene, "whole")


@_plant(CONTROLLED, "TideLimitMissed TideLimitUnreachable")
async def _tiny_limit(scene):
    """Requests ask for 0.01 ms per token."""
    scene.load.extra = {"vllm_xargs": {"tide_slo_tpot_ms": 0.01}}
    yield
    scene.load.extra = None


@_plant(CONTROLLED, "TideTimeModelWrong")
async def _bursts(scene):
    """Four processes work on the engine's core, 0.6 of every 0.75 s."""
    with _crowd(scene, 4, 0.6):
        yield


@_plant(CONTROLLED, "TideSwapSlow")
async def _crowded_swap(scene):
    """A swap beside 48 busy processes on the engine's core."""
    with _crowd(scene, 48, 1.0):
        await _pass_on(scene, "unsure")
    yield


class Run:
    """Plants, watches, notes.

    Args:
        args: Of the command line.
        places: Folders.
        known: What the load asks.
    """

    def __init__(self, args, places, known) -> None:
        every = {name for _, _, names, *_ in PLANTS for name in names}
        self._wanted = set(args.alerts.split(",")) if args.alerts else every
        if self._wanted - every:
            raise BenchError(f"--alerts: give some of {','.join(sorted(every))}")
        self._path, self._places, self._known = args.json, places, known
        self._found = {"alerts": {}, "right_answers": 0, "problems": []}
        if args.alerts and args.json is not None and args.json.exists():
            self._found = json.loads(args.json.read_text(encoding="utf-8"))
        self._rows, self._problems = self._found["alerts"], self._found["problems"]
        old = [p for p in self._problems if not any(n in p for n in self._wanted)]
        self._problems[:] = old
        self._say = say_since(time.monotonic())
        self._firing, self._began = set(), {}

    def run(self) -> int:
        """Start the servers; the exit status."""
        for server in LEARNING, CONTROLLED:
            try:
                asyncio.run(self._serve(server))
            except NotRecovered as error:
                self._problems.append(f"server {server}: {error}")
        self._write()
        fired = sum("fired_s" in row for row in self._rows.values())
        print(f"{fired} alerts fired; problems: {self._problems or 'none'}")
        return int(bool(self._problems))

    async def _serve(self, server):
        plants = [p[1:] for p in PLANTS if p[0] == server and self._wanted & p[2]]
        if not plants:
            return
        (control, clients, sizes), places = SERVERS[server], self._places
        target = targets_of(places.target, sizes, places.work, self._say)[0].path
        run_dir = places.run_dir / str(server)
        run_dir.mkdir(mode=0o700)
        port = free_port()
        self._say("starting a server and its trainer")
        async with serving(
            replace(places, target=target, run_dir=run_dir),
            lambda session: Load(session, self._known, 0, clients),
            knobs={"train": TRAIN | {"metrics_port": port}, "control": control},
            env=_plugin(places.work)
            | {"PLANT_UNCALIBRATED": str(int(server == CONTROLLED))},
        ) as scene:
            urls = [scene.server.url, f"http://127.0.0.1:{port}"]
            with prometheus(urls, 1, scaled(contents()[ALERTS])) as found:
                watching = asyncio.create_task(self._watch(found))
                await asyncio.sleep(WATCHED_S)
                self._say(f"without a fault: {', '.join(self._firing) or 'none'}")
                tasks = []
                for *plant, beside in plants:
                    mended = asyncio.Event()
                    tasks.append(asyncio.create_task(self._try(scene, mended, *plant)))
                    if not beside:
                        await mended.wait()
                await asyncio.gather(*tasks)
                watching.cancel()
            self._found["right_answers"] += scene.load.right
            self._problems += scene.load.problems

    async def _watch(self, server):
        while True:
            alerts = (await asyncio.to_thread(server.get, "alerts"))["alerts"]
            found = [one for one in alerts if one["state"] == "firing"]
            names = {one["labels"]["alertname"] for one in found}
            self._began |= dict.fromkeys(names - self._firing, time.monotonic())
            self._firing = names
            await asyncio.sleep(0.3)

    async def _try(self, scene, mended, strike, names, stops):
        await self._until(lambda: not names & self._firing)
        self._problems += [f"{n} fires without it" for n in names & self._firing]
        self._rows |= {name: {"fault": strike.__doc__} for name in names}
        self._say(f"planting: {strike.__doc__}")
        at = time.monotonic()
        try:
            async with asynccontextmanager(strike)(scene):
                await self._see(names, "fired_s", at, partial(self._fires, at))
        except NotRecovered as error:
            self._problems.append(f"{' '.join(names)}: {error}")
        finally:
            mended.set()
        if stops:
            at = time.monotonic()
            await self._see(names, "stopped_s", at, lambda n: n not in self._firing)

    def _fires(self, since, name):
        return self._began.get(name, 0.0) > since

    async def _see(self, names, key, began, check):
        async def wait(name):
            if await self._until(lambda: check(name)):
                self._rows[name][key] = round(time.monotonic() - began, 1)
            else:
                self._problems.append(f"{name}: no {key} within {MOST_S:.0f} s")
            self._say(f"{name}: {key} {self._rows[name].get(key)}")
            self._write()

        await asyncio.gather(*map(wait, names))

    async def _until(self, check):
        end = time.monotonic() + MOST_S
        while not check() and time.monotonic() < end:
            await asyncio.sleep(0.1)
        return check()

    def _write(self):
        if self._path is not None:
            document = self._found | {"environment": environment({})}
            self._path.write_text(json.dumps(document, indent=1) + "\n")


def _plugin(work):
    """Write the plugin; the environment in which vLLM finds it."""
    info = work / "planted-0.dist-info"
    info.mkdir(exist_ok=True)
    (work / "planted.py.on").unlink(missing_ok=True)  # the last server's
    (work / "planted.py").write_text(BUG)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nplanted = planted:plant\n"
    (info / "entry_points.txt").write_text(entry)
    return {"PYTHONPATH": f"{work}:{os.environ.get('PYTHONPATH', '')}"}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alerts", help="only these, comma-separated")
    add_places(parser)
    args = parser.parse_args()
    return run_command(args, lambda *found: Run(*found).run(), ("python",))


if __name__ == "__main__":
    sys.exit(main())
