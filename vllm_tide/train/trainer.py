"""Trains a candidate draft from captured rows and decides when it is better.

Records come in, checkpoint tensors go out.
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
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.prune import LiveVocabulary, reprune
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.assemble import MAX_BRANCHES, Assembler
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.distributed import OneRank, Stepper
from vllm_tide.train.evaluate import Evaluation, Scores, evaluate
from vllm_tide.train.gpu import Progress, Turns, Watch, give_up_memory, lacks_memory
from vllm_tide.train.judgement import (
    ENOUGH,
    LEAST_RATE,
    CycleResult,
    Evidence,
    Pair,
    cycle_lr_scale,
    judge,
    next_rate,
    unjudged,
)
from vllm_tide.train.packing import take_batch
from vllm_tide.train.reservoir import CYCLE_PASSES, SEED, SampleBuffer, is_held_out
from vllm_tide.train.sample import Sample

if TYPE_CHECKING:
    from vllm_tide.transport.record import Record

CYCLE_SECONDS, LEAST_STEPS, LEAST_SCORED = 20.0, 4, 2048
"""Most time of a cycle's steps (s), least steps and least rows of a comparison: a slow
device publishes as often as a fast one."""
WARMUP_STEPS = 8  # of the learning rate, with an optimizer that has no moments yet
MAX_KNOWN = 1 << 16
"""Requests remembered as learnt from or counted as evidence, the newest."""


class Trainer:
    """Holds the live draft, the candidate, and the data.

    Args:
        draft: The draft being served; becomes the candidate, a copy stays as live.
        num_speculative_tokens: Depth the engine serves; evaluation uses it.
        draft_sample_method: vLLM's: how the engine draws drafted tokens.
        stepper: Made from `draft`; None steps in this process alone.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
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
        self.metric = "served"  # of `evaluate.FORMS`, what the gate compares
        drawn = draft_sample_method == "probabilistic"
        self.sampled_form = "mass" if drawn else "argmax_mass"
        self.live = draft.clone()
        self.stepper = stepper or OneRank(draft, target, config)
        self.turns: Turns | None = None
        share = config.gpu_share or 1.0
        if target.lm_head.device.type == "cuda" and share < 1:
            self.turns = Turns(share)
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
        # New tokens and fresh documents that the cycle being run took, and its queue.
        self._taken: tuple[int, list[Sample], deque[Sample]] = 0, [], deque()
        self._capacity = self._packed = 0
        self._since_reset = 0  # steps with the optimizer's moments
        self._offered = -1  # `steps` of the last candidate that fresh requests judged
        self._step_s = self._row_s = 0.0  # of a step, of scoring a row with both drafts
        self._differs = False  # the candidate from the live draft
        self._restored = 0  # how often `restore` was called
        self.evidence = Evidence()  # that candidates are better than the live draft
        self.unscored_requests = 0  # too many came at once: no evidence
        self._known: dict[int, None] = {}  # request keys: see MAX_KNOWN
        # Of the live draft, which rarely changes.
        self._live_scores = Scores(self.depth)
        self.rate = LEAST_RATE
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
        """Store documents; mark rows whose next token the draft can say."""
        vocab = self.draft.vocab
        for sample in samples:
            if reason := sample.why_unusable(self.target.vocab_size):
                self.skipped[reason] += sample.num_tokens
                continue
            if self.vocabulary is not None:
                generated = max(0, sample.num_prompt_tokens - sample.start)
                self.vocabulary.add(sample.tokens[generated:])
            held = is_held_out(sample.key, self.config.holdout_share)
            if not (held or vocab.is_identity):
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
        """Share of the rows of all batches that stayed empty (0 to 1)."""
        return 1.0 - self._packed / self._capacity if self._capacity else 0.0

    def train_cycle(self, progress: Progress | None = None) -> CycleResult:
        """Run `steps_per_cycle` steps, then compare the candidate with the live draft.

        The comparison is over held-out requests and over those that came since the last
        cycle, scored before the first step on them (prequential: Dawid 1984). Each
        counts once as evidence, a held-out one when it is first scored; all held-out
        ones together only say whether harm was done. A cycle without memory ends early.

        Args:
            progress: Called after every step and evaluation batch, so that the caller
                can drain the ring meanwhile; False ends the cycle.
        """
        steps, watch = self.steps, Watch(progress, self.turns)
        try:
            result = self._run_cycle(watch)
        except RuntimeError as error:
            # Other ranks are amid the same step.
            if not (lacks_memory(error) and isinstance(self.stepper, OneRank)):
                raise
            error.__traceback__ = None  # it holds the step's frames, so its tensors
            give_up_memory(self.stepper.step.optimizer)
            self.out_of_memory += 1
            self._differs |= self.steps > steps
            self._give_back()
            result = unjudged(0, math.nan, "out of memory")
        finally:  # a purge finds no documents here
            self._taken = 0, [], deque()
            self._live_scores.keep({s.key for s in self.buffer.holdout})
        return replace(
            result, evaluation_s=watch.evaluation_s, elsewhere_s=watch.elsewhere_s
        )

    def _run_cycle(self, watch: Watch) -> CycleResult:
        restored = self._restored
        # What comes from now on is scored in the next cycle, before it is learnt from.
        until, taken = self.buffer.newest, self.buffer.new_tokens
        ahead = self._judge_fresh(watch)
        enough = ahead is not None and self.evidence.wealth >= ENOUGH
        if enough and self.steps > self._offered:
            # What was scored is published as it is: of what more steps would make of it
            # only held-out requests could tell. Once: it may have to wait.
            self._offered = self.steps
            judged = self._judge(0, self.last_loss, ahead, watch, restored)
            if judged is not None and judged.publish:
                self.cycles += 1
                return judged
        self._follow_vocabulary()
        fresh = self.buffer.fresh
        self.buffer.new_tokens = max(0, self.buffer.new_tokens - taken)
        cycle = self.cycles
        self._queue = self.buffer.shuffled(cycle, until)
        self._taken = taken, fresh, self._queue
        total = self._num_steps()
        losses: list[float] = []
        index = 0
        # A pause of the machine is not a slow step; a GPU computes elsewhere.
        on_cpu = self.target.lm_head.device.type == "cpu"
        clock = time.thread_time if on_cpu else time.monotonic
        while watch.going and index < total:
            if not self._queue:
                self._queue = self.buffer.shuffled(cycle, until)
            if not self._queue:
                break  # every document had its passes
            began = clock()
            loss = self._one_step(self.rate * cycle_lr_scale(index, total))
            spent, index = clock() - began, index + 1
            self._step_s += (0.2 if self._step_s else 1.0) * (spent - self._step_s)
            total = max(index, min(total, self._affordable_steps()))
            if loss is not None:
                losses.append(loss)
                self.last_loss = loss
            if not watch() or self._restored != restored:
                break
        self._differs |= bool(losses)
        self.cycles += 1
        mean = sum(losses) / len(losses) if losses else math.nan
        result = unjudged(len(losses), mean, "interrupted")
        if not losses and watch.going:
            return replace(result, reason="no row could be trained")
        if watch.going and self._restored == restored:
            self.stepper.gather()
            judged = self._judge(len(losses), mean, ahead, watch, restored)
            if judged is not None:
                self._adapt_rate(judged)
                return judged
        if self._restored != restored:
            result = replace(result, reason="another draft was put in place")
        elif not watch.going:
            self._give_back()
        return result

    def _judge(
        self, steps: int, loss: float, ahead: Pair | None, watch: Watch, restored: int
    ) -> CycleResult | None:
        """Judge the candidate by `ahead` and by held-out requests.

        None if the cycle ended meanwhile: neither half an evaluation counts nor one of
        a draft that is gone.
        """
        rows = self._rows_to_score()
        chosen, others = self.buffer.held_out(self._known, rows, self.cycles)
        self._live_scores.keep({s.key for s in chosen + others})
        held_out = self._compared(chosen, watch)
        if watch.going and self._restored == restored:
            self._count(held_out)
            if others and self.evidence.wealth >= ENOUGH:
                held_out += self._compared(others, watch)
        if not watch.going or self._restored != restored:
            return None
        return judge(
            steps, loss, held_out, ahead, self.config, self.metric, self.evidence
        )

    def _give_back(self) -> None:
        """The next cycle need not wait until as many have come again."""
        taken, fresh, queue = self._taken
        self.buffer.new_tokens += taken
        if self._queue is queue:  # what it has not come to is as fresh as before
            left = {id(sample) for sample in queue}
            as_fresh = [sample for sample in fresh if id(sample) in left]
            self.buffer.fresh = [*self.buffer.fresh, *as_fresh]

    def evaluate(
        self,
        draft: Eagle3Draft | None = None,
        progress: Progress | None = None,
        samples: list[Sample] | None = None,
    ) -> Evaluation:
        """Evaluate a draft (the candidate when None) on the held-out requests."""
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
        """Tensors to publish: names and dtype of the checkpoint served at start.

        `t2d` is left out: vLLM ignores it, and a server compares without it. A `master`
        of `snapshot` takes the candidate's place.
        """
        draft = self.draft
        if master is not None:
            draft = self._with_vocabulary_of(master).clone()
            draft.take(master)
        out = export_tensors(draft, None, stored_names=True)
        out.pop("t2d", None)
        return out

    def live_tensors(self) -> dict[str, Tensor]:
        """Tensors of the live draft under EAGLE-3 names, in the checkpoint's dtype."""
        return export_tensors(self.live)

    def live_digest(self) -> str:
        """Of the live draft as it is published: its name over restarts."""
        return digest(self.live_tensors())

    def published(self) -> None:
        """The candidate is served now: it becomes the live draft."""
        if not torch.equal(self.live.vocab.target_ids, self.draft.vocab.target_ids):
            self.live = self.draft.clone()
        self.live.take(self.draft.named_tensors())
        self._differs = False
        self.evidence, self._live_scores = Evidence(), Scores(self.depth)

    def snapshot(self) -> dict[str, Tensor]:
        """Master weights of the live draft, on the host; `d2t` too if it is pruned."""
        live, master = self.live, self.live.named_tensors()
        out = {name: t.detach().to("cpu", copy=True) for name, t in master.items()}
        return out if live.vocab.is_identity else out | {"d2t": live.vocab.d2t}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Make `tensors` both live and candidate, and forget the optimizer's state."""
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
        self._restored += 1

    def purge(self, tenant: int | None = None) -> dict[str, int]:
        """Forget what was captured of a tenant (None: of all), for good.

        The draft keeps what it has learnt.
        """
        self._queue = deque(
            s for s in self._queue if tenant is not None and s.tenant != tenant
        )
        self._live_scores.keep(())
        gone = self.buffer.purge(tenant)
        return {
            "samples": gone.samples,
            "tokens": gone.tokens,
            "open_rows": self.assembler.purge(tenant),
        }

    def expire(self) -> None:
        if self.buffer.expire().samples:
            self._live_scores.keep(())
            self._queue = deque(s for s in self._queue if not self.buffer.expired(s))

    def save(self, directory: Path, published_version: int) -> Path:
        """Write a checkpoint: weights, moments, counters, evidence, no records."""
        held = {s.key for s in (*self.buffer.train, *self.buffer.holdout)}
        state = TrainState(
            steps=self.steps,
            cycles=self.cycles,
            published_version=published_version,
            extra={
                "train_tokens": self.train_tokens,
                "live": self.live_digest(),
                "rate": self.rate,
                "evidence": asdict(self.evidence),
                "known": [key for key in self._known if key in held],
            },
        )
        return self.stepper.save(directory, state)

    def load(self, path: Path) -> TrainState:
        """Go on from a checkpoint, with a new cycle.

        Raises:
            DraftError: It is damaged or of another draft; nothing is changed.
        """
        state = self.stepper.load(path)
        self.steps, self.cycles = state.steps, state.cycles
        self.train_tokens = int(state.extra.get("train_tokens", 0))
        self.rate = float(state.extra.get("rate", LEAST_RATE))
        self.evidence = Evidence(**state.extra.get("evidence", {}))
        self._know(state.extra.get("known", ()))
        self._differs = True
        return state

    def _adapt_rate(self, result: CycleResult) -> None:
        """After harm: smaller steps, from the live draft again."""
        self.rate = next_rate(self.rate, result)
        # Where nothing is gained, serving is spared, and passes are left for a shift.
        self.buffer.at_once = CYCLE_PASSES if result.improved else 1
        if result.harmful:
            left = self.evidence.dropped()
            self.restore(self.snapshot())
            self.evidence = left

    def _follow_vocabulary(self) -> None:
        """Let the candidate know the tokens that traffic has come to need."""
        if self.vocabulary is None:
            return
        vocab = self.vocabulary.better(self.draft.vocab)
        if vocab is not None:
            self._use_draft(reprune(self.draft, vocab, self.target))

    def _with_vocabulary_of(self, tensors: dict[str, Tensor]) -> Eagle3Draft:
        """The candidate, or one like it that has the vocabulary of `tensors`."""
        if "d2t" not in tensors or self.draft.vocab.is_identity:
            return self.draft
        vocab = VocabMap.from_d2t(tensors["d2t"], self.target.vocab_size)
        if torch.equal(vocab.target_ids, self.draft.vocab.target_ids):
            return self.draft
        return reprune(self.draft, vocab, self.target)

    def _use_draft(self, draft: Eagle3Draft) -> None:
        """Another vocabulary, and the optimizer anew: its rows are other tokens'."""
        self.stepper.replace(draft)
        self._since_reset = 0
        self.draft, members = draft, draft.vocab.t2d
        self.buffer.map_train(lambda sample: sample.in_vocabulary(members))

    def _num_steps(self) -> int:
        """Steps of a cycle, fewer where few passes over the buffer are left."""
        steps = math.ceil(self.buffer.rows_left(self.cycles) / self.config.batch_tokens)
        return max(1, min(self.config.steps_per_cycle, steps, self._affordable_steps()))

    def _affordable_steps(self) -> int:
        if not self._step_s:
            return self.config.steps_per_cycle
        return max(LEAST_STEPS, int(CYCLE_SECONDS / self._step_s))

    def _rows_to_score(self) -> int:
        """Rows of one comparison: an eighth of what a cycle trains on, and of its time.

        A cycle makes two comparisons.
        """
        rows = self.config.steps_per_cycle * self.config.batch_tokens // 8
        time_left = int(CYCLE_SECONDS / 8 / self._row_s) if self._row_s else 0
        return max(LEAST_SCORED, min(rows, time_left))

    def _one_step(self, lr_scale: float) -> float | None:
        capacity = self.config.batch_tokens
        samples = take_batch(self._queue, capacity, branches=self._branches)
        self._know(s.key for s in samples)
        # Moments of few steps make large steps, which a draft that fits is harmed by.
        self._since_reset += 1
        lr_scale *= min(1.0, self._since_reset / WARMUP_STEPS)
        result = self.stepper.run(samples, lr_scale)
        for sample in samples:
            sample.trained.append(self.cycles)
        if result is None:
            self.skipped["unusable_batch"] += sum(s.num_tokens for s in samples)
            self.last_loss = math.nan  # or the last good one would be shown for ever
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
        """Fresh windows of requests neither learnt from nor counted yet."""
        return [s for s in self.buffer.fresh if s.key not in self._known]

    def _judge_fresh(self, progress: Watch) -> Pair | None:
        """Candidate and live draft on requests that neither has learnt from.

        None if there are none, or both are the same draft. The candidate is the one of
        before the cycle, as a rule a little worse than the one it ends with. Under
        overload only the newest (`_rows_to_score`).
        """
        unscored, restored = self.unscored if self._differs else [], self._restored
        most = self._rows_to_score()
        samples: deque[Sample] = deque()
        for sample in reversed(unscored):
            most -= sample.num_tokens
            if most < 0:
                break
            # As held-out ones are: also rows whose token a pruned draft cannot say.
            samples.appendleft(replace(sample, in_vocab=None))
        if not samples:
            return None
        pair = self._compared(list(samples), progress)
        if progress.going and self._restored == restored:
            self._count(pair)
            left_out = {s.key for s in unscored} - {s.key for s in samples}
            self.unscored_requests += len(left_out)
            self._know(left_out)
        return pair

    def _count(self, pair: Pair) -> None:
        """Take scores as evidence; those of known requests have been taken before."""
        gains = pair.gains(self.metric)
        self.evidence.add([g for key, g in gains.items() if key not in self._known])
        self._know(gains)

    def _know(self, keys: Iterable[int]) -> None:
        self._known.update(dict.fromkeys(keys))
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _compared(self, samples: list[Sample], watch: Watch) -> Pair:
        began = time.monotonic() - watch.elsewhere_s
        scores = self._live_scores  # another draft put in place gets others
        new = self.evaluate(self.draft, watch, samples)
        if missing := scores.missing(samples):
            found = self.evaluate(self.live, watch, missing)
            if watch.going:
                scores.add(missing, found)
        live = scores.of(samples)
        for key, row in list(live.requests.items()):
            if not all(map(math.isfinite, row)):  # no judge of any draft
                self.skipped["not_finite"] += int(row[0])
                del live.requests[key]
        # An expiry meanwhile may have taken scores of the live draft.
        new.requests = {k: r for k, r in new.requests.items() if k in live.requests}
        spent = time.monotonic() - watch.elsewhere_s - began
        if watch.going and missing:
            self._row_s = spent / sum(s.num_tokens for s in samples)
        watch.evaluation_s += spent
        return Pair(new, live)
