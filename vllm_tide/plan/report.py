"""The plan as a table, a sentence and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from vllm_tide.plan.allocate import NONE, STATIC, TIDE, best_of, rows
from vllm_tide.plan.cluster import ClusterFile

LIMITS = (
    "Mean field: no queues and no latency limits, one kind of shift, no forgetting, "
    "requests are distributed by serving rate; rates are for one load."
)


class Plan:
    """All ways to run a cluster, and the one with the highest rate."""

    def __init__(self, file: ClusterFile) -> None:
        self.file = file
        self.case = file.case()
        self.rows = rows(self.case)
        self.best = best_of(self.rows)

    @property
    def train(self) -> bool:
        """True if training increases throughput."""
        return self.best.name in TIDE

    def to_json(self) -> dict[str, Any]:
        rate = {row.name: row.tokens_per_s for row in self.rows}
        return {
            "train": self.train,
            "best": self.best.name,
            "rows": [
                asdict(row)
                | {
                    "vs_static": row.tokens_per_s / rate[STATIC],
                    "vs_none": row.tokens_per_s / rate[NONE],
                    "usd_per_mtok": self._usd_per_mtok(row.tokens_per_s),
                }
                for row in self.rows
            ],
            "cluster": self.file.model_dump(),
        }

    def _usd_per_mtok(self, tokens_per_s: float) -> float | None:
        if not tokens_per_s:
            return None
        return self.case.usd_per_hour / (tokens_per_s * 3600.0 / 1e6)


def text(plan: Plan) -> Iterator[str]:
    names = [group.name for group in plan.file.classes]
    header = ("", "trains", "tokens/s", "vs static", "vs none", "$/Mtok")
    table: list[tuple[str, ...]] = [header]
    for row in plan.to_json()["rows"]:
        if row["training"] is None:
            table.append((row["name"], "none can", *["-"] * 4))
            continue
        amounts = zip(row["training"], names, strict=True)
        table.append(
            (
                row["name"],
                ", ".join(f"{x:.3g} {name}" for x, name in amounts if x) or "-",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['vs_static']:.3f}",
                f"{row['vs_none']:.3f}",
                "-" if row["usd_per_mtok"] is None else f"{row['usd_per_mtok']:.3f}",
            )
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    for line in table:
        cells = (cell.ljust(w) for cell, w in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()
    yield ""
    every = " and ".join(f"{group.count} {group.name}" for group in plan.file.classes)
    verdict = "Train" if plan.train else "Do not train"
    yield f"{verdict}: {plan.best.name} has the highest throughput on {every}."
    yield LIMITS
