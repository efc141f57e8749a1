"""Trains a candidate draft from captured rows and decides when it is better.

Knows nothing of transport: records come in, checkpoint tensors go out.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_tide.config import TrainConfig
from vllm_tide.draft.checkpoint import export_tensors
from vllm_tide.draft.config import DraftError
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.assemble import Assembler
from vllm_tide.train.evaluate import Evaluation, evaluate, gain
from vllm_tide.train.packing import pack, take_batch
from vllm_tide.train.reservoir import SampleBuffer, is_held_out
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep

if TYPE_CHECKING:
    from vllm_tide.transport.record import Record

WARMUP_SHARE, DECAY_SHARE, FLOOR = 0.1, 0.3, 0.1
MIN_HOLDOUT_REQUESTS = 2
# Called between steps; False ends the cycle early.
Progress = Callable[[], bool]


@dataclass(frozen=True)
class CycleResult:
    """One cycle of steps and the decision after it.

    Attributes:
        steps: Optimizer steps done.
        loss: Mean training loss of the cycle; NaN without steps.
        new: Evaluation of the candidate, or None when not evaluated.
        live: Evaluation of the draft being served.
        gain: `new` minus `live`, expected tokens per verify step.
        gain_error: Paired standard error of `gain` over requests.
        publish: The candidate passed the gate.
        reason: Why, in words.
    """

    steps: int
    loss: float
    new: Evaluation | None
    live: Evaluation | None
    gain: float
    gain_error: float
    publish: bool
    reason: str


def cycle_lr_scale(step: int, total: int) -> float:
    """Linear warm-up, plateau, linear decay, so that a cycle ends at a quiet point."""
    warm = max(1, round(total * WARMUP_SHARE))
    if step < warm:
        return (step + 1) / (warm + 1)
    tail = max(1, round(total * DECAY_SHARE))
    left = total - step
    return 1.0 if left > tail else FLOOR + (1 - FLOOR) * left / (tail + 1)


class Trainer:
    """Holds the live draft, the candidate, and the data.

    Args:
        draft: The draft being served; becomes the candidate, a copy stays as live.
        target: Rows of the target.
        config: Knobs.
        num_speculative_tokens: Depth the engine serves; evaluation uses it.
        feature_dtype: Wire dtype of features and hidden teachers.
        max_branches: Rejected branches kept per request.
        metric: Form of the acceptance length that the gate compares.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        target: TargetRows,
        config: TrainConfig,
        *,
        num_speculative_tokens: int | None = None,
        feature_dtype: str = "bfloat16",
        max_branches: int = 0,
        metric: str = "greedy",
    ) -> None:
        """Copy the draft as the live one."""
        torch.manual_seed(config.seed)
        self.draft, self.target, self.config = draft, target, config
        self.depth = num_speculative_tokens or config.ttt_steps
        self.metric = metric
        self.live = _clone(draft)
        self.step = TrainStep(draft, target, config)
        self.buffer = SampleBuffer(config)
        self.assembler = Assembler(
            draft.config.feature_size,
            feature_dtype,
            max_open_rows=config.buffer_tokens,
            max_request_rows=max(4 * config.max_sample_tokens, config.batch_tokens),
            context_rows=config.max_sample_tokens // 4,
            max_branches=max_branches,
        )
        self.cycles = self.steps = self.train_tokens = self.rows_read = 0
        self.last_loss = math.nan
        self.skipped: Counter[str] = Counter()
        self._queue: deque[Sample] = deque()
        self._capacity = 0

    def check_features(self, aux_layer_ids: Iterable[int]) -> None:
        """Refuse data captured at other layers than the draft was made for.

        Raises:
            DraftError: The ids differ.
        """
        got, want = tuple(aux_layer_ids), self.draft.config.aux_layer_ids
        if got != want:
            raise DraftError(
                f"captured layers {got} are not the draft's {want}; training on them "
                "would give a draft that serves badly."
            )

    def add_records(self, records: Iterable[Record], now: float) -> None:
        """Take records from the ring.

        Args:
            records: In ring order.
            now: Monotonic clock (seconds).
        """
        for record in records:
            self.rows_read += len(record.token_ids)
            self.add_samples(self.assembler.add(record, now))

    def flush_idle(self, now: float) -> None:
        """Close requests whose end was never captured."""
        self.add_samples(self.assembler.flush_idle(now))

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Store documents; mark rows whose best token the draft cannot say."""
        vocab = self.draft.vocab
        for sample in samples:
            if int(sample.tokens.max()) >= self.target.vocab_size:
                self.skipped["token_out_of_range"] += sample.num_tokens
                continue
            if not vocab.is_identity:
                share, seed = self.config.holdout_share, self.config.seed
                if not is_held_out(sample.key, share, seed):
                    sample = replace(sample, in_vocab=self._in_vocab(sample))
            self.buffer.add(sample)

    @property
    def rows_skipped(self) -> dict[str, int]:
        """Rows dropped, by reason."""
        total = self.skipped + self.assembler.skipped
        total["missing_in_holes"] += self.assembler.num_holes
        for side, count in self.buffer.evicted.items():
            total[f"evicted_{side}"] += count
        return dict(+total)

    @property
    def packing_waste(self) -> float:
        """Share of the rows of all batches that stayed empty (0 to 1)."""
        return 1.0 - self.train_tokens / self._capacity if self._capacity else 0.0

    def ready(self, min_new_tokens: int | None = None) -> bool:
        """Whether enough new data came for another cycle."""
        wanted = (
            self.config.min_new_tokens if min_new_tokens is None else min_new_tokens
        )
        return self.buffer.new_tokens >= wanted and bool(self.buffer.train)

    def train_cycle(self, progress: Progress | None = None) -> CycleResult:
        """Run `steps_per_cycle` steps, then compare the candidate with the live draft.

        Args:
            progress: Called after every step and evaluation batch, so that the caller
                can drain the ring meanwhile; False ends the cycle.
        """
        self.buffer.new_tokens = 0
        self._queue = self.buffer.shuffled()
        losses: list[float] = []
        going = True
        total = self._num_steps()
        for index in range(total):
            loss = self._one_step(cycle_lr_scale(index, total))
            if loss is not None:
                losses.append(loss)
                self.last_loss = loss
            if progress is not None and not progress():
                going = False
                break
        self.cycles += 1
        mean = sum(losses) / len(losses) if losses else math.nan
        if not going or not losses:
            reason = "interrupted" if not going else "no row could be trained"
            return CycleResult(
                len(losses), mean, None, None, 0.0, math.inf, False, reason
            )
        return self._judge(len(losses), mean, progress)

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
            dtype=self.step.dtype,
            progress=progress,
        )

    def candidate_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Tensors to publish: names and dtype of the checkpoint served at start.

        `t2d` is left out: vLLM ignores it, and a server compares without it.
        """
        out = export_tensors(self.draft, dtype, stored_names=True)
        out.pop("t2d", None)
        return out

    def published(self) -> None:
        """The candidate is served now: it becomes the live draft."""
        _copy(self.draft.named_tensors(), self.live)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the live draft's master weights."""
        return {n: t.detach().clone() for n, t in self.live.named_tensors().items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Make `tensors` both live and candidate, and forget the optimizer's state."""
        _copy(tensors, self.live)
        _copy(tensors, self.draft)
        self.step.reset()

    def _num_steps(self) -> int:
        """Steps of a cycle, fewer while the buffer is small."""
        held = self.buffer.train_tokens
        passes = math.ceil(self.config.max_passes * held / self.config.batch_tokens)
        return max(1, min(self.config.steps_per_cycle, passes))

    def _one_step(self, lr_scale: float) -> float | None:
        if not self._queue:
            self._queue = self.buffer.shuffled()
        samples = take_batch(self._queue, self.config.batch_tokens)
        if not samples:
            return None
        batch = pack(samples, self.config.batch_tokens)
        result = self.step.run(batch, lr_scale)
        if result is None:
            self.skipped["unusable_batch"] += sum(s.num_tokens for s in samples)
            return None
        self.steps += 1
        self.train_tokens += result.num_tokens
        self._capacity += batch.capacity
        return result.loss

    def _judge(self, steps: int, loss: float, progress: Progress | None) -> CycleResult:
        samples = list(self.buffer.holdout)  # `progress` may change the reservoir
        new = self.evaluate(self.draft, progress, samples)
        live = self.evaluate(self.live, progress, samples)
        difference, error = gain(new, live, self.metric)
        publish = False
        if len(new.requests) < MIN_HOLDOUT_REQUESTS:
            reason = f"only {len(new.requests)} held-out requests"
        elif difference < self.config.min_gain:
            reason = f"gain {difference:+.4f} below min_gain {self.config.min_gain}"
        elif difference <= error:
            reason = f"gain {difference:+.4f} within its standard error {error:.4f}"
        else:
            publish, reason = True, f"gain {difference:+.4f} +- {error:.4f}"
        return CycleResult(steps, loss, new, live, difference, error, publish, reason)

    def _in_vocab(self, sample: Sample) -> Tensor:
        """Bool [S]: the target's best token is in the draft vocabulary."""
        inside = self.draft.vocab.t2d
        if sample.teacher_topk is not None:
            return inside[sample.teacher_topk.ids[:, 0].long()]
        out = torch.zeros(sample.num_tokens, dtype=torch.bool)
        if sample.teacher_hidden is None:
            return out
        rows = self.target.lm_head.to(self.step.dtype)
        for lo in range(0, sample.num_tokens, 256):
            hidden = sample.teacher_hidden[lo : lo + 256].to(rows.dtype)
            out[lo : lo + 256] = inside[self.target.logits(hidden, rows).argmax(-1)]
        return out


def _clone(draft: Eagle3Draft) -> Eagle3Draft:
    return Eagle3Draft(
        draft.config,
        draft.named_tensors(),
        draft.vocab,
        draft.embed,
        owns_lm_head=draft.owns_lm_head,
        owns_embed=draft.owns_embed,
        dtype=draft.checkpoint_dtype,
        constants=draft.constants,
        stored_names=draft.stored_names,
    )


@torch.no_grad()
def _copy(tensors: dict[str, Tensor], into: Eagle3Draft) -> None:
    for name, value in into.named_tensors().items():
        if name in tensors:  # a shared LM head is not published
            value.copy_(tensors[name])
