"""Rewrites the generated tables of README.md: `python scripts/readme_tables.py`."""

from __future__ import annotations

import json
import lzma
import re
import sys
from pathlib import Path

from vllm_tide import metrics
from vllm_tide.cli import config

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.faults.report import markdown  # noqa: E402

README = Path(__file__).parent.parent / "README.md"
FAULTS = Path(__file__).parent / "bench" / "results" / "faults.json.xz"


def faults() -> list[str]:
    """What became of each kind of fault, from the stored run."""
    return markdown(json.loads(lzma.decompress(FAULTS.read_bytes()))["kinds"])


TABLES = {
    "knobs": config.reference,
    "metrics": metrics.reference,
    "faults": faults,
}


def rewritten(text: str) -> str:
    """`text` with every generated table as the code has it now."""
    for name, lines in TABLES.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        body = "\n".join((begin, *lines(), end))
        text = re.sub(
            f"{re.escape(begin)}.*?{re.escape(end)}",
            lambda _, body=body: body,
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8")
    after = rewritten(before)
    README.write_text(after, encoding="utf-8")
    sys.exit(0)
