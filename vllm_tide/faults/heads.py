"""Heads that a broken trainer publishes."""

from __future__ import annotations

import functools
import random

from .counters import total
from .fault import Fault
from .scene import Scene
from .trainer import OFFERED, PASSED_ON, order

REFUSED = "vllm_tide:refused_drafts_total"


async def refused_head(scene: Scene, rng: random.Random, what: str) -> None:
    """A head that the engine must not install."""
    counter = f"{REFUSED}{{{'not_finite' if what == 'nan' else what}}}"
    before = total(await scene.reading(), counter)
    scene.struck()
    path = order(scene.run_dir, what, rng.getrandbits(30))
    try:
        await scene.until("a refusal", lambda r: total(r, counter) > before)
    finally:
        path.unlink(missing_ok=True)
    await scene.good_head()


async def permuted_head(scene: Scene, rng: random.Random) -> None:
    """A sound head that drafts nonsense: it is served, and has to be taken back."""
    before = await scene.reading()
    scene.struck()
    path = order(scene.run_dir, "permuted", rng.getrandbits(30))
    counter = "trainer:rollbacks"
    try:
        after = await scene.until(
            "a rollback", lambda r: total(r, counter) > total(before, counter), 60.0
        )
        good = after["trainer:published_version"]
        await scene.until(
            "the head before", lambda r: r.get("vllm_tide:draft_version", 0) >= good
        )
    finally:
        path.unlink(missing_ok=True)


def _fault(what: str) -> Fault:
    reason = "not_finite" if what == "nan" else what
    strike = functools.partial(refused_head, what=what)
    return Fault(f"head_{what}", strike, f"{REFUSED}{{{reason}}}")


FAULTS = (
    *(_fault(what) for what in (*PASSED_ON, OFFERED[0])),
    Fault("head_permuted", permuted_head, "trainer:rollbacks"),
)
