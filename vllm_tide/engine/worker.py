"""TIDE's part of the worker: ring, weights segment, capture, swapper, trainer process.

Created once per worker after the models are loaded (`factory.py`). Calls per step:
`begin_step` before it, and the hooks of the runner (`worker_v1.py`, `worker_v2.py`).
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from vllm_tide.capture.guard import Guard
from vllm_tide.capture.policy import OVERLOAD
from vllm_tide.capture.switch import watch_capture_switch
from vllm_tide.config import (
    MIB,
    TideConfig,
    starts_trainer,
)
from vllm_tide.engine.capture import Capture
from vllm_tide.engine.control import Control
from vllm_tide.engine.facts import draft_facts
from vllm_tide.engine.server_log import ServerLog, log_start
from vllm_tide.engine.swapper import Swapper, checkpoint_tensors
from vllm_tide.engine.trainer_process import (
    TrainerProcess,
    call_on,
    free_cores,
    given_cores,
)
from vllm_tide.transport import rendezvous
from vllm_tide.transport.record import RingSpec
from vllm_tide.transport.rendezvous import to_builtins
from vllm_tide.transport.ring import Collect, RingWriter
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.tenant import key_id, tenant_key
from vllm_tide.transport.weights import WeightsSegment

if TYPE_CHECKING:
    from vllm_tide.engine.scheduler import StepDirective


C = TypeVar("C", bound=Control)

logger = logging.getLogger("vllm.tide")

FEATURE_DTYPE = "bfloat16"
"""Type of captured features and hidden teachers: half of float32, with its range."""

REPORT_SECONDS = 0.5
RETRY_SECONDS = 2.0
"""Interval of checks for the engine's manifest (s)."""


def with_valid_topk(config: TideConfig, vocab_size: int) -> TideConfig:
    """Limit `capture.teacher_topk` to the size of the target's vocabulary."""
    topk = min(config.capture.teacher_topk, vocab_size)
    capture = config.capture.model_copy(update={"teacher_topk": topk})
    return config.model_copy(update={"capture": capture})


