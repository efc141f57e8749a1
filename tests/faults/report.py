"""The JSON of a run, and the table at its end."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .suite import FAULTS, OK, Row


def by_kind(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Figures of each kind: how many, how many recovered, in what time (s)."""
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


def table(kinds: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each kind."""
    lines = [f"{'fault':18}{'ok':>9}{'p50 s':>8}{'max s':>8}  counted by"]
    for kind, found in kinds.items():
        ok = f"{found['ok']}/{found['count']}"
        lines.append(
            f"{kind:18}{ok:>9}{found['recovery_s_p50']:>8.2f}"
            f"{found['recovery_s_max']:>8.2f}  {found['counter'] or _why(found)}"
        )
    return "\n".join(lines)


def markdown(kinds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The same as lines of a Markdown table."""
    lines = [
        "| fault | recovered | recovery p50 / max (s) | counted by |",
        "| --- | --- | --- | --- |",
    ]
    for kind, found in kinds.items():
        lines.append(
            f"| `{kind}` | {found['ok']} of {found['count']} | "
            f"{found['recovery_s_p50']:.1f} / {found['recovery_s_max']:.1f} | "
            + (f"`{found['counter']}` |" if found["counter"] else f"{_why(found)} |")
        )
    return lines


def _why(found: Mapping[str, Any]) -> str:
    return f"nothing: {found['uncounted']}"


def write(path: Path, document: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write the document with its rows, one a line."""
    head = json.dumps(document, indent=1)[:-2]
    lines = [
        json.dumps(
            {"kind": r.kind, "outcome": r.outcome, "recovery_s": r.recovery_s},
            separators=(",", ":"),
        )
        for r in rows
    ]
    body = ",\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "rows": [\n{body}\n ]\n}}\n', encoding="utf-8")
