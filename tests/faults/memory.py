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

_LATEST, _SEQUENCE = 0, 1  # words of a weights segment
DAMAGED_BYTES = 4096
ROWS, SWAPS = "vllm_tide:captured_rows_total", "vllm_tide:swaps_total"
REFUSED = "vllm_tide:refused_drafts_total"
RING_LOST = "vllm_tide:faults_total{ring_lost}"
WEIGHTS_LOST = "vllm_tide:faults_total{weights_lost}"


def poke(name: str, at: int, data: bytes) -> None:
    """Overwrite bytes of a segment without joining it."""
    fd = os.open(f"{SHM_DIR}/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def peek(name: str, at: int, count: int) -> bytes:
    """Bytes of a segment, read without joining it."""
    fd = os.open(f"{SHM_DIR}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, count, at)
    finally:
        os.close(fd)


def read_atomic(name: str, number: int) -> int:
    """A word of page 1."""
    return int.from_bytes(peek(name, ATOMICS_AT + number * LINE_BYTES, 8), "little")


def write_atomic(name: str, number: int, value: int) -> None:
    """Overwrite a word of page 1."""
    poke(name, ATOMICS_AT + number * LINE_BYTES, value.to_bytes(8, "little"))


@contextlib.contextmanager
def trainer_stopped(scene: Scene) -> Iterator[None]:
    """It neither reads nor publishes meanwhile."""
    trainer = scene.trainer
    trainer.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        trainer.send_signal(signal.SIGCONT)


async def fill_ring(scene: Scene, rng: random.Random) -> None:
    """Nobody reads until the ring is full; then somebody does again."""
    key = "vllm_tide:dropped_rows_total{over_budget}"
    before = (await scene.reading()).get(key, 0)
    scene.struck()
    with trainer_stopped(scene):
        await scene.until("a full ring", lambda r: r.get(key, 0) > before)
    await scene.until("an empty ring", lambda r: r.get("ring:used_bytes", 9e9) < 2**20)


async def damage_ring(scene: Scene, rng: random.Random) -> None:
    """Random bytes over records that nobody has read yet."""
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
    """A random value over one of the words that both sides steer by.

    Those that stand until the next drop or pause are left out: nothing mends a word,
    its owner just stores it again when it changes.
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
    await scene.until("a stored word", lambda _: read_atomic(ring, chosen) != value)
    await rows_flow(scene)


async def shrink_ring(scene: Scene, rng: random.Random) -> None:
    """The ring loses its end, or all of it: nothing is captured until a restart."""
    await _shrink(scene, rng, scene.manifest().ring, RING_LOST)
    rows = await settled(scene, ROWS)
    if await settled(scene, ROWS) != rows:
        raise NotRecovered("rows were captured without a ring")


async def shrink_weights(scene: Scene, rng: random.Random) -> None:
    """The weights segment loses its end, or all of it: no swap until a restart."""
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
    """A counter once what is in flight has ended and a later request was right."""
    if wrong := await scene.load.settle():
        raise NotRecovered(wrong)
    return (await scene.reading()).get(counter, 0)


async def damage_weights(scene: Scene, rng: random.Random) -> None:
    """A new version appears whose bytes are not what its sums say."""
    name = scene.manifest().weights
    if not read_atomic(name, _LATEST):
        await scene.good_head()
    # A head that it publishes now would have the number that is forged here.
    with trainer_stopped(scene):
        before = total(await scene.reading(), REFUSED)
        _forge_version(scene, rng, name)
        await scene.until("a refusal", lambda r: total(r, REFUSED) > before)
    await scene.good_head()


def _forge_version(scene: Scene, rng: random.Random, name: str) -> None:
    latest = read_atomic(name, _LATEST)
    slot_bytes = (os.stat(f"{SHM_DIR}/{name}").st_size - DATA_AT) // 2
    starts = [DATA_AT, DATA_AT + slot_bytes]
    heads = [SLOT_HEAD.unpack(peek(name, at, SLOT_HEAD.size)) for at in starts]
    slot = 0 if heads[0][1] == latest else 1
    magic, _, size, digest = heads[slot]
    body = bytearray(peek(name, starts[slot], BLOB_AT + size))
    forged = SLOT_HEAD.pack(magic, latest + 1, size, digest)
    body[: SLOT_HEAD.size] = forged
    for _ in range(rng.randint(1, 64)):
        body[rng.randrange(SLOT_HEAD.size, len(body))] ^= rng.randint(1, 255)
    scene.struck()
    poke(name, starts[1 - slot], bytes(body))
    write_atomic(name, _LATEST, latest + 1)


async def rows_flow(scene: Scene) -> None:
    """Rows are written and read again."""
    least = await scene.reading()

    def grew(now: Reading, key: str) -> bool:
        # A trainer that was started anew counts from 0, some time after it joined.
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
        uncounted="the word's owner stores it again, which the suite reads there",
    ),
    Fault("damage_weights", damage_weights, REFUSED),
    Fault("shrink_ring", shrink_ring, RING_LOST, 0.2, lasting=True),
    Fault("shrink_weights", shrink_weights, WEIGHTS_LOST, 0.2, lasting=True),
)
