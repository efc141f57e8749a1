"""A disk that takes no more.

As a limit on the trainer's files (RLIMIT_FSIZE): it needs no rights and hurts nobody
else. A write over it fails in the middle, as one on a full disk does.
"""

from __future__ import annotations

import random
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # no stubs needed for this

from .fault import Fault
from .scene import Scene
from .trainer import order

FAILED = "trainer:failed_writes"


async def fill_disk(scene: Scene, rng: random.Random) -> None:
    """The trainer's writes fail, some after a few bytes; then there is room again."""
    trainer = scene.trainer
    before = await scene.reading()
    # The log of the live engine, which may not be there yet: those of servers that were
    # killed may be longer, and room for one of them would be room for everything.
    log = scene.run_dir / f"events-{scene.manifest().engine_id}.jsonl"
    size = log.stat().st_size if log.exists() else 0
    scene.struck()
    limit = size + rng.randrange(200) if rng.random() < 0.7 else 0
    trainer.rlimit(psutil.RLIMIT_FSIZE, (limit, psutil.RLIM_INFINITY))
    paths = [order(scene.run_dir, "again", 0) for _ in range(3)]
    try:
        await scene.until("carried out orders", lambda _: not any(map(_there, paths)))
    finally:
        trainer.rlimit(
            psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
        )
        for path in paths:
            path.unlink(missing_ok=True)
    await scene.until(
        "a counted write", lambda r: r.get(FAILED, 0) > before.get(FAILED, 0)
    )
    await scene.good_head()


def _there(path: Path) -> bool:
    return path.exists()


FAULTS = (Fault("fill_disk", fill_disk, FAILED),)
