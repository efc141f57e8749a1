"""The fast draft: a copy of the deployed draft, trained on running requests.

`tide.test_time.adapt: shared` trains on new rows of all long requests. Rows are scored
before they are trained on (prequential: Dawid 1984), with the served fast draft and its
base. The fast draft is published once it is better, and updated while it stays better.
The base is published again when it is not, when no long request is left, in a pause and
at the end. Its changes decay, and are dropped when the base changes.

`exact` is algorithm 1 of Test-Time Speculation (arXiv 2605.09329): one request, the
last drafted tokens including rejected ones, KL to the target weighted by position, one
step of Adam, and the base again at the request's end.

All tensors are published, at intervals that bound the time for it. The base,
`Trainer.live`, is only read. Runs in the thread of the trainer's loop; a tick runs at
most one step, also within a training cycle.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_tide.config import TideConfig, TrainConfig
from vllm_tide.deploy.deployment import RETRY_S, AddEvent, Deployment
from vllm_tide.draft.checkpoint import export_tensors
from vllm_tide.draft.module import Draft
from vllm_tide.draft.rows import StepRows
from vllm_tide.draft.tensor_bytes import to_bytes
from vllm_tide.train.evaluate import FORMS
from vllm_tide.train.gpu import MemoryBackoff, is_out_of_memory, release_cache
from vllm_tide.train.packing import Batch, PackedBatch, pack
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport.feeds import EngineVersions, Feeds, NoStepLeft
from vllm_tide.transport.shm import TransportError

logger = logging.getLogger("vllm_tide.train")

RATES = {"shared": 1e-3, "exact": 3e-4}
"""Learning rate of AdamW."""
STRIDES = {"shared": 64, "exact": 10}
"""Default of `tide.test_time.stride`: new tokens, verify steps."""
HALF_LIFE_ROWS = 8192
"""Trained rows after which earlier changes are halved (`shared`)."""
SCORE_HALF_LIFE = 512
"""Scored rows after which the weight of a score is halved."""
MIN_SCORES, ERRORS = 4, 2.0
"""Scores, and standard errors above zero, needed to publish a fast draft."""
MAX_STEP_S = 60.0
"""Upper limit of the measured time of a step (s)."""
CONTEXT_ROWS = 256
"""Maximum context rows before the new ones."""
PUBLISH_SHARE = 0.05
"""Share of a core for publications; the engine's checks need about as much again."""


@dataclass
class Gain:
    """Decayed mean of paired gains, and its standard error (ratio estimator)."""

    rows: float = 0.0
    total: float = 0.0
    _rows2: float = 0.0
    _cross: float = 0.0
    _total2: float = 0.0
    count: int = 0

    def add(self, rows: float, total: float) -> None:
        """Add rows of one request and the sum of their gains (tokens)."""
        keep = 0.5 ** (rows / SCORE_HALF_LIFE)
        self.rows = keep * self.rows + rows
        self.total = keep * self.total + total
        self._rows2 = keep**2 * self._rows2 + rows * rows
        self._cross = keep**2 * self._cross + rows * total
        self._total2 = keep**2 * self._total2 + total * total
        self.count += 1

    @property
    def mean(self) -> float:
        """Tokens per verify step; NaN without a row."""
        return self.total / self.rows if self.rows else math.nan

    @property
    def error(self) -> float:
        if self.count < 2:
            return math.inf
        mean, more = self.mean, self.count / (self.count - 1)
        squares = self._total2 - 2 * mean * self._cross + mean * mean * self._rows2
        return math.sqrt(max(0.0, squares) * more) / self.rows


class FastStep(TrainStep):
    """Training steps of a fast draft: AdamW on forward KL.

    Attributes:
        drafting: The only row to train, with its chain of drafts; None: all rows.
    """

    drafting: int | None = None

    def _plan(self, packed: PackedBatch) -> Batch | None:
        if self.drafting is None:
            return super()._plan(packed)
        row, most = self.drafting, self.config.ttt_steps
        taught = packed.valid[row + 1 :][:most].nonzero().flatten().tolist()
        if not taught:
            return None
        at = torch.tensor([row])
        # A teacher may be missing within the chain.
        trained = [torch.arange(int(i in taught)) for i in range(taught[-1] + 1)]
        steps = [StepRows(at, loss) for loss in trained]
        return Batch.from_plan(packed, steps, self.draft.vocab.draft_ids)


