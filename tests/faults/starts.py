"""Starts: of trainers that died, of servers without room, of fifty engines."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import subprocess  # noqa: S404 - our own commands
import sys
from dataclasses import asdict, replace
from pathlib import Path

from bench.harness.client import make_session
from vllm_tide.config import parse_tide
from vllm_tide.engine.trainer_process import TrainerProcess
from vllm_tide.transport.rendezvous import KEPT, group_of, reclaim_orphans
from vllm_tide.transport.shm import SHM_DIR

from .fault import Fault
from .scene import TRAINER_ALIVE, NotRecovered, Scene

ENGINES = 50
FULL = "vllm_tide:faults_total{run_dir_full}"
_ENGINE = """
import json, os, secrets, sys
from pathlib import Path
from vllm_tide.transport import WeightsSegment, process, rendezvous
run, told, killed = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "1"
rendezvous.reclaim_orphans(run)
rendezvous.require_room(run)
weights, name = WeightsSegment.create(1 << 16), secrets.token_hex(8)
told |= {"engine_id": name, "ring": "", "weights": weights.name, "pid": os.getpid()}
told["pid_start"] = process.start_time(os.getpid())
rendezvous.write_manifest(run, rendezvous.manifest_from(told))
for file in ("trainer-{}.json", "trainer-{}.log", "events-{}.jsonl"):
    (run / file.format(name)).write_text("{}")
print(weights.name, flush=True)
os.kill(os.getpid(), 9) if killed else rendezvous.remove_manifest(run, name)
"""


async def kill_trainer_autostart(scene: Scene, rng: random.Random) -> None:
    """SIGKILL a trainer as a server starts it: it is started again."""
    scene.kill_trainer()
    gone = "the loss of the trainer", lambda r: r.get(TRAINER_ALIVE) == 0
    await scene.until(*gone)
    told, run, spool = scene.manifest(), scene.run_dir, parse_tide({}).spool
    os.sched_setaffinity(0, scene.other_cpus)
    keeper = TrainerProcess(told.engine_id, run, group_of(told), spool)
    keeper.start()
    try:
        await scene.trainer_reads()
        scene.struck()
        if keeper.process is not None:
            keeper.process.kill()
        await scene.until(*gone)
        await scene.trainer_reads()
    finally:
        await asyncio.to_thread(keeper.close)
    await scene.until(*gone)
    scene.start_trainer()
    await scene.trainer_reads()


async def full_run_dir(scene: Scene, rng: random.Random) -> None:
    """A server starts beside ours in a full run directory: it serves all the same."""
    run = scene.places.work / "second" / "run"
    run.mkdir(parents=True, exist_ok=True)
    places = replace(scene.places, run_dir=run, work=run.parent)
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k,mode=700", "tmpfs", str(run)]
    scene.struck()
    async with make_session() as session:
        other = Scene(places, session, copy.copy(scene.load))
        subprocess.run(mount, check=True)  # noqa: S603
        try:
            await other.start_server()
            if wrong := await other.load.request(other.load.ask((16, 32))):
                raise NotRecovered(wrong)
            await other.until("a word of it", lambda r: r.get(FULL) == 1)
        finally:
            await other.stop()
            subprocess.run(["umount", str(run)], check=True)  # noqa: S603, S607


def _may_mount() -> bool:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return bool(int(status.split("CapEff:")[1].split()[0], 16) >> 21 & 1)


async def restart_storm(scene: Scene, rng: random.Random) -> None:
    """Fifty engines come and go, half of them killed: little may stay behind."""
    run, told = scene.places.work / "storm", json.dumps(asdict(scene.manifest()))
    argv = [sys.executable, "-c", _ENGINE, str(run), told]
    scene.struck()
    starts = [
        asyncio.to_thread(subprocess.run, [*argv, killed], stdout=-1, text=True)
        for killed in rng.choices("01", k=ENGINES)
    ]
    made = "".join([done.stdout for done in await asyncio.gather(*starts)]).split()
    reclaim_orphans(run)
    left = [name for name in made if os.path.exists(f"{SHM_DIR}/{name}")]
    files = os.listdir(run)
    if len(made) != ENGINES or left or len(files) > 3 * KEPT:
        raise NotRecovered(f"{len(made)} engines left {len(left)} segments, {files}")


FAULTS = (
    Fault("kill_trainer_autostart", kill_trainer_autostart, TRAINER_ALIVE, gauge=True),
    *[Fault("full_run_dir", full_run_dir, FULL, 0.1, gauge=True)] * _may_mount(),
    Fault("restart_storm", restart_storm, None, 0.2, uncounted="nothing may be left"),
)
