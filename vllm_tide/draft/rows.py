"""Rows of one draft forward: packed documents (the trunk), then rejected branches.

Shapes: N trunk rows of D documents, M branch rows of B branches, R = N + M rows in
all. Branch row r of a batch is row N + r of the forward.

A branch leaves its document at anchor a: its row 0 embeds the rejected token b_1 in
place of the true x_{a+1} and sees the trunk rows before a only
(eagle3-training.md c.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepRows:
    """Which rows one training-time-test step computes.

    Attributes:
        active: int64 [Q], sorted rows computed at this step; a subset of the last.
        loss: int64 [L], indices into `active` of rows with a teacher at this step.
    """

    active: Tensor
    loss: Tensor


def rows_of_steps(masks: Sequence[Tensor]) -> list[StepRows]:
    """Rows that each step computes: all that it or a later one trains.

    Args:
        masks: Per step bool [n], rows that it trains.

    Returns:
        No entries for steps after the last that trains any.
    """
    steps: list[StepRows] = []
    needed = torch.zeros(())
    for mask in reversed(masks):
        needed = mask | needed if steps else mask
        if steps or bool(mask.any()):
            active = needed.nonzero().flatten()
            steps.append(StepRows(active, mask[active].nonzero().flatten()))
    return steps[::-1]


@dataclass(frozen=True)
class BranchInputs:
    """Inputs of `Eagle3Draft.forward_ttt` for the branches.

    Attributes:
        tokens: int64 [M], drafted target ids b_1..b_m of each branch. Row j of a branch
            embeds b_{j+1+i} at step i.
        features: [M, A*H]; row 0 of a branch has the trunk's g_a, row j the target's
            features at a + j on the branch.
        positions: int64 [M], true positions a + j.
        starts: B + 1 offsets into the M rows.
        anchors: B trunk rows (packed index of position a).
        steps: Rows per step; `active` counts from 0 to M - 1.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    starts: list[int]
    anchors: list[int]
    docs: list[int]
    steps: Sequence[StepRows]


@dataclass(frozen=True)
class RowLayout:
    """Which step-0 keys each of R rows may attend to.

    Every row belongs to a segment of consecutive rows (a document or a branch) and sees
    the rows of its segment up to itself. A row of a branch sees its document's rows
    before the anchor as well.

    Attributes:
        doc_starts: D + 1 offsets; the last is N.
        branch_starts: B + 1 offsets, the first is N and the last R; [N] without any.
        anchors: B trunk rows; the branch sees its document's rows before this one.
    """

    doc_starts: list[int]
    branch_starts: list[int]
    anchors: list[int]
    docs: list[int]

    @property
    def num_rows(self) -> int:
        return self.branch_starts[-1]

    def spans(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys that some rows see: [own, row] and [low, high).

        Args:
            rows: int64 [Q].

        Returns:
            own, low, high, each int64 [Q]; low == high for trunk rows.
        """
        device = rows.device
        starts = torch.tensor(
            [*self.doc_starts[:-1], *self.branch_starts[:-1]], device=device
        )
        low = [0] * (len(self.doc_starts) - 1)
        high = list(low)
        low += [self.doc_starts[d] for d in self.docs]
        high += self.anchors
        segment = torch.searchsorted(starts, rows, right=True) - 1
        return (
            starts[segment],
            torch.tensor(low, device=device)[segment],
            torch.tensor(high, device=device)[segment],
        )


@dataclass(frozen=True)
class JoinedRows:
    """Trunk and branches as one batch.

    Attributes:
        tokens: Row r embeds `tokens[r + 1 + i]` at step i.
        features: [R, A*H].
        positions: int64 [R].
        steps: Rows per step over all R rows, the trunk's first.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    layout: RowLayout
    steps: Sequence[StepRows]


def join_rows(
    tokens: Tensor,
    features: Tensor,
    positions: Tensor,
    doc_starts: Sequence[int],
    steps: Sequence[StepRows],
    branches: BranchInputs | None,
) -> JoinedRows:
    """Put the branches after the trunk; arguments as in `Eagle3Draft.forward_ttt`."""
    starts = list(doc_starts)
    count = starts[-1]
    if branches is None:
        layout = RowLayout(starts, [count], [], [])
        return JoinedRows(tokens, features, positions, layout, steps)
    layout = RowLayout(
        starts, [count + s for s in branches.starts], branches.anchors, branches.docs
    )
    # one filler, so that r + 1 + i is right for branch rows as it is for the trunk
    following = torch.cat([tokens, tokens[-1:], branches.tokens])
    none = tokens.new_empty(0, dtype=torch.int64)
    empty = StepRows(none, none)
    joined = []
    for i in range(max(len(steps), len(branches.steps))):
        trunk = steps[i] if i < len(steps) else empty
        branch = branches.steps[i] if i < len(branches.steps) else empty
        active = torch.cat([trunk.active, branch.active + count])
        loss = torch.cat([trunk.loss, branch.loss + trunk.active.numel()])
        joined.append(StepRows(active, loss))
    return JoinedRows(
        following,
        torch.cat([features, branches.features]),
        torch.cat([positions, branches.positions]),
        layout,
        joined,
    )
