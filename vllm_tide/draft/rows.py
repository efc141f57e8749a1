"""Rows of one draft forward: packed documents (the trunk), then rejected branches.

Shapes: N trunk rows of D documents, M rows of B branches, R = N + M rows in all.

A branch starts at anchor a of its document: its row 0 embeds the rejected token b_1
instead of the committed x_{a+1} and attends to the trunk rows before a only
(eagle3-training.md c.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepRows:
    """Rows that one training-time-test step computes.

    Attributes:
        active: int64 [Q], sorted rows of this step; a subset of the previous step's.
        loss: int64 [L], indices into `active` of rows with a teacher at this step.
    """

    active: Tensor
    loss: Tensor


@dataclass(frozen=True)
class RowLayout:
    """Step-0 keys that each of R rows may attend to.

    Every row is in a segment of consecutive rows (a document or a branch) and attends
    to the rows of its segment up to itself. A row of a branch also attends to its
    document's rows before the anchor.

    Attributes:
        doc_starts: D + 1 offsets; the last is N.
        branch_starts: B + 1 offsets from N to R; [N] without branches.
        anchors: B trunk rows; the branch attends to its document's rows before it.
        docs: B documents of the branches.
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
        """Return the rows that hold the embedded token and the teacher of `rows`.

        Entry j of a branch is of position a + j + 1, so at step 0 row j has entry j.
        """
        return rows + step + (rows < self.num_trunk)

    def spans(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the visible keys of some rows: [own, row] and [low, high).

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
class Rows:
    """R packed rows, and the rows of each step.

    Row t pairs feature t with token t + 1 of the same document. Step i is drafted token
    i + 1: it predicts x_{t+2+i}, whatever the kind of draft.

    Attributes:
        tokens: int64 [R] target ids x_t, and b_1..b_m of each branch.
        positions: int64 [R] true positions, a + j for row j of a branch.
        features: [R, A*H] captured features g_t; row 0 of a branch repeats g_a.
        steps: Not empty when a draft computes them.
    """

    tokens: Tensor
    positions: Tensor
    features: Tensor
    layout: RowLayout
    steps: Sequence[StepRows]
