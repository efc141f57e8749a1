"""The trainer's status file: what an operator or the engine's metrics read."""

from __future__ import annotations

import json
import math
import os
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_tide.transport.rendezvous import write_private

PERIOD_S = 1.0


@dataclass
class TrainerStatus:
    """Fields of `trainer-<engine_id>.json`.

    Attributes:
        state: "starting", "waiting", "training", "stopped" or "engine_gone".
        model_name: Name that the first engine serves the target under.
        holdout_acceptance_new: Expected tokens per verify step of the candidate at the
            last evaluation; `holdout_acceptance_live` of the draft served then.
        refused_versions: Publications that no engine took.
        training_seconds: Time spent in training cycles, evaluations included.
        waiting_for: Why a better draft would not be published now; empty if it would.
        schedule: `Schedule.snapshot()`.
        canary: Trial of the newest draft: `speed_before` the swap and `speed_after` it
            in tokens per step without drafts, `change`, its `error`, `requests`.
        tenant_keys: Ids of the keys that tenants of its data were named by.
        engines: Per engine: version published, installed, refused.
        feeds: Per engine: counters of its feed.
        terms: Mean of each loss term over the last step.
        out_of_memory: Cycles that the trainer's device had no memory for.
        failed_writes: Status files and events that could not be written.
    """

    pid: int = field(default_factory=os.getpid)
    state: str = "starting"
    model_name: str = ""
    cycles: int = 0
    steps: int = 0
    loss: float | None = None
    rows_read: int = 0
    samples: int = 0
    train_tokens: int = 0
    packing_waste: float = 0.0
    holdout_tokens: int = 0
    holdout_acceptance_new: float | None = None
    holdout_acceptance_live: float | None = None
    last_decision: str = ""
    published_version: int = 0
    installed_version: int = 0
    refused_versions: int = 0
    publications: int = 0
    rollbacks: int = 0
    training_seconds: float = 0.0
    waiting_for: str = ""
    requests: int = 0
    schedule: dict[str, Any] = field(default_factory=dict)
    canary: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    feeds: dict[str, dict[str, int]] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    tenant_keys: list[str] = field(default_factory=list)
    last_publish_unix: float | None = None
    rows_skipped: dict[str, int] = field(default_factory=dict)
    out_of_memory: int = 0
    failed_writes: int = 0
    peak_rss_bytes: int = 0
    updated_unix: float = 0.0


class StatusFile:
    """Writes the status at most once a second; a full disk never stops training.

    Args:
        run_dir: Run directory.
        engine_id: Engine trained for.
    """

    def __init__(self, run_dir: Path, engine_id: str) -> None:
        """Write nothing yet."""
        self.path = run_dir / f"trainer-{engine_id}.json"
        self.failed_writes = 0
        self._next = 0.0

    def due(self) -> bool:
        """Whether a second has passed since the last writing."""
        return time.monotonic() >= self._next

    def write(self, status: TrainerStatus, *, force: bool = False) -> None:
        """Replace the file if a second has passed."""
        now = time.monotonic()
        if now < self._next and not force:
            return
        self._next = now + PERIOD_S
        status.updated_unix = time.time()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        status.peak_rss_bytes = usage.ru_maxrss * 1024
        values = finite(asdict(status))
        try:
            write_private(self.path, json.dumps(values, indent=1))
        except OSError:
            self.failed_writes += 1


def finite(value: Any) -> Any:
    """`value` with every float that is not finite replaced by None: JSON has none."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
