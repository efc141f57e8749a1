"""What the trainers of a run directory say: status files and event logs.

Read tolerantly: a field that is missing, or of another type, is None.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .live import trainer_statuses
from .scrape import Scrape

EVENT_KEYS = (
    "unix",
    "event",
    "version",
    "reason",
    "holdout_new",
    "holdout_live",
    "steps",
    "seconds",
)
_STATUS_KEYS = (
    "state",
    "cycles",
    "steps",
    "train_tokens",
    "rows_read",
    "training_seconds",
    "publications",
    "rollbacks",
    "refused_versions",
    "published_version",
    "installed_version",
    "holdout_acceptance_new",
    "holdout_acceptance_live",
    "last_decision",
    "packing_waste",
    "schedule",
    "canary",
    "engines",
    "rows_skipped",
    "peak_rss_bytes",
)


def number(value: object) -> float | None:
    """Return a number of a JSON value; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def total(values: Sequence[float | None]) -> float | None:
    """Return the sum of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Read the event logs of all trainers, oldest first; damaged lines are left out."""
    found: list[dict[str, Any]] = []
    for path in sorted(run_dir.glob("events-*.jsonl")):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:  # the last line may still be being written
                continue
            if isinstance(event, dict):
                found.append({key: event.get(key) for key in EVENT_KEYS} | event)
    return sorted(found, key=lambda event: number(event["unix"]) or 0.0)


def training_seconds(
    statuses: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()
) -> float | None:
    """Return the seconds all trainers trained; None if nobody says."""
    told = total([number(status.get("training_seconds")) for status in statuses])
    if told is not None:
        return told
    cycles = [event for event in events if event.get("event") == "cycle"]
    return total([number(event.get("seconds")) for event in cycles])


def trainer_facts(statuses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what a report keeps of each trainer's last status."""
    return [{key: status.get(key) for key in _STATUS_KEYS} for status in statuses]


def engine_versions(statuses: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return published, installed and refused version of each engine."""
    found: dict[str, dict[str, Any]] = {}
    for status in statuses:
        engines = status.get("engines")
        for name, entry in engines.items() if isinstance(engines, Mapping) else ():
            if isinstance(entry, Mapping):
                found[str(name)] = {
                    key: entry.get(key) for key in ("published", "installed", "refused")
                }
    return found


@dataclass(frozen=True, slots=True)
class Look:
    """What the trainers said at one moment.

    Attributes:
        t_s: Seconds since the run's start.
        training_s: Seconds trained until then.
        engines: Versions by engine.
    """

    t_s: float
    training_s: float | None
    engines: dict[str, dict[str, Any]]


@dataclass
class TrainerWatch:
    """Looks at the trainers whenever the server's metrics are read."""

    run_dir: Path | None
    looks: list[Look] = field(default_factory=list)
    _offset_s: float | None = None

    def on_sample(self, sample: Scrape) -> None:
        """Look now."""
        lag = time.time() - sample.t_s
        # A reading is noted a little after its time, never before.
        self._offset_s = lag if self._offset_s is None else min(self._offset_s, lag)
        if self.run_dir is not None:
            statuses = trainer_statuses(self.run_dir)
            told = training_seconds(statuses)
            self.looks.append(Look(sample.t_s, told, engine_versions(statuses)))

    def training_s(self, t_s: float) -> float | None:
        """Return the seconds trained until a moment, as last seen before it."""
        seen = [look.training_s for look in self.looks if look.t_s <= t_s]
        return seen[-1] if seen else None

    def events(self) -> list[dict[str, Any]]:
        """Return the event logs with `t_s`, seconds since the run's start."""
        out = []
        for event in read_events(self.run_dir) if self.run_dir else ():
            out.append({"t_s": self.seconds_of(number(event["unix"])), **event})
        return out

    def seconds_of(self, unix: float | None) -> float | None:
        """Return a Unix time as seconds since the run's start; None if not known."""
        if unix is None or self._offset_s is None:
            return None
        return round(unix - self._offset_s, 2)
