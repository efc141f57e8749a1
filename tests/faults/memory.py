"""Shared memory that is full, damaged or cut short."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from functools import partial

from vllm_tide.transport.ring import Atomic
from vllm_tide.transport.shm import ATOMICS_AT, DATA_AT, LINE_BYTES, SHM_DIR
from vllm_tide.transport.weights import BLOB_AT, SLOT_HEAD

from .counters import Reading, total
from .fault import Fault
from .scene import NotRecovered, Scene
from .trainer import AGAIN, order

_LATEST, _SEQUENCE = 0, 1  # atomics of a weights segment
DAMAGED_BYTES = 4096
ROWS, SWAPS = "vllm_tide:captured_rows_total", "vllm_tide:swaps_total"
REFUSED = "vllm_tide:refused_drafts_total"
RING_LOST = "vllm_tide:faults_total{ring_lost}"
WEIGHTS_LOST = "vllm_tide:faults_total{weights_lost}"


def poke(name: str, at: int, data: bytes) -> None:
    """Overwrite bytes of a segment without attaching to it."""
    fd = os.open(f"{SHM_DIR}/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def peek(name: str, at: int, count: int) -> bytes:
    """Read bytes of a segment without attaching to it."""
    fd = os.open(f"{SHM_DIR}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, count, at)
    finally:
        os.close(fd)


def read_atomic(name: str, number: int) -> int:
    """Return an atomic of page 1."""
    return int.from_bytes(peek(name, ATOMICS_AT + number * LINE_BYTES, 8), "little")


def write_atomic(name: str, number: int, value: int) -> None:
    """Overwrite an atomic of page 1."""
    poke(name, ATOMICS_AT + number * LINE_BYTES, value.to_bytes(8, "little"))


@contextlib.contextmanager
def trainer_stopped(scene: Scene) -> Iterator[None]:
    """Suspend the trainer: it neither reads nor publishes."""
    trainer = scene.trainer
    trainer.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        trainer.send_signal(signal.SIGCONT)


async def fill_ring(scene: Scene, rng: random.Random) -> None:
    """Read nothing until the ring is full; then read again."""
    key = "vllm_tide:dropped_rows_total{over_budget}"
    before = (await scene.reading()).get(key, 0)
    scene.struck()
    with trainer_stopped(scene):
        await scene.until("a full ring", lambda r: r.get(key, 0) > before)
    await scene.until("an empty ring", lambda r: r.get("ring:used_bytes", 9e9) < 2**20)


async def damage_ring(scene: Scene, rng: random.Random) -> None:
    """Write random bytes over records that were not read yet."""
    ring = scene.manifest().ring
    before = (await scene.reading()).get("ring:corrupt_records", 0)
    with trainer_stopped(scene):
        await scene.until(
            "unread records", lambda r: r.get("ring:used_bytes", 0) > 4 * DAMAGED_BYTES
        )
        scene.struck()
        capacity = os.stat(f"{SHM_DIR}/{ring}").st_size - DATA_AT
        place = read_atomic(ring, Atomic.TAIL) + rng.randrange(DAMAGED_BYTES)
        at = min(place % capacity, capacity - DAMAGED_BYTES)
        poke(ring, DATA_AT + at, rng.randbytes(DAMAGED_BYTES))
    await scene.until(
        "a counted record", lambda r: r.get("ring:corrupt_records", 0) > before
    )
    await rows_flow(scene)


async def damage_atomics(scene: Scene, rng: random.Random) -> None:
    """Write a random value over one of the atomics that both sides depend on.

    Atomics that stay until the next drop or pause are excluded: a side does not repair
    an atomic but stores it again when it changes.
    """
    ring = scene.manifest().ring
    stand = (
        Atomic.CORRUPT,
        Atomic.DROPPED_RECORDS,
        Atomic.DROPPED_ROWS,
        Atomic.COLLECT,
    )
    chosen = rng.choice([w for w in Atomic if w not in stand])
    value = rng.getrandbits(rng.choice((8, 32, 64)))
    while value == read_atomic(ring, chosen):  # no damage
        value = rng.getrandbits(64)
    scene.struck()
    write_atomic(ring, chosen, value)
    await scene.until("a stored atomic", lambda _: read_atomic(ring, chosen) != value)
    await rows_flow(scene)


async def shrink_ring(scene: Scene, rng: random.Random) -> None:
    """Truncate or unlink the ring: nothing is captured until a restart."""
    await _shrink(scene, rng, scene.manifest().ring, RING_LOST)
    rows = await settled(scene, ROWS)
    if await settled(scene, ROWS) != rows:
        raise NotRecovered("rows were captured without a ring")


async def shrink_weights(scene: Scene, rng: random.Random) -> None:
    """Truncate or unlink the weights segment: no swap until a restart."""
    await _shrink(scene, rng, scene.manifest().weights, WEIGHTS_LOST)
    swaps = await settled(scene, SWAPS)
    path = order(scene.run_dir, AGAIN, 0)
    try:
        if await settled(scene, SWAPS) != swaps:
            raise NotRecovered("a draft was swapped in without a weights segment")
    finally:
        path.unlink(missing_ok=True)


async def _shrink(scene: Scene, rng: random.Random, name: str, counter: str) -> None:
    path = f"{SHM_DIR}/{name}"
    size = os.stat(path).st_size
    before = (await scene.reading()).get(counter, 0)
    scene.struck()
    os.truncate(path, rng.choice((0, rng.randrange(size))))
    await scene.until("a counted loss", lambda r: r.get(counter, 0) > before)


async def settled(scene: Scene, counter: str) -> float:
    """Return a counter after the requests in flight and a later right answer."""
    if wrong := await scene.load.settle():
        raise NotRecovered(wrong)
    return (await scene.reading()).get(counter, 0)


async def damage_weights(scene: Scene, rng: random.Random) -> None:
    """Forge a new version with bytes that contradict its digest."""
    name = scene.manifest().weights
    if not read_atomic(name, _LATEST):
        await scene.good_draft()
    # A draft published now would have the version that is forged here.
    with trainer_stopped(scene):
        before = total(await scene.reading(), REFUSED)
        _forge_version(scene, rng, name)
        await scene.until("a refusal", lambda r: total(r, REFUSED) > before)
    await scene.good_draft()


def _forge_version(scene: Scene, rng: random.Random, name: str) -> None:
    latest = read_atomic(name, _LATEST)
    slot_bytes = (os.stat(f"{SHM_DIR}/{name}").st_size - DATA_AT) // 2
    starts = [DATA_AT, DATA_AT + slot_bytes]
    headers = [SLOT_HEAD.unpack(peek(name, at, SLOT_HEAD.size)) for at in starts]
    slot = 0 if headers[0][1] == latest else 1
    magic, _, size, digest = headers[slot]
    body = bytearray(peek(name, starts[slot], BLOB_AT + size))
    forged = SLOT_HEAD.pack(magic, latest + 1, size, digest)
    body[: SLOT_HEAD.size] = forged
    for _ in range(rng.randint(1, 64)):
        body[rng.randrange(SLOT_HEAD.size, len(body))] ^= rng.randint(1, 255)
    scene.struck()
    poke(name, starts[1 - slot], bytes(body))
    write_atomic(name, _LATEST, latest + 1)


async def rows_flow(scene: Scene) -> None:
    """Wait until rows are written and read again."""
    least = await scene.reading()

    def grew(now: Reading, key: str) -> bool:
        # A restarted trainer counts from 0, some time after it joined.
        value = now.get(key, least.get(key, 0))
        least[key] = min(least.get(key, 0), value)
        return value > least[key]

    for key in (ROWS, "trainer:rows_read"):
        await scene.until(key, partial(grew, key=key))


FAULTS = (
    Fault("fill_ring", fill_ring, "vllm_tide:dropped_rows_total{over_budget}"),
    Fault("damage_ring", damage_ring, "ring:corrupt_records"),
    Fault(
        "damage_words",
        damage_atomics,
        None,
        uncounted="its writer stores the atomic again, which the suite reads there",
    ),
    Fault("damage_weights", damage_weights, REFUSED),
    Fault("shrink_ring", shrink_ring, RING_LOST, 0.2, lasting=True),
    Fault("shrink_weights", shrink_weights, WEIGHTS_LOST, 0.2, lasting=True),
)
