"""The plan: every way to run the cluster, bands, a decision, and what would flip it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_tide.plan.allocate import NONE, STATIC, TIDE, Row, rows
from vllm_tide.plan.cluster import Cluster
from vllm_tide.plan.throughput import Case

DRAWS = 200
BAND = 10, 90  # percentiles
_FLIP_FACTOR, _FLIP_STEPS = 20.0, 8
_SAME = 1.005  # what serves so little more is not worth its trainer
LIMITS = (
    "Mean field: no queues and no latency limits, one kind of shift, nothing "
    "forgotten, requests spread over accelerators by what each serves; rates are of "
    "one load."
)


@dataclass(frozen=True)
class PlanRow:
    """A `Row` with what it is compared to, and the 10 to 90% bands of some of it."""

    row: Row
    vs_none: float
    vs_static: float
    vs_static_band: tuple[float, float]
    usd_per_mtok: float
    break_even_band: tuple[float, float] | None


@dataclass(frozen=True)
class Plan:
    """What `vllm-tide plan` says.

    Attributes:
        best: The row that serves most.
        pays: Share of draws in which training serves more than not training.
        flips: Sentences, the nearest values of an input that would change the decision.
        uncontrolled: Tokens per second of the static draft without control; None if
            speed-ups were simulated.
    """

    cluster: Cluster
    rows: list[PlanRow]
    best: Row
    pays: float
    flips: list[str]
    uncontrolled: float | None

    @property
    def train(self) -> bool:
        return self.best.name in TIDE

    def to_json(self) -> dict[str, Any]:
        """JSON-able; times in seconds."""
        return {
            "train": self.train,
            "best": self.best.name,
            "pays": self.pays,
            "flips": self.flips,
            "static_without_control_tokens_per_s": self.uncontrolled,
            "rows": [
                {**asdict(r.row), **{k: v for k, v in asdict(r).items() if k != "row"}}
                for r in self.rows
            ],
            "inputs": {name: asdict(x) for name, x in self.cluster.inputs.items()},
            "classes": [group.name for group in self.cluster.file.classes],
            "limits": LIMITS,
        }


def make_plan(cluster: Cluster, draws: int = DRAWS) -> Plan:
    """Plan a cluster: at the middle of its ranges, and over draws of them."""
    middle = {name: x.at(0.5) for name, x in cluster.inputs.items()}
    case = cluster.case(middle)
    found = rows(case)
    drawn = [
        {row.name: row for row in rows(cluster.case(values))}
        for values in latin_hypercube(cluster, draws)
    ]
    best = best_of(found)
    uncontrolled = None
    if not cluster.speeds:
        uncontrolled = min(cluster.case(middle, control=False).frozen, case.demand)
    return Plan(
        cluster=cluster,
        rows=[_compared(row, found, drawn, case) for row in found],
        best=best,
        pays=float(np.mean([best_of([*d.values()]).name in TIDE for d in drawn])),
        flips=list(_flips(cluster, middle, best.name in TIDE)),
        uncontrolled=uncontrolled,
    )


def best_of(found: list[Row]) -> Row:
    """The row that serves most; of those that do as much (`_SAME`) the simplest."""
    best = found[0]
    for row in found[1:]:
        if row.training is not None and row.tokens_per_s > best.tokens_per_s * _SAME:
            best = row
    return best


def latin_hypercube(cluster: Cluster, draws: int) -> Iterator[dict[str, float]]:
    """Values of all inputs, each range cut into as many strata as there are draws."""
    rng = np.random.default_rng(0)
    wide = {n: x for n, x in cluster.inputs.items() if x.high > x.low}
    known = {n: x.low for n, x in cluster.inputs.items() if n not in wide}
    shares = {
        name: (rng.permutation(draws) + rng.random(draws)) / draws for name in wide
    }
    for i in range(draws if wide else 1):
        yield known | {name: x.at(float(shares[name][i])) for name, x in wide.items()}


def _compared(
    row: Row, found: list[Row], drawn: list[dict[str, Row]], case: Case
) -> PlanRow:
    at = {each.name: each.tokens_per_s for each in found}
    ratios = [d[row.name].tokens_per_s / d[STATIC].tokens_per_s for d in drawn]
    low, high = np.percentile(ratios, BAND)
    evens = [d[row.name].break_even_s for d in drawn]
    times = [math.inf if even is None else even for even in evens]
    band = None
    if row.name in TIDE:
        # The nearest draw, not between two: some are infinite.
        ends = np.percentile(times, BAND, method="nearest")
        band = float(ends[0]), float(ends[1])
    served = row.tokens_per_s * 3600.0 / 1e6
    return PlanRow(
        row=row,
        vs_none=row.tokens_per_s / at[NONE],
        vs_static=row.tokens_per_s / at[STATIC],
        vs_static_band=(float(low), float(high)),
        usd_per_mtok=case.usd_per_hour / served if served else math.inf,
        break_even_band=band,
    )


def _flips(cluster: Cluster, middle: Mapping[str, float], train: bool) -> Iterator[str]:
    """The nearest value on either side at which the decision changes."""

    def changes(name: str, value: float) -> bool:
        found = rows(cluster.case({**middle, name: value}), even=False)
        return (best_of(found).name in TIDE) != train

    for name, value in middle.items():
        if value <= 0 or name.endswith("usd_per_hour"):
            continue
        for factor, word in ((1 / _FLIP_FACTOR, "below"), (_FLIP_FACTOR, "above")):
            near = value
            for i in range(1, _FLIP_STEPS + 1):
                far = value * factor ** (i / _FLIP_STEPS)
                if name == "workload.prefill_share" and far >= 1:
                    break
                if changes(name, far):
                    for _ in range(14):
                        between = math.sqrt(near * far)
                        if changes(name, between):
                            far = between
                        else:
                            near = between
                    yield f"{name} {word} {far:.4g}"
                    break
                near = far


def text(plan: Plan) -> Iterator[str]:
    """Lines for a terminal."""
    names = [group.name for group in plan.cluster.file.classes]
    counts = [group.count for group in plan.cluster.file.classes]
    head = ("", "trains", "tokens/s", "vs static", "vs none", "$/Mtok", "break-even")
    table: list[tuple[str, ...]] = [head]
    for each in plan.rows:
        row = each.row
        if row.training is None:
            table.append((row.name, "nobody can", *["-"] * 5))
            continue
        who = ", ".join(
            f"{x:.3g} {name}" for x, name in zip(row.training, names, strict=True) if x
        )
        ratio, (low, high) = each.vs_static, each.vs_static_band
        band = f" [{low:.2f}, {high:.2f}]" if high - low > 0.005 else ""
        table.append(
            (
                row.name,
                who or "-",
                f"{row.tokens_per_s:,.0f}",
                f"{ratio:.3f}{band}",
                f"{each.vs_none:.3f}",
                f"{each.usd_per_mtok:.3f}" if each.usd_per_mtok < math.inf else "-",
                _even(each),
            )
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    for line in table:
        cells = (cell.ljust(w) for cell, w in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()
    yield ""
    every = " and ".join(f"{n} {name}" for n, name in zip(counts, names, strict=True))
    yield (
        f"{'Train' if plan.train else 'Do not train'}: {plan.best.name} serves most on "
        f"{every}; training pays in {plan.pays:.0%} of {DRAWS} draws of the ranges."
    )
    yield "It flips with " + "; ".join(plan.flips or ["no single input"]) + "."
    static = next(r.row.tokens_per_s for r in plan.rows if r.row.name == STATIC)
    if plan.uncontrolled is not None and plan.uncontrolled < static - 1:
        yield (
            f"Without tide.control the static draft serves {plan.uncontrolled:,.0f} "
            "tokens/s: it drafts where it does not pay."
        )
    yield ""
    for name, x in plan.cluster.inputs.items():
        value = f"{x.low:g}" if x.low == x.high else f"{x.low:g} to {x.high:g}"
        yield f"  {name:40} {value:20} {x.source}"
    for name in plan.cluster.speeds:
        yield f"  {name + ' speed-up by length':40} {'table':20} simulated"
    yield LIMITS


def _even(each: PlanRow) -> str:
    if each.break_even_band is None:
        return "-"
    low, high = each.break_even_band
    middle = each.row.break_even_s
    said = duration(math.inf if middle is None else middle)
    return said if low == high else f"{said} [{duration(low)}, {duration(high)}]"


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds == math.inf:
        return "never"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
