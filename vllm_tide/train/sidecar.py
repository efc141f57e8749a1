"""The trainer process of one engine: drain the ring, train, publish, report.

Never blocks the engine: it only reads the ring and writes its own weights slot. The
ring is drained after every optimizer step and evaluation batch, so it does not fill
during a cycle. A dead engine ends the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from vllm_tide.config import TideConfig, TrainConfig, parse_tide
from vllm_tide.draft.checkpoint import canonical_name, load_draft
from vllm_tide.draft.config import DraftError
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.status import StatusFile, TrainerStatus
from vllm_tide.train.step import has_fast_bfloat16
from vllm_tide.train.trainer import CycleResult, Trainer
from vllm_tide.transport.header import TransportError
from vllm_tide.transport.record import Record
from vllm_tide.transport.rendezvous import EngineManifest, reclaim_orphans
from vllm_tide.transport.ring import RingReader
from vllm_tide.transport.weights import WeightsSegment, WeightsWriter

logger = logging.getLogger("vllm_tide.train")

IDLE_SLEEP_S = 0.05
DRAIN_BATCH, DRAIN_LIMIT_S = 256, 2.0


def prepare_process(config: TrainConfig, engine_id: str) -> None:
    """Affinity, niceness, threads and title of this process.

    Raises:
        DraftError: A knob cannot be honoured on this machine.
    """
    if torch.device(config.device).type != "cpu":
        raise DraftError(
            f"tide.train.device: {config.device!r} is not supported yet; use 'cpu'."
        )
    # The server that started us may be pinned, and children inherit that.
    cpus = config.cpus or range(os.cpu_count() or 1)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        if config.cpus:
            raise DraftError(
                f"tide.train.cpus: {config.cpus} cannot be used ({error.strerror})."
            ) from None
    allowed = len(os.sched_getaffinity(0))
    # Unpinned: leave most of the machine to the server.
    torch.set_num_threads(allowed if config.cpus else max(1, allowed // 4))
    if config.nice:
        os.nice(config.nice)
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(f"vllm-tide train {engine_id}")


def as_wire(tensors: dict[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], Any]]:
    """Tensors as dtype name, shape and bytes."""
    return {
        name: (
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            t.contiguous().flatten().view(torch.uint8).numpy(),
        )
        for name, t in tensors.items()
    }


class Sidecar:
    """One attachment to one engine.

    Args:
        manifest: The engine.
        run_dir: Where the status file goes.
        config: Overrides the engine's `tide` section when given.

    Raises:
        TransportError: A segment cannot be attached.
        DraftError: Draft, target and capture do not fit together.
        ConfigError: The manifest's `tide` section is wrong.
    """

    def __init__(
        self, manifest: EngineManifest, run_dir: Path, config: TideConfig | None = None
    ) -> None:
        """Load, check and attach."""
        self.manifest = manifest
        self._run_dir = run_dir
        self.config = (config or parse_tide(manifest.tide)).train
        if self.config.compute_dtype == "bfloat16" and not has_fast_bfloat16():
            self.config = self.config.model_copy(update={"compute_dtype": "float32"})
            logger.info("this CPU has no bfloat16 arithmetic: computing in float32")
        self.status = TrainerStatus()
        self._file = StatusFile(run_dir, manifest.engine_id)
        self._stopping = False
        self._installed = 0
        self._handled_refusal = 0
        target = TargetRows.load(manifest.target_path)
        draft = load_draft(manifest.draft_path, target, frozenset(manifest.shared))
        self.trainer = Trainer(
            draft,
            target,
            self.config,
            num_speculative_tokens=manifest.num_speculative_tokens,
            feature_dtype=manifest.feature_dtype,
        )
        self.trainer.check_features(manifest.aux_layer_ids)
        self._reader = RingReader.attach(manifest.ring)
        try:
            self._check_ring()
            self._writer = WeightsWriter.attach(manifest.weights)
        except BaseException:
            self._reader.close()
            raise
        self._adopt_installed()
        # master weights by version: the installed one, and those not yet answered
        self._versions = {self._installed: self.trainer.snapshot()}
        self._handled_refusal = self._writer.feedback().refused_version

    def stop(self) -> None:
        """Ask the loop to end after the current step."""
        self._stopping = True

    def run(self, *, once: bool = False) -> str:
        """Work until stopped, or the engine is gone; returns the last state.

        Args:
            once: End after the first cycle.
        """
        try:
            while self._tick():
                if not self.trainer.ready():
                    self.status.state = "waiting"
                    time.sleep(IDLE_SLEEP_S)
                    continue
                self.status.state = "training"
                result = self.trainer.train_cycle(self._tick)
                self._finish_cycle(result)
                if once:
                    break
        except TransportError:
            if self._engine_alive():
                raise
        finally:
            self.status.state = "stopped" if self._engine_alive() else "engine_gone"
            self._update_status(force=True)
            self._reader.close()
            self._writer.close()
            if self.status.state == "engine_gone":
                # An engine killed outright could not unlink its segments.
                reclaim_orphans(self._run_dir)
        return self.status.state

    def _tick(self) -> bool:
        """Everything that must not wait for the end of a cycle."""
        self._drain()
        self._reader.heartbeat()
        self._writer.heartbeat()
        self._read_feedback()
        self._update_status()
        return not self._stopping and self._engine_alive()

    def _engine_alive(self) -> bool:
        return self._reader.producer_alive()

    def _drain(self) -> None:
        now = time.monotonic()
        until = now + DRAIN_LIMIT_S
        going = True
        while going and time.monotonic() < until:
            records: list[Record] = []
            while len(records) < DRAIN_BATCH:
                record = self._reader.read()
                if record is None:
                    going = False
                    break
                records.append(record)
            self.trainer.add_records(records, now)
        self.trainer.flush_idle(now)

    def _finish_cycle(self, result: CycleResult) -> None:
        status = self.status
        if result.new is not None and result.live is not None:
            status.holdout_acceptance_new = result.new.acceptance()
            status.holdout_acceptance_live = result.live.acceptance()
        status.last_decision = result.reason
        logger.info(
            "cycle %d: %d steps, loss %.4f, %s",
            self.trainer.cycles,
            result.steps,
            result.loss,
            result.reason,
        )
        if result.publish:
            self._publish(result)
        self._update_status(force=True)

    def _publish(self, result: CycleResult) -> None:
        version = self._writer.latest_version + 1
        self._writer.publish(
            as_wire(self.trainer.candidate_tensors()),
            version=version,
            parent_version=max(self._versions),
            meta={
                "holdout_acceptance_new": self.status.holdout_acceptance_new,
                "holdout_acceptance_live": self.status.holdout_acceptance_live,
                "gain": result.gain,
                "gain_error": result.gain_error,
                "holdout_requests": 0
                if result.new is None
                else len(result.new.requests),
                "steps": self.trainer.steps,
                "loss": result.loss,
            },
        )
        self.trainer.published()
        self._versions[version] = self.trainer.snapshot()
        self.status.published_version = version
        self.status.last_publish_unix = time.time()
        logger.info("published version %d (%s)", version, result.reason)

    def _read_feedback(self) -> None:
        feedback = self._writer.feedback()
        if feedback.installed_version in self._versions:
            self._installed = feedback.installed_version
            for version in [v for v in self._versions if v < self._installed]:
                del self._versions[version]
        refused = feedback.refused_version
        if refused == self._handled_refusal:
            return
        self._handled_refusal = refused
        if refused not in self._versions:
            return
        self.status.refused_versions += 1
        logger.warning(
            "version %d was refused (%s); training goes on from version %d",
            refused,
            feedback.refused_reason,
            self._installed,
        )
        for version in [v for v in self._versions if v > self._installed]:
            del self._versions[version]
        self.trainer.restore(self._versions[self._installed])

    def _check_ring(self) -> None:
        """Refuse a ring whose rows are not what the draft was made for."""
        spec, m = self._reader.spec, self.manifest
        self.trainer.check_features(spec.aux_layer_ids)
        for name in ("hidden_size", "vocab_size", "feature_dtype", "teacher"):
            ring, told = getattr(spec, name), getattr(m, name)
            if ring != told:
                raise DraftError(
                    f"ring: {name} is {ring!r}, the manifest says {told!r}."
                )
        if self.trainer.target.hidden_size != m.hidden_size:
            raise DraftError(
                f"target: hidden size {self.trainer.target.hidden_size} is not the "
                f"engine's {m.hidden_size}."
            )

    def _adopt_installed(self) -> None:
        """After a restart of the trainer, go on from its last publication."""
        feedback = self._writer.feedback()
        self.status.published_version = self._writer.latest_version
        if self._writer.latest_version == 0:
            return
        reader = WeightsSegment.attach(self.manifest.weights)
        try:
            publication = reader.read()
        finally:
            reader.close()
        if publication.version == feedback.refused_version:
            raise DraftError(
                f"the engine refused version {publication.version} and its live draft "
                "is in no segment: restart the engine to train it again."
            )
        tensors = {}
        for name, item in publication.tensors.items():
            raw = torch.from_numpy(item.data.copy())
            dtype = getattr(torch, item.dtype)
            tensors[canonical_name(name)] = raw.view(dtype).view(item.shape)
        self.trainer.restore(tensors)
        self._installed = publication.version

    def _update_status(self, *, force: bool = False) -> None:
        status, trainer = self.status, self.trainer
        status.cycles, status.steps = trainer.cycles, trainer.steps
        status.loss = trainer.last_loss
        status.rows_read = trainer.rows_read
        status.samples = trainer.buffer.num_samples
        status.train_tokens = trainer.train_tokens
        status.packing_waste = trainer.packing_waste
        status.holdout_tokens = trainer.buffer.holdout_tokens
        status.rows_skipped = trainer.rows_skipped
        status.installed_version = self._installed
        self._file.write(status, force=force)


def install_signal_handlers(sidecar: Sidecar) -> None:
    """SIGTERM and SIGINT end the loop after the current step."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        sidecar.stop()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def describe(sidecar: Sidecar) -> str:
    """One line for the log: what is trained, with which knobs."""
    count = sum(p.numel() for p in sidecar.trainer.draft.parameters())
    knobs = json.dumps(sidecar.config.model_dump(), sort_keys=True)
    return f"draft with {count} parameters, tide.train {knobs}"
