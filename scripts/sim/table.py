"""Markdown tables of the rows: a summary for the targets, and every cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.suite import CLAIRVOYANT

Row = dict[str, Any]


def ratios(row: Row, measure: str = "throughput") -> dict[str, float]:
    """Return `adaspec` over the clairvoyant policy, none and the best static length.

    Args:
        row: A row of `run_cells`.
        measure: `throughput` or `speed`.

    Returns:
        `clairvoyant`, `none` and `best_static`, as far as the row has them.
    """
    values = row[measure]
    ours = values.get("adaspec")
    if ours is None:
        return {}
    best = row["clairvoyant"] if measure == "throughput" else values[CLAIRVOYANT]
    result = {"clairvoyant": ours / best}
    if "none" in values:
        result["none"] = ours / values["none"]
    static = [value for arm, value in values.items() if arm.startswith("static")]
    if static:
        result["best_static"] = ours / max(static)
    return result


def summary(rows: Sequence[Row], measure: str = "throughput") -> dict[str, float]:
    """Return the figures of the targets over all cells.

    Args:
        rows: Rows of `run_cells`.
        measure: `throughput` or `speed`.
    """
    entries = [ratios(row, measure) for row in rows]
    result: dict[str, float] = {"cells": len(rows)}
    for name in ("clairvoyant", "none", "best_static"):
        values = [entry[name] for entry in entries if name in entry]
        if values:
            result[f"mean_of_{name}"] = sum(values) / len(values)
            result[f"min_of_{name}"] = min(values)
            result[f"share_above_{name}"] = sum(v > 1.0 for v in values) / len(values)
    return result


def markdown(rows: Sequence[Row]) -> str:
    """Format the summary and all cells, with speed for exact arrival times."""
    parts = []
    titles = {"throughput": "Throughput (output tokens per busy second)"}
    if any(row["pace"] == "time" for row in rows):
        titles["speed"] = "Speed (output tokens per second in the system, per request)"
    for measure, title in titles.items():
        parts += [f"### {title}", "", _targets(summary(rows, measure)), ""]
        parts += [_cells(rows, measure), ""]
    return "\n".join(parts)


def _targets(figures: dict[str, float]) -> str:
    lines = [f"{figures['cells']:.0f} cells."]
    if "mean_of_clairvoyant" in figures:
        lines.append(
            f"adaspec / clairvoyant: mean {figures['mean_of_clairvoyant']:.1%},"
        )
        lines.append(f"least {figures['min_of_clairvoyant']:.1%}.")
    if "min_of_none" in figures:
        lines.append(f"adaspec / none: least {figures['min_of_none']:.1%}.")
    if "min_of_best_static" in figures:
        lines.append(
            f"Better than the best static in {figures['share_above_best_static']:.0%}"
        )
        lines.append(f"of the cells, least {figures['min_of_best_static']:.1%} of it.")
    return " ".join(lines)


def _cells(rows: Sequence[Row], measure: str) -> str:
    arms = list(rows[0]["throughput"]) if rows else []
    columns = ["model", "trace", "regime", *arms, CLAIRVOYANT]
    columns += ["/ clairvoyant", "/ best static", "/ none"]
    lines = []
    for row in rows:
        values = row[measure]
        best = row["clairvoyant"] if measure == "throughput" else values[CLAIRVOYANT]
        over = ratios(row, measure)
        cells = [row["model"], row["trace"], row["regime"]]
        cells += [f"{values[arm]:.1f}" for arm in arms] + [f"{best:.1f}"]
        for name in ("clairvoyant", "best_static", "none"):
            cells.append(f"{over[name]:.1%}" if name in over else "")
        lines.append(cells)
    header = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(header + ["| " + " | ".join(line) + " |" for line in lines])
