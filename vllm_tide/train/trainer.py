"""The trainer: trains a candidate draft on captured rows and evaluates it.

Input: records. Output: checkpoint tensors of candidates that pass the gate.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_tide.config import TrainConfig
from vllm_tide.draft.checkpoint import digest, export_tensors
from vllm_tide.draft.module import Draft
from vllm_tide.draft.prune import LiveVocabulary, reprune
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.assemble import MAX_BRANCHES, Assembler
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.distributed import OneRank, Stepper
from vllm_tide.train.evaluate import Evaluation, Scores, evaluate
from vllm_tide.train.gpu import (
    INTERRUPTED,
    GpuTimeBudget,
    Progress,
    ProgressCallback,
    is_out_of_memory,
    release_cache,
)
from vllm_tide.train.judgement import (
    MIN_RATE,
    PUBLISH_EVIDENCE,
    CycleResult,
    Evidence,
    Pair,
    cycle_lr_scale,
    judge,
    next_rate,
    without_evaluation,
)
from vllm_tide.train.packing import take_batch
from vllm_tide.train.reservoir import CYCLE_PASSES, SEED, SampleBuffer, in_holdout
from vllm_tide.train.sample import Sample

if TYPE_CHECKING:
    from vllm_tide.transport.record import Record

CYCLE_SECONDS, MIN_STEPS, MIN_SCORED_ROWS = 20.0, 4, 2048
"""Maximum time of a cycle's steps (s), minimum steps, minimum rows of a comparison."""
WARMUP_STEPS = 8  # of the learning rate, after the optimizer's moments were cleared
MAX_KNOWN = 1 << 16
"""Maximum keys of requests that were trained on or counted as evidence."""


