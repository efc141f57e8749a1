"""A training step whose weights, gradients and moments are sharded (FSDP2).

`Eagle3Draft` reads its parameters directly, without the forward of submodules, so the
whole loss is made one module and FSDP gathers around its forward. The weights stay
gathered until the backward pass has used them: a draft has one layer, so gathering it
twice would save nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from vllm_tide.config import TrainConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.loss_sums import LossSums
from vllm_tide.train.packing import PackedBatch
from vllm_tide.train.ranks import Ranks
from vllm_tide.train.step import TrainStep


class _Loss(nn.Module):
    """The loss of a batch as a module, for FSDP's hooks around its forward."""

    def __init__(self, draft: Eagle3Draft) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class ShardedStep(TrainStep):
    """A `TrainStep` whose draft is sharded over the ranks; all ranks step together.

    Args:
        draft: Sharded in place.
        target: Output rows for hidden teachers.
        config: Knobs.
        ranks: The group.
    """

    def __init__(
        self, draft: Eagle3Draft, target: TargetRows, config: TrainConfig, ranks: Ranks
    ) -> None:
        """Shard, then start with empty moments."""
        self._module = _Loss(draft)
        fully_shard(self._module, mesh=ranks.mesh, reshard_after_forward=False)
        if ranks.mesh.device_type == "cpu":  # gloo cannot average
            self._module.set_force_sum_reduction_for_comms(True)
        super().__init__(draft, target, config, reduce=_sum_over_ranks)

    def loss_of(self, batch: PackedBatch | None) -> tuple[Tensor, LossSums] | None:
        """See `TrainStep`; parameters are whole inside, and until after backward."""
        compute = super().loss_of
        found: tuple[Tensor, LossSums] | None = self._module(lambda: compute(batch))
        if found is None:  # no backward pass will come
            self._module.reshard()
        return found

    def clip_gradients(self) -> float:
        """See `TrainStep`; the norm is over all shards."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Whole master weights, one after the other (every rank must go through)."""
        for name, value in self.draft.named_tensors().items():
            value = value.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value


def _sum_over_ranks(vector: Tensor) -> Tensor:
    out = vector.detach().clone()
    dist.all_reduce(out)
    return out
