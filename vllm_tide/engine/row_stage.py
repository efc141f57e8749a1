"""One step's rows on their way from the device to the ring (Model Runner V2).

A captured graph hands out views of buffers that its next replay overwrites, so the rows
are packed on the model's stream and leave from there. On a CPU the host is the device
and packing is all there is (`HostStage`); elsewhere see `device_stage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vllm_tide.capture.staging import wire_view
from vllm_tide.capture.step_frames import TopK

if TYPE_CHECKING:
    from vllm_tide.engine.device_stage import DeviceStage

RowStage: TypeAlias = "HostStage | DeviceStage"
TopRows = tuple[Tensor, Tensor, Tensor]
_ALIGN = 16


@dataclass(frozen=True)
class RunLayout:
    """Sizes and offsets of one run, the same on device and host: one copy moves a step.

        features | hidden | top-k ids | log-probs | tail

    Args:
        num_logits: Rows of its logits; 0 without a top-k teacher.
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

    def of(self, rows: np.ndarray, topk: TopRows | None) -> RunLayout:
        """The same for another step; the arguments are those of `HostStage.fill`."""
        logits = 0 if topk is None else len(topk[0])
        return replace(self, num_rows=len(rows), num_logits=logits)

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

    def fill(
        self,
        run: Tensor,
        aux: Sequence[Tensor],
        hidden: Tensor,
        rows: Tensor,
        topk: TopRows | None,
    ) -> None:
        """Copy rows of a step into a run; the arguments are those of `HostStage.fill`.

        Args:
            aux: Empty where the features are there already.
        """
        width, features = self.hidden_size, self.features(run)
        for i, part in enumerate(aux):
            columns = features[:, i * width : (i + 1) * width]
            columns.copy_(part.index_select(0, rows))
        states, top = self.hidden_states(run), self.top(run)
        if states is not None:
            if states.dtype == hidden.dtype:
                torch.index_select(hidden, 0, rows, out=states)
            else:
                states.copy_(hidden.index_select(0, rows))
        if top is not None and topk is not None:
            for out, part in zip(top, topk, strict=True):
                out.copy_(part)

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


class StagedRows:
    """The rows of one step; on a device they may be on their way to the host.

    Attributes:
        layout: None once they are released on a device; so is `host`, their run.
    """

    layout: RunLayout | None = None
    host: Tensor | None = None

    @property
    def features(self) -> np.ndarray:
        """[rows, num_aux * H] in the wire's type, once filled."""
        layout, host = self._held()
        return wire_view(layout.features(host))

    @property
    def hidden(self) -> np.ndarray | None:
        """[rows, H] in the wire's type, or None."""
        layout, host = self._held()
        hidden = layout.hidden_states(host)
        return None if hidden is None else wire_view(hidden)

    @property
    def topk(self) -> TopK | None:
        """Ids, log-probabilities and tail of the step's logits, or None."""
        layout, host = self._held()
        top = layout.top(host)
        return top and (top[0].numpy(), top[1].numpy(), top[2].numpy())

    def filled(self) -> bool:
        """True if the rows have arrived; never waits."""
        return True

    def release(self) -> None:
        """Nobody reads the rows any more."""

    def _held(self) -> tuple[RunLayout, Tensor]:
        if self.layout is None or self.host is None:
            raise RuntimeError("rows were read after they were released")
        return self.layout, self.host


class HostRows(StagedRows):
    """The rows of one step on a CPU.

    Args:
        layout: Of the largest step.
    """

    def __init__(self, layout: RunLayout, stage: HostStage | None = None) -> None:
        self._largest, self._stage = layout, stage
        self.layout, self.host = (
            layout,
            torch.empty(layout.num_bytes, dtype=torch.uint8),
        )

    def fill(
        self,
        aux: Sequence[Tensor],
        hidden: Tensor,
        rows: np.ndarray,
        topk: TopRows | None = None,
    ) -> None:
        """Copy rows of a step; the arguments are those of `HostStage.fill`."""
        layout = self._largest.of(rows, topk)
        self.layout, (_, host) = layout, self._held()
        layout.fill(host, aux, hidden, torch.from_numpy(rows), topk)

    def release(self) -> None:
        if self._stage is not None:
            self._stage.give_back(self)


class HostStage:
    """Buffers for the rows of several steps, on a CPU.

    Args:
        places: Steps under way, at most.
        layout: Of the largest step.
    """

    def __init__(self, places: int, layout: RunLayout) -> None:
        self._free = [HostRows(layout, self) for _ in range(places)]

    def fill(
        self,
        aux: Sequence[Tensor],
        hidden: Tensor,
        rows: np.ndarray,
        topk: TopRows | None,
    ) -> HostRows | None:
        """Pack rows of a step, on the current stream.

        Args:
            aux: num_aux tensors [>= rows of the step, H], lowest layer first.
            rows: int32 [n], which.
            topk: Ids int32 [m, k], log-probabilities [m, k], tail [m] of all logits; or
                None.

        Returns:
            The rows, or None if there is no room: then nothing was done.
        """
        if not self._free:
            return None
        self._free[-1].fill(aux, hidden, rows, topk)
        return self._free.pop()

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what packing needs, before anything is served: nothing here."""

    def give_back(self, rows: HostRows) -> None:
        """A step's place is free again. Idempotent."""
        if rows not in self._free:
            self._free.append(rows)

    def close(self) -> None:
        """Let go what is not garbage-collected; nothing is filled after."""


def make_stage(
    device: torch.device, places: int, layout: RunLayout, room: int
) -> RowStage:
    """The stage for a device; `room` is that of the ring (bytes)."""
    if device.type == "cpu":
        return HostStage(places, layout)
    from vllm_tide.engine.device_stage import DeviceStage

    return DeviceStage(places, layout, device, room)
