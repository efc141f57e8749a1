"""What moved: the server's metrics, the trainer's status and events, the ring."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_tide.top.collect import parse_page

Reading = dict[str, float]
GIVEN_UP = "requests given up"
"""Not a metric of vLLM, which counts no aborted request: see :func:`given_up`."""
_STATUS = ("rollbacks", "published_version", "rows_read", "failed_writes")


def read_metrics(text: str) -> Reading:
    """Samples of a `/metrics` page, summed over all labels but `reason`.

    Histogram buckets are left out: they are many and say nothing here.
    """
    page = parse_page(text, 0.0)
    found: Reading = {}
    for (name, labels), value in getattr(page, "values", {}).items():
        if not name.endswith("_created"):
            by = dict(labels)
            reason = by.get("reason") or by.get("finished_reason")
            key = f"{name}{{{reason}}}" if reason else name
            found[key] = found.get(key, 0.0) + value
    return found


def given_up(reading: Reading) -> float:
    """Requests that had a first token and neither ended nor are in a queue.

    Only an abort takes a request away like that. One in a queue that has no first token
    yet hides one that was given up, so this may be too few, and never is too many.
    """
    return (
        reading.get("vllm:time_to_first_token_seconds_count", 0.0)
        - total(reading, "vllm:request_success_total")
        - reading.get("vllm:num_requests_running", 0.0)
        - reading.get("vllm:num_requests_waiting", 0.0)
    )


def read_status(run_dir: Path) -> Reading:
    """Figures of the newest trainer status in a run directory."""
    newest: dict[str, Any] = {}
    for path in run_dir.glob("trainer-*.json"):
        with contextlib.suppress(OSError, ValueError):
            status = json.loads(path.read_text(encoding="utf-8"))
            if status["updated_unix"] > newest.get("updated_unix", 0.0):
                newest = status
    return {f"trainer:{k}": float(newest.get(k) or 0) for k in _STATUS if newest}


class EventCounts:
    """Counts the trainers' events, reading each line once.

    Args:
        run_dir: Run directory.

    Attributes:
        broken: Lines that are no JSON.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._places: dict[Path, int] = {}
        self._counts: Counter[str] = Counter()
        self.broken = 0

    def read(self) -> Reading:
        """Number of events so far, by kind."""
        for path in self._run_dir.glob("events-*.jsonl"):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                place = self._places.get(path, 0)
                if len(data) < place:  # halved: what is left was counted
                    self._places[path] = len(data)
                    continue
                end = data.rfind(b"\n") + 1
                for line in data[place:end].splitlines():
                    self._count(line)
                self._places[path] = max(end, place)
        return {f"event:{name}": float(n) for name, n in self._counts.items()}

    def _count(self, line: bytes) -> None:
        try:
            self._counts[str(json.loads(line)["event"])] += 1
        except (ValueError, KeyError, TypeError):
            self.broken += 1


def total(reading: Reading, name: str) -> float:
    """A counter of a reading, summed over its reasons where it has some."""
    prefix = name + "{"
    return sum(v for k, v in reading.items() if k == name or k.startswith(prefix))
