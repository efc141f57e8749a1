"""Where the parts of one step's rows lie in their run of staging memory.

    token ids, features (`PackLayout`) | hidden | top-k ids | log-probs | tail

Device and host hold the same bytes at the same offsets, so one copy moves a step. Of
the rows that land in the ring itself each request's are one piece there, and go alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_tide.kernels.pack_layout import NUM_LAYERS, PackLayout
from vllm_tide.transport.ring_format import Places

_ALIGN = 16


class Landing(NamedTuple):
    """Rows of a step that go straight into a slot of the ring.

    Attributes:
        low: First row.
        high: End of the rows.
        teacher: First row whose hidden state goes too.
        places: Of the slot.
    """

    low: int
    high: int
    teacher: int
    places: Places


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
    def packed(self) -> PackLayout | None:
        """Of the part that `pack_rows` writes; None if these are not its layers."""
        if self.num_aux != NUM_LAYERS:
            return None
        return PackLayout(self.num_rows, self.hidden_size, self.dtype)

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
        return self._view(run, self._features_at, self.dtype, width)

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

    def copies(
        self, landings: Sequence[Landing]
    ) -> Iterator[tuple[slice, slice | None]]:
        """What moves a step to the host.

        Args:
            landings: In the order of their rows.

        Yields:
            Bytes of the run, and those of the ring's segment that they go to; None for
            the same bytes of the host's run.
        """
        if not landings:
            yield slice(0, self.num_bytes), None
            return
        end = 0
        for low, high, teacher, places in landings:
            yield from self._pieces(end, low)
            features, _ = self._bytes_of(low, high)
            yield features, places.features
            if self.hidden and teacher < high:
                yield self._bytes_of(teacher, high)[1], places.hidden
            end = high
        yield from self._pieces(end, self.num_rows)
        if self.num_logits:
            yield slice(self._ends()[1], self.num_bytes), None

    def _pieces(self, low: int, high: int) -> Iterator[tuple[slice, None]]:
        if low < high:
            features, hidden = self._bytes_of(low, high)
            yield features, None
            if self.hidden:
                yield hidden, None

    def _bytes_of(self, low: int, high: int) -> tuple[slice, slice]:
        """Of rows: their features, their hidden states."""
        row = self.hidden_size * self.dtype.itemsize
        starts = (self._features_at, row * self.num_aux), (self._ends()[0], row)
        first, second = (slice(at + low * n, at + high * n) for at, n in starts)
        return first, second

    @property
    def _features_at(self) -> int:
        packed = self.packed
        return 0 if packed is None else packed.features_at

    def _view(self, run: Tensor, start: int, dtype: torch.dtype, width: int) -> Tensor:
        end = start + self.num_rows * width * dtype.itemsize
        return run[start:end].view(dtype).view(self.num_rows, width)

    def _ends(self) -> tuple[int, int, int, int, int]:
        """End of the features, of hidden states, of ids, log-probabilities, tail."""
        packed, item = self.packed, self.dtype.itemsize
        row = self.hidden_size * item
        first = self.num_rows * self.num_aux * row
        ends = [_up(first if packed is None else packed.num_bytes)]
        top = 4 * self.num_logits * self.topk
        for size in (self.num_rows * row * self.hidden, top, top, 4 * self.num_logits):
            ends.append(_up(ends[-1] + size))
        return (ends[0], ends[1], ends[2], ends[3], ends[4])


def _up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
