"""Trainers of a run directory: status files, event logs, and a trainer process.

A field that is missing, or of another type, is read as None.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.common import number, total
from bench.harness.options import SuiteOptions
from bench.harness.scrape import Scrape

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


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of all trainers, oldest first; skip damaged lines."""
    events: list[dict[str, Any]] = []
    for path in sorted(run_dir.glob("events-*.jsonl")):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:  # the last line may be incomplete
                continue
            if isinstance(event, dict):
                events.append({key: event.get(key) for key in EVENT_KEYS} | event)
    return sorted(events, key=lambda event: number(event["unix"]) or 0.0)


def training_seconds(
    statuses: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()
) -> float | None:
    """Return the training seconds of all trainers; None if not reported."""
    seconds = total([number(status.get("training_seconds")) for status in statuses])
    if seconds is not None:
        return seconds
    cycles = [event for event in events if event.get("event") == "cycle"]
    return total([number(event.get("seconds")) for event in cycles])


def trainer_facts(statuses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fields of each trainer's last status that a report includes."""
    return [{key: status.get(key) for key in _STATUS_KEYS} for status in statuses]


@dataclass
class TrainerWatch:
    """Converter of the trainers' event times to the clock of the readings."""

    run_dir: Path | None
    # Unix time and length (s) of each stop of the arm, which its clock excludes.
    waits: list[tuple[float, float]] = field(default_factory=list)
    _offset_s: float | None = None

    def on_sample(self, sample: Scrape) -> None:
        lag = time.time() - sample.t_s - sum(seconds for _, seconds in self.waits)
        # This call is never before the reading, so the smallest lag is the best.
        self._offset_s = lag if self._offset_s is None else min(self._offset_s, lag)

    def events(self) -> list[dict[str, Any]]:
        out = []
        for event in read_events(self.run_dir) if self.run_dir else ():
            out.append({"t_s": self.seconds_of(number(event["unix"])), **event})
        return out

    def seconds_of(self, unix: float | None) -> float | None:
        if unix is None or self._offset_s is None:
            return None
        waited = sum(seconds for began, seconds in self.waits if began < unix)
        return round(unix - self._offset_s - waited, 2)


STOP_S = 20.0
# Variables that would bind the trainer's threads to the engine's cores.
_ENGINE_ONLY = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_")


@contextlib.contextmanager
def trainer_process(
    options: SuiteOptions,
    name: str,
    section: Mapping[str, Any],
    run_dir: Path,
    module: Sequence[str] = ("-m", "vllm_tide", "train"),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a trainer for every engine of a run directory; stop it at the end."""
    config = options.work / "configs" / f"{name}-trainer.json"
    log = options.work / "logs" / f"{name}-trainer.log"
    for path in (config, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"tide": dict(section)}, indent=2)
    config.write_text(text + "\n", encoding="utf-8")
    command = [str(options.venv / "bin" / "python"), *module]
    command += ["--run-dir", str(run_dir), "--config", str(config)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(_ENGINE_ONLY)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def trainer_statuses(run_dir: Path | None) -> list[dict[str, Any]]:
    """Read the trainers' status files; skip one that is being replaced."""
    statuses = []
    for path in sorted(run_dir.glob("trainer-*.json")) if run_dir else ():
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(status, dict):
            statuses.append(status)
    return statuses
