"""The best accelerators to train on, and how long it takes until that has paid.

For a given rate of training the cheapest allocation fills the classes in ascending
order of tokens not served per token trained: a fractional knapsack. So the search is
over one number and the orders. Whole instances are tried one by one where there are few
combinations, else in those same orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product

from vllm_tide.plan.throughput import Case

_COMBINATIONS = 512  # of whole instances that are tried one by one
_PERMUTED = 3  # classes, at most, of which every order is tried
_PLACES = 96  # numbers of instances of a class that are tried, few ones closer
_GRID = 24  # places in each class that a fraction is looked for at first
_SECTIONS = 25
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_LONGEST = 1e9  # seconds, longer than anybody waits
_ROUNDED = 1 + 1e-9  # less is no lead

Allocation = tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One way to run the cluster.

    Attributes:
        name: What it is.
        training: Accelerators of each class that train; None: none can.
        tokens_per_s: Mean, at most what is asked for.
        break_even_s: Seconds from a shift until more was served than by the draft of
            before on all of them; None: never, or not asked.
    """

    name: str
    training: Allocation | None
    tokens_per_s: float
    break_even_s: float | None = None


NONE, STATIC, DEDICATED, SHARE, SWITCHING = (
    "all serve, no speculation",
    "all serve, static draft",
    "TIDE, dedicated",
    "TIDE, share of a GPU",
    "TIDE, switching",
)
TIDE = DEDICATED, SHARE, SWITCHING


def rows(case: Case, even: bool = True) -> list[Row]:
    """Every way to run the cluster, each at its best.

    Args:
        even: Whether to ask for the time until it breaks even.
    """
    nothing = (0.0,) * len(case.classes)
    found = [Row(NONE, nothing, case.plain), Row(STATIC, nothing, case.frozen)]
    ways: list[tuple[str, Allocation | None, Callable[..., float]]] = [
        (DEDICATED, best_whole(case, case.mean), case.tokens),
        (SHARE, best_share(case), case.tokens),
        (SWITCHING, best_whole(case, case.switched_mean), case.switched_tokens),
    ]
    for name, training, tokens in ways:
        if training is None:
            found.append(Row(name, None, 0.0))
            continue
        mean = tokens(training, case.every) / case.every
        caught_up = None
        if even:
            caught_up = break_even(case, partial(tokens, training))
        found.append(Row(name, training, mean, caught_up))
    return [
        Row(r.name, r.training, min(r.tokens_per_s, case.demand), r.break_even_s)
        for r in found
    ]


def orders(case: Case) -> list[list[int]]:
    """Orders in which classes may be taken for training, the cheapest first.

    A class is cheap if it serves little per trained token. How much it serves depends
    on its speed-up and so on the rate of training: of a few classes every order is
    tried.
    """
    able = [i for i, c in enumerate(case.classes) if c.trains > 0 and c.count > 0]
    if len(able) <= _PERMUTED:
        return [list(order) for order in permutations(able)]

    def price(i: int) -> float:
        group = case.classes[i]
        return group.serves * group.speed(case.learning.best) / group.trains

    return [sorted(able, key=price)]


def _in_order(
    case: Case, places: Callable[[int], Sequence[float]]
) -> Iterator[Allocation]:
    """Allocations with the classes before one of an order all training."""
    for order in orders(case):
        taken = [0.0] * len(case.classes)
        for i in order:
            for amount in places(i):
                taken[i] = amount
                yield tuple(taken)
            taken[i] = float(case.classes[i].count)


def _instances(case: Case, i: int) -> list[float]:
    """Numbers of a class that may train, in whole instances; of many `_PLACES`."""
    group = case.classes[i]
    most = group.count // group.step
    tried = {round(most * (j / _PLACES) ** 3) for j in range(_PLACES + 1)}
    return [
        float(n * group.step)
        for n in sorted(tried if most > _PLACES else range(most + 1))
    ]


def best_whole(case: Case, worth: Callable[[Allocation], float]) -> Allocation | None:
    """The best allocation of whole instances, at least one of which trains and serves.

    Args:
        worth: Mean tokens per second of an allocation.
    """
    choices = [
        _instances(case, i) if group.trains > 0 else [0.0]
        for i, group in enumerate(case.classes)
    ]
    if math.prod(map(len, choices)) <= _COMBINATIONS:
        tried: Iterator[Allocation] = product(*choices)
    else:
        tried = _in_order(case, lambda i: _instances(case, i))
    full = tuple(float(c.count) for c in case.classes)
    fit = [x for x in tried if any(x) and x != full]
    return max(fit, key=worth, default=None)


def best_share(case: Case) -> Allocation | None:
    """The best fractional allocation, each class's training a share of time."""
    best: Allocation | None = None
    for order in orders(case):
        taken = [0.0] * len(case.classes)
        for i in order:
            found = _best_of_one(case, taken, i)
            if best is None or case.mean(found) > case.mean(best):
                best = found
            taken[i] = float(case.classes[i].count)
    return best


def _best_of_one(case: Case, taken: list[float], i: int) -> Allocation:
    """The best amount of one class beside what is taken of others: golden section."""

    def at(amount: float) -> Allocation:
        return (*taken[:i], amount, *taken[i + 1 :])

    def worth(amount: float) -> float:
        return case.mean(at(amount))

    # Denser near nothing: the best share is often a small part of one.
    count = float(case.classes[i].count)
    grid = [count * (j / _GRID) ** 3 for j in range(_GRID + 1)]
    top = max(range(_GRID + 1), key=lambda j: worth(grid[j]))
    low, high = grid[max(top - 1, 0)], grid[min(top + 1, _GRID)]
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = worth(left), worth(right)
    for _ in range(_SECTIONS):
        if at_left >= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = worth(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = worth(right)
    return at((low + high) / 2)


def break_even(case: Case, tokens: Callable[[float], float]) -> float | None:
    """First time after a shift at which `tokens` has caught up with a static draft.

    Args:
        tokens: Served in the first so many seconds.

    Returns:
        Seconds; None: never, as where a static draft serves all that is asked for.
    """

    def ahead(seconds: float) -> float:
        return tokens(seconds) - case.frozen * seconds * _ROUNDED

    if case.demand <= case.frozen * _ROUNDED:
        return None
    high = max(case.learning.delay, 1.0)
    while ahead(high) <= 0:
        high *= 2
        if high > _LONGEST:
            return None
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if ahead(middle) > 0 else (middle, high)
    return high
