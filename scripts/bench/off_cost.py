#!/usr/bin/env python
"""What control costs while its draft is of no use.

An engine without a speculative configuration and one with `eagle3`, adaspec and their
defaults, whose draft proposes nonsense (the rows of its `fc` are shuffled), take turns
on the same requests (`interleaved.py`): a closed loop of new prompts, so prefills come
between the decode steps, and control looks now and then whether drafting pays. The
first rounds of a batch size are not counted: control learns there that nothing pays.

`ratio` is output tokens per second over none's (1: off is free), a geometric mean over
groups of turns with its 95% interval (Student's t of the logarithms); `again_ratio` is
that of a second engine of none: what this machine calls equal.

    scripts/bench/off_cost.py [--batches 1,4,16,48] [--minutes 20] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.blocks import NONE
from bench.harness.server import end_on_signals
from bench.interleaved import AGAIN, OFF, checked, measure, parser_of
from json_text import json_text

LEARNS = 60  # rounds of a batch size


def rows_of(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each batch size."""
    rows: dict[int, dict[str, Any]] = {}
    for cell in cells:
        name = {OFF: "", AGAIN: "again_"}.get(cell["arm"])
        row = rows.setdefault(cell["batch"], {"batch": cell["batch"]})
        if name is not None:
            row[f"{name}ratio"] = cell["ratio_to_none"]
            row |= {f"{name}{end}": cell[f"ratio_{end}"] for end in ("low", "high")}
            row["blocks"] = cell["blocks"]
    return [rows[batch] for batch in sorted(rows)]


def main() -> int:
    parser = parser_of(__doc__, f"{NONE},{AGAIN},{OFF}", "matched", 20.0, LEARNS)
    options = checked(parser.parse_args())
    report = measure(options)
    rows = rows_of(report["cells"])
    for row in rows:
        print(row)
    print(report["identity"])
    if options.json:
        options.json.write_text(json_text({"rows": rows, **report}))
    return int(report["identity"]["differing"] > 0)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
