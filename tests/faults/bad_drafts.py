"""Drafts that a broken trainer publishes."""

from __future__ import annotations

import functools
import random

from .counters import Reading, total
from .fault import Fault
from .processes import GENERATED
from .scene import Scene
from .trainer import OFFERED, PASSED_ON, order

REFUSED = "vllm_tide:refused_drafts_total"
ROLLBACKS = "trainer:rollbacks"
VERSION = "vllm_tide:draft_version"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
UNUSED_TOKENS, UNUSED_SHARE = 2000, 0.05
"""Tokens generated after an install of which fewer than this share were drafted."""


async def refused_draft(scene: Scene, rng: random.Random, what: str) -> None:
    """Publish a draft that the engine must not install."""
    counter = f"{REFUSED}{{{'not_finite' if what == 'nan' else what}}}"
    before = total(await scene.reading(), counter)
    scene.struck()
    path = order(scene.run_dir, what, rng.getrandbits(30))
    try:
        await scene.until("a refusal", lambda r: total(r, counter) > before)
    finally:
        path.unlink(missing_ok=True)
    await scene.good_draft()


async def permuted_draft(scene: Scene, rng: random.Random) -> None:
    """Publish a valid draft with bad tokens: it is rolled back, or not used.

    Where drafting does not pay with any draft, control disables drafting, and serving
    is no worse than before.
    """
    before = await scene.reading()
    installed: dict[str, float] = {}
    scene.struck()
    path = order(scene.run_dir, "permuted", rng.getrandbits(30))

    def taken_back(now: Reading) -> bool:
        return total(now, ROLLBACKS) > total(before, ROLLBACKS)

    def over(now: Reading) -> bool:
        if taken_back(now):
            return True
        if now.get(VERSION, 0) <= before.get(VERSION, 0):
            return False
        installed.update(now if not installed else {})
        made = total(now, GENERATED) - total(installed, GENERATED)
        drafted = total(now, DRAFTED) - total(installed, DRAFTED)
        return made >= UNUSED_TOKENS and drafted < UNUSED_SHARE * made

    try:
        after = await scene.until("a rollback, or a draft unused,", over, 180.0)
        if taken_back(after):
            good = after["trainer:published_version"]
            await scene.until("the previous draft", lambda r: r.get(VERSION, 0) >= good)
    finally:
        path.unlink(missing_ok=True)
    if not taken_back(after):
        await scene.good_draft()


def _fault(what: str) -> Fault:
    reason = "not_finite" if what == "nan" else what
    strike = functools.partial(refused_draft, what=what)
    return Fault(f"head_{what}", strike, f"{REFUSED}{{{reason}}}")


FAULTS = (
    *(_fault(what) for what in (*PASSED_ON, OFFERED[0])),
    Fault(
        "head_permuted",
        permuted_draft,
        None,
        uncounted="a rollback counts it where control drafts with it; the suite "
        "reads which of the two it was",
    ),
)
