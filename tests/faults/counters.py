"""Changes of the server's metrics and the trainer's status."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from vllm_tide.top.collect import parse_page

Reading = dict[str, float]
_STATUS = ("rollbacks", "published_version", "rows_read", "failed_writes")


def read_metrics(text: str) -> Reading:
    """Sum samples of a `/metrics` page over all labels but `reason`.

    Histogram buckets are left out: there are many, and no check reads them.
    """
    page = parse_page(text, 0.0)
    reading: Reading = {}
    for (name, labels), value in getattr(page, "values", {}).items():
        if not name.endswith("_created"):
            by = dict(labels)
            reason = by.get("reason") or by.get("finished_reason")
            key = f"{name}{{{reason}}}" if reason else name
            reading[key] = reading.get(key, 0.0) + value
    return reading


def read_status(run_dir: Path) -> Reading:
    """Return figures of the newest trainer status in a run directory."""
    newest: dict[str, Any] = {}
    for path in run_dir.glob("trainer-*.json"):
        with contextlib.suppress(OSError, ValueError):
            status = json.loads(path.read_text(encoding="utf-8"))
            if status["updated_unix"] > newest.get("updated_unix", 0.0):
                newest = status
    return {f"trainer:{k}": float(newest.get(k) or 0) for k in _STATUS if newest}


def total(reading: Reading, name: str) -> float:
    """Return a counter of a reading, summed over its reasons if it has some."""
    prefix = name + "{"
    return sum(v for k, v in reading.items() if k == name or k.startswith(prefix))
