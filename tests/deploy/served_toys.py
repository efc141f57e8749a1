"""Served requests whose acceptance is known."""

from __future__ import annotations

import itertools

import numpy as np

from vllm_tide.deploy.served import Cell, ServedRequest, bucket_of

SPREAD = 0.07
"""Standard deviation of acceptance between requests."""
_BEGAN = itertools.count(1)


def make_request(
    rng: np.random.Generator,
    level: float,
    *,
    group: int = 0,
    rounds: tuple[int, int] = (15, 45),
    version: int = 0,
    key: int = 0,
    drafts: int = 3,
    engine: str = "",
) -> ServedRequest:
    """One served request.

    Args:
        rng: Source of chance.
        level: Mean chance that a drafted token is accepted after the ones before it.
        group: Group it belongs to.
        rounds: Fewest and most rounds.
        version: Draft version it was served with.
        key: Request key.
        drafts: Drafted tokens per round.
        engine: Engine that served it.
    """
    chance = float(np.clip(rng.normal(level, SPREAD), 0.01, 0.99))
    count = int(rng.integers(rounds[0], rounds[1] + 1))
    passed = rng.random((count, drafts)) < chance
    accepted = np.cumprod(passed, axis=1).sum(axis=1)
    cells: dict[Cell, list[float]] = {}
    generated = 0
    for taken in accepted.tolist():
        sums = cells.setdefault((bucket_of(generated), 1, 0), [0.0, 0.0])
        sums[0] += taken + 1
        sums[1] += 1.0
        generated += taken + 1
    return ServedRequest(
        key=key,
        engine=engine,
        group=group,
        versions=(version,),
        began=next(_BEGAN),
        cells=cells,
        tries=float(count),
        hits=float((accepted > 0).sum()),
        squares=float(count),
    )
