"""Enumeration of allocations of accelerators to training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from vllm_tide.plan.throughput import Case

_COMBINATIONS = 8192  # maximum number of allocations of whole instances
_SHARES = 64
_MIN_GAIN = 1.005  # minimum gain in throughput that justifies a trainer

Allocation = tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One way to run the cluster.

    Attributes:
        training: Training accelerators of each class; None: no class can train.
        tokens_per_s: Mean rate, at most the demand.
    """

    name: str
    training: Allocation | None
    tokens_per_s: float


NONE, STATIC, DEDICATED, SHARE, SWITCHING = (
    "all serve, no speculation",
    "all serve, static draft",
    "TIDE, dedicated",
    "TIDE, share of a GPU",
    "TIDE, switching",
)
TIDE = DEDICATED, SHARE, SWITCHING


def rows(case: Case) -> list[Row]:
    """Return all ways to run the cluster with their best allocations."""
    nothing = (0.0,) * len(case.classes)
    compared = [
        Row(NONE, nothing, min(case.plain, case.demand)),
        Row(STATIC, nothing, min(case.frozen, case.demand)),
    ]
    ways: list[tuple[str, Allocation | None, Callable[[Allocation], float]]] = [
        (DEDICATED, best_whole(case, case.mean), case.mean),
        (SHARE, best_share(case), case.mean),
        (SWITCHING, best_whole(case, case.switched_mean), case.switched_mean),
    ]
    for name, training, mean in ways:
        tokens = 0.0 if training is None else min(mean(training), case.demand)
        compared.append(Row(name, training, tokens))
    return compared


def best_of(compared: list[Row]) -> Row:
    """Return the row with the highest rate; a simpler one if the gain is negligible."""
    best = compared[0]
    for row in compared[1:]:
        if row.tokens_per_s > best.tokens_per_s * _MIN_GAIN:
            best = row
    return best


def best_whole(case: Case, value: Callable[[Allocation], float]) -> Allocation | None:
    """Return the best allocation of whole instances to training and serving.

    For large counts only some numbers are tried, small ones more densely.
    """
    able = sum(group.trains > 0 for group in case.classes)
    places = int(_COMBINATIONS ** (1 / max(able, 1)))
    choices = []
    for group in case.classes:
        count = group.count // group.step if group.trains > 0 else 0
        tried = {round(count * (j / places) ** 3) for j in range(places + 1)}
        numbers = range(count + 1) if count <= places else sorted(tried)
        choices.append([float(n * group.step) for n in numbers])
    full = tuple(float(c.count) for c in case.classes)
    allocations = (x for x in product(*choices) if any(x) and x != full)
    return max(allocations, key=value, default=None)


def best_share(case: Case) -> Allocation | None:
    """Return the best share of one class's time; small shares are tried densely."""
    allocations = [
        tuple(
            group.count * (j / _SHARES) ** 3 if place == i else 0.0
            for place in range(len(case.classes))
        )
        for i, group in enumerate(case.classes)
        if group.trains > 0 and group.count
        for j in range(1, _SHARES + 1)
    ]
    return max(allocations, key=case.mean, default=None)
