"""What a person reads of the rows: a summary against the targets, and every cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.suite import CLAIRVOYANT

Row = dict[str, Any]


def ratios(row: Row, measure: str = "throughput") -> dict[str, float]:
    """`adaspec` over the clairvoyant policy, over none, over the best static length.

    Args:
        row: A row of `run_cells`.
        measure: `throughput` or `speed`.

    Returns:
        `clairvoyant`, `none`, `best_static`, each if the row has it.
    """
    values = row[measure]
    ours = values.get("adaspec")
    if ours is None:
        return {}
    best = row["clairvoyant"] if measure == "throughput" else values[CLAIRVOYANT]
    found = {"clairvoyant": ours / best}
    if "none" in values:
        found["none"] = ours / values["none"]
    static = [value for arm, value in values.items() if arm.startswith("static")]
    if static:
        found["best_static"] = ours / max(static)
    return found


def summary(rows: Sequence[Row], measure: str = "throughput") -> dict[str, float]:
    """The figures that the targets are set for, over all cells.

    Args:
        rows: Rows of `run_cells`.
        measure: `throughput` or `speed`.
    """
    found = [ratios(row, measure) for row in rows]
    result: dict[str, float] = {"cells": len(rows)}
    for name in ("clairvoyant", "none", "best_static"):
        values = [entry[name] for entry in found if name in entry]
        if values:
            result[f"mean_of_{name}"] = sum(values) / len(values)
            result[f"min_of_{name}"] = min(values)
            result[f"share_above_{name}"] = sum(v > 1.0 for v in values) / len(values)
    return result


def markdown(rows: Sequence[Row]) -> str:
    """Summary and all cells; of speed too where requests arrive at exact times."""
    parts = []
    titles = {"throughput": "Throughput (output tokens per busy second)"}
    if any(row["pace"] == "time" for row in rows):
        titles["speed"] = "Speed (output tokens per second in the system, per request)"
    for measure, title in titles.items():
        parts += [f"### {title}", "", _targets(summary(rows, measure)), ""]
        parts += [_cells(rows, measure), ""]
    return "\n".join(parts)


def _targets(found: dict[str, float]) -> str:
    lines = [f"{found['cells']:.0f} cells."]
    if "mean_of_clairvoyant" in found:
        lines.append(f"adaspec / clairvoyant: mean {found['mean_of_clairvoyant']:.1%},")
        lines.append(f"least {found['min_of_clairvoyant']:.1%}.")
    if "min_of_none" in found:
        lines.append(f"adaspec / none: least {found['min_of_none']:.1%}.")
    if "min_of_best_static" in found:
        lines.append(
            f"Better than the best static in {found['share_above_best_static']:.0%}"
        )
        lines.append(f"of the cells, least {found['min_of_best_static']:.1%} of it.")
    return " ".join(lines)


def _cells(rows: Sequence[Row], measure: str) -> str:
    arms = list(rows[0]["throughput"]) if rows else []
    columns = ["model", "trace", "regime", *arms, CLAIRVOYANT]
    columns += ["/ clairvoyant", "/ best static", "/ none"]
    lines = []
    for row in rows:
        values = row[measure]
        best = row["clairvoyant"] if measure == "throughput" else values[CLAIRVOYANT]
        found = ratios(row, measure)
        cells = [row["model"], row["trace"], row["regime"]]
        cells += [f"{values[arm]:.1f}" for arm in arms] + [f"{best:.1f}"]
        for name in ("clairvoyant", "best_static", "none"):
            cells.append(f"{found[name]:.1%}" if name in found else "")
        lines.append(cells)
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(head + ["| " + " | ".join(line) + " |" for line in lines])
