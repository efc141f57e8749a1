"""Rewrites what READMEs show of code and stored results.

    python scripts/readme_tables.py

Tables between `<!-- NAME: generated -->` and `<!-- NAME: end -->`, and README.md's
picture (with matplotlib only).
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
)
PICTURE = RESULTS / "quickstart.png"


def stored(name: str) -> Any:
    """A result of `scripts/bench/results`."""
    return json.loads(lzma.decompress((RESULTS / f"{name}.json.xz").read_bytes()))


def faults() -> list[str]:
    """Table of the outcome of each kind of fault, from the stored run."""
    return markdown(stored("faults")["kinds"])


def alerts() -> list[str]:
    """What each alert means and what to do, below a heading that is its anchor."""
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


TABLES = {
    "alerts": alerts,
    "knobs": config.reference,
    "metrics": metrics.reference,
    "faults": faults,
}


def rewritten(text: str) -> str:
    """`text` with every generated table as the code has it now."""
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
    """Rewrite all of them."""
    for name in READMES:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        path.write_text(rewritten(before), encoding="utf-8")
    if find_spec("matplotlib"):
        plots.draw(stored("quickstart"), PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
