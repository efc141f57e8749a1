"""The JSON of a run, and its table."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .suite import FAULTS, OK, Row


def by_kind(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return figures of each kind: number, recovered, recovery time (s)."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.kind].append(row)
    faults = {fault.kind: fault for fault in FAULTS}
    return {
        kind: {
            "count": len(some),
            "ok": sum(row.outcome == OK for row in some),
            "recovery_s_p50": round(statistics.median(r.recovery_s for r in some), 2),
            "recovery_s_max": max(row.recovery_s for row in some),
            "counter": faults[kind].counter,
        }
        | ({} if faults[kind].counter else {"uncounted": faults[kind].uncounted})
        for kind, some in sorted(groups.items())
    }


def markdown(kinds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines of a Markdown table, one for each kind."""
    lines = [
        "| fault | recovered | recovery p50 / max (s) | counted by |",
        "| --- | --- | --- | --- |",
    ]
    for kind, rows in kinds.items():
        counter = f"`{rows['counter']}`"
        if not rows["counter"]:
            counter = f"nothing: {rows['uncounted']}"
        lines.append(
            f"| `{kind}` | {rows['ok']} of {rows['count']} | "
            f"{rows['recovery_s_p50']:.1f} / {rows['recovery_s_max']:.1f} | "
            f"{counter} |"
        )
    return lines


def write(
    path: Path,
    document: Mapping[str, Any],
    name: str,
    rows: Sequence[Mapping[str, object]],
) -> None:
    """Write a document and its rows, one a line, under a name."""
    text = json.dumps(document, indent=1)[:-2]
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text},\n "{name}": [\n{body}\n ]\n}}\n', encoding="utf-8")
