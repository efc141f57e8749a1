"""How often each document appears in one pass over the buffer.

A document of weight 1 appears once, one of weight 0.3 in three passes of ten, one of
weight 2 twice: the expected number of appearances is the weight.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from vllm_tide.config import TrainConfig
from vllm_tide.train.sample import Sample
from vllm_tide.train.tenants import cap_factors

MAX_REPEAT = 4.0
"""Most appearances in one pass of a document whose group is small."""
CYCLE_PASSES = 4
"""Most appearances of a document in one cycle."""
REST = -2
"""Stands for all groups that are not wanted."""


def passes_left(sample: Sample, most: int, cycle: int) -> int:
    """How often a document may still appear in a cycle; `most` is its `max_passes`."""
    done = sample.trained
    return max(0, min(most - len(done), CYCLE_PASSES - done.count(cycle)))


def weights(
    samples: Sequence[Sample],
    config: TrainConfig,
    now_unix_s: float,
    wanted_groups: Collection[int] | None = None,
) -> list[float]:
    """Weight of each document.

    Age halves it every `age_half_life_s`; the wanted groups weigh alike (a small one is
    repeated up to `MAX_REPEAT` times), and all others together as much as they at most:
    a draft trained on a shift alone forgets the rest. Then every tenant is brought down
    to `tenant_share`.
    """
    out = [_freshness(sample, config.age_half_life_s, now_unix_s) for sample in samples]
    if wanted_groups is not None:
        factors = _group_factors(samples, out, frozenset(wanted_groups))
        out = [
            w * factors.get(s.group, factors[REST])
            for s, w in zip(samples, out, strict=True)
        ]
    if config.tenant_share < 1:
        masses: defaultdict[int, float] = defaultdict(float)
        for sample, weight in zip(samples, out, strict=True):
            masses[sample.tenant] += weight * sample.num_tokens
        caps = cap_factors(masses, config.tenant_share)
        out = [w * caps.get(s.tenant, 1.0) for s, w in zip(samples, out, strict=True)]
    return out


def draw(
    samples: Sequence[Sample],
    weight: Sequence[float],
    rng: random.Random,
    most: Callable[[Sample], int],
) -> list[Sample]:
    """The documents of one pass, shuffled, each as often as `most` says at most.

    Chance plays no part for whole weights: a plain pass depends on the order only.
    """
    out: list[Sample] = []
    for sample, expected in zip(samples, weight, strict=True):
        times = int(expected)
        if expected > times and rng.random() < expected - times:
            times += 1
        out += [sample] * min(times, most(sample))
    rng.shuffle(out)
    return out


def _freshness(sample: Sample, half_life_s: float | None, now: float) -> float:
    if half_life_s is None:
        return 1.0
    return float(0.5 ** (max(0.0, now - sample.captured_unix_s) / half_life_s))


def _group_factors(
    samples: Sequence[Sample], weight: Sequence[float], wanted: frozenset[int]
) -> dict[int, float]:
    masses: defaultdict[int, float] = defaultdict(float)
    rest = 0.0
    for sample, value in zip(samples, weight, strict=True):
        if sample.group in wanted:
            masses[sample.group] += value * sample.num_tokens
        else:
            rest += value * sample.num_tokens
    masses = defaultdict(float, {g: m for g, m in masses.items() if m > 0})
    if not masses:
        return {REST: 0.0}
    even = sum(masses.values()) / len(masses)
    factors = {group: min(MAX_REPEAT, even / mass) for group, mass in masses.items()}
    drawn = sum(factors[group] * mass for group, mass in masses.items())
    factors[REST] = min(1.0, drawn / rest) if rest else 1.0
    return factors
