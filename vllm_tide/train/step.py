"""One optimizer step on packed documents: AdamW on fp32 master parameters."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vllm_tide.config import TrainConfig
from vllm_tide.draft.module import Draft, Weights
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.gpu import on_device
from vllm_tide.train.loss_terms import LossMix
from vllm_tide.train.losses import (
    HiddenTeacher,
    KernelTeacher,
    LossSums,
    Reduce,
    StepResult,
    Teacher,
    TopKTeacher,
    fused_lm_head_loss,
)
from vllm_tide.train.packing import Batch, PackedBatch, plan_rows
from vllm_tide.train.sample import TopK

logger = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
COMPUTE_DTYPE = torch.bfloat16  # of the forward pass; master weights are fp32
GRAD_CLIP = 1.0  # largest global gradient norm, as in EAGLE-3's trainers
_FAST_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # CPU flags; bf16 on aarch64
_BFLOAT16_ISAS = ("BF16", "FP16", "AMX", "AVX10", "DEFAULT", "ALL")  # of oneDNN


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
        self, packed: PackedBatch | None, lr_scale: float = 1.0
    ) -> StepResult | None:
        """Train on this rank's batch; None: take part without a batch.

        Returns:
            None if no rank has a row to train, or the gradient is not finite.
        """
        loss = self.loss_of(packed)
        if loss is None:
            return None
        total, result = loss
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = self.clip_gradients()
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * lr_scale
        self.optimizer.step()
        return replace(result, grad_norm=norm)

    def clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, GRAD_CLIP)
        return float(norm)

    def loss_of(self, packed: PackedBatch | None) -> tuple[Tensor, StepResult] | None:
        """Return the loss of a batch times the number of ranks, and its figures.

        None if no rank has a row to train.
        """
        batch = None if packed is None else self._plan(packed)
        if batch is None and self.reduce is None:
            return None
        draft, config = self.draft, self.config
        decay, num_steps = draft.step_decay, config.ttt_steps
        sums = LossSums(self.mix, num_steps, decay, self.reduce, packed, batch)
        if sums.is_empty:
            return None
        w = draft.compute_weights(self.dtype)
        if batch is None:
            return _zero(w), sums.result(None)
        wide = torch.promote_types(self.dtype, torch.float32)
        batch, weights = on_device((batch, sums.weights.to(wide)), self.device)
        outputs = torch.cat(
            draft.forward_steps(
                batch.rows, w, depth=num_steps, attention=config.attention
            )
        )
        total, values = fused_lm_head_loss(
            outputs[batch.loss.order] if self.trains_branches else outputs,
            draft.tensor("lm_head.weight"),
            w["lm_head.weight"].detach(),
            self._teacher(batch.teacher),
            self.mix,
            batch.loss,
            weights,
        )
        return total * sums.num_ranks, sums.result(values)

    def _plan(self, packed: PackedBatch) -> Batch | None:
        draft, mix = self.draft, self.mix
        kinds = {"committed": bool(mix.committed), "branches": self.trains_branches}
        steps = plan_rows(packed, self.config.ttt_steps, **kinds)
        if not steps:
            return None
        return Batch.from_plan(packed, draft.choose_rows(steps), draft.vocab.draft_ids)

    @torch.no_grad()
    def _teacher(self, rows: Tensor | TopK) -> Teacher | KernelTeacher:
        if isinstance(rows, TopK):
            return TopKTeacher.from_topk(rows, on_device(self.draft.vocab, self.device))
        if self._by_kernel:
            return KernelTeacher(
                rows.to(self.dtype),
                self.target,
                self.target_rows,
                self.mix.names == ("reverse_kl",),
            )
        return HiddenTeacher.from_hidden(
            rows, self.target, self.target_rows, self.dtype, self._target_ids
        )


def _zero(weights: Weights) -> Tensor:
    """Return a zero that depends on every trained weight, so all have gradients."""
    parts = [w.sum().float() for w in weights.values() if w.requires_grad]
    return torch.stack(parts).sum() * 0.0