class FastDraft:
    """Trains and publishes the fast draft, at most one at a time.

    Args:
        overrides: `tide` replaces the sections of all engines (`--config`).

    Attributes:
        draft: None without a request to train on.
        gain: Gain of `served`, else of `draft`, over the base.
        served: The last published fast draft; None while the base is served.
        steps: Optimizer steps of all fast drafts so far.
    """

    def __init__(
        self,
        tide: TideConfig,
        trainer: Trainer,
        feeds: Feeds,
        deployment: Deployment,
        add_event: AddEvent,
        *,
        overrides: bool = False,
    ) -> None:
        self._knobs, self._mode = tide.test_time, tide.test_time.adapt
        self._overrides = overrides
        self._trainer, self._feeds = trainer, feeds
        self._deployment, self._add_event = deployment, add_event
        # The trainer's config has `gpu_share` filled in.
        self._config: TrainConfig = trainer.config
        self._stride = tide.test_time.stride or STRIDES.get(self._mode, 1)
        self._memory_backoff = MemoryBackoff(self._config)
        self.steps = 0
        # Monotonic (s).
        self._next_step = self._next_publication = self._next_return = 0.0
        self._send_failed = False  # logged already
        self._base = -1
        self._long: dict[int, int] = {}
        self._forget()

    def _forget(self) -> None:
        self.draft: Draft | None = None
        self._step: FastStep | None = None
        self.served: Draft | None = None
        self._sent_at = self.steps
        self.gain = Gain()
        # By request, least recently trained first: position up to which it is trained
        # on, with `exact` the number of its verify steps.
        self._upto: dict[int, int] = {}

    @property
    def figures(self) -> dict[str, Any]:
        state = "learning" if self._long else "waiting"
        if self.served is not None:
            state = "serving"
        known = self.gain.count >= MIN_SCORES
        return {
            "state": "off" if self._mode == "off" else state,
            "gain": self.gain.mean if known else None,
            "steps": self.steps,
            "requests": len(self._upto),
        }

    def tick(self, now: float, *, paused: bool) -> None:
        """Train on new rows, and publish the fast draft or the base as needed.

        Out of memory drops the fast draft and does not raise. `now` is monotonic (s).
        """
        if self._mode == "off":
            return
        try:
            # The caller may be in an evaluation, under no_grad.
            with torch.inference_mode(False), torch.enable_grad():
                self._tick(now, paused or self._memory_backoff.is_paused(now))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None  # it references the step's tensors
            self.drop("out of memory")
            release_cache()
            self._memory_backoff.cycle_done(True, time.monotonic())

    def drop(self, reason: str) -> None:
        """Drop the fast draft; the next tick publishes the base."""
        if self.served is not None:
            facts = {"gain": self.gain.mean, "steps": self.steps, "reason": reason}
            self._add_event("given_back", base=self._base, **facts)
        self._next_return = 0.0
        self._forget()

    def stop(self) -> None:
        """Drop the fast draft and publish the base; log an error if that fails."""
        try:
            self.drop("the trainer stops")
            self._republish_base(time.monotonic(), self._feeds.versions())
        except (RuntimeError, TransportError) as error:
            logger.error("base of the fast draft not published at exit: %s", error)

    def _tick(self, now: float, idle: bool) -> None:
        least = self._knobs.min_tokens
        self._long = {} if idle else self._trainer.assembler.long_requests(least)
        base = self._deployment.published
        if base != self._base:
            self.drop("another base")
        elif self.draft is not None and self._ended():
            self.drop("a pause" if idle else "the long requests have ended")
        self._base = base
        if self._long and now >= self._next_step:
            began = time.monotonic()
            if self._train():
                # Half of the time is for everything else, within a GPU's share. The
                # limit ignores the time of a process that was stopped within a step.
                spent = min(time.monotonic() - began, MAX_STEP_S)
                share = self._config.gpu_share or 1.0
                self._next_step = began + 2 * spent / share
                if budget := self._trainer.gpu_budget:
                    budget.add_busy(began, spent)
        versions = self._feeds.versions()
        if any(state.adaptation == "refused" for state in versions.values()):
            self.drop("an engine refused it")
            self._next_step = now + RETRY_S
        if self.draft is not None and self._is_better():
            self._publish(now, versions)
        self._republish_base(now, versions)

    def _ended(self) -> bool:
        """Return whether no request is left to train on."""
        if self._mode == "exact":
            return not self._upto.keys() <= self._long.keys()
        return not self._long

    def _train(self) -> bool:
        """Score new rows, then run a step on them; return whether there were any."""
        self._upto = {k: n for k, n in self._upto.items() if k in self._long}
        exact = self._mode == "exact"
        samples = self._last_verify_step() if exact else self._new_rows()
        if not samples:
            return False
        if self._mode == "shared":
            self._score(samples)
        step = self._begin()
        if not self._trainer.live.vocab.is_identity:
            samples = [self._mark_vocab(sample) for sample in samples]
        if exact:
            step.drafting = samples[0].loss_from - samples[0].start - 1
        else:
            samples = [sample for sample in samples if sample.num_trained]
        if samples and step.run(pack(samples, branches=False)) is not None:
            self.steps += 1
            self._memory_backoff.cycle_done(False, time.monotonic())
            if self._mode == "shared":
                self._decay(sum(sample.num_trained for sample in samples))
        return True

    def _new_rows(self) -> list[Sample]:
        """Return new rows of long requests up to a batch; none below the stride."""
        free = self._config.batch_tokens
        limit, context = free // 4, min(CONTEXT_ROWS, free // 8)
        first = {k: max(self._upto.get(k, 0), n - limit) for k, n in self._long.items()}
        if sum(n - self._upto.get(k, 0) for k, n in self._long.items()) < self._stride:
            return []
        samples: list[Sample] = []
        others = [key for key in self._long if key not in self._upto]
        for key in [*others, *self._upto]:
            end, since = self._long[key], first[key]
            if end <= since:
                continue
            if (free := free - (end - since + context)) < 0:
                break
            self._upto.pop(key, None)
            self._upto[key] = end
            samples += self._trainer.assembler.window(key, since, context)
        size = self._trainer.target.vocab_size
        return [sample for sample in samples if sample.why_unusable(size) is None]

    def _last_verify_step(self) -> list[Sample]:
        """Return the last verify step of the request, once per stride."""
        assembler = self._trainer.assembler
        key = next(iter(self._upto), next(iter(self._long)))
        count, last = assembler.num_verify_steps(key), self._upto.setdefault(key, 0)
        if count < last:  # the document was closed early and restarted
            last = 0
        if count - last < self._stride:
            return []
        self._upto[key] = count
        sample = assembler.last_verify_step(key, CONTEXT_ROWS)
        size = self._trainer.target.vocab_size
        if sample is None or sample.why_unusable(size):
            return []
        return [sample]

    def _mark_vocab(self, sample: Sample) -> Sample:
        """Set `in_vocab`; for rows after the drafting row, by the teacher's argmax."""
        members, target = self._trainer.live.vocab.t2d, self._trainer.target
        marked = sample.in_vocabulary(members)
        hidden, topk = sample.teacher_hidden, sample.teacher_topk
        if self._mode == "exact" and (known := marked.in_vocab) is not None:
            rows = slice(sample.loss_from - sample.start, None)
            if topk is not None:
                known[rows] = members[topk.ids[rows, 0].long()]
            elif hidden is not None:
                logits = target.logits(hidden[rows].to(target.lm_head))
                known[rows] = members[logits.argmax(-1).cpu()]
        return marked

    def _begin(self) -> FastStep:
        if self._step is not None:
            return self._step
        trainer, exact = self._trainer, self._mode == "exact"
        draft = trainer.live.clone()
        if not exact:  # the layer has most of the gain
            draft.tensor("lm_head.weight").requires_grad_(False)
        changes = {"loss": {"forward_kl": 1.0}, "learning_rate": RATES[self._mode]}
        config = self._config.model_copy(update=changes)
        if exact:
            config = config.model_copy(update={"ttt_steps": trainer.depth})
        step = FastStep(draft, trainer.target, config, like=trainer.stepper.step)
        self.draft, self._step = draft, step
        return step

    def _score(self, samples: list[Sample]) -> None:
        """Compare the served fast draft, else the trained one, with the base."""
        judged = self.served or self.draft
        if judged is None or self.served is None and self.steps == self._sent_at:
            return  # the draft equals the base
        trainer, column = self._trainer, 1 + FORMS.index(self._trainer.metric)
        new = trainer.evaluate(judged, samples=samples).requests
        old = trainer.evaluate(trainer.live, samples=samples).requests
        for key, row in new.items():
            before, after = old[key][column], row[column]
            if row[0] and math.isfinite(before):
                # A non-finite score counts as no accepted token.
                after = after if math.isfinite(after) else 0.0
                self.gain.add(row[0], after - before)
        gain = self.gain
        harm = gain.mean <= 0 if self.served else gain.mean < -ERRORS * gain.error
        if gain.count >= MIN_SCORES and harm:
            upto = self._upto
            self.drop("no better than its base")
            self._upto = upto

    @torch.no_grad()
    def _decay(self, rows: int) -> None:
        assert self.draft is not None  # noqa: S101 - set by the step
        base = self._trainer.live.named_tensors()
        share = 1 - 0.5 ** (rows / HALF_LIFE_ROWS)
        for name, value in self.draft.named_tensors().items():
            value.lerp_(base[name], share)

    def _is_better(self) -> bool:
        """Return whether `draft` should be published, also to replace an older one."""
        if self.steps == self._sent_at or self._mode == "exact" or self.served:
            return self.steps > self._sent_at
        gain = self.gain
        return gain.count >= MIN_SCORES and gain.mean > ERRORS * gain.error

    def _serves_base(self, state: EngineVersions) -> bool:
        """Return whether an engine serves the base or a fast draft of it."""
        is_swapping = state.published not in (self._base, state.refused)
        return state.installed == self._base and not is_swapping

    def _is_enabled(self, engine: str) -> bool:
        """Return whether the engine's section, or the overriding one, is not off."""
        if self._overrides:
            return True
        section = self._feeds.feed(engine).manifest.tide.get("test_time", {})
        return bool(section.get("adapt", "off") != "off")

    def _publish(self, now: float, versions: Mapping[str, EngineVersions]) -> None:
        """Send the fast draft to the engines that serve its base and are not swapping.

        A failed send is retried after the next step.
        """
        assert self.draft is not None  # noqa: S101 - checked by caller
        engines = [
            engine
            for engine, state in versions.items()
            if self._serves_base(state)
            and state.adaptation in ("", "served")
            and self._is_enabled(engine)
        ]
        if not engines or now < self._next_publication:
            return
        began = time.thread_time()
        sent = self._send(engines, self.draft, fast=True)
        spent = time.thread_time() - began
        self._next_publication = now + spent / PUBLISH_SHARE
        if not sent:
            return
        if self.served is None:
            facts = {"gain": self.gain.mean, "steps": self.steps}
            self._add_event("adapted", base=self._base, **facts)
            self.served = self.draft.clone()
        self.served.take(self.draft.named_tensors())
        self._sent_at = self.steps

    def _republish_base(
        self, now: float, versions: Mapping[str, EngineVersions]
    ) -> None:
        """Send the base to engines with a fast draft of it, until it is installed.

        An engine with a fast draft of an earlier base keeps it until it installs a new
        base.
        """
        engines = [
            engine
            for engine, state in versions.items()
            if state.adaptation and self._serves_base(state)
        ]
        if self.served is not None or not engines:
            self._send_failed = self._send_failed and self.served is not None
        elif now >= self._next_return:
            self._next_return = now + RETRY_S
            self._send(engines, self._trainer.live, fast=False)

    def _send(self, engines: Collection[str], draft: Draft, *, fast: bool) -> bool:
        """Send a draft to engines; on failure log once and return False."""
        tensors = export_tensors(draft, stored_names=True)
        tensors.pop("t2d", None)
        try:
            self._feeds.send_step(
                engines, to_bytes(tensors), number=self._base, fast=fast
            )
        except NoStepLeft:
            self._deployment.renumber()
        except TransportError as error:
            if not self._send_failed:
                what = "fast draft" if fast else "base of the fast draft"
                logger.error("cannot send the %s: %s", what, error)
            self._send_failed = True
        else:
            return True
        return False
