"""Release stage: the trained target and draft, with their figures in their READMEs.

The tables come from the provenance records: no figure is typed by hand.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from .unpack import pack

# Headings of the tables, by the provenance's key.
TABLES = {
    "held_out_loss": ("domain", "nats per token"),
    "expected_acceptance_length": ("domain", "expected length", "standard error"),
    "served": ("temperature, domain", "prompts", "acceptance length", "drafts"),
}


def _table(rows: dict[str, Any], heads: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name, value in rows.items():
        cells = value.values() if isinstance(value, dict) else [value]
        lines.append("| " + " | ".join([name, *(str(c) for c in cells)]) + " |")
    return "\n".join(lines)


def with_figures(card: str, provenance: dict[str, Any]) -> str:
    """Return a README with the tables that it has markers for."""
    for name, heads in TABLES.items():
        begin, end = f"<!-- {name}: generated -->\n", f"\n<!-- {name}: end -->"
        table = begin + _table(provenance.get(name, {}), heads) + end
        card = re.sub(begin + ".*?" + end, lambda _, t=table: t, card, flags=re.DOTALL)
    return card


def release(work: Path, output: Path) -> dict[str, int]:
    """Copy both exports and rewrite their READMEs; return bytes of weights."""
    sizes = {}
    for name in ("target", "draft"):
        folder = output / name
        card = (folder / "README.md").read_text()
        shutil.rmtree(folder)
        shutil.copytree(work / name, folder)
        provenance = json.loads((folder / "provenance.json").read_text())
        if name == "target" and not provenance["final"]:
            raise ValueError("the target is an intermediate checkpoint")
        (folder / "README.md").write_text(with_figures(card, provenance))
        sizes[name] = (folder / "model.safetensors").stat().st_size
        pack(folder / "model.safetensors")
    return sizes
