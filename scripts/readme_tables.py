"""Rewrite the generated parts of READMEs from code and stored results.

    python scripts/readme_tables.py

These are tables between `<!-- NAME: generated -->` and `<!-- NAME: end -->`, and the
plot in README.md (only with matplotlib).
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from vllm_tide import dashboards, metrics
from vllm_tide.cli import config

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from bench.harness import plots
from tests.faults.report import markdown

RESULTS = ROOT / "scripts" / "bench" / "results"
READMES = (
    "README.md",
    "vllm_tide/README.md",
    "vllm_tide/dashboards/runbooks.md",
    "tests/README.md",
    "scripts/bench/README.md",
)
PICTURE = RESULTS / "quickstart.png"


def stored(name: str) -> Any:
    """Return a result of `scripts/bench/results`."""
    return json.loads(lzma.decompress((RESULTS / f"{name}.json.xz").read_bytes()))


def faults() -> list[str]:
    """Return the table of outcomes by kind of fault, from the stored run."""
    return markdown(stored("faults")["kinds"])


def alerts() -> list[str]:
    """Return meaning and action of each alert, below a heading with its name."""
    lines = []
    for group in yaml.safe_load(dashboards.contents()[dashboards.ALERTS])["groups"]:
        for rule in group["rules"]:
            notes, severity = rule["annotations"], rule["labels"]["severity"]
            lines += [
                "",
                f"## {rule['alert']}",
                "",
                f"{severity}. {notes['description']}",
            ]
            lines += ["", notes["action"]]
    return [*lines, ""]


def interval(row: dict[str, Any], *names: str) -> str:
    """Format a value, and its interval in brackets if there is one."""
    value, low, high = (row[name] for name in names)
    if value is None:
        return "-"
    return f"{value:.2f}" + (
        "" if low in (None, high) else f" ({low:.2f} to {high:.2f})"
    )


def control() -> list[str]:
    """Return tokens/s of each arm over none, by cell, and means over the cells."""
    report = stored("control")
    arms = [
        row["arm"] for row in report["overall"] if row["arm"] not in ("none", "adaspec")
    ]
    arms.sort()
    cells = {(c["domain"], c["requests"], c["arm"]): c for c in report["cells"]}
    columns = ["prompts", "requests", "none, tokens/s", *arms, "control"]
    lines = [
        f"| {' | '.join(columns)} | control over the best arm |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for domain, requests in sorted({key[:2] for key in cells}):
        here = {arm: cells[domain, requests, arm] for arm in ("none", "adaspec", *arms)}
        ours = here["adaspec"]
        best = interval(ours, "ratio_to_best", "best_low", "best_high")
        others = [f"{here[arm]['ratio_to_none']:.2f}" for arm in arms]
        cell = [
            domain,
            str(requests),
            f"{here['none']['output_tokens_per_s']:.0f}",
            *others,
        ]
        cell.append(interval(ours, "ratio_to_none", "low", "high"))
        cell.append(f"{best}, {ours['best_arm']}")
        lines.append(f"| {' | '.join(cell)} |")
    over = {row["arm"]: row for row in report["overall"]}
    names = ("adaspec_over_it", "over_low", "over_high")
    means = [interval(over[arm], *names) for arm in arms]
    none = interval(over["none"], *names)
    lines.append(f"| control over it, all cells | | {none} | {' | '.join(means)} | | |")
    return lines


def overhead() -> list[str]:
    """Cost of a step beyond the model, one row per number of requests."""
    lines = [
        "| requests | none, ms | over none, ms: static | off | off_capture "
        "| full over static, ms | tokens/s over none: static | off | off_capture "
        "| full |",
        "|---" * 10 + "|",
    ]
    rows = {(row["requests"], row["arm"]): row for row in stored("overhead")["rows"]}
    none, static = (
        (f"over_{name}_ms", f"{name}_ms_low", f"{name}_ms_high")
        for name in ("none", "static")
    )
    for requests in sorted({key[0] for key in rows}):
        here = {arm: rows[requests, arm] for _, arm in rows if (requests, arm) in rows}
        cells = [str(requests), f"{here['none']['stepping_cpu_ms']:.1f}"]
        for arm in ("static", "off", "off_capture"):
            cells.append(interval(here[arm], *none))
        cells.append(interval(here["full"], *static))
        for arm in ("static", "off", "off_capture", "full"):
            cells.append(interval(here[arm], "tokens_ratio", "low", "high"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ablation() -> list[str]:
    """Return simulated throughput without a part of control over that with it.

    Parts without an effect of 0.2% in any mean share the last row.
    """
    rows = stored("sim_ablation")["rows"]
    names = list(rows[0]["of"])
    lines = [f"| without | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    without_effect = []
    for row in rows:
        if all(abs(x["mean"] - 1) < 0.002 for x in row["of"].values()):
            without_effect.append(row)
            continue
        cells = [f"{x['mean']:.3f}, {x['least']:.2f}" for x in row["of"].values()]
        lines.append(f"| {row['without']} | {' | '.join(cells)} |")
    text = ", ".join(row["without"] for row in without_effect)
    least = [min(row["of"][name]["least"] for row in without_effect) for name in names]
    cells = [f"1.00, {x:.2f}" for x in least]
    lines.append(f"| one of: {text} | {' | '.join(cells)} |")
    return lines


TABLES = {
    "ablation": ablation,
    "control": control,
    "overhead": overhead,
    "alerts": alerts,
    "knobs": config.reference,
    "metrics": metrics.reference,
    "faults": faults,
}


def rewritten(text: str) -> str:
    """Return `text` with every generated table updated."""
    for name, lines in TABLES.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        if begin not in text:
            continue
        body = "\n".join((begin, *lines(), end))
        text = re.sub(
            f"{re.escape(begin)}.*?{re.escape(end)}",
            lambda _, body=body: body,
            text,
            flags=re.DOTALL,
        )
    return text


def main() -> int:
    """Rewrite all READMEs and the plot."""
    for name in READMES:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        path.write_text(rewritten(before), encoding="utf-8")
    if find_spec("matplotlib"):
        plots.draw(stored("quickstart"), PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
