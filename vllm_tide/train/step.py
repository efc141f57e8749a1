"""One optimizer step: packed documents in, fp32 master parameters moved by AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_tide.config import TrainConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.losses import LOSSES, Loss, Teacher, fused_head_loss
from vllm_tide.train.masks import Plan, plan_steps
from vllm_tide.train.packing import PackedBatch

# A document with fewer trained rows than this weighs less than a full one, so that
# equal weight per request does not hand a batch to its shortest documents.
MIN_ROWS_OF_FULL_WEIGHT = 64
BETAS = (0.9, 0.95)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FAST_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one on aarch64


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        loss: Weighted sum over steps (gamma^i).
        step_losses: Mean loss per training-time-test step (nats).
        grad_norm: Global norm before clipping.
        num_tokens: Packed rows.
        num_loss_rows: Rows with a loss, all steps.
    """

    loss: float
    step_losses: list[float]
    grad_norm: float
    num_tokens: int
    num_loss_rows: int


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware.

    With it a step takes 0.6 of the fp32 time at the demo size, without it 1.8 times
    as long (scripts/bench/train_step.py, with ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI).
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = next(
        (x for x in text.splitlines() if x.startswith(("flags", "Features"))), ""
    )
    return not _FAST_BFLOAT16.isdisjoint(flags.split())


def document_weights(batch: PackedBatch) -> Tensor:
    """fp32 [N]: equal weight per document, reduced for very short ones."""
    counts = torch.zeros(len(batch.doc_starts) - 1)
    counts.index_add_(0, batch.doc_ids, batch.valid.float())
    return (1.0 / counts.clamp(min=MIN_ROWS_OF_FULL_WEIGHT))[batch.doc_ids]


class TrainStep:
    """Holds optimizer state for one draft.

    Args:
        draft: Moved in place.
        target: Output rows for hidden teachers.
        config: Knobs.
        loss: Name in `LOSSES`.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        target: TargetRows,
        config: TrainConfig,
        loss: str = "forward_kl",
    ) -> None:
        """Start with empty moments."""
        self.draft, self.target, self.config = draft, target, config
        self.dtype = _DTYPES[config.compute_dtype]
        self.loss: Loss = LOSSES[loss]
        self.target_rows = target.lm_head[draft.vocab.target_ids].to(self.dtype)
        self.parameters = [p for p in draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def reset(self) -> None:
        """Forget the optimizer's moments (after going back to the live draft)."""
        self.optimizer.state.clear()

    def run(self, batch: PackedBatch, lr_scale: float = 1.0) -> StepResult | None:
        """Train on one batch; None when nothing in it can be trained."""
        plan = plan_steps(batch.valid, batch.doc_ids, self.config.ttt_steps)
        if plan is None:
            return None
        total, step_losses = self.loss_of(batch, plan)
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip)
        if not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * lr_scale
        self.optimizer.step()
        return StepResult(
            loss=float(total.detach()),
            step_losses=step_losses,
            grad_norm=float(norm),
            num_tokens=batch.num_tokens,
            num_loss_rows=plan.num_loss_rows,
        )

    def loss_of(self, batch: PackedBatch, plan: Plan) -> tuple[Tensor, list[float]]:
        """Differentiable loss of a batch, and the mean value per step."""
        draft = self.draft
        weights = draft.compute_weights(self.dtype)
        outputs = draft.forward_ttt(
            batch.tokens,
            batch.features,
            batch.positions,
            batch.doc_starts,
            plan.steps,
            self.dtype,
            weights,
        )
        wanted = torch.cat(plan.targets)
        used, index = torch.unique(wanted, return_inverse=True)
        teacher = self._teacher(batch, used)
        per_row = document_weights(batch)
        parts, decay = [], 1.0
        for target in plan.targets:
            w = per_row[target]
            parts.append(w * (decay / w.sum()))
            decay *= self.config.step_decay
        total, values = fused_head_loss(
            torch.cat(outputs),
            draft.tensor("lm_head.weight"),
            weights["lm_head.weight"].detach(),
            teacher,
            index,
            torch.cat(parts),
            self.loss,
        )
        sizes = [t.numel() for t in plan.targets]
        means = [float(v.mean()) for v in values.split(sizes)]
        return total, means

    def _teacher(self, batch: PackedBatch, used: Tensor) -> Teacher:
        with torch.no_grad():
            if batch.teacher_hidden is not None:
                return Teacher.from_hidden(
                    batch.teacher_hidden[used],
                    self.target,
                    self.target_rows,
                    self.dtype,
                )
            return Teacher.from_topk(
                batch.topk_rows(used), self.draft.vocab, self.dtype
            )
