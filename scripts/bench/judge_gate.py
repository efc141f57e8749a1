"""How often the publication gate is right, on gains whose truth is known.

Drives the trainer's own `judge` and `Evidence` with evaluations drawn at random: no
model, no server. `rows` is for `scripts/bench/judge.py`; by itself it prints them.

    judge_gate.py [--runs N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_tide.config import TrainConfig
from vllm_tide.train.evaluate import FORMS, Evaluation
from vllm_tide.train.judgement import Evidence, Pair, judge

DEPTH = 3
ROWS = 100
CONFIG = TrainConfig()
SMALL = (3, 8)
"""Requests of a cycle, from and to."""


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
    """Deviations of one cycle's gains from their truth (tokens).

    Args:
        shape: One of `SHAPES` or `TIED`.
        spread: Standard deviation (tokens).
        random_: Generator.
    """
    tie = TIED.get(shape)
    draw = SHAPES["normal" if tie is not None else shape]
    value = draw(random_, spread)
    while True:
        yield value
        fresh = draw(random_, spread)
        value = fresh if tie is None else tie * value + math.sqrt(1 - tie**2) * fresh


def pair_of(gains: dict[int, float]) -> Pair:
    """Evaluations in which the candidate accepts so many tokens more a row."""

    def evaluation(by_key: dict[int, float]) -> Evaluation:
        found = Evaluation(DEPTH)
        found.reached = {form: [0.0] * DEPTH for form in FORMS}
        for key, more in by_key.items():
            accepted = ROWS * (DEPTH + more)
            found.requests[key] = [float(ROWS)] + [accepted] * len(FORMS)
        return found

    return Pair([], evaluation(gains), evaluation(dict.fromkeys(gains, 0.0)))


def run(
    gain: float,
    cycles: int,
    random_: random.Random,
    *,
    spread: float = 0.15,
    shape: str = "normal",
    requests: tuple[int, int] = SMALL,
) -> int | None:
    """Requests scored until the first publication; None if there was none.

    Args:
        gain: True gain (tokens).
        cycles: At most so many.
        random_: Generator.
        spread: Of the gains of requests (tokens).
        shape: One of `SHAPES` or `TIED`.
        requests: Of a cycle, from and to.
    """
    evidence, nothing = Evidence(), pair_of({})
    for cycle in range(cycles):
        source = noise(shape, spread, random_)
        count = random_.randint(*requests)
        gains = {
            1000 * cycle + i: max(-DEPTH, min(DEPTH, gain + next(source)))
            for i in range(count)
        }
        pair = pair_of(gains)
        evidence.add(list(pair.gains("served").values()))
        if judge(1, 0.0, nothing, pair, CONFIG, "served", evidence).publish:
            return evidence.requests
    return None


def row(
    gain: float, runs: int, seed: int, cycles: int = 20, **how: Any
) -> dict[str, Any]:
    """Figures of many runs: see `run`."""
    random_ = random.Random(f"{seed} {gain} {sorted(how.items())}")  # noqa: S311
    found = [run(gain, cycles, random_, **how) for _ in range(runs)]
    published = [n for n in found if n is not None]
    return {
        "true_gain": gain,
        "cycles": cycles,
        "runs": runs,
        "published": len(published),
        "requests_p50": statistics.median(published) if published else None,
        "published_within_60": sum(n <= 60 for n in published),
        "spread": how.get("spread", 0.15),
        "shape": how.get("shape", "normal"),
        "requests_per_cycle": list(how.get("requests", SMALL)),
    }


def rows(seed: int = 0) -> list[dict[str, Any]]:
    """Gains of the review's spread (0.15), and a shift (+0.3, spread 0.3)."""
    return [
        row(0.0, 1000, seed),
        row(0.05, 200, seed),
        row(0.10, 400, seed),
        row(0.30, 200, seed),
        row(0.30, 200, seed, spread=0.3),
        *(row(0.0, 200, seed, spread=s) for s in (0.05, 0.3, 0.6)),
    ]


def shapes(seed: int = 0, runs: int = 400) -> list[dict[str, Any]]:
    """True gain 0 in every shape and spread, and in cycles of all sizes."""
    return [
        row(0.0, runs, seed, spread=spread, shape=shape, requests=requests)
        for shape in (*SHAPES, *TIED)
        for spread in (0.05, 0.15, 0.3, 0.6)
        for requests in ((2, 2), SMALL, (20, 20), (60, 60))
    ]


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=400, help="of every shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = rows(args.seed)
    for line in found:
        print(json.dumps(line))
    by_shape = shapes(args.seed, args.runs)
    for line in by_shape:
        share = 100 * line["published"] / line["runs"]
        print(
            f"{line['shape']:10} spread {line['spread']:.2f} requests "
            f"{line['requests_per_cycle']}: {share:.1f} % published"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"gate": found, "shapes": by_shape}, indent=1))


if __name__ == "__main__":
    main()