class Trainer:
    """The live draft, the candidate, and the training data.

    Args:
        draft: The served draft; it becomes the candidate, a copy of it the live draft.
        num_speculative_tokens: Served draft depth, used by evaluation.
        draft_sample_method: vLLM's option: how the engine samples drafted tokens.
        stepper: Training steps for `draft`; None: in this process alone.
    """

    def __init__(
        self,
        draft: Draft,
        target: TargetRows,
        config: TrainConfig,
        *,
        num_speculative_tokens: int | None = None,
        feature_dtype: str = "bfloat16",
        draft_sample_method: str = "greedy",
        stepper: Stepper | None = None,
    ) -> None:
        torch.manual_seed(SEED)
        self.draft, self.target, self.config = draft, target, config
        self.depth = num_speculative_tokens or config.ttt_steps
        self.metric = "served"  # of `evaluate.FORMS`, compared by the gate
        drawn = draft_sample_method == "probabilistic"
        self.sampled_form = "mass" if drawn else "argmax_mass"
        self.live = draft.clone()
        self.stepper = stepper or OneRank(draft, target, config)
        self.gpu_budget: GpuTimeBudget | None = None
        share = config.gpu_share or 1.0
        if target.lm_head.device.type == "cuda" and share < 1:
            self.gpu_budget = GpuTimeBudget(share)
        self.buffer = SampleBuffer(config)
        window = self.buffer.window
        self.assembler = Assembler(
            draft.config.feature_size,
            feature_dtype,
            max_open_rows=config.buffer_tokens,
            max_request_rows=max(4 * window, config.batch_tokens),
            context_rows=window // 4,
            max_branches=MAX_BRANCHES if self._branches else 0,
        )
        self.cycles = self.steps = self.train_tokens = self.rows_read = 0
        self.last_loss = math.nan
        self.skipped: Counter[str] = Counter()
        self.vocabulary: LiveVocabulary | None = None
        if draft.owns_lm_head and not draft.vocab.is_identity:
            self.vocabulary = LiveVocabulary(target.vocab_size)
        self.out_of_memory = 0
        self._queue: deque[Sample] = deque()
        self._capacity = self._packed = 0
        self._since_reset = 0  # steps since the optimizer's moments were cleared
        self._submitted = -1  # `steps` of the last candidate judged without a cycle
        self._step_s = self._row_s = 0.0  # per step, per row scored with both drafts
        self._differs = False  # the candidate differs from the live draft
        self._callback = ProgressCallback(None)  # of the last cycle
        self.evidence = Evidence()  # that candidates are better than the live draft
        self.unscored_requests = 0  # not used as evidence, under overload
        self._known: dict[int, None] = {}  # request keys: see MAX_KNOWN
        # Scores of the live draft, which rarely changes.
        self._live_scores = Scores(self.depth)
        self.rate = MIN_RATE
        self.last_terms: dict[str, float] = {}

    @property
    def _branches(self) -> bool:
        return self.stepper.step.trains_branches

    def add_records(self, records: Iterable[Record], now: float) -> None:
        for record in records:
            self.rows_read += len(record.token_ids)
            self.add_samples(self.assembler.add(record, now))

    def flush_idle(self, now: float) -> None:
        self.add_samples(self.assembler.flush_idle(now))

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Store documents; mark rows with a next token in the draft vocabulary."""
        vocab = self.draft.vocab
        for sample in samples:
            if reason := sample.why_unusable(self.target.vocab_size):
                self.skipped[reason] += sample.num_tokens
                continue
            if self.vocabulary is not None:
                generated = max(0, sample.num_prompt_tokens - sample.start)
                self.vocabulary.add(sample.tokens[generated:])
            holdout = in_holdout(sample.key, self.config.holdout_share)
            if not (holdout or vocab.is_identity):
                sample = sample.in_vocabulary(vocab.t2d)
            self.buffer.add(sample)

    @property
    def rows_skipped(self) -> dict[str, int]:
        total = self.skipped + self.assembler.skipped
        total["missing_in_holes"] += self.assembler.num_holes
        for side, count in self.buffer.evicted.items():
            total[f"evicted_{side}"] += count
        return dict(+total)

    @property
    def packing_waste(self) -> float:
        """Share of unused rows in all batches (0 to 1)."""
        return 1.0 - self._packed / self._capacity if self._capacity else 0.0

    def train_cycle(self, progress: Progress | None = None) -> CycleResult:
        """Run `steps_per_cycle` steps, then compare the candidate with the live draft.

        Compares on held-out requests and on requests captured since the last cycle,
        which are scored before the first step on them (prequential: Dawid 1984). Each
        request counts once as evidence, a held-out one at its first score; all held-out
        requests together only detect harm. Out of memory ends a cycle early.

        Args:
            progress: Called after every step and evaluation batch, so that the caller
                can drain the ring meanwhile; False ends the cycle.
        """
        steps = self.steps
        self._callback = callback = ProgressCallback(progress, self.gpu_budget)
        try:
            result = self._run_cycle(callback)
        except RuntimeError as error:
            # Other ranks are in the same step and cannot skip it.
            if not (is_out_of_memory(error) and isinstance(self.stepper, OneRank)):
                raise
            error.__traceback__ = None  # it references the step's tensors
            self.stepper.step.optimizer.zero_grad(set_to_none=True)
            release_cache()
            self.out_of_memory += 1
            self._differs |= self.steps > steps
            result = without_evaluation(0, math.nan, "out of memory")
        finally:
            self._live_scores.keep({s.key for s in self.buffer.holdout})
        return replace(
            result, evaluation_s=callback.evaluation_s, elsewhere_s=callback.elsewhere_s
        )

    def _run_cycle(self, callback: ProgressCallback) -> CycleResult:
        # Later windows are scored in the next cycle, before they are trained on.
        until, taken = self.buffer.newest, self.buffer.new_tokens
        prequential = self._score_fresh(callback)
        enough = self.evidence.wealth >= PUBLISH_EVIDENCE
        if prequential is not None and enough and self.steps > self._submitted:
            # Once per candidate: publish what was scored, not the result of more steps.
            self._submitted = self.steps
            judged = self._judge(0, self.last_loss, prequential, callback)
            if judged is not None and judged.publish:
                self.cycles += 1
                return judged
        self._update_vocabulary()
        losses = self._run_steps(until, callback)
        self._differs |= bool(losses)
        self.cycles += 1
        mean = sum(losses) / len(losses) if losses else math.nan
        judged = None
        if losses and callback.running:
            self.stepper.gather()
            judged = self._judge(len(losses), mean, prequential, callback)
        reason = callback.stopped or "no row could be trained"
        if reason != INTERRUPTED:
            self.buffer.end_cycle(until, taken)
        if judged is None:
            return without_evaluation(len(losses), mean, reason)
        self._adapt_rate(judged)
        return judged

    def _run_steps(self, until: int, callback: ProgressCallback) -> list[float]:
        """Run the steps of a cycle on windows up to `until`; return their losses."""
        cycle, index = self.cycles, 0
        losses: list[float] = []
        # Thread time on a CPU excludes pauses of the machine; a GPU needs wall time.
        on_cpu = self.target.lm_head.device.type == "cpu"
        clock = time.thread_time if on_cpu else time.monotonic
        self._queue = self.buffer.shuffled(cycle, until)
        total = self._num_steps()
        while callback.running and index < total:
            if not self._queue:
                self._queue = self.buffer.shuffled(cycle, until)
            if not self._queue:
                break  # every document has had its passes
            began = clock()
            loss = self._one_step(self.rate * cycle_lr_scale(index, total))
            spent, index = clock() - began, index + 1
            self._step_s += (0.2 if self._step_s else 1.0) * (spent - self._step_s)
            total = max(index, min(total, self._affordable_steps()))
            if loss is not None:
                losses.append(loss)
                self.last_loss = loss
            callback()
        return losses

    def _judge(
        self,
        steps: int,
        loss: float,
        prequential: Pair | None,
        callback: ProgressCallback,
    ) -> CycleResult | None:
        """Judge the candidate by `prequential` and by held-out requests.

        None if the cycle ended or the draft was replaced meanwhile.
        """
        rows = self._rows_to_score()
        chosen, others = self.buffer.split_holdout(self._known, rows, self.cycles)
        self._live_scores.keep({s.key for s in chosen + others})
        holdout = self._compare(chosen, callback)
        if callback.running:
            self._add_evidence(holdout)
            if others and self.evidence.wealth >= PUBLISH_EVIDENCE:
                holdout += self._compare(others, callback)
        if not callback.running:
            return None
        return judge(
            steps, loss, holdout, prequential, self.config, self.metric, self.evidence
        )

    def evaluate(
        self,
        draft: Draft | None = None,
        progress: Progress | None = None,
        samples: list[Sample] | None = None,
    ) -> Evaluation:
        """Evaluate a draft (None: the candidate) on samples (None: held-out ones)."""
        return evaluate(
            draft or self.draft,
            self.target,
            list(self.buffer.holdout) if samples is None else samples,
            self.depth,
            capacity=self.config.batch_tokens,
            dtype=self.stepper.step.dtype,
            progress=progress,
            attention=self.config.attention,
            sampled_form=self.sampled_form,
        )

    def candidate_tensors(
        self, master: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return tensors to publish, with names and dtype of the initial checkpoint.

        `t2d` is left out: vLLM ignores it, and a server compares without it. `master`
        (from `snapshot`) replaces the candidate's weights.
        """
        draft = self.draft
        if master is not None:
            draft = self._with_vocabulary_of(master).clone()
            draft.take(master)
        out = export_tensors(draft, None, stored_names=True)
        out.pop("t2d", None)
        return out

    def live_tensors(self) -> dict[str, Tensor]:
        """Return live tensors by parameter, in the checkpoint's dtype."""
        return export_tensors(self.live)

    def live_digest(self) -> str:
        """Return the digest of the published live draft, stable over restarts."""
        return digest(self.live_tensors())

    def published(self) -> None:
        """Make the published candidate the live draft."""
        if not torch.equal(self.live.vocab.target_ids, self.draft.vocab.target_ids):
            self.live = self.draft.clone()
        self.live.take(self.draft.named_tensors())
        self._differs = False
        self.evidence, self._live_scores = Evidence(), Scores(self.depth)

    def snapshot(self) -> dict[str, Tensor]:
        """Copy the live master weights to the host, with `d2t` if it is pruned."""
        live, master = self.live, self.live.named_tensors()
        out = {name: t.detach().to("cpu", copy=True) for name, t in master.items()}
        return out if live.vocab.is_identity else out | {"d2t": live.vocab.d2t}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Set live draft and candidate to `tensors`; clear the optimizer's state."""
        draft = self._with_vocabulary_of(tensors)
        if draft is not self.draft:
            self._use_draft(draft)
        if not torch.equal(draft.vocab.target_ids, self.live.vocab.target_ids):
            self.live = draft.clone()
        self.live.take(tensors)
        self.draft.take(tensors)
        self.stepper.restore()
        self._since_reset = 0
        self._differs = False
        self.evidence, self._live_scores = Evidence(), Scores(self.depth)
        self._callback.stop("another draft was restored")

    def purge(self, tenant: int | None = None) -> dict[str, int]:
        """Delete captured data of a tenant (None: of all); weights do not change."""
        self._queue = deque(
            s for s in self._queue if tenant is not None and s.tenant != tenant
        )
        self._live_scores.keep(())
        samples, tokens = self.buffer.purge(tenant)
        open_rows = self.assembler.purge(tenant)
        return {"samples": samples, "tokens": tokens, "open_rows": open_rows}

    def expire(self) -> None:
        if self.buffer.expire():
            self._live_scores.keep(())
            self._queue = deque(s for s in self._queue if not self.buffer.expired(s))

    def save(self, directory: Path, published_version: int) -> Path:
        """Write a checkpoint: weights, moments, counters, evidence, no records."""
        buffered = {s.key for s in (*self.buffer.train, *self.buffer.holdout)}
        state = TrainState(
            steps=self.steps,
            cycles=self.cycles,
            published_version=published_version,
            extra={
                "train_tokens": self.train_tokens,
                "live": self.live_digest(),
                "rate": self.rate,
                "evidence": asdict(self.evidence),
                "known": [key for key in self._known if key in buffered],
            },
        )
        return self.stepper.save(directory, state)

    def load(self, path: Path) -> TrainState:
        """Resume from a checkpoint, with a new cycle.

        Raises:
            DraftError: It is damaged or of another draft; nothing is changed.
        """
        state = self.stepper.load(path)
        self.steps, self.cycles = state.steps, state.cycles
        self.train_tokens = int(state.extra.get("train_tokens", 0))
        self.rate = float(state.extra.get("rate", MIN_RATE))
        self.evidence = Evidence(**state.extra.get("evidence", {}))
        self._mark_known(state.extra.get("known", ()))
        self._differs = True
        return state

    def _adapt_rate(self, result: CycleResult) -> None:
        """Adapt the learning rate; after harm restart from the live draft."""
        self.rate = next_rate(self.rate, result)
        # Without improvement one pass per cycle: less load, more passes for a shift.
        self.buffer.cycle_passes = CYCLE_PASSES if result.improved else 1
        if result.harmful:
            evidence = self.evidence.dropped()
            self.restore(self.snapshot())
            self.evidence = evidence

    def _update_vocabulary(self) -> None:
        """Adapt the pruned vocabulary of the candidate to the traffic."""
        if self.vocabulary is None:
            return
        vocab = self.vocabulary.better(self.draft.vocab)
        if vocab is not None:
            self._use_draft(reprune(self.draft, vocab, self.target))

    def _with_vocabulary_of(self, tensors: dict[str, Tensor]) -> Draft:
        """Return the candidate, repruned if `tensors` have another vocabulary."""
        if "d2t" not in tensors or self.draft.vocab.is_identity:
            return self.draft
        vocab = VocabMap.from_d2t(tensors["d2t"], self.target.vocab_size)
        if torch.equal(vocab.target_ids, self.draft.vocab.target_ids):
            return self.draft
        return reprune(self.draft, vocab, self.target)

    def _use_draft(self, draft: Draft) -> None:
        """Use a draft with another vocabulary and a new optimizer."""
        self.stepper.replace(draft)
        self._since_reset = 0
        self.draft, members = draft, draft.vocab.t2d
        self.buffer.map_train(lambda sample: sample.in_vocabulary(members))

    def _num_steps(self) -> int:
        """Return the steps of a cycle; fewer if few passes over the buffer are left."""
        steps = math.ceil(self.buffer.rows_left(self.cycles) / self.config.batch_tokens)
        return max(1, min(self.config.steps_per_cycle, steps, self._affordable_steps()))

    def _affordable_steps(self) -> int:
        if not self._step_s:
            return self.config.steps_per_cycle
        return max(MIN_STEPS, int(CYCLE_SECONDS / self._step_s))

    def _rows_to_score(self) -> int:
        """Return the rows of one comparison: 1/8 of a cycle's rows and of its time."""
        rows = self.config.steps_per_cycle * self.config.batch_tokens // 8
        time_left = int(CYCLE_SECONDS / 8 / self._row_s) if self._row_s else 0
        return max(MIN_SCORED_ROWS, min(rows, time_left))

    def _one_step(self, lr_scale: float) -> float | None:
        capacity = self.config.batch_tokens
        samples = take_batch(self._queue, capacity, branches=self._branches)
        self._mark_known(s.key for s in samples)
        # Moments of few steps give large updates, which harm a draft that fits.
        self._since_reset += 1
        lr_scale *= min(1.0, self._since_reset / WARMUP_STEPS)
        result = self.stepper.run(samples, lr_scale)
        for sample in samples:
            sample.trained.append(self.cycles)
        if result is None:
            self.skipped["unusable_batch"] += sum(s.num_tokens for s in samples)
            self.last_loss = math.nan  # not the loss of an earlier step
            return None
        self.steps += 1
        self.train_tokens += result.num_tokens
        self.last_terms = {
            name: sum(means) / len(means) for name, means in result.terms.items()
        }
        self._packed += result.num_tokens
        self._capacity += max(capacity, result.num_tokens)
        return result.loss

    @property
    def unscored(self) -> list[Sample]:
        """Fresh windows of requests not trained on and not counted as evidence."""
        return [s for s in self.buffer.fresh if s.key not in self._known]

    def _score_fresh(self, progress: ProgressCallback) -> Pair | None:
        """Score candidate and live draft on requests not trained on.

        None without such requests, or if both drafts are equal. Under overload only the
        newest requests are scored (`_rows_to_score`).
        """
        unscored = self.unscored if self._differs else []
        rows_left = self._rows_to_score()
        samples: deque[Sample] = deque()
        for sample in reversed(unscored):
            rows_left -= sample.num_tokens
            if rows_left < 0:
                break
            # As in held-out samples: with rows outside of a pruned vocabulary.
            samples.appendleft(replace(sample, in_vocab=None))
        if not samples:
            return None
        pair = self._compare(list(samples), progress)
        if progress.running:
            self._add_evidence(pair)
            left_out = {s.key for s in unscored} - {s.key for s in samples}
            self.unscored_requests += len(left_out)
            self._mark_known(left_out)
        return pair

    def _add_evidence(self, pair: Pair) -> None:
        """Add scores of new requests to the evidence."""
        gains = pair.gains(self.metric)
        self.evidence.add([g for key, g in gains.items() if key not in self._known])
        self._mark_known(gains)

    def _mark_known(self, keys: Iterable[int]) -> None:
        self._known.update(dict.fromkeys(keys))
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _compare(self, samples: list[Sample], callback: ProgressCallback) -> Pair:
        began = time.monotonic() - callback.elsewhere_s
        scores = self._live_scores  # `restore` may replace them meanwhile
        new = self.evaluate(self.draft, callback, samples)
        if missing := scores.missing(samples):
            evaluation = self.evaluate(self.live, callback, missing)
            if callback.running:
                scores.add(missing, evaluation)
        live = scores.of(samples)
        for key, row in list(live.requests.items()):
            if not all(map(math.isfinite, row)):  # not usable for a comparison
                self.skipped["not_finite"] += int(row[0])
                del live.requests[key]
        # Samples that expired meanwhile have no score of the live draft.
        new.requests = {k: r for k, r in new.requests.items() if k in live.requests}
        spent = time.monotonic() - callback.elsewhere_s - began
        if callback.running and missing:
            self._row_s = spent / sum(s.num_tokens for s in samples)
        callback.evaluation_s += spent
        return Pair(new, live)
