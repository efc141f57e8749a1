"""A fast draft over the deployed one, trained on requests while they run.

`tide.test_time.adapt: shared` steps on new rows of all long requests. Rows are scored
before they are learnt from (prequential: Dawid 1984), the fast draft that is served
against its base: it is published once it is better, newer ones while it stays so, and
the base again when it does not, when no long request is left, in a pause and at the
end. What it has learnt fades, and is gone with its base.

`exact` is algorithm 1 of Test-Time Speculation (arXiv 2605.09329): one request, the
tokens drafted last with those rejected, KL to the target weighted by position, one step
of Adam, the base again at the request's end. Every step is served.

The base, `Trainer.live`, is only read. One thread, that of the trainer's loop; a tick
makes one step at most, also amid a training cycle.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_tide.config import TideConfig, TrainConfig
from vllm_tide.deploy.deployment import RETRY_S, AddEvent, Deployment, as_wire
from vllm_tide.draft.checkpoint import export_tensors
from vllm_tide.draft.config import DraftError
from vllm_tide.draft.delta import RANK, apply, factors, fingerprint
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.rows import StepRows
from vllm_tide.train.evaluate import FORMS
from vllm_tide.train.gpu import Shortage, give_back_cache, lacks_memory
from vllm_tide.train.packing import PackedBatch, pack
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep, Work
from vllm_tide.train.trainer import Trainer
from vllm_tide.transport.feeds import EngineVersions, Feeds
from vllm_tide.transport.shm import TransportError

logger = logging.getLogger("vllm_tide.train")

RATES = {"shared": 1e-3, "exact": 3e-4}
"""Learning rate of AdamW."""
STRIDES = {"shared": 64, "exact": 10}
"""Where `tide.test_time.stride` is null: new tokens, verify steps."""
HALF_LIFE_ROWS = 8192
"""Rows learnt from after which half of what was learnt is left (`shared`)."""
SCORE_HALF_LIFE = 512
"""Rows scored after which a score counts half."""
MIN_SCORES, ERRORS = 4, 2.0
"""Scores, and standard errors above zero, that publish a fast draft."""
LONGEST_STEP_S = 60.0
"""Seconds that a step is taken to have lasted, most."""
CONTEXT_ROWS = 256
"""Rows before the new ones, most."""


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
        """Rows of one request, and what they gained together (tokens)."""
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
    """Steps of AdamW alone on forward KL.

    Attributes:
        drafting: Row whose chain of drafts is trained, and nothing else; None trains
            every row.
    """

    drafting: int | None = None

    def _plan(self, batch: PackedBatch) -> Work | None:
        if self.drafting is None:
            return super()._plan(batch)
        row, most = self.drafting, self.config.ttt_steps
        taught = batch.valid[row + 1 :][:most].nonzero().flatten().tolist()
        if not taught:
            return None
        at = torch.tensor([row])
        # A teacher may be missing amid the chain.
        trained = [torch.arange(int(i in taught)) for i in range(taught[-1] + 1)]
        return self._work(batch, [StepRows(at, loss) for loss in trained])


class FastDraft:
    """At most one fast draft, of the draft that is deployed.

    Args:
        overrides: `tide` stands in the place of all engines' sections (`--config`).

    Attributes:
        draft: None while there is nothing to learn from.
        gain: Over the base, of the one that is served, else of `draft`.
        served: As it was published last; None while the base is.
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
        self._knobs, self._how = tide.test_time, tide.test_time.adapt
        self._overrides = overrides
        self._trainer, self._feeds = trainer, feeds
        self._deployment, self._add_event = deployment, add_event
        # The sidecar's: it knows the share of a GPU.
        self._config: TrainConfig = trainer.config
        self._stride = tide.test_time.stride or STRIDES.get(self._how, 1)
        self._shortage = Shortage(self._config)
        self.steps = 0
        self._next_step = self._next_return = 0.0  # monotonic (s)
        self._told = False  # that the base could not be given back
        self._base = -1
        self._sent_on: dict[str, str] = {}  # by engine: fingerprint of the base last
        self._long: dict[int, int] = {}
        self._forget()

    def _forget(self) -> None:
        self.draft: Eagle3Draft | None = None
        self._fingerprint = ""  # of the base, as engines hold it
        self._step: FastStep | None = None
        self.served: Eagle3Draft | None = None  # as it was published last
        self._sent_at = self.steps
        self.gain = Gain()
        # By request, the one whose turn is longest ago first: position up to which it
        # is learnt from, with `exact` its verify steps.
        self._upto: dict[int, int] = {}

    @property
    def figures(self) -> dict[str, Any]:
        state = "learning" if self._long else "waiting"
        if self.served is not None:
            state = "serving"
        known = self.gain.count >= MIN_SCORES
        return {
            "state": "off" if self._how == "off" else state,
            "gain": self.gain.mean if known else None,
            "steps": self.steps,
            "requests": len(self._upto),
        }

    def tick(self, now: float, *, paused: bool) -> None:
        """Learn if there is something new, and see that the right draft is served.

        Never raises for a lack of memory: what was learnt is given up then. `now` is
        monotonic (s).
        """
        if self._how == "off":
            return
        try:
            # A cycle may be amid an evaluation, which keeps no gradients.
            with torch.inference_mode(False), torch.enable_grad():
                self._tick(now, paused or self._shortage.resting(now))
        except (DraftError, torch.linalg.LinAlgError) as error:  # no finite change
            self.drop(str(error))
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            error.__traceback__ = None  # it holds the step's frames, so its tensors
            self.drop("out of memory")
            give_back_cache()
            self._shortage.cycle_done(True, time.monotonic())

    def drop(self, reason: str) -> None:
        """Forget all that was learnt; the next tick gives the base back."""
        if self.served is not None:
            facts = {"gain": self.gain.mean, "steps": self.steps, "reason": reason}
            self._add_event("given_back", base=self._base, **facts)
        self._next_return = 0.0
        self._forget()

    def stop(self) -> None:
        """Give the base back, if that can be."""
        try:
            self.drop("the trainer stops")
            self._give_back(time.monotonic(), self._feeds.versions())
        except (RuntimeError, TransportError) as error:
            logger.error("the base could not be given back at the end: %s", error)

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
            if self._learn():
                # As long for everything else, and within the share of a shared GPU.
                # A process that was stopped amid it does not rest for that, too.
                spent = min(time.monotonic() - began, LONGEST_STEP_S)
                share = self._config.gpu_share or 1.0
                self._next_step = began + 2 * spent / share
                if turns := self._trainer.turns:
                    turns.worked(began, spent)
        versions = self._feeds.versions()
        # One that holds another base bit by bit (`base`) is left out, and no more.
        if any(
            told.adaptation == "refused" and not _is_of_another(told)
            for told in versions.values()
        ):
            self.drop("an engine refused it")
            self._next_step = now + RETRY_S
        if self.draft is not None and self._is_better():
            self._publish(versions)
        self._give_back(now, versions)

    def _ended(self) -> bool:
        """True if no request is left to go on with."""
        if self._how == "exact":
            return not self._upto.keys() <= self._long.keys()
        return not self._long

    def _learn(self) -> bool:
        """Score what is new, then make a step on it; False if there was nothing."""
        self._upto = {k: n for k, n in self._upto.items() if k in self._long}
        samples = self._canvas() if self._how == "exact" else self._new_rows()
        if not samples:
            return False
        if self._how == "shared":
            self._score(samples)
        step = self._begin()
        if not self._trainer.live.vocab.is_identity:
            samples = [self._marked(sample) for sample in samples]
        if self._how == "exact":
            step.drafting = samples[0].loss_from - samples[0].start - 1
        else:
            samples = [sample for sample in samples if sample.num_trained]
        if samples and step.run(pack(samples, branches=False)) is not None:
            self.steps += 1
            self._shortage.cycle_done(False, time.monotonic())
            if self._how == "shared":
                self._fade(sum(sample.num_trained for sample in samples))
        return True

    def _new_rows(self) -> list[Sample]:
        """New rows of long requests, as many as a batch holds; none below a stride."""
        room = self._config.batch_tokens
        most, context = room // 4, min(CONTEXT_ROWS, room // 8)
        first = {k: max(self._upto.get(k, 0), n - most) for k, n in self._long.items()}
        if sum(n - self._upto.get(k, 0) for k, n in self._long.items()) < self._stride:
            return []
        found = []
        others = [key for key in self._long if key not in self._upto]
        for key in [*others, *self._upto]:
            end, since = self._long[key], first[key]
            if end <= since:
                continue
            if (room := room - (end - since + context)) < 0:
                break
            self._upto.pop(key, None)
            self._upto[key] = end
            found += self._trainer.assembler.window(key, since, context)
        size = self._trainer.target.vocab_size
        return [sample for sample in found if sample.why_unusable(size) is None]

    def _canvas(self) -> list[Sample]:
        """The last verify step of the one request, when it is its turn."""
        assembler = self._trainer.assembler
        key = next(iter(self._upto), next(iter(self._long)))
        rounds, last = assembler.rounds(key), self._upto.setdefault(key, 0)
        if rounds < last:  # it was closed early, and goes on
            last = 0
        if rounds - last < self._stride:
            return []
        self._upto[key] = rounds
        found = assembler.canvas(key, CONTEXT_ROWS)
        size = self._trainer.target.vocab_size
        if found is None or found.why_unusable(size):
            return []
        return [found]

    def _marked(self, sample: Sample) -> Sample:
        """Marks rows that the draft can say; behind a drafted row by their teacher."""
        members, target = self._trainer.live.vocab.t2d, self._trainer.target
        marked = sample.in_vocabulary(members)
        hidden, topk, known = (
            sample.teacher_hidden,
            sample.teacher_topk,
            marked.in_vocab,
        )
        if self._how == "exact" and known is not None:
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
        trainer, exact = self._trainer, self._how == "exact"
        draft = trainer.live.clone()
        if not exact:  # the gain is in the layer
            draft.tensor("lm_head.weight").requires_grad_(False)
        changes = {"loss": {"forward_kl": 1.0}, "learning_rate": RATES[self._how]}
        config = self._config.model_copy(update=changes)
        if exact:
            config = config.model_copy(update={"ttt_steps": trainer.depth})
        step = FastStep(draft, trainer.target, config, like=trainer.stepper.step)
        self.draft, self._step = draft, step
        return step

    def _score(self, samples: list[Sample]) -> None:
        """Compare the draft that is served, or would be, with the base."""
        judged = self.served or self.draft
        if judged is None or self.served is None and self.steps == self._sent_at:
            return  # it is the base
        trainer, column = self._trainer, 1 + FORMS.index(self._trainer.metric)
        new = trainer.evaluate(judged, samples=samples).requests
        old = trainer.evaluate(trainer.live, samples=samples).requests
        for key, row in new.items():
            before, after = old[key][column], row[column]
            if row[0] and math.isfinite(before):
                # What is no number accepts nothing.
                after = after if math.isfinite(after) else 0.0
                self.gain.add(row[0], after - before)
        gain = self.gain
        harm = gain.mean <= 0 if self.served else gain.mean < -ERRORS * gain.error
        if gain.count >= MIN_SCORES and harm:
            upto = self._upto
            self.drop("no better than its base")
            self._upto = upto

    @torch.no_grad()
    def _fade(self, rows: int) -> None:
        assert self.draft is not None  # noqa: S101 - it has just made a step
        base, lost = (
            self._trainer.live.named_tensors(),
            1 - 0.5 ** (rows / HALF_LIFE_ROWS),
        )
        for name, value in self.draft.named_tensors().items():
            value.lerp_(base[name], lost)

    def _is_better(self) -> bool:
        """True if `draft` should be served, also in the place of an older one."""
        if self.steps == self._sent_at or self._how == "exact" or self.served:
            return self.steps > self._sent_at
        gain = self.gain
        return gain.count >= MIN_SCORES and gain.mean > ERRORS * gain.error

    def tensors_to_send(self, draft: Eagle3Draft) -> dict[str, Tensor]:
        """All tensors of a publication, by the names that engines know."""
        out = export_tensors(draft, stored_names=True)
        out.pop("t2d", None)
        return out

    def _change(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The change that is published, and the draft that engines make of it."""
        live = self._trainer.live
        if not self._fingerprint:
            self._fingerprint = fingerprint(self.tensors_to_send(live))
        assert self.draft is not None  # noqa: S101 - it is better
        held, learnt = live.named_tensors(), self.draft.named_tensors()
        if not live.owns_lm_head:
            held.pop("lm_head.weight", None), learnt.pop("lm_head.weight", None)
        # A step of Adam has any rank: `exact` sends all that it has changed, whole.
        rank = sum(map(sum, (t.shape for t in held.values())))
        found = factors(held, learnt, rank if self._how == "exact" else RANK)
        made = apply(held, found)
        names = live.stored_names
        told = {}
        for key, tensor in found.items():
            name, dot, factor = key.rpartition(".")
            if key in held or factor not in ("u", "v"):
                name, dot, factor = key, "", ""
            told[names.get(name, name) + dot + factor] = tensor
        return told, made

    def _holds(self, told: EngineVersions) -> bool:
        """True if an engine serves the base, or a fast draft of it, and goes on to."""
        on_its_way = told.published not in (self._base, told.refused)
        return told.installed == self._base and not on_its_way

    def _is_wanted(self, engine: str) -> bool:
        """False if its own section says off, unless another overrides all of them."""
        if self._overrides:
            return True
        section = self._feeds.feed(engine).manifest.tide.get("test_time", {})
        return bool(section.get("adapt", "off") != "off")

    def _publish(self, versions: Mapping[str, EngineVersions]) -> None:
        """Send the fast draft to the engines that hold its base and wait for nothing.

        One that cannot be sent it is tried again after the next step.
        """
        assert self.draft is not None  # noqa: S101 - it is better
        engines = [
            engine
            for engine, told in versions.items()
            if self._holds(told)
            and told.adaptation in ("", "served")
            and self._is_wanted(engine)
        ]
        if not engines:
            return
        change, made = self._change()
        sent = [self._send(engine, change, self._fingerprint) for engine in engines]
        if not any(sent):
            return
        if self.served is None:
            facts = {"gain": self.gain.mean, "steps": self.steps}
            self._add_event("adapted", base=self._base, **facts)
            self.served = self.draft.clone()
        self.served.take(made)  # as engines have it: that is what is judged
        self._sent_at = self.steps

    def _give_back(self, now: float, versions: Mapping[str, EngineVersions]) -> None:
        """Send the base to the engines that have a fast draft of it, until it is in.

        Also to one that serves a fast draft of an earlier base and has refused this.
        """
        back = {
            engine: self._holds(told)
            for engine, told in versions.items()
            if told.adaptation and (told.serves_fast or not _is_of_another(told))
        }
        if self.served is not None:
            back = {engine: holds for engine, holds in back.items() if not holds}
        if not back:
            self._told = self._told and self.served is not None
        elif now >= self._next_return:
            self._next_return = now + RETRY_S
            for engine, holds in back.items():
                if holds:  # whole: the next trainer goes on from it
                    base = self.tensors_to_send(self._trainer.live)
                    self._send(engine, base, fast=False)
                elif of := self._sent_on.get(engine):  # no change of what it holds
                    number = versions[engine].installed
                    self._send(engine, {}, of, fast=False, base=number)

    def _send(
        self,
        engine: str,
        tensors: dict[str, Tensor],
        of: str | None = None,
        *,
        fast: bool = True,
        base: int | None = None,
    ) -> bool:
        """False, and once a sentence, if it could not be sent.

        Args:
            of: Fingerprint of what `tensors` change; None: they are all.
            base: Its version, if it is not the deployed one.
        """
        number = self._base if base is None else base
        meta = {"adaptation": {"fast": fast}} | ({"delta": {"base": of}} if of else {})
        try:
            self._feeds.send_fast(engine, as_wire(tensors), meta, base=number)
        except TransportError as error:
            if not self._told:
                what = "a fast draft" if fast else "the base of the fast draft"
                logger.error("engine %s cannot be sent %s: %s", engine, what, error)
            self._told = True
            return False
        if fast and of:
            self._sent_on[engine] = of
        return True


def _is_of_another(told: EngineVersions) -> bool:
    """True if an engine holds another base bit by bit: it is left out."""
    return told.adaptation == "refused" and told.refused_reason == "base"
