"""Where the parts of one step's rows lie in their run of staging memory.

    features | hidden | top-k ids | log-probs | tail

Device and host hold the same bytes at the same offsets, so one copy moves a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN = 16


@dataclass(frozen=True)
class RunLayout:
    """Sizes and offsets of one run.

    Args:
        num_rows: Rows of the step.
        num_logits: Rows of its logits; 0 without a top-k teacher.
        num_aux: Captured layers.
        hidden_size: H.
        dtype: Of features and hidden states.
        hidden: Whether hidden teachers are staged.
        topk: Tokens of a top-k teacher.
    """

    num_rows: int
    num_logits: int
    num_aux: int
    hidden_size: int
    dtype: torch.dtype
    hidden: bool
    topk: int

    @property
    def num_bytes(self) -> int:
        """Size of the run (bytes)."""
        return self._ends()[-1]

    def features(self, run: Tensor) -> Tensor:
        """Its features, [num_rows, num_aux * H].

        Args:
            run: uint8 [num_bytes], 16-byte aligned.
        """
        width = self.num_aux * self.hidden_size
        return self._view(run, 0, self.dtype, width)

    def hidden_states(self, run: Tensor) -> Tensor | None:
        """Its hidden states, [num_rows, H], or None."""
        if not self.hidden:
            return None
        return self._view(run, self._ends()[0], self.dtype, self.hidden_size)

    def top(self, run: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Ids int32 [num_logits, k], log-probabilities and tail float32; or None."""
        if not self.num_logits:
            return None
        _, ids, logprobs, tail, _ = self._ends()
        n, k = self.num_logits, self.topk
        return (
            run[ids : ids + 4 * n * k].view(torch.int32).view(n, k),
            run[logprobs : logprobs + 4 * n * k].view(torch.float32).view(n, k),
            run[tail : tail + 4 * n].view(torch.float32),
        )

    def _view(self, run: Tensor, start: int, dtype: torch.dtype, width: int) -> Tensor:
        end = start + self.num_rows * width * dtype.itemsize
        return run[start:end].view(dtype).view(self.num_rows, width)

    def _ends(self) -> tuple[int, int, int, int, int]:
        """End of the features, of hidden states, of ids, log-probabilities, tail."""
        row = self.hidden_size * self.dtype.itemsize
        ends = [_up(self.num_rows * self.num_aux * row)]
        top = 4 * self.num_logits * self.topk
        for size in (self.num_rows * row * self.hidden, top, top, 4 * self.num_logits):
            ends.append(_up(ends[-1] + size))
        return (ends[0], ends[1], ends[2], ends[3], ends[4])


def _up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
