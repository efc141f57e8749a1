"""One optimizer step on packed documents: AdamW on fp32 master parameters."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vllm_tide.config import TrainConfig
from vllm_tide.draft.module import Draft, Weights
from vllm_tide.draft.rows import StepRows
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.gpu import on_device
from vllm_tide.train.loss_terms import LossMix
from vllm_tide.train.losses import (
    HiddenTeacher,
    KernelTeacher,
    LossSummer,
    LossSums,
    LossTask,
    Reduce,
    Teacher,
    TopKTeacher,
    fused_lm_head_loss,
)
from vllm_tide.train.packing import LossRows, PackedBatch, plan_rows
from vllm_tide.train.sample import TopK

logger = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
COMPUTE_DTYPE = torch.bfloat16  # of the forward pass; master weights are fp32
GRAD_CLIP = 1.0  # largest global gradient norm, as in EAGLE-3's trainers
_FAST_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # CPU flags; bf16 on aarch64
_BFLOAT16_ISAS = ("BF16", "FP16", "AMX", "AVX10", "DEFAULT", "ALL")  # of oneDNN


@dataclass(frozen=True)
class StepResult:
    """Results of one step, over all ranks.

    Attributes:
        loss: Weighted sum over steps (gamma^i) and terms.
        step_losses: Weighted sum of the terms' means per training-time-test step.
        terms: Mean of each term at each step (nats).
    """

    loss: float
    step_losses: list[float]
    grad_norm: float
    num_tokens: int
    num_loss_rows: int
    num_branch_rows: int = 0
    terms: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """A batch of this rank with the rows to train."""

    batch: PackedBatch
    steps: list[StepRows]
    rows: LossRows
    labels: Tensor


def has_fast_bfloat16(device: str = "cpu") -> bool:
    """Return whether a device multiplies bfloat16 in hardware.

    On a CPU a bfloat16 step takes 0.6 of the fp32 time at the demo size, without such
    hardware 1.8 (scripts/bench/train_step.py, ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI).
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # ONEDNN_MAX_CPU_ISA may disable the bfloat16 instructions.
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    if not any(isa in most for isa in _BFLOAT16_ISAS):
        return False
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = next(
        (x for x in text.splitlines() if x.startswith(("flags", "Features"))), ""
    )
    return not _FAST_BFLOAT16.isdisjoint(flags.split())


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the forward pass: float32 where bfloat16 is emulated."""
    fast = torch.bfloat16 != COMPUTE_DTYPE or has_fast_bfloat16(str(device))
    return COMPUTE_DTYPE if fast else torch.float32


class TrainStep:
    """Training step and optimizer state of one draft.

    With `reduce` each rank trains on different documents: numerators, denominators and
    counts are reduced over all ranks, and the loss is multiplied by the number of
    ranks, since the framework averages gradients. All documents of a request must be on
    one rank, because they share its weight.

    Batches are planned and weighted on the host, and computed on the target's device.

    Args:
        reduce: Sums a float64 vector (host) over ranks, called twice per step by every
            rank (once if no rank has a row to train); None: one rank.
        like: A step of the same target; its target rows are reused if they fit.

    Raises:
        ConfigError: No loss term has a weight.
    """

    def __init__(
        self,
        draft: Draft,
        target: TargetRows,
        config: TrainConfig,
        reduce: Reduce | None = None,
        like: TrainStep | None = None,
    ) -> None:
        self.draft, self.target, self.config = draft, target, config
        self.mix = LossMix.from_config(config)
        self.reduce = reduce
        self.device = target.lm_head.device
        self.dtype = compute_dtype(self.device)
        if self.dtype != COMPUTE_DTYPE:
            logger.info("no bfloat16 on %s: computing in float32", self.device)
        self._by_kernel = KernelTeacher.fits(self.mix, self.device)
        self._target_ids: Tensor | None = None
        self.target_rows: Tensor
        ids = draft.vocab.target_ids
        if like is not None and like.has_rows(self.mix, ids):
            self.target_rows = like.target_rows
        elif not self.mix.needs_mass or draft.vocab.is_identity:
            self.target_rows = target.lm_head[ids].to(self.dtype)
        else:
            self._target_ids = on_device(ids, self.device)
            self.target_rows = target.rows_in(self.dtype)
        self.parameters = [p for p in draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=BETAS,
            weight_decay=0.0,  # decay would erase the initial weights
            fused=True,
        )

    @property
    def trains_branches(self) -> bool:
        """True if batches need rejected branches."""
        return bool(self.mix.branch) and self.draft.trains_branches

    def has_rows(self, mix: LossMix, target_ids: Tensor) -> bool:
        """Return whether `target_rows` fit a draft vocabulary and these terms."""
        vocab = self.draft.vocab
        if self._target_ids is not None or mix.needs_mass and not vocab.is_identity:
            return False
        return torch.equal(vocab.target_ids, target_ids)

    def reset(self) -> None:
        """Clear the optimizer's moments (after a return to the live draft)."""
        self.optimizer.state.clear()

    def run(
        self, batch: PackedBatch | None, lr_scale: float = 1.0
    ) -> StepResult | None:
        """Train on this rank's batch; None: take part without a batch.

        Returns:
            None if no rank has a row to train, or the gradient is not finite.
        """
        result = self.loss_of(batch)
        if result is None:
            return None
        total, sums = result
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = self.clip_gradients()
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * lr_scale
        self.optimizer.step()
        losses = sums.step_losses
        return StepResult(
            loss=sum(x * self.draft.step_decay**i for i, x in enumerate(losses)),
            step_losses=losses,
            grad_norm=norm,
            num_tokens=sums.num_tokens,
            num_loss_rows=sums.num_loss_rows,
            num_branch_rows=sums.num_branch_rows,
            terms=sums.terms,
        )

    def clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, GRAD_CLIP)
        return float(norm)

    def loss_of(self, batch: PackedBatch | None) -> tuple[Tensor, LossSums] | None:
        """Return the loss of a batch times the number of ranks, and its sums.

        None if no rank has a row to train.
        """
        work = None if batch is None else self._plan(batch)
        if work is None and self.reduce is None:
            return None
        config = self.config
        weights = self.draft.compute_weights(self.dtype)
        outputs = None if work is None else self._forward(work, weights)
        summer = LossSummer(
            self.mix, config.ttt_steps, self.draft.step_decay, self.reduce
        )
        per_row = summer.weigh(
            None if work is None else work.rows,
            None if work is None else work.labels,
            [] if batch is None else batch.keys,
            0 if batch is None else batch.num_rows,
        )
        if per_row is None:
            return None
        if work is None or outputs is None:
            return _zero(weights), summer.close(None)
        total, values = self._lm_head_loss(work, outputs, weights, per_row)
        return total * summer.num_ranks, summer.close(values)

    def _plan(self, batch: PackedBatch) -> Work | None:
        mix, num_steps = self.mix, self.config.ttt_steps
        kinds = {"committed": bool(mix.committed), "branches": self.trains_branches}
        steps = plan_rows(batch, num_steps, **kinds)
        return self._work(batch, self.draft.choose_rows(steps)) if steps else None

    def _work(self, batch: PackedBatch, steps: list[StepRows]) -> Work:
        rows = LossRows.from_plan(batch, steps)
        return Work(batch, steps, rows, rows.labels(self.draft.vocab.draft_ids))

    def _forward(self, work: Work, weights: Weights) -> Tensor:
        """Return normed output rows [L, H] in the order of `work.rows`."""
        batch = work.batch
        inputs = batch.tokens, batch.features, batch.positions, work.rows.order
        tokens, features, positions, order = on_device(inputs, self.device)
        outputs = self.draft.forward_steps(
            tokens,
            features,
            positions,
            batch.layout,
            on_device(work.steps, self.device),
            self.dtype,
            weights,
            depth=self.config.ttt_steps,
            attention=self.config.attention,
        )
        joined = torch.cat(outputs)
        return joined[order] if self.trains_branches else joined

    def _lm_head_loss(
        self, work: Work, outputs: Tensor, weights: Weights, per_row: Tensor
    ) -> tuple[Tensor, Tensor]:
        used, index = torch.unique(work.rows.teacher, return_inverse=True)
        per_row = per_row.to(torch.promote_types(self.dtype, torch.float32))
        rows = index, per_row, work.labels
        index, per_row, labels = on_device(rows, self.device)
        task = LossTask(self.mix, index, per_row, labels, work.rows.num_committed)
        return fused_lm_head_loss(
            outputs,
            self.draft.tensor("lm_head.weight"),
            weights["lm_head.weight"].detach(),
            self._teacher(work.batch, used),
            task,
        )

    @torch.no_grad()
    def _teacher(self, batch: PackedBatch, used: Tensor) -> Teacher | KernelTeacher:
        rows = batch.teacher[used]
        if isinstance(rows, TopK):
            listed = TopKTeacher.from_topk(rows, self.draft.vocab)
            return on_device(listed, self.device)  # type: ignore[no-any-return]
        hidden = on_device(rows, self.device)
        if self._by_kernel:
            return KernelTeacher(hidden.to(self.dtype), self.target, self.target_rows)
        return HiddenTeacher.from_hidden(
            hidden,
            self.target,
            self.target_rows,
            self.dtype,
            self._target_ids,
        )


def _zero(weights: Weights) -> Tensor:
    """Return a zero that depends on every trained weight, so all have gradients."""
    parts = [w.sum().float() for w in weights.values() if w.requires_grad]
    return torch.stack(parts).sum() * 0.0
