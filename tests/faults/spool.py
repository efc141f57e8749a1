"""What others put into a spool, and records that no engine has computed.

The scene's trainer reads its ring, and beside it a spool that no relay writes to.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from vllm_tide import _shm
from vllm_tide.config import SpoolConfig
from vllm_tide.transport.record import META_BYTES
from vllm_tide.transport.ring import (
    FRAME_BYTES,
    RECORD,
    Word,
    frame_at,
    pack_frame,
)
from vllm_tide.transport.shm import DATA_AT, SHM_DIR
from vllm_tide.transport.spool import DEAD_S, EngineFolder, EngineState
from vllm_tide.transport.spool_store import Store, open_store
from vllm_tide.transport.spool_writer import Bounds

from .fault import Fault
from .memory import poke, rows_flow, trainer_stopped, word
from .scene import NotRecovered, Scene

_HOSTILE = "trainer:hostile_values"
_SHARD = "000000000001-5.safetensors"
_DAYS = 3 * 86400.0


async def _planted(scene: Scene, plant: Callable[[Store, Path], Path]) -> None:
    """Plant something; a relay must keep a file of it, and the trainer learn on."""
    store = open_store(str(scene.spool))
    scene.struck()
    kept = plant(store, scene.spool / "engines")
    bounds = Bounds(store, SpoolConfig.model_validate({}))
    until = time.monotonic() + DEAD_S + 2
    try:
        while time.monotonic() < until:
            # That engine lives, by a clock that is days behind ours.
            state = EngineState(unix=time.time() - _DAYS)
            EngineFolder(store, "behind").write_state(state)
            bounds.enforce("nobody")
            await rows_flow(scene)
        if not kept.exists():
            raise NotRecovered(f"{kept.name} was removed")
    finally:
        shutil.rmtree(scene.spool / "engines")


def _links(store: Store, engines: Path) -> Path:
    away = engines.parent.parent / "away"
    away.mkdir(exist_ok=True)
    (away / _SHARD).touch()
    store.write("engines/dead/state.json", b"{}")
    (engines / "dead/records").symlink_to(away)
    return away / _SHARD


def _pipes(store: Store, engines: Path) -> Path:
    EngineFolder(store, "piped").write_state(EngineState(unix=time.time()))
    os.mkfifo(engines / "piped/engine.json")
    (engines / "dead").mkdir()
    os.mkfifo(engines / "dead/state.json")
    return engines / "dead/state.json"


def _steps(store: Store, engines: Path) -> Path:
    name = f"000000000001-{int(time.time() - _DAYS)}.safetensors"
    store.write(f"engines/behind/records/{name}", b"x")
    return engines / "behind/records" / name


async def spool_symlink(scene: Scene, rng: random.Random) -> None:
    """A folder of a dead engine has links to what is not the spool's."""
    await _planted(scene, _links)


async def spool_fifo(scene: Scene, rng: random.Random) -> None:
    """Files of engines are pipes, to which nobody ever writes."""
    await _planted(scene, _pipes)


async def clock_step(scene: Scene, rng: random.Random) -> None:
    """The clock of the host that keeps the spool in bounds goes days ahead."""
    await _planted(scene, _steps)


async def hostile_values(scene: Scene, rng: random.Random) -> None:
    """A record whose checksum is right holds a token that there is not."""
    before = (await scene.reading()).get(_HOSTILE, 0)
    ring = scene.manifest().ring
    with trainer_stopped(scene):
        await scene.until("unread records", lambda r: r.get("ring:used_bytes", 0) > 0)
        scene.struck()
        _forge(ring)
    await scene.until("a counted record", lambda r: r.get(_HOSTILE, 0) > before)
    await rows_flow(scene)


def _forge(ring: str) -> None:
    """Put a token of -2^31 into the newest record that is not read yet."""
    data = memoryview((Path(SHM_DIR) / ring).read_bytes())
    capacity, head = len(data) - DATA_AT, word(ring, Word.HEAD)
    position, newest = word(ring, Word.TAIL), None
    while position < head and (frame := frame_at(data, capacity, position, head)):
        if frame.kind == RECORD and frame.body > META_BYTES:
            newest = position, frame
        position += frame.length
    if newest is None:
        raise NotRecovered("no record of rows was there to forge")
    position, frame = newest
    at = DATA_AT + position % capacity
    body = bytearray(data[at + FRAME_BYTES : at + FRAME_BYTES + frame.body])
    body[META_BYTES : META_BYTES + 4] = (1 << 31).to_bytes(4, "little")
    whole = pack_frame(RECORD, position, frame.length, len(body), _shm.crc32c(body))
    poke(ring, at, whole + bytes(body))


_KEPT = "nothing of it counts; the suite reads whether the file is still there"
FAULTS = (
    Fault("spool_symlink", spool_symlink, None, 0.2, uncounted=_KEPT),
    Fault("spool_fifo", spool_fifo, None, 0.2, uncounted=_KEPT),
    Fault("clock_step", clock_step, None, 0.2, uncounted=_KEPT),
    Fault("hostile_values", hostile_values, _HOSTILE),
)
