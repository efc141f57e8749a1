"""Which rows are trained at which training-time-test step (eagle3-training.md c.6).

Row t, step i predicts token x_{t+2+i} with teacher y_{t+1+i}. It is trained iff
position t+1+i lies in the same document, has a captured teacher, and its token is
generated. So the first trained row is P-1 (P prompt tokens): the first draft after
prefill. The last captured position has no teacher for its own row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tide.draft.rows import StepRows


@dataclass(frozen=True)
class Plan:
    """Rows of all steps.

    Attributes:
        steps: Rows computed and trained per step.
        targets: Per step int64 [L_i], packed index of the teacher of each loss row.
    """

    steps: list[StepRows]
    targets: list[Tensor]

    @property
    def num_loss_rows(self) -> int:
        """Loss rows over all steps."""
        return sum(t.numel() for t in self.targets)


def plan_steps(
    valid: Tensor, doc_ids: Tensor, num_steps: int, *, complete: bool = False
) -> Plan | None:
    """Plan the rows of every step.

    Args:
        valid: bool [N], position may serve as teacher (generated token, captured).
        doc_ids: int64 [N], document of each packed row, non-decreasing.
        num_steps: Training-time-test steps K.
        complete: Keep only rows trained at every step (used by evaluation).

    Returns:
        None when nothing is trained. Steps after the last trained one are left out.
    """
    count = valid.numel()
    masks = []
    for i in range(num_steps):
        mask = torch.zeros(count, dtype=torch.bool)
        shift = i + 1
        if shift < count:
            same = doc_ids[shift:] == doc_ids[:-shift]
            mask[:-shift] = valid[shift:] & same
        masks.append(mask)
    if complete:
        every = torch.stack(masks).all(0)
        masks = [every] * num_steps
    while masks and not bool(masks[-1].any()):
        masks.pop()
    if not masks:
        return None
    steps: list[StepRows] = []
    targets: list[Tensor] = []
    needed = torch.zeros(count, dtype=torch.bool)
    for i in reversed(range(len(masks))):
        needed = needed | masks[i]
        active = needed.nonzero().flatten()
        loss = masks[i][active].nonzero().flatten()
        steps.append(StepRows(active, loss))
        targets.append(active[loss] + 1 + i)
    return Plan(steps[::-1], targets[::-1])
