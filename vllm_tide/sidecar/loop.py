"""The trainer's loop: read records, train when it is useful, deploy better drafts.

It never blocks an engine: it only reads rings and writes free weights slots. It drains
the rings after every optimizer step and evaluation batch, so none fills up in a cycle.
The process exits when the last engine has left.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_tide.capture.switch import PAUSED, Switch, Switches, switch_folders
from vllm_tide.config import TideConfig, TrainConfig, parse_tide
from vllm_tide.deploy.canary_groups import Groups
from vllm_tide.deploy.deployment import Deployment
from vllm_tide.deploy.fast_draft import FastDraft
from vllm_tide.deploy.rollback import initial_draft
from vllm_tide.deploy.schedule import Schedule
from vllm_tide.deploy.served import ServedRequest, ServedRequests
from vllm_tide.deploy.store import DraftStore, fingerprint_of
from vllm_tide.draft.checkpoint import load_draft
from vllm_tide.draft.config import DraftError, read_config
from vllm_tide.draft.fresh import is_fresh
from vllm_tide.draft.kind import draft_config
from vllm_tide.draft.target import TargetRows
from vllm_tide.metrics import finite
from vllm_tide.sidecar.report import Report, TrainerStatus
from vllm_tide.tracing import open_tracing
from vllm_tide.train import checkpoint, gpu
from vllm_tide.train.distributed import (
    HEARTBEAT_S,
    LeadRank,
    OneRank,
    Stepper,
    send_heartbeat,
    setup_of,
)
from vllm_tide.train.judgement import CycleResult
from vllm_tide.train.ranks import Ranks
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport.admin import AdminSocket, Answer
from vllm_tide.transport.feed_spool import Feed
from vllm_tide.transport.feeds import Feeds
from vllm_tide.transport.process import renice
from vllm_tide.transport.rendezvous import read_manifests, state_dirs
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.tenant import purged_tenant

logger = logging.getLogger("vllm_tide.train")

IDLE_SLEEP_S = 0.05
EXPIRE_PERIOD_S = 1.0
BATCH, LIMIT_S = 256, 2.0
ROWS_PER_READ = 8192
"""Maximum rows per read; many per engine, so that all get fair shares."""
COMMANDS = ("status", "pause", "resume", "rollback", "purge")


class Sidecar:
    """One trainer and its engines.

    Args:
        feeds: Feeds with at least one engine.
        config: Replaces the engine's `tide` section if given.
        ranks: Other training ranks; this process is their leader.

    Raises:
        TransportError: An engine cannot be reached.
        DraftError: Draft, target and capture do not match.
        ConfigError: The manifest's `tide` section is invalid.
    """

    def __init__(
        self,
        feeds: Feeds,
        run_dir: Path,
        config: TideConfig | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        try:
            self._open(feeds, run_dir, config, ranks)
        except BaseException as error:
            feeds.close()
            if gpu.is_out_of_memory(error):
                what = "the draft and the target's rows"
                message = gpu.memory_message(self.config.device, what)
                raise DraftError(message) from error
            raise

    def _open(
        self,
        feeds: Feeds,
        run_dir: Path,
        config: TideConfig | None,
        ranks: Ranks | None,
    ) -> None:
        feed = feeds.reference
        if feed is None:
            raise ValueError("no engine has joined")
        self.feeds, self.manifest = feeds, feed.manifest
        self._run_dir = run_dir
        self.tide = config or parse_tide(self.manifest.tide)
        self.config = self.tide.train
        # Also those of engines that will join later: ranks of a group start together.
        engines = (self.manifest, *read_manifests(run_dir))
        servers = {uuid for engine in engines for uuid in engine.gpu_uuids}
        self.config = gpu.with_gpu_share(self.config, servers)
        if gpu.serves_on(self.config, servers):
            self._wait_for_rows(feed, ranks)
            target_path, draft_path = feed.models()
            shape = draft_config(read_config(draft_path), read_config(target_path))
            depth = self.manifest.num_speculative_tokens
            need = gpu.memory_need(shape, self.config, depth)
            gpu.claim_memory(torch.device(self.config.device), need)
        self.status = TrainerStatus(model_name=self.manifest.model_name)
        self.report = Report(run_dir, feed.id, open_tracing("trainer"))
        folders = state_dirs(run_dir) or [self.config.state_dir]
        # A purge must find this process while it starts; other commands need its loop.
        self._admin = AdminSocket("trainer", *switch_folders(run_dir, *folders)[1:])
        self._next_expiry = 0.0
        self.stopping = self._purge_waits = False
        self._trained_s = 0.0
        self._cycle_began: float | None = None
        self._served = ServedRequests(Groups())
        self.trainer = self._make_trainer(feed, ranks)
        day0 = is_fresh(self._draft_path)
        self.schedule = Schedule(
            self.tide.schedule, self.config.min_new_tokens, day0=day0
        )
        self._pause = Switch(run_dir, PAUSED, self.config.state_dir, *folders)
        self._switches = Switches(run_dir, self.config.state_dir)
        self._memory_backoff = gpu.MemoryBackoff(self.config)
        self._set_collect()
        self._emptied = False
        fingerprint = fingerprint_of(self._target_path, self._draft_path)
        store = DraftStore(self._state_dir(), fingerprint)
        if not store.claim():
            why = (
                "the trainer of another server of this model stores drafts there too, "
                "and a rollback removes the newest: set another tide.train.state_dir"
            )
            self.report.add("state_dir_shared", path=str(self._state_dir()), reason=why)
        self.deployment = Deployment(
            feeds,
            self.trainer,
            self.tide,
            store,
            self.report.add,
            self._served,
            lambda: initial_draft(self._draft_path, self.manifest.shared),
        )
        self.deployment.adopt()
        self.fast = FastDraft(
            self.tide,
            self.trainer,
            feeds,
            self.deployment,
            self.report.add,
            overrides=config is not None,
        )
        self._resume()
        self._admin.listen_in(run_dir)

    def stop(self) -> None:
        """Request the loop to end after the current step."""
        self.stopping = True

    @property
    def paused(self) -> bool:
        return self._pause.on

    @property
    def training_seconds(self) -> float:
        """Time in training cycles, including the current one (s)."""
        began = self._cycle_began
        return self._trained_s + (0.0 if began is None else time.monotonic() - began)

    def run(self, *, once: bool = False) -> str:
        """Run until stopped or no engine is left, or `once` for one cycle."""
        try:
            while self._tick():
                if once and self._pause.on:
                    break
                if not self._may_train():
                    self.status.state = "paused" if self._pause.on else "waiting"
                    time.sleep(IDLE_SLEEP_S)
                    continue
                self.status.state = "training"
                self._train()
                if once and not self._pause.on:  # a pause interrupts a cycle
                    break
        finally:
            self.status.state = "stopped" if len(self.feeds) else "engine_gone"
            self.fast.stop()
            if self.deployment.canary.undecided:
                why = "the canary has not decided, so the next server does not serve it"
                self.report.add(
                    "not_stored", version=self.deployment.published, reason=why
                )
            self._update_status(force=True)
            self._switches.close()
            self.trainer.stepper.close()
            self.feeds.close()
            self._admin.close()
        return self.status.state

    def _tick(self) -> bool:
        """Do all work that must not wait for the end of a cycle."""
        now = time.monotonic()
        changes = self.feeds.poll()
        for engine in changes.joined:
            self.report.add("joined", engine=engine)
        for engine, why in changes.left.items():
            self._served.forget(engine)
            self.report.add("left", engine=engine, reason=why)
        collecting = self.schedule.collecting
        for request in self._drain(now):
            self._observe(request, now)
        if self.schedule.collecting != collecting:
            self._collect_changed()
        self.feeds.heartbeat()
        self.deployment.tick()
        self.fast.tick(now, paused=self._pause.on)
        self.trainer.stepper.idle()
        self._expire(now)
        self._admin.poll(self.execute)
        self._update_status()
        return not self.stopping and len(self.feeds) > 0

    def _drain(self, now: float) -> Iterator[ServedRequest]:
        """Process records for at most `LIMIT_S`; yield finished requests."""
        until = time.monotonic() + LIMIT_S
        self._emptied = False
        while time.monotonic() < until:
            taken = self.feeds.read(BATCH, ROWS_PER_READ)
            if not taken:
                self._emptied = True
                break
            for engine, records in taken:
                for record in records:
                    yield from self._served.add(record, engine, now)
                    self.trainer.add_records((record,), now)
        yield from self._served.flush_idle(now)
        self.trainer.flush_idle(now)

    def execute(self, request: dict[str, Any]) -> Answer | None:
        """Execute an operator's command between two steps; None: repeat it later."""
        command = request["do"]
        if command == "status":
            self._update_status(force=True)
            return {"ok": True, "status": finite(asdict(self.status))}
        if command in ("pause", "resume"):
            return self._set_pause(command == "pause")
        if command == "rollback":
            return {"ok": True, **self.deployment.rollback("ordered")}
        if command == "purge":
            return self._purge(purged_tenant(request))
        message = f"unknown command {command!r}; use one of {', '.join(COMMANDS)}"
        return {"ok": False, "error": message}

    def _set_pause(self, on: bool) -> Answer:
        was = self._pause.on
        volatile = self._pause.set(on)
        if was != on:
            self._pause_changed()
        note = {"note": volatile} if volatile else {}
        return {"ok": True, "paused": on, "was_paused": was, **note}

    def _pause_changed(self) -> None:
        self.status.state = "paused" if self._pause.on else "waiting"
        self.report.add("paused" if self._pause.on else "resumed", reason="ordered")
        self._set_collect()

    def _observe(self, request: ServedRequest, now: float) -> None:
        self.status.requests += 1
        shifts = self.schedule.shifts
        self.schedule.observe(request)
        if self.schedule.shifts != shifts:
            self.report.add("shift", reason=self.schedule.reason)
        self.deployment.observe(request)

    def _set_collect(self) -> None:
        mode = Collect.FULL if self.schedule.collecting else Collect.METADATA
        self.feeds.set_collect(Collect.NOTHING if self._pause.on else mode)

    def _collect_changed(self) -> None:
        self._set_collect()
        if not self.schedule.collecting:
            self.report.add("pause", reason=self.schedule.reason)

    def _may_train(self) -> bool:
        if self._pause.on or self._memory_backoff.is_paused(time.monotonic()):
            return False
        buffer = self.trainer.buffer
        due = self.schedule.should_train(buffer.new_tokens, time.monotonic())
        return due and buffer.train_tokens > 0

    def _train(self) -> None:
        self._cycle_began = began = time.monotonic()
        self._purge_waits = False
        before, cpu = self.trainer.out_of_memory, time.process_time()
        result = self.trainer.train_cycle(self._tick_in_cycle)
        now = time.monotonic()
        seconds = now - began
        self._memory_backoff.cycle_done(self.trainer.out_of_memory > before, now)
        self._trained_s, self._cycle_began = self._trained_s + seconds, None
        self._finish_cycle(result, seconds, time.process_time() - cpu)

    def _tick_in_cycle(self) -> bool:
        """Return whether the cycle continues; a pause or a purge ends it.

        A cycle has references to samples that the buffer has already removed.
        """
        return self._tick() and not self._pause.on and not self._purge_waits

    def _finish_cycle(self, result: CycleResult, seconds: float, cpu_s: float) -> None:
        status = self.status
        new = live = None
        if result.new is not None and result.live is not None:
            new, live = result.new.acceptance(), result.live.acceptance()
            status.holdout_acceptance_new = new
            status.holdout_acceptance_live = live
            collecting = self.schedule.collecting
            now = time.monotonic()
            self.schedule.cycle_done(result.improved, result.gaining, seconds, now)
            if self.schedule.collecting != collecting:
                self._collect_changed()
        status.last_decision = result.reason
        self.report.add(
            "cycle",
            cycle=self.trainer.cycles,
            steps=result.steps,
            seconds=round(seconds, 3),
            evaluation_s=round(result.evaluation_s, 3),
            elsewhere_s=round(result.elsewhere_s, 3),
            cpu_s=round(cpu_s, 3),
            loss=result.loss,
            holdout_new=new,
            holdout_live=live,
            gain=result.gain,
            gain_error=result.gain_error,
            fresh_requests=result.fresh_requests,
            unscored_requests=self.trainer.unscored_requests,
            evidence=result.evidence,
            publish=result.publish,
            waiting_for=self.deployment.waiting_for,
            reason=result.reason,
        )
        self.deployment.offer(result, time.monotonic())
        every = self.config.checkpoint_cycles
        if every and self.trainer.cycles % every == 0:
            self._save_checkpoint()
        self._update_status(force=True)

    def _expire(self, now: float) -> None:
        """Remove expired data, follow the files of `pause`."""
        if now < self._next_expiry:
            return
        self._next_expiry = now + EXPIRE_PERIOD_S
        # A command sets it in the files while this trainer starts or hangs.
        if self._pause.follow(self._switches):
            self._pause_changed()
        self.trainer.expire()

    def _purge(self, tenant: int | None) -> Answer | None:
        """Remove the data of a tenant, or all; None: repeat it later.

        It waits for the end of a cycle, and until the rings have been empty.
        """
        self._purge_waits = self._cycle_began is not None
        if self._purge_waits:
            return None
        now = time.monotonic()
        for served in self._drain(now):
            self._observe(served, now)
        if not self._emptied:  # the rings may still contain purged rows
            return None
        self.fast.drop("purged")
        self.fast.tick(now, paused=True)  # send the base before the answer
        counts = self.trainer.purge(tenant)
        counts["fetched_records"] = self.feeds.purge(tenant)
        counts["open_requests"] = self._served.purge(tenant)
        self.report.add("purge", **counts)
        return {"ok": True, "removed": counts, "engines": self.feeds.ids}

    def _wait_for_rows(self, feed: Feed, ranks: Ranks | None) -> None:
        """Wait for the first captured rows, so until the server's KV cache exists.

        Memory that is taken before is missing when vLLM sizes the cache.

        Raises:
            TransportError: The engine has ended.
        """
        logger.info("waiting for the server's first request before using its GPU")
        names = ("waiting_bytes", "waiting_shards", "dropped_rows")
        last_heartbeat = time.monotonic()
        while not any(feed.stats().get(name) for name in names):
            self.feeds.heartbeat()
            if ranks is not None and time.monotonic() - last_heartbeat >= HEARTBEAT_S:
                send_heartbeat(ranks)
                last_heartbeat = time.monotonic()
            if not feed.alive():
                raise TransportError("the engine has ended before its first request")
            time.sleep(IDLE_SLEEP_S)

    def _make_trainer(self, feed: Feed, ranks: Ranks | None) -> Trainer:
        manifest, spec = feed.manifest, feed.spec
        target_path, draft_path = feed.models()
        target = TargetRows.load(target_path, self.config.device)
        draft = load_draft(draft_path, target, frozenset(manifest.shared))
        if target.hidden_size != manifest.hidden_size:
            raise DraftError(
                f"target: hidden size {target.hidden_size} differs from the engine's "
                f"{manifest.hidden_size}."
            )
        captured, layers = tuple(spec.aux_layer_ids), draft.config.aux_layer_ids
        if captured != layers:
            raise DraftError(
                f"captured layers {captured} differ from the draft's {layers}; the "
                "trained draft would have a low acceptance."
            )
        self._target_path, self._draft_path = target_path, draft_path
        steps = draft.config.num_steps(
            self.config.ttt_steps, manifest.num_speculative_tokens
        )
        config = self.config.model_copy(update={"ttt_steps": steps})
        stepper: Stepper
        if ranks is None:
            stepper = OneRank(draft, target, config)
        elif ranks.mesh.device_type != target.lm_head.device.type:
            raise DraftError(
                f"tide.train.device is {self.config.device!r}, but the other ranks use "
                f"{ranks.mesh.device_type!r}; set it for them with --config."
            )
        else:
            setup = setup_of(str(target_path), str(draft_path), manifest.shared, config)
            stepper = LeadRank(ranks, draft, target, config, setup)
        return Trainer(
            draft,
            target,
            config,
            num_speculative_tokens=manifest.num_speculative_tokens,
            feature_dtype=manifest.feature_dtype,
            draft_sample_method=manifest.draft_sample_method,
            stepper=stepper,
        )

    def _state_dir(self) -> Path:
        given = self.config.state_dir
        return Path(given).expanduser() if given else self._run_dir / "heads"

    def _checkpoints(self) -> Path:
        return self._state_dir() / "checkpoints"

    def _save_checkpoint(self) -> None:
        try:
            self.trainer.save(self._checkpoints(), self.deployment.published)
        except OSError as error:
            logger.error("the checkpoint cannot be written: %s", error)

    def _resume(self) -> None:
        """Resume from a checkpoint that was trained from the live draft."""
        path = checkpoint.latest(self._checkpoints())
        if not self.config.checkpoint_cycles or path is None:
            return
        try:
            state, _ = checkpoint.verify(path, self.trainer.draft)
            if state.extra.get("live") != self.trainer.live_digest():
                logger.info("%s belongs to another live draft: not resumed", path.name)
                return
            self.trainer.load(path)
        except DraftError as error:
            logger.warning("not resumed: %s", error)
            return
        self.report.add("restored", checkpoint=path.name, steps=state.steps)

    def _update_status(self, *, force: bool = False) -> None:
        if not force and not self.report.due():
            return
        status = self.status
        status.copy_from(self)
        if status.state == "waiting" and not status.waiting_for:
            tokens, now = self.trainer.buffer.new_tokens, time.monotonic()
            status.waiting_for = self.schedule.waiting_for(tokens, now)
        status.rows_skipped = self.trainer.rows_skipped
        schedule = self.schedule.snapshot()
        schedule["collecting"] &= not self._pause.on
        status.schedule = schedule
        snapshot = self.deployment.snapshot()
        status.canary, status.engines = snapshot["canary"], snapshot["engines"]
        status.feeds = self.feeds.stats()
        status.tenant_keys = sorted(self.feeds.tenant_keys)
        self.report.write(status)


def describe(sidecar: Sidecar) -> str:
    count = sum(p.numel() for p in sidecar.trainer.draft.parameters())
    knobs = json.dumps(sidecar.config.model_dump(), sort_keys=True)
    return f"draft with {count} parameters, tide.train {knobs}"


def prepare_process(config: TrainConfig, engine_id: str, *, pin: bool = True) -> None:
    """Set device, affinity, niceness, threads and title of this process.

    With several ranks `pin` is False, as torchrun sets the affinity.

    Raises:
        DraftError: A setting is not possible on this machine.
    """
    gpu.use_device(config.device)
    if pin:
        _pin(config)
    if config.nice:
        renice(config.nice)
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(f"vllm-tide train {engine_id}")


def _pin(config: TrainConfig) -> None:
    allowed = len(os.sched_getaffinity(0))
    if config.cpus is None:
        # The inherited affinity; the server has excluded the cores of its engine.
        torch.set_num_threads(max(1, allowed // 4))
        return
    try:
        os.sched_setaffinity(0, config.cpus)
        # Attaching to an engine may have started threads already (file checksums).
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), config.cpus)
    except OSError as error:
        raise DraftError(
            f"tide.train.cpus: {config.cpus} cannot be used ({error.strerror})."
        ) from None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
