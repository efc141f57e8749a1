"""The trainer's status file: what an operator or the engine's metrics read."""

from __future__ import annotations

import json
import math
import os
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vllm_tide.transport.rendezvous import write_private

PERIOD_S = 1.0


@dataclass
class TrainerStatus:
    """Fields of `trainer-<engine_id>.json`.

    Attributes:
        state: "starting", "waiting", "training", "stopped" or "engine_gone".
        holdout_acceptance_new: Expected tokens per verify step of the candidate at the
            last evaluation; `holdout_acceptance_live` of the draft served then.
        refused_versions: Publications the engine refused.
    """

    pid: int = field(default_factory=os.getpid)
    state: str = "starting"
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
    last_publish_unix: float | None = None
    rows_skipped: dict[str, int] = field(default_factory=dict)
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

    def write(self, status: TrainerStatus, *, force: bool = False) -> None:
        """Replace the file if a second has passed."""
        now = time.monotonic()
        if now < self._next and not force:
            return
        self._next = now + PERIOD_S
        status.updated_unix = time.time()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        status.peak_rss_bytes = usage.ru_maxrss * 1024
        values = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in asdict(status).items()
        }
        try:
            write_private(self.path, json.dumps(values, indent=1))
        except OSError:
            self.failed_writes += 1
