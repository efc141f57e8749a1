"""Gains of every shape, for the gate; imported, `judges.NOISE` has them too."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial

from scripts.bench import judges


def _t3(random_: random.Random) -> float:
    squares = sum(random_.gauss(0, 1) ** 2 for _ in range(3))
    return random_.gauss(0, 1) / math.sqrt(squares)


def _rare(random_: random.Random, spread: float) -> float:
    """A fall of one token, seldom; else a little better."""
    chance = spread**2 / (1 + spread**2)
    return -1.0 if random_.random() < chance else chance / (1 - chance)


SHAPES: dict[str, Callable[[random.Random, float], float]] = {
    "normal": lambda r, s: r.gauss(0, s),
    "t3": lambda r, s: s * _t3(r),
    "left": lambda r, s: s * (1 - r.expovariate(1)),
    "right": lambda r, s: s * (r.expovariate(1) - 1),
    "mostly 0": lambda r, s: s * r.choice([0.0] * 18 + [math.sqrt(10), -math.sqrt(10)]),
    "rare fall": _rare,
    "rare rise": lambda r, s: -_rare(r, s),
    "lengths": lambda r, s: r.gauss(0, s * math.exp(r.gauss(-0.5, 1) / 2)),
}
TIED = {"tied 0.3": 0.3, "tied 0.6": 0.6}
"""Correlation of neighbours within a cycle."""


def noise(shape: str, spread: float, random_: random.Random) -> Iterator[float]:
    """Deviations of one cycle's gains from their truth (tokens)."""
    tie = TIED.get(shape)
    draw = SHAPES["normal" if tie is not None else shape]
    value = draw(random_, spread)
    while True:
        yield value
        fresh = draw(random_, spread)
        value = fresh if tie is None else tie * value + math.sqrt(1 - tie**2) * fresh


judges.NOISE.update((shape, partial(noise, shape)) for shape in (*SHAPES, *TIED))
