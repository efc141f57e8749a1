"""Blocks of visits, and what they say: ratios with intervals, and the best arm.

A block of a cell is a visit of `none`, one of every other arm in random order, and
`none` again, all on the same requests. Ratios are taken within a block, whose `none` is
the mean of its two visits; over blocks they have a geometric mean and a 95% interval
(Student's t on the logarithms). An arm that is best of several by measurement is partly
lucky: so the best arm of a cell is chosen on odd blocks, and arms are compared with it
on even ones. The spread of that comparison is that of both halves, each about its own
mean. With two blocks there is no interval; with one the best arm is compared on the
block that chose it, and ratios to it are too low.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.arms import STATIC, Arm

NONE = "none"
MIXED = "mixed"
RAMP = "ramp"  # the batch of a cell that goes from 1 to the largest and back
# A ratio and its interval; no interval where there are too few blocks.
Ratio = tuple[float, float | None, float | None]


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the plan: a closed loop at a batch size, or a trace."""

    domain: str
    batch: int | str | None = None
    trace: str | None = None

    @property
    def name(self) -> str:
        place = f"batch {self.batch}" if self.trace is None else self.trace
        return f"{place}, {self.domain}"


@dataclass(frozen=True, slots=True)
class Visit:
    """One measurement; of `none` a block has two."""

    cell: Cell
    block: int
    arm: Arm


def plan(
    cells: Sequence[Cell], arms: Sequence[Arm], blocks: int, seed: int
) -> list[list[Visit]]:
    """Blocks in the order of the run: every cell once, in random order, then again."""
    rng = random.Random(f"{seed}:plan")
    first = next(arm for arm in arms if arm.name == NONE)
    order = []
    for block in range(1, blocks + 1):
        for cell in rng.sample(list(cells), len(cells)):
            others = [arm for arm in arms if arm is not first]
            rng.shuffle(others)
            order.append([Visit(cell, block, a) for a in (first, *others, first)])
    return order


def ratio_of(logs: Sequence[float], *others: Sequence[float]) -> Ratio:
    """Geometric mean and 95% interval; `others` only say more of the spread."""
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
    found: dict[Any, list[Any]] = defaultdict(list)
    for visit in visits:
        if visit.get("output_tokens_per_s"):
            found[visit["batch"], visit["domain"]].append(visit)
    return found


def _logs(visits: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Logarithm of each arm's rate over `none`'s, by block."""
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
    """The fastest arm of the odd blocks (of all, if there is no odd one)."""
    blocks = sorted(logs[NONE])
    odd = [block for block in blocks if block % 2] or blocks
    whole = [arm for arm in logs if all(block in logs[arm] for block in odd)]
    return max(whole, key=lambda arm: sum(logs[arm][block] for block in odd))


def to_best(mine: Mapping[int, float], best: Mapping[int, float]) -> Ratio:
    """Ratio of an arm to the best one, of the blocks that did not choose it."""
    both = sorted(mine.keys() & best.keys())
    odd = [mine[block] - best[block] for block in both if block % 2]
    even = [mine[block] - best[block] for block in both if block % 2 == 0]
    return ratio_of(even, odd) if even else ratio_of(odd)


def drift(visits: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Second visit of `none` over the first of a block: mean, and the largest change.

    A change is |log ratio|: 0.04 is 4%.
    """
    rates: dict[int, list[float]] = defaultdict(list)
    for visit in visits:
        if visit["arm"] == NONE:
            rates[visit["block"]].append(math.log(visit["output_tokens_per_s"]))
    changes = [pair[1] - pair[0] for pair in rates.values() if len(pair) == 2]
    if not changes:
        return None
    return {
        "mean": round(math.exp(statistics.fmean(changes)), 4),
        "largest": round(max(map(abs, changes)), 4),
    }


def cell_rows(visits: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every arm of every cell."""
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
                "batch": batch,
                "domain": domain,
                "arm": arm,
                "output_tokens_per_s": round(math.exp(statistics.fmean(rates)), 2),
                **rounded_ratio(
                    ("ratio_to_none", "ratio_low", "ratio_high"),
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
            for key in ("acceptance_length", "verified_per_request_round"):
                known = [v[key] for v in own if v.get(key) is not None]
                row[key] = round(statistics.fmean(known), 4) if known else None
            rows.append(row | ({"drift": drift(here)} if arm == NONE else {}))
    return rows


def subject_of(arms: Iterable[str]) -> str:
    """The arm that a verdict is about: control, where it ran."""
    names = list(dict.fromkeys(arms))
    return "adaspec" if "adaspec" in names else names[-1]


def over_static(rows: Sequence[Mapping[str, Any]], arm: str) -> tuple[str, float]:
    """Best single static length over all cells, and the arm's rate over it."""
    logs: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        logs[row["arm"]].append(math.log(row["ratio_to_none"]))
    static = [a for a in logs if STATIC.match(a) and len(logs[a]) == len(logs[arm])]
    if not static:
        return "", math.nan
    best = max(static, key=lambda name: sum(logs[name]))
    return best, math.exp(statistics.fmean(logs[arm]) - statistics.fmean(logs[best]))


def over_cells(visits: Iterable[Mapping[str, Any]], arm: str, other: str) -> Ratio:
    """An arm's rate over another's: geometric mean over cells, each of equal weight.

    Cells in which the two share no block are left out.
    """
    found = [_logs(here) for here in _by_cell(visits).values()]
    pairs = [(logs[arm], logs[other]) for logs in found if {arm, other} <= logs.keys()]
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


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on control (or the last arm): in how many cells nothing beats it."""
    if not rows:
        return "nothing was measured"
    arm = subject_of(row["arm"] for row in rows)
    mine = [row for row in rows if row["arm"] == arm]
    good = [row for row in mine if (row["best_high"] or row["ratio_to_best"]) >= 1.0]
    worst = min(mine, key=lambda row: row["ratio_to_best"])
    logs = [math.log(row["ratio_to_best"]) for row in mine]
    text = (
        f"{arm}: best or within noise of the best in {len(good)} of {len(mine)} cells; "
        f"worst cell batch {worst['batch']}, {worst['domain']}: "
        f"{worst['ratio_to_best']:.3f} of {worst['best_arm']}{_within(worst, 'best')}; "
        f"mean {math.exp(statistics.fmean(logs)):.3f} of the best"
    )
    single, gain = over_static(rows, arm)
    if single:
        text += f", {gain:.3f} of {single}, the best single length"
    least = min(row["blocks"] for row in mine)
    if least == 1:
        text += " (one block: the best is compared on the block that chose it)"
    elif least == 2:
        text += " (two blocks: no interval against the best)"
    return text


def _within(row: Mapping[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "" if low is None else f" ({low:.3f} to {high:.3f})"


_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)


def t_975(df: int) -> float:
    """Student's t that 2.5% exceed: of a table, else Cornish and Fisher's series."""
    if df <= len(_T_975):
        return _T_975[df - 1]
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / df**power for power, term in enumerate(terms, 1))
