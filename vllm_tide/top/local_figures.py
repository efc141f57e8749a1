"""What the run directory and shared memory say of engines and trainers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_tide.top.rates import ring_rates
from vllm_tide.top.run_files import EngineLook, TrainerLook
from vllm_tide.top.samples import Sample

SILENT_S = 10.0
"""A trainer writes every second, in a long step less often."""

_ENDED = ("stopped", "engine_gone")


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine.

    Attributes:
        alive: None where its pid cannot be looked up.
        ring_capacity_bytes: None without capture, like the figures beside it.
        installed_version: Head that it serves; None without swaps, or not known.
    """

    engine_id: str
    pid: int
    alive: bool | None
    target: str
    draft: str
    num_speculative_tokens: int
    policy: str
    ring_used_bytes: int | None
    ring_capacity_bytes: int | None
    ring_consumer_alive: bool | None
    rows_per_s: float | None
    dropped_rows_per_s: float | None
    corrupt_records: int | None
    published_version: int | None
    installed_version: int | None
    refused_version: int | None
    refused_reason: str
    swap_pause_ms: float | None


@dataclass(frozen=True, slots=True)
class TrainerFigures:
    """One trainer; None where a figure is not known.

    Attributes:
        age_s: Since its last sign of life (s).
        silent: It should have given one by now.
        canary_undecided: A trial of the newest draft is under way.
        speed_before: Speed over plain decoding before the swap; `speed_after` since.
        speed_change: Of the one over the other, less one; `speed_error` of it.
    """

    name: str
    pid: int
    state: str
    age_s: float
    silent: bool
    cycles: int
    steps: int
    loss: float | None
    rows_read: int
    train_tokens: int
    holdout_acceptance_new: float | None
    holdout_acceptance_live: float | None
    last_decision: str
    published_version: int
    installed_version: int
    refused_versions: int
    publications: int
    rollbacks: int
    seconds_since_publish: float | None
    waiting_for: str
    schedule_mode: str
    collecting: bool
    schedule_reason: str
    short_average: float | None
    long_average: float | None
    shifts: int
    canary_undecided: bool
    canary_requests: int
    speed_before: float | None
    speed_after: float | None
    speed_change: float | None
    speed_error: float | None
    backoff_cycles: int
    engines: int

    @property
    def running(self) -> bool:
        """Whether it works, as far as its file tells."""
        return not self.silent and self.state not in _ENDED


def engine_figures(history: Sequence[Sample], look: EngineLook) -> EngineFigures:
    """Figures of an engine.

    Args:
        history: Samples, oldest first.
        look: It, in the newest.
    """
    manifest, ring, weights = look.manifest, look.ring, look.weights
    written, dropped = ring_rates(history, manifest.ring)
    told = weights.feedback if weights is not None else None
    control = manifest.tide.get("control") if isinstance(manifest.tide, dict) else None
    policy = control.get("policy") if isinstance(control, dict) else None
    return EngineFigures(
        engine_id=str(manifest.engine_id),
        pid=manifest.pid,
        alive=look.alive,
        target=Path(str(manifest.target_path)).name,
        draft=Path(str(manifest.draft_path)).name,
        num_speculative_tokens=manifest.num_speculative_tokens,
        policy=policy if isinstance(policy, str) else "",
        ring_used_bytes=ring.used_bytes if ring else None,
        ring_capacity_bytes=ring.capacity_bytes if ring else None,
        ring_consumer_alive=ring.consumer_alive if ring else None,
        rows_per_s=written,
        dropped_rows_per_s=dropped,
        corrupt_records=ring.corrupt_records if ring else None,
        published_version=weights.latest_version if weights else None,
        installed_version=told.installed_version if told else None,
        refused_version=told.refused_version if told else None,
        refused_reason=told.refused_reason if told else "",
        swap_pause_ms=told.swap_pause_ms_last if told else None,
    )


def trainer_figures(look: TrainerLook, unix_s: float) -> TrainerFigures:
    """Figures of a trainer.

    Args:
        look: Its status file.
        unix_s: When it was read.
    """
    state = look.text("state") or "unknown"
    published = look.number("last_publish_unix")
    engines = look.status.get("engines") if hasattr(look.status, "get") else None
    return TrainerFigures(
        name=look.name,
        pid=look.count("pid"),
        state=state,
        age_s=look.age_s,
        silent=state not in _ENDED and look.age_s > SILENT_S,
        cycles=look.count("cycles"),
        steps=look.count("steps"),
        loss=look.number("loss"),
        rows_read=look.count("rows_read"),
        train_tokens=look.count("train_tokens"),
        holdout_acceptance_new=look.number("holdout_acceptance_new"),
        holdout_acceptance_live=look.number("holdout_acceptance_live"),
        last_decision=look.text("last_decision"),
        published_version=look.count("published_version"),
        installed_version=look.count("installed_version"),
        refused_versions=look.count("refused_versions"),
        publications=look.count("publications"),
        rollbacks=look.count("rollbacks"),
        seconds_since_publish=None if published is None else unix_s - published,
        waiting_for=look.text("waiting_for"),
        schedule_mode=look.text("schedule", "mode"),
        collecting=look.flag("schedule", "collecting"),
        schedule_reason=look.text("schedule", "reason"),
        short_average=look.number("schedule", "short"),
        long_average=look.number("schedule", "long"),
        shifts=look.count("schedule", "shifts"),
        canary_undecided=look.flag("canary", "undecided"),
        canary_requests=look.count("canary", "requests"),
        speed_before=look.number("canary", "speed_before"),
        speed_after=look.number("canary", "speed_after"),
        speed_change=look.number("canary", "change"),
        speed_error=look.number("canary", "error"),
        backoff_cycles=look.count("canary", "backoff_cycles"),
        engines=len(engines) if isinstance(engines, dict) else 0,
    )
