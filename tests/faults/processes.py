"""Processes that die, hang, lose their clock or their disk."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import psutil  # type: ignore[import-untyped]  # no stubs needed for this

from vllm_tide.transport.ring import Atomic
from vllm_tide.transport.shm import ATOMICS_AT, LINE_BYTES

from .counters import Reading
from .fault import Fault
from .memory import poke
from .scene import TRAINER_ALIVE, NotRecovered, Scene
from .trainer import AGAIN, order

FAILED_WRITES = "trainer:failed_writes"
GENERATED = "vllm:generation_tokens_total"
IN_FLIGHT_S = 0.2
"""Time (s) for the API server to count what the engine sent before it was suspended."""
GONE_S = 120.0
"""After its engine was killed, a server has to end by itself in this time (s)."""


async def kill_trainer(scene: Scene, rng: random.Random) -> None:
    """SIGKILL the trainer and start another one."""
    scene.struck()
    scene.kill_trainer()
    await scene.until("the loss of the trainer", lambda r: r.get(TRAINER_ALIVE) == 0)
    scene.start_trainer()
    await scene.trainer_reads()


async def stop_heartbeat(scene: Scene, rng: random.Random) -> None:
    """Suspend the trainer until its heartbeat is old, then continue it.

    Its last beat is set to the boot of the machine, which saves a wait of ten seconds.
    """
    trainer, ring = scene.trainer, scene.manifest().ring
    scene.struck()
    trainer.send_signal(signal.SIGSTOP)
    try:
        poke(
            ring,
            ATOMICS_AT + Atomic.CONSUMER_BEAT * LINE_BYTES,
            (1).to_bytes(8, "little"),
        )
        await scene.until("a stale heartbeat", lambda r: r.get(TRAINER_ALIVE) == 0)
    finally:
        trainer.send_signal(signal.SIGCONT)
    await scene.trainer_reads()


async def hang_engine(scene: Scene, rng: random.Random) -> None:
    """Suspend the engine for up to a second; check it from outside.

    Tokens come before and after it. None comes during it, once those in flight are
    counted.
    """
    engine = scene.engine()
    before = await scene.reading()
    await _tokens_come(scene, before)
    scene.struck()
    engine.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(IN_FLIGHT_S)
        still = await scene.reading()
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        later = await scene.reading()
    finally:
        engine.send_signal(signal.SIGCONT)
    if GENERATED not in still or still[GENERATED] != later.get(GENERATED):
        raise NotRecovered("tokens were counted while the engine stood still")
    await _tokens_come(scene, later)


async def _tokens_come(scene: Scene, after: Reading) -> None:
    start = after.get(GENERATED, 0)
    await scene.until("a token", lambda r: r.get(GENERATED, 0) > start)


async def kill_server(scene: Scene, rng: random.Random) -> None:
    """SIGKILL the engine, or all of the server at once; start another one.

    A kill of the API server alone is not tested: vLLM's engine does not notice its
    death and runs on without clients; service managers and containers end the whole
    group.
    """
    server, load = scene.server, scene.load
    family = [p for some in server.processes().values() for p in some]
    engine = rng.random() < 0.5
    load.url = None
    scene.struck()
    if engine:
        os.kill(scene.manifest().pid, signal.SIGKILL)
    else:
        os.killpg(server.pid, signal.SIGKILL)
    _, left = await asyncio.to_thread(psutil.wait_procs, family, GONE_S)
    if left:
        await asyncio.to_thread(server.stop)
        raise NotRecovered(
            f"{len(left)} of {len(family)} processes outlived the server"
        )
    await asyncio.to_thread(server.stop)
    await scene.start_server()
    await scene.trainer_reads()


async def fill_disk(scene: Scene, rng: random.Random) -> None:
    """Let the trainer's writes fail, some after a few bytes; then permit them again.

    As a limit on its files (RLIMIT_FSIZE): it needs no rights and affects no other
    process. A write beyond it fails in the middle, as one on a full disk does.
    """
    trainer = scene.trainer
    before = await scene.reading()
    # The log of the live engine may not exist yet: those of killed servers may be
    # longer, and space for one of them would be space for everything.
    log = scene.run_dir / f"events-{scene.manifest().engine_id}.jsonl"
    size = log.stat().st_size if log.exists() else 0
    scene.struck()
    limit = size + rng.randrange(200) if rng.random() < 0.7 else 0
    trainer.rlimit(psutil.RLIMIT_FSIZE, (limit, psutil.RLIM_INFINITY))
    paths = [order(scene.run_dir, AGAIN, 0) for _ in range(3)]
    try:
        await scene.until(
            "carried out orders", lambda _: not any(path.exists() for path in paths)
        )
    finally:
        trainer.rlimit(
            psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
        )
        for path in paths:
            path.unlink(missing_ok=True)
    await scene.until(
        "a counted write",
        lambda r: r.get(FAILED_WRITES, 0) > before.get(FAILED_WRITES, 0),
    )
    await scene.good_draft()


FAULTS = (
    Fault("kill_trainer", kill_trainer, TRAINER_ALIVE, weight=0.5, gauge=True),
    Fault("stop_heartbeat", stop_heartbeat, TRAINER_ALIVE, gauge=True),
    Fault("hang_engine", hang_engine, GENERATED, gauge=True),
    Fault(
        "kill_server",
        kill_server,
        None,
        weight=0.2,
        uncounted="its counters are gone; the next server has to be read and to answer",
    ),
    Fault("fill_disk", fill_disk, FAILED_WRITES),
)
