"""Rows of one draft forward: packed documents (the trunk), then rejected branches.

Shapes: N trunk rows of D documents, M rows of B branches, R = N + M rows in all.

A branch leaves its document at anchor a: its row 0 embeds the rejected token b_1 in
place of the true x_{a+1} and sees the trunk rows before a only
(eagle3-training.md c.8).
"""

from __future__ import annotations

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

    @property
    def num_trunk(self) -> int:
        return self.doc_starts[-1]

    def ahead(self, rows: Tensor, step: int | Tensor) -> Tensor:
        """Rows whose token some rows embed at a step, and whose teacher they have.

        Entry j of a branch is of position a + j + 1, so its row j begins with its own.
        """
        return rows + step + (rows < self.num_trunk)

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
