"""One step's rows on their way from the device to the ring (Model Runner V2).

A captured graph hands out views of buffers that its next replay overwrites, so the rows
are packed on the model's stream and leave from there. On a CPU the host is the device
and packing is all there is (`HostStage`); elsewhere see `device_stage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from vllm_tide.capture.recorder import TopK
from vllm_tide.capture.staging import WIRE_DTYPES, Staging

TopRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class StagedRows(Protocol):
    """The rows of one step, on the host or on their way to it."""

    @property
    def features(self) -> np.ndarray:
        """[>= rows, num_aux * H] in the wire's type, once filled."""

    @property
    def hidden(self) -> np.ndarray | None:
        """[>= rows, H] in the wire's type, or None."""

    @property
    def topk(self) -> TopK | None:
        """Ids, log-probabilities and tail of the step's logits, or None."""

    def filled(self) -> bool:
        """Whether the rows have arrived; never waits."""

    def release(self) -> None:
        """Nobody reads the rows any more."""


class RowStage(Protocol):
    """Room for the rows of several steps."""

    def fill(
        self,
        aux: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        rows: np.ndarray,
        topk: TopRows | None,
    ) -> StagedRows | None:
        """Pack rows of a step, on the current stream.

        Args:
            aux: num_aux tensors [>= rows of the step, H], lowest layer first.
            hidden: The same after the target's final norm.
            rows: int32 [n], which.
            topk: Ids int32 [m, k], log-probabilities [m, k], tail [m] of all logits; or
                None.

        Returns:
            The rows, or None if there is no room: then nothing was done.
        """

    def like(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Features [0, num_aux * H] and hidden states [0, H] in the wire's type."""

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what packing needs, before anything is served.

        Args:
            dtype: Of the layers that will be given.
        """

    def close(self) -> None:
        """Let go what is not garbage-collected; nothing is filled after."""


class HostRows:
    """A step's place on a CPU.

    Args:
        stage: Where it goes back to.
        staging: Features and hidden states.
        max_logits: Most rows of logits of a step.
        topk: Tokens of a top-k teacher; 0 for none.
    """

    def __init__(
        self, stage: HostStage, staging: Staging, max_logits: int, topk: int
    ) -> None:
        self._stage = stage
        self._staging = staging
        self._has_topk = False
        self._ids = torch.empty(max_logits, topk, dtype=torch.int32)
        self._logprobs = torch.empty(max_logits, topk)
        self._tail = torch.empty(max_logits)

    @property
    def features(self) -> np.ndarray:
        """See `StagedRows`."""
        return self._staging.features

    @property
    def hidden(self) -> np.ndarray | None:
        """See `StagedRows`."""
        return self._staging.teacher

    @property
    def topk(self) -> TopK | None:
        """See `StagedRows`."""
        if not self._has_topk:
            return None
        return self._ids.numpy(), self._logprobs.numpy(), self._tail.numpy()

    def copy_in(
        self,
        aux: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        rows: np.ndarray,
        topk: TopRows | None,
    ) -> None:
        """Copy rows of a step; the arguments are those of `RowStage.fill`."""
        self._staging.fill(aux, hidden, torch.from_numpy(rows))
        self._has_topk = topk is not None
        if topk is not None:
            ids, logprobs, tail = topk
            self._ids[: len(ids)].copy_(ids)
            self._logprobs[: len(ids)].copy_(logprobs)
            self._tail[: len(ids)].copy_(tail)

    def filled(self) -> bool:
        """A CPU copies at once."""
        return True

    def release(self) -> None:
        """See `StagedRows`."""
        self._stage.give_back(self)


class HostStage:
    """`RowStage` on a CPU.

    Args:
        places: Steps under way, at most.
        max_rows: Most rows of a step.
        num_aux: Number of captured layers.
        hidden_size: H.
        dtype: "bfloat16", "float16" or "float32", of features and hidden states.
        hidden: Whether hidden teachers are staged too.
        max_logits: Most rows of logits of a step.
        topk: Tokens of a top-k teacher; 0 for none.
    """

    def __init__(
        self,
        places: int,
        max_rows: int,
        num_aux: int,
        hidden_size: int,
        dtype: str,
        hidden: bool,
        max_logits: int,
        topk: int,
    ) -> None:
        sizes = (max_rows, num_aux, hidden_size, dtype, hidden)
        self._free = [
            HostRows(self, Staging(*sizes), max_logits, topk) for _ in range(places)
        ]
        features, teacher = self._free[0].features, self._free[0].hidden
        self._like = features[:0], None if teacher is None else teacher[:0]

    def fill(
        self,
        aux: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        rows: np.ndarray,
        topk: TopRows | None,
    ) -> HostRows | None:
        """See `RowStage`."""
        if not self._free:
            return None
        self._free[-1].copy_in(aux, hidden, rows, topk)
        return self._free.pop()

    def like(self) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RowStage`."""
        return self._like

    def warm_up(self, dtype: torch.dtype) -> None:
        """See `RowStage`; there is nothing to compile."""

    def give_back(self, rows: HostRows) -> None:
        """A step's place is free again. Idempotent."""
        if rows not in self._free:
            self._free.append(rows)

    def close(self) -> None:
        """See `RowStage`."""


def make_stage(
    device: torch.device,
    places: int,
    max_rows: int,
    num_aux: int,
    hidden_size: int,
    dtype: str,
    hidden: bool,
    max_logits: int,
    topk: int,
    room: int,
) -> RowStage:
    """The stage for a device; the arguments are those of `HostStage`.

    `room` is that of the ring (bytes).
    """
    sizes = (places, max_rows, num_aux, hidden_size)
    if device.type == "cpu":
        return HostStage(*sizes, dtype, hidden, max_logits, topk)
    from vllm_tide.engine.device_stage import DeviceStage

    kind = WIRE_DTYPES[dtype]
    return DeviceStage(*sizes, kind, hidden, max_logits, topk, device, room)
