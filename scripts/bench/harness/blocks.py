"""Ratios of arms within blocks, with confidence intervals, and the best arm.

A block of a cell holds the measurements of all arms in the same period. Ratios are
taken within a block; over blocks they have a geometric mean and a 95% interval
(Student's t on the logarithms). The measured best of several arms is biased upwards by
the selection, so the best arm of a cell is chosen on odd blocks and compared on even
ones. The variance of that comparison pools both halves, each about its own mean. With
two blocks there is no interval; with one block the best arm is compared on the block
that selected it, and ratios to it are too low.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NONE = "none"
MIXED = "mixed"
# A ratio and its interval; the interval is None for too few blocks.
Ratio = tuple[float, float | None, float | None]


def ratio_of(logs: Sequence[float], *others: Sequence[float]) -> Ratio:
    """Return geometric mean and 95% interval; `others` only add to the variance."""
    mean = statistics.fmean(logs)
    groups = [group for group in (logs, *others) if group]
    df = sum(len(group) - 1 for group in groups)
    if df == 0:
        return math.exp(mean), None, None
    squares = sum((x - statistics.fmean(group)) ** 2 for group in groups for x in group)
    half = t_975(df) * math.sqrt(squares / df / len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def rounded_ratio(names: Sequence[str], ratio: Ratio) -> dict[str, float | None]:
    numbers = (None if x is None else round(x, 4) for x in ratio)
    return dict(zip(names, numbers, strict=True))


def _by_cell(visits: Iterable[Mapping[str, Any]]) -> dict[Any, list[Any]]:
    cells: dict[Any, list[Any]] = defaultdict(list)
    for visit in visits:
        if visit.get("output_tokens_per_s"):
            cells[visit["batch"], visit["domain"]].append(visit)
    return cells


def _logs(visits: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the logarithm of each arm's rate over `none`'s, by block."""
    rates: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for visit in visits:
        rate = math.log(visit["output_tokens_per_s"])
        rates[visit["block"]][visit["arm"]].append(rate)
    logs: dict[str, dict[int, float]] = defaultdict(dict)
    for block, arms in rates.items():
        for arm, values in arms.items() if NONE in arms else ():
            logs[arm][block] = statistics.fmean(values) - statistics.fmean(arms[NONE])
    return logs


def best_arm(logs: Mapping[str, Mapping[int, float]]) -> str:
    """Return the fastest arm of the odd blocks (of all, if there is no odd one)."""
    blocks = sorted(logs[NONE])
    odd = [block for block in blocks if block % 2] or blocks
    whole = [arm for arm in logs if all(block in logs[arm] for block in odd)]
    return max(whole, key=lambda arm: sum(logs[arm][block] for block in odd))


def to_best(mine: Mapping[int, float], best: Mapping[int, float]) -> Ratio:
    """Return the ratio of an arm to the best one, on blocks not used to select it."""
    both = sorted(mine.keys() & best.keys())
    odd = [mine[block] - best[block] for block in both if block % 2]
    even = [mine[block] - best[block] for block in both if block % 2 == 0]
    return ratio_of(even, odd) if even else ratio_of(odd)


def cell_rows(visits: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for every arm of every cell."""
    rows = []
    for (batch, domain), here in _by_cell(visits).items():
        logs = _logs(here)
        if not logs:
            continue
        best = best_arm(logs)
        for arm, mine in logs.items():
            own = [visit for visit in here if visit["arm"] == arm]
            rates = [math.log(visit["output_tokens_per_s"]) for visit in own]
            cpu = [v for v in own if v.get("cpu_s") is not None and v.get("tokens")]
            tokens = sum(v["tokens"] for v in cpu)
            row = {
                "requests": batch,
                "domain": domain,
                "arm": arm,
                "output_tokens_per_s": round(math.exp(statistics.fmean(rates)), 2),
                **rounded_ratio(
                    ("ratio_to_none", "low", "high"),
                    (1.0, 1.0, 1.0) if arm == NONE else ratio_of(list(mine.values())),
                ),
                **rounded_ratio(
                    ("ratio_to_best", "best_low", "best_high"),
                    (1.0, 1.0, 1.0) if arm == best else to_best(mine, logs[best]),
                ),
                "cpu_s_per_token": round(sum(v["cpu_s"] for v in cpu) / tokens, 6)
                if tokens
                else None,
                "blocks": len(mine),
                "best_arm": best,
            }
            rows.append(row)
    return rows


def over_cells(visits: Iterable[Mapping[str, Any]], arm: str, other: str) -> Ratio:
    """Return an arm's rate over another's: geometric mean over cells of equal weight.

    Cells without a block of both arms are skipped.
    """
    each = [_logs(here) for here in _by_cell(visits).values()]
    pairs = [(logs[arm], logs[other]) for logs in each if {arm, other} <= logs.keys()]
    shared = [[a[block] - b[block] for block in a.keys() & b.keys()] for a, b in pairs]
    cells = [cell for cell in shared if cell]
    if not cells:
        return math.nan, None, None
    mean = statistics.fmean(statistics.fmean(cell) for cell in cells)
    df = sum(len(cell) - 1 for cell in cells)
    if min(map(len, cells)) < 2:
        return math.exp(mean), None, None
    spread = sum(statistics.variance(cell) / len(cell) for cell in cells)
    half = t_975(df) * math.sqrt(spread) / len(cells)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)


def t_975(df: int) -> float:
    """Return the 97.5% quantile of Student's t (table or Cornish-Fisher series)."""
    if df <= len(_T_975):
        return _T_975[df - 1]
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / df**power for power, term in enumerate(terms, 1))