class WorkerTide(Generic[C]):
    """TIDE in one worker: the parts that do not depend on the model runner.

    `worker_v1.py` and `worker_v2.py` add the hooks of the two runners.
    """

    max_steps = 1  # most steps in flight
    _at_first_step: Sequence[Callable[[], None]] = ()

    def __init__(self, worker: Any, config: TideConfig) -> None:
        from vllm.distributed import get_tp_group

        self._worker = worker
        self._group = get_tp_group() if get_tp_group().world_size > 1 else None
        self._leader = get_tp_group().rank_in_group == 0
        self._facts = draft_facts(worker)
        self._config = config = with_valid_topk(config, self._facts.vocab_size)
        self._guard, self._reports = Guard("capture"), Guard("reporting")
        self._engine_id = secrets.token_hex(8)
        self._run_dir = Path(config.run_dir or rendezvous.default_run_dir())
        self._manifest: Path | None = None
        self._ring: RingWriter | None = None
        self._segment: WeightsSegment | None = None
        self._trainer: TrainerProcess | None = None
        self._reported = 0.0
        self._sent_staged = 0
        self._stop, self._not_announced = Event(), ""
        self._server_log = ServerLog()
        self._draft_since = time.time()
        self._losses: Counter[str] = Counter()
        self.capture: Capture | None = None
        self._tenant_key_id = ""
        self.swapper: Swapper | None = None
        self.control: C | None = None
        cores = given_cores()
        learns = self._leader and self._prepare_run_dir()
        if config.capture.enabled and learns:
            self._open_capture()
        if config.swap.enabled:
            self._open_swap(worker, cores)
        if config.control.policy != "static" or config.test_time.memory == "ngram":
            self._open_control(worker)
        if learns:
            self._announce_if_missing()
            Thread(
                target=self._keep_announced, name="vllm-tide-announce", daemon=True
            ).start()
            log_start(config, self._run_dir, self._facts.num_speculative_tokens)
            if starts_trainer(config):
                self._trainer = TrainerProcess(
                    self._engine_id,
                    self._run_dir,
                    self._group_id,
                    config.spool,
                    self._trainer_reads,
                )
                start = partial(call_on, free_cores(cores), self._trainer.start)
                if config.train.device == "cpu":
                    start()
                else:  # vLLM measures free memory before it allocates the KV cache
                    thread = Thread(target=start, name="vllm-tide-start")
                    self._at_first_step = [thread.start]
        if self.swapper is not None:
            upload = self.swapper.stager.upload_from_now
            self._at_first_step = [*self._at_first_step, upload]
            self.swapper.stager.start()

    def attach(self) -> None:
        """Set the attribute `tide` of the runner and its drafter."""
        raise NotImplementedError

    def refuse_reload(self) -> None:
        """Raise the error of a reload of the target's weights (hook)."""
        raise RuntimeError(
            "tide: reload_weights is not supported, because the draft is trained for "
            "the target's original weights; restart the server with the new ones."
        )

    def on_logits(self, logits: torch.Tensor | None) -> None:
        """Process the target's raw logits before sampling (hook)."""
        if self.capture is not None:
            self._guard.run("logits", self.capture.on_logits, logits)

    def choose_drafts(
        self, req_ids: list[str], draft_token_ids: list[list[int]]
    ) -> list[list[int]]:
        """Return the drafted tokens of each request to verify (hook)."""
        if self.control is None:
            return draft_token_ids
        return self.control.choose(req_ids, draft_token_ids)

    def close(self) -> None:
        """Stop the trainer, unlink the segments. Idempotent.

        Segments are unlinked before any wait: vLLM kills a slow worker, and users' text
        would remain in shared memory.
        """
        self._stop.set()
        if self.capture is not None:
            self._closing.set()
            self._guard.always("close", self.capture.close)
        if self._trainer is not None:
            self._trainer.terminate()
        for segment in (self._ring, self._segment):
            if segment is not None:
                segment.unlink()
        if self._leader:
            rendezvous.remove_manifest(self._run_dir, self._engine_id)
        for part in (self._trainer, self.swapper, self._ring, self._segment):
            if part is not None:
                part.close()
        self._trainer = self._ring = self._segment = self.capture = self.swapper = None

    def _take_requests(self, scheduler_output: Any) -> None:
        """Decide which new requests are captured, after the directive's exclusions."""
        directive = scheduler_output.tide
        if self.capture is None or not scheduler_output.scheduled_new_reqs:
            return
        if directive is not None and "salted" in directive:
            self._guard.always("keep_out", self.capture.keep_out, directive["salted"])
        # Also while capture is suspended: consent is sent only once per request.
        self._guard.always("admit", self.capture.admit, scheduler_output)

    def _forget(self, req_ids: Sequence[str]) -> None:
        if self.capture is not None and req_ids:
            self._guard.always("forget", self.capture.forget, req_ids)

    def _between_steps(self, scheduler_output: Any) -> None:
        if self._at_first_step and scheduler_output.num_scheduled_tokens:
            # Steps without tokens precede it: they end vLLM's warm-up requests.
            for call in self._at_first_step:
                self._reports.always("first_step", call)
            self._at_first_step = ()
        directive = scheduler_output.tide
        self._install_ordered(directive)
        if self._guard.retry() and self.capture is not None:
            self.capture.resume()

    def _install_ordered(self, directive: StepDirective | None) -> None:
        if directive is None or "install" not in directive or self.swapper is None:
            return
        version, number = self.swapper.version, self.swapper.number
        self.swapper.install_ordered(directive["install"])
        if self.capture is not None:
            self.capture.draft_version = self.swapper.version
        if self.swapper.version != version:
            self._draft_since = time.time()
        # A fast draft differs little from its base, so its statistics stay valid.
        if self.swapper.number != number and self.control is not None:
            self.control.draft_swapped()

    def _prepare_run_dir(self) -> bool:
        """Remove files of dead engines; return whether the directory has free space."""
        try:
            rendezvous.reclaim_orphans(self._run_dir)
            rendezvous.require_space(self._run_dir)
        except TransportError as error:
            if not rendezvous.is_full(error):
                raise
            self._losses["run_dir_full"] = 1
            logger.error(
                "vllm_tide: %s; capture and training are off: free space there and "
                "restart the server.",
                error,
            )
            return False
        return True

    def _open_capture(self) -> None:
        self._ring = self._create_ring()
        key = tenant_key(self._run_dir, self._config.train.state_dir)
        self._tenant_key_id = key_id(key)
        self.capture = Capture(
            self._worker.model_runner,
            self._ring,
            self._config.capture,
            self._facts.num_speculative_tokens,
            self.max_steps,
            key,
        )
        self._closing = watch_capture_switch(
            self.capture, self._run_dir, self._config.train.state_dir
        )

    def _create_ring(self) -> RingWriter:
        facts, capture = self._facts, self._config.capture
        spec = RingSpec(
            engine_id=self._engine_id,
            hidden_size=facts.hidden_size,
            aux_layer_ids=facts.aux_layer_ids,
            vocab_size=facts.vocab_size,
            feature_dtype=FEATURE_DTYPE,
            teacher=capture.teacher,
            teacher_topk=capture.teacher_topk,
        )
        rows = int(self._worker.model_runner.max_num_tokens)
        num_aux = len(facts.aux_layer_ids)
        size = capture.ring_bytes(num_aux, facts.hidden_size, rows)
        return RingWriter.create(spec, size)

    def _create_weights(self) -> WeightsSegment:
        tensors = checkpoint_tensors(self._facts.draft_path).values()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        # Doubled, because a trainer may publish fp32 for a bf16 checkpoint.
        return WeightsSegment.create(2 * size + MIB)

    def _check_segments(self) -> None:
        """Count and log a segment that was truncated or removed, once.

        Reader and writer detect that themselves and stop using the memory.
        """
        for reason, segment in (
            ("ring_lost", self._ring),
            ("weights_lost", self._segment),
        ):
            if segment is not None and segment.lost and not self._losses[reason]:
                self._losses[reason] = 1
                logger.error(
                    "vllm_tide: segment %s was truncated or removed: learning may have "
                    "stopped; restart this server.",
                    segment.name,
                )

    def _trainer_reads(self) -> bool:
        """Return whether a trainer reads the ring; True without a usable ring."""
        ring = self._ring
        return ring is None or ring.lost or ring.stats().consumer_alive

    def _keep_announced(self) -> None:
        """Write the manifest again if that failed or it was removed.

        Runs in a separate thread, because the file system may block.
        """
        while not self._stop.wait(RETRY_SECONDS):
            self._announce_if_missing()

    def _announce_if_missing(self) -> None:
        try:
            if self._manifest is not None:
                if self._manifest.exists():
                    return
                logger.warning(
                    "vllm_tide: %s was removed and is written again; drafts and logs "
                    "that were removed with it are lost.",
                    self._manifest,
                )
            self._announce()
            if self._stop.is_set():  # `close` may have run before the write
                rendezvous.remove_manifest(self._run_dir, self._engine_id)
        except (TransportError, OSError) as error:
            if (reason := str(error)) != self._not_announced:
                self._not_announced = reason
                logger.error("vllm_tide: manifest not written, retrying: %s", reason)

    def _open_swap(self, worker: Any, cores: set[int]) -> None:
        from vllm.distributed import get_tp_group

        name = ""
        if self._leader:
            self._segment = self._create_weights()
            name = self._segment.name
        if self._group is not None:
            name = get_tp_group().broadcast_object(name, src=0)
        if self._segment is None:
            self._segment = WeightsSegment.attach(name)
        self.swapper = Swapper(
            worker.model_runner.get_draft_model(),
            worker.model_runner.get_model(),
            worker.vllm_config,
            self._facts.draft_path,
            self._segment,
            self._group,
            cores,
        )
        self.swapper.stager.beat = self._log_pause  # also without requests

    def _log_pause(self) -> None:
        if (ring := self._ring) is not None and ring.intact:
            self._server_log.collect(bool(ring.collect))

    def _open_control(self, worker: Any) -> None:
        raise NotImplementedError

    def agree(self, value: int) -> int:
        if self._group is None:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        torch.distributed.broadcast(
            tensor, src=self._group.ranks[0], group=self._group.cpu_group
        )
        return int(tensor)

    def _announce(self) -> None:
        capture, serving = self._config.capture, self._worker.vllm_config
        facts = asdict(self._facts) | {"draft_path": str(self._facts.draft_path)}
        manifest = rendezvous.EngineManifest(
            **facts,
            engine_id=self._engine_id,
            pid=os.getpid(),
            ring="" if self._ring is None else self._ring.name,
            weights="" if self._segment is None else self._segment.name,
            teacher=capture.teacher,
            teacher_topk=capture.teacher_topk,
            feature_dtype=FEATURE_DTYPE,
            shared=sorted(self.swapper.shared) if self.swapper is not None else [],
            tide=self._config.model_dump(),
            created_unix=time.time(),
            model_name=str(serving.model_config.served_model_name),
            tenant_key_id=self._tenant_key_id,
            draft_sample_method=serving.speculative_config.draft_sample_method,
        )
        self._group_id = rendezvous.group_of(manifest)
        self._manifest = rendezvous.write_manifest(self._run_dir, manifest)

    def _report(self) -> dict[str, Any] | None:
        """Return a report for the scheduler, twice a second or for a new staged draft.

        It contains totals, so a lost report has no effect.
        """
        now = time.monotonic()
        staged = self.swapper.ready_version() if self.swapper is not None else 0
        if staged == self._sent_staged and now - self._reported < REPORT_SECONDS:
            return None
        self._reported, self._sent_staged = now, staged
        self._guard.run("segments", self._check_segments)
        report: dict[str, Any] = {
            "staged": staged,
            "faults": dict(self._faults()),
            "draft_installed_unix": self._draft_since,
        }
        if self.capture is not None and self._ring is not None:
            if self.swapper is None:  # else the stager's thread does it
                self._log_pause()
            report |= self._capture_report(self.capture, self._ring)
        if self.control is not None:
            report |= self._reports.always("stats", self.control.stats) or {}
        if (swapper := self.swapper) is not None:
            swapper.report()
            report |= {
                "draft_version": swapper.number,
                "swaps": swapper.num_swaps,
                "swap_seconds": swapper.seconds,
                "refused": dict(swapper.stager.refused),
            }
            swapper.seconds = []
        self._reports.run("log", self._server_log.report, report, now)
        return cast(dict[str, Any], to_builtins(report))

    def _faults(self) -> Counter[str]:
        faults = self._guard.faults + self._reports.faults + self._losses
        if self.control is not None:
            faults += self.control.faults
        return faults

    def _capture_report(self, capture: Capture, ring: RingWriter) -> dict[str, Any]:
        stats = ring.stats()
        dropped = {"ring_full": 0, **dict.fromkeys(OVERLOAD, 0), **capture.dropped}
        for reason, rows in ring.dropped_rows.items():
            dropped[f"ring_{reason}"] = rows
        return {
            "rows": capture.rows,
            "requests": capture.requests,
            "dropped": dropped,
            "capture_on": capture.collect_mode is not Collect.NOTHING,
            "capture_suspended_s": self._guard.suspension.left,
            "ring_used_bytes": stats.used_bytes,
            "ring_capacity_bytes": stats.capacity_bytes,
            "consumer_alive": stats.consumer_alive,
        }
