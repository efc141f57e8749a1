"""The trainer's loop: drain the engines, train when it helps, deploy what is better.

Never blocks an engine: it only reads rings and writes weights slots of its own. They
are drained after every optimizer step and evaluation batch, so none fills during a
cycle. One engine's end is not the others' business; the last one's ends the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from vllm_tide.capture.switch import PAUSED, Switch
from vllm_tide.config import TideConfig, parse_tide
from vllm_tide.draft.checkpoint import load_draft
from vllm_tide.draft.config import DraftError, read_config
from vllm_tide.draft.fresh import is_fresh
from vllm_tide.draft.target import TargetRows, rows_fingerprint
from vllm_tide.tracing import open_tracing
from vllm_tide.train import checkpoint
from vllm_tide.train.deployment import Deployment, as_wire
from vllm_tide.train.distributed import LeadRank, OneRank, Stepper, setup_of
from vllm_tide.train.events import EventLog
from vllm_tide.train.feed import Feed
from vllm_tide.train.feeds import Feeds
from vllm_tide.train.gpu import Shortage, lacks_memory, no_memory, with_share
from vllm_tide.train.groups import Groups
from vllm_tide.train.head_store import HeadStore, head_fingerprint
from vllm_tide.train.intake import Intake
from vllm_tide.train.judgement import CycleResult
from vllm_tide.train.orders import Orders
from vllm_tide.train.ranks import Ranks
from vllm_tide.train.schedule import Schedule
from vllm_tide.train.served import ServedRequest, ServedRequests
from vllm_tide.train.status import StatusFile, TrainerStatus
from vllm_tide.train.step import has_fast_bfloat16
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport.admin import AdminSocket
from vllm_tide.transport.purge import PurgeInbox, PurgeRequest
from vllm_tide.transport.ring_format import Collect

__all__ = [
    "Sidecar",
    "as_wire",
    "describe",
    "install_signal_handlers",
    "stopped_by_signals",
]

logger = logging.getLogger("vllm_tide.train")

IDLE_SLEEP_S = 0.05
PURGE_PERIOD_S = 1.0


class Sidecar:
    """One trainer and its engines.

    Args:
        feeds: At least one engine has joined.
        run_dir: Where status, events and purge requests are.
        config: Overrides the engine's `tide` section when given.
        ranks: Other ranks that train with this one; this is their leader.

    Raises:
        TransportError: An engine cannot be reached.
        DraftError: Draft, target and capture do not fit together.
        ConfigError: The manifest's `tide` section is wrong.
    """

    def __init__(
        self,
        feeds: Feeds,
        run_dir: Path,
        config: TideConfig | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Load, check and attach."""
        try:
            self._open(feeds, run_dir, config, ranks)
        except BaseException as error:
            feeds.close()
            if lacks_memory(error):
                said = no_memory(self.config.device, "the draft and the target's rows")
                raise DraftError(said) from error
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
        self.tide = config or parse_tide(self.manifest.tide, self.manifest.version)
        self.config = self.tide.train
        self.config = train = with_share(self.config, self.manifest.gpu_uuid)
        if train.compute_dtype == "bfloat16" and not has_fast_bfloat16(train.device):
            self.config = train.model_copy(update={"compute_dtype": "float32"})
            logger.info("this %s has no bfloat16: computing in float32", train.device)
        self.status = TrainerStatus(model_name=self.manifest.model_name)
        self._file = StatusFile(run_dir, feed.id)
        self._events = EventLog(run_dir, feed.id, open_tracing("trainer"))
        self._purges, self._next_purge = PurgeInbox(run_dir), 0.0
        self._stopping = self._purge_waits = False
        self._trained_s = 0.0
        self._cycle_began: float | None = None
        groups = Groups(self.tide.schedule.max_groups)
        self._served = ServedRequests(groups)
        self.trainer = self._make_trainer(feed, ranks)
        day0 = is_fresh(self._draft_path)
        self.schedule = Schedule(
            self.tide.schedule, self.config.min_new_tokens, day0=day0
        )
        self._pause, self._shortage = Switch(run_dir, PAUSED), Shortage(self.config)
        self._set_collect()
        self._intake = Intake(feeds, self.trainer, self._served)
        self.deployment = Deployment(
            feeds,
            self.trainer,
            self.tide,
            self._open_store(),
            self._events,
            self._served,
        )
        self.deployment.adopt()
        self._resume()
        self._operator = Orders(
            lambda: self.status,
            self._pause,
            self.deployment,
            self._events,
            self._set_collect,
        )
        self._admin = AdminSocket(run_dir)

    def stop(self) -> None:
        """Ask the loop to end after the current step."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether it was asked to."""
        return self._stopping

    @property
    def paused(self) -> bool:
        """Whether an operator has paused training."""
        return self._pause.on

    def run(self, *, once: bool = False) -> str:
        """Work until stopped, or no engine is left; returns the last state.

        Args:
            once: End after the first cycle, or where a pause allows none.
        """
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
                if once and not self._pause.on:  # a pause ends a cycle half-way
                    break
        finally:
            self.status.state = "stopped" if len(self.feeds) else "engine_gone"
            self._update_status(force=True)
            self._admin.close()
            self.trainer.stepper.close()
            self.feeds.close()
        return self.status.state

    def _tick(self) -> bool:
        """Everything that must not wait for the end of a cycle."""
        now = time.monotonic()
        changes = self.feeds.poll()
        for engine in changes.joined:
            self._events.add("joined", engine=engine)
        for engine, why in changes.left.items():
            self._served.forget(engine)
            self._events.add("left", engine=engine, reason=why)
        collecting = self.schedule.collecting
        for request in self._intake.drain(now):
            self._observe(request, now)
        if self.schedule.collecting != collecting:
            self._collect_changed()
        self.feeds.heartbeat()
        self.deployment.tick()
        self.trainer.stepper.idle()
        self._forget(now)
        self._admin.poll(self._operator.carry_out)
        self._update_status()
        return not self._stopping and len(self.feeds) > 0

    def _observe(self, request: ServedRequest, now: float) -> None:
        self.status.requests += 1
        shifts = self.schedule.shifts
        self.schedule.observe(request)
        if self.schedule.shifts != shifts:
            self._events.add("shift", reason=self.schedule.reason)
        self.deployment.observe(request)

    def _set_collect(self) -> None:
        wanted = Collect.FULL if self.schedule.collecting else Collect.LIGHT
        self.feeds.set_collect(Collect.NOTHING if self._pause.on else wanted)

    def _collect_changed(self) -> None:
        self._set_collect()
        if not self.schedule.collecting:
            self._events.add("pause", reason=self.schedule.reason)

    def _may_train(self) -> bool:
        if self._pause.on or self._shortage.resting(time.monotonic()):
            return False
        buffer = self.trainer.buffer
        enough = self.schedule.should_train(buffer.new_tokens)
        return enough and buffer.train_tokens > 0

    def _train(self) -> None:
        self._cycle_began = began = time.monotonic()
        before = self.trainer.out_of_memory
        result = self.trainer.train_cycle(
            self._tick_in_cycle, self.schedule.wanted_groups()
        )
        now = time.monotonic()
        seconds = now - began
        self._shortage.cycle_done(self.trainer.out_of_memory > before, now)
        self._trained_s, self._cycle_began = self._trained_s + seconds, None
        self._finish_cycle(result, seconds)

    def _tick_in_cycle(self) -> bool:
        """Whether the cycle goes on: a pause ends it, and so does a purge.

        A cycle holds documents that it judges, also those that the buffer has let go.
        """
        return self._tick() and not self._pause.on and not self._purge_waits

    def _finish_cycle(self, result: CycleResult, seconds: float) -> None:
        status = self.status
        new = live = None
        if result.new is not None and result.live is not None:
            new, live = result.new.acceptance(), result.live.acceptance()
            status.holdout_acceptance_new = new
            status.holdout_acceptance_live = live
            collecting = self.schedule.collecting
            self.schedule.cycle_done(result.improved, result.by_group)
            if self.schedule.collecting != collecting:
                self._collect_changed()
        status.last_decision = result.reason
        self._events.add(
            "cycle",
            cycle=self.trainer.cycles,
            steps=result.steps,
            seconds=round(seconds, 3),
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

    def _forget(self, now: float) -> None:
        """What is too old, and what somebody asks for."""
        if now < self._next_purge:
            return
        self._next_purge = now + PURGE_PERIOD_S
        self.trainer.expire()
        pending = self._purges.pending()
        self._purge_waits = bool(pending) and self._cycle_began is not None
        if self._purge_waits:
            self._next_purge = now  # at once when the cycle has ended
        else:
            self._answer(pending, now)

    def _answer(self, pending: Iterable[PurgeRequest], now: float) -> None:
        for request in pending:
            for served in self._intake.drain(now):
                self._observe(served, now)
            if not self._intake.emptied:  # what is asked about may still be in there
                return
            counts = self.trainer.purge(request.tenant)
            counts["fetched_records"] = self.feeds.purge(request.tenant)
            counts["open_requests"] = self._served.purge(request.tenant)
            self._purges.done(request, counts)
            self._events.add("purge", **counts)

    def _make_trainer(self, feed: Feed, ranks: Ranks | None) -> Trainer:
        manifest, spec = feed.manifest, feed.spec
        target_path, draft_path = feed.models()
        target = TargetRows.load(target_path, self.config.device)
        draft = load_draft(draft_path, target, frozenset(manifest.shared))
        if target.hidden_size != manifest.hidden_size:
            raise DraftError(
                f"target: hidden size {target.hidden_size} is not the engine's "
                f"{manifest.hidden_size}."
            )
        self._target_path, self._draft_path = target_path, draft_path
        self.feeds.vocab_size = target.vocab_size
        stepper: Stepper
        if ranks is None:
            stepper = OneRank(draft, target, self.config)
        elif ranks.mesh.device_type != target.lm_head.device.type:
            raise DraftError(
                f"tide.train.device is {self.config.device!r}, but ranks have "
                f"{ranks.mesh.device_type!r} unless --config says so too."
            )
        else:
            setup = setup_of(
                str(target_path), str(draft_path), manifest.shared, self.config
            )
            stepper = LeadRank(ranks, draft, target, self.config, setup)
        trainer = Trainer(
            draft,
            target,
            self.config,
            num_speculative_tokens=manifest.num_speculative_tokens,
            feature_dtype=manifest.feature_dtype,
            draft_sample_method=manifest.draft_sample_method,
            stepper=stepper,
            group_of=self._group_of,
        )
        trainer.check_features(spec.aux_layer_ids)
        return trainer

    def _group_of(self, key: int) -> int:
        return self._served.group_of(key, self._intake.engine)

    def _state_dir(self) -> Path:
        given = self.config.state_dir
        return Path(given).expanduser() if given else self._run_dir / "heads"

    def _open_store(self) -> HeadStore | None:
        if not self.config.keep_last_good:
            return None
        target = rows_fingerprint(self._target_path)
        return HeadStore(
            self._state_dir(), head_fingerprint(target, read_config(self._draft_path))
        )

    def _checkpoints(self) -> Path:
        return self._state_dir() / "checkpoints"

    def _save_checkpoint(self) -> None:
        try:
            self.trainer.save(self._checkpoints(), self.deployment.published)
        except OSError as error:
            logger.error("the checkpoint could not be written: %s", error)

    def _resume(self) -> None:
        """Go on from a checkpoint that was training from the draft that is live."""
        path = checkpoint.latest(self._checkpoints())
        if not self.config.checkpoint_cycles or path is None:
            return
        try:
            state, _ = checkpoint.verify(path, self.trainer.draft)
            if state.extra.get("live") != self.trainer.live_digest():
                logger.info("%s is of another live draft: not resumed", path.name)
                return
            self.trainer.load(path)
        except DraftError as error:
            logger.warning("not resumed: %s", error)
            return
        self._events.add("restored", checkpoint=path.name, steps=state.steps)

    def _update_status(self, *, force: bool = False) -> None:
        if not force and not self._file.due():
            return
        status, trainer, deployment = self.status, self.trainer, self.deployment
        status.cycles, status.steps = trainer.cycles, trainer.steps
        status.training_seconds = self._trained_s
        if self._cycle_began is not None:
            status.training_seconds += time.monotonic() - self._cycle_began
        status.loss, status.terms = trainer.last_loss, trainer.last_terms
        status.rows_read = trainer.rows_read
        status.samples = trainer.buffer.num_samples
        status.train_tokens = trainer.train_tokens
        status.packing_waste = trainer.packing_waste
        status.out_of_memory = trainer.out_of_memory
        status.holdout_tokens = trainer.buffer.holdout_tokens
        status.rows_skipped = trainer.rows_skipped | self.feeds.rejected
        status.published_version = deployment.published
        status.installed_version = deployment.installed
        status.publications = deployment.publications
        status.refused_versions = deployment.refusals
        status.last_publish_unix = deployment.last_publish_unix
        status.rollbacks = deployment.canary.rollbacks
        status.waiting_for = deployment.waiting_for
        schedule = self.schedule.snapshot()
        schedule["collecting"] &= not self._pause.on
        status.schedule = schedule
        found = deployment.snapshot()
        status.canary, status.engines = found["canary"], found["engines"]
        status.feeds = self.feeds.stats()
        status.tenant_keys = sorted(self.feeds.tenant_keys)
        status.failed_writes = self._file.failed_writes + self._events.failed_writes
        self._file.write(status, force=True)


def install_signal_handlers(sidecar: Sidecar) -> None:
    """SIGTERM and SIGINT end the loop after the current step."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        sidecar.stop()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


@contextlib.contextmanager
def stopped_by_signals(sidecar: Sidecar) -> Iterator[None]:
    """SIGTERM and SIGINT end the loop; afterwards they do again what they did before.

    A trainer that waits for its next engine has no loop to end.
    """
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    install_signal_handlers(sidecar)
    try:
        yield
    finally:
        for number, handler in zip(
            (signal.SIGTERM, signal.SIGINT), before, strict=True
        ):
            signal.signal(number, handler)


def describe(sidecar: Sidecar) -> str:
    """One line for the log: what is trained, with which knobs."""
    count = sum(p.numel() for p in sidecar.trainer.draft.parameters())
    knobs = json.dumps(sidecar.config.model_dump(), sort_keys=True)
    return f"draft with {count} parameters, tide.train {knobs}"
