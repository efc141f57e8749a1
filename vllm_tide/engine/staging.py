"""Fixed buffers for a step's rows between the model and the ring.

The outputs of a captured graph are overwritten by its next replay, so rows are packed
on the model's stream. On a CPU that is all (`HostStage`). Otherwise they are then
copied to the host (`device_stage.py`). A step allocates nothing.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm_tide.capture.step import TopK
from vllm_tide.kernels.pack_rows import pack_rows

logger = logging.getLogger("vllm.tide")

TopRows = tuple[Tensor, Tensor, Tensor]
WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_ALIGN = 16
_PORTABLE = 1  # cudaHostRegisterPortable, hipHostRegisterPortable


@dataclass(frozen=True)
class RunLayout:
    """Sizes and offsets of one run, equal on device and host, so one copy moves a step.

        features | hidden | top-k ids | log-probs | tail

    Args:
        num_logits: Rows of logits; 0 without a top-k teacher.
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
        """Return the layout of another step; arguments as for `HostStage.fill`."""
        logits = 0 if topk is None else len(topk[0])
        return replace(self, num_rows=len(rows), num_logits=logits)

    def features(self, run: Tensor) -> Tensor:
        """Return the features of a run, [num_rows, num_aux * H].

        Args:
            run: uint8 [num_bytes], 16-byte aligned.
        """
        width = self.num_aux * self.hidden_size
        return self._view(run, 0, self.dtype, width)

    def hidden_states(self, run: Tensor) -> Tensor | None:
        """Return the hidden states of a run, [num_rows, H], or None."""
        if not self.hidden:
            return None
        return self._view(run, self._ends()[0], self.dtype, self.hidden_size)

    def top(self, run: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return ids int32 [num_logits, k], log-probs and tail float32; or None."""
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
        """Copy rows of a step into a run; arguments as for `HostStage.fill`."""
        pack_rows(aux, rows, self.features(run))
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
        """Return the ends of features, hidden states, ids, log-probabilities, tail."""
        row = self.hidden_size * self.dtype.itemsize
        ends = [_up(self.num_rows * self.num_aux * row)]
        top = 4 * self.num_logits * self.topk
        for size in (self.num_rows * row * self.hidden, top, top, 4 * self.num_logits):
            ends.append(_up(ends[-1] + size))
        return (ends[0], ends[1], ends[2], ends[3], ends[4])


def _up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class StagedRows:
    """Rows of one step; on a device their copy to the host may be pending.

    Attributes:
        layout: None after the release on a device.
        host: The run in host memory; None after the release on a device.
    """

    layout: RunLayout | None = None
    host: Tensor | None = None

    @property
    def features(self) -> np.ndarray:
        """[rows, num_aux * H] in the wire's type, once filled."""
        layout, host = self._run_on_host()
        return wire_view(layout.features(host))

    @property
    def hidden(self) -> np.ndarray | None:
        """[rows, H] in the wire's type, or None."""
        layout, host = self._run_on_host()
        hidden = layout.hidden_states(host)
        return None if hidden is None else wire_view(hidden)

    @property
    def topk(self) -> TopK | None:
        """Ids, log-probabilities and tail of the step's logits, or None."""
        layout, host = self._run_on_host()
        top = layout.top(host)
        return top and (top[0].numpy(), top[1].numpy(), top[2].numpy())

    def send(self) -> None:
        """Enqueue the copy to the host, at the end of the step."""

    def filled(self) -> bool:
        """Return whether no copy to the host is pending; does not block."""
        return True

    def release(self) -> None:
        """Release the rows after the last read."""

    def _run_on_host(self) -> tuple[RunLayout, Tensor]:
        if self.layout is None or self.host is None:
            raise RuntimeError("rows are read after their release")
        return self.layout, self.host


class HostRows(StagedRows):
    """Rows of one step on a CPU.

    Views are created once, because each costs as much as the copy of a short step.
    """

    def __init__(self, layout: RunLayout, stage: HostStage) -> None:
        self._stage, self._filled = stage, 0
        width, rows = layout.hidden_size, layout.num_rows
        features = torch.empty(rows, layout.num_aux * width, dtype=layout.dtype)
        self._parts = list(features.split(width, dim=1))
        self._features, self._hidden = wire_view(features), None
        if layout.hidden:
            self._parts.append(torch.empty(rows, width, dtype=layout.dtype))
            self._hidden = wire_view(self._parts[-1])
        self._topk: TopRows | None = None

    def fill(
        self,
        aux: Sequence[Tensor],
        hidden: Tensor,
        rows: np.ndarray,
        topk: TopRows | None = None,
    ) -> None:
        """Copy rows of a step; arguments as for `HostStage.fill`."""
        n = self._filled = len(rows)
        self._topk = topk
        first, last = int(rows[0]), int(rows[-1])
        together = last - first == n - 1
        for out, part in zip(self._parts, (*aux, hidden), strict=False):
            if together:
                out[:n].copy_(part[first : last + 1])
            else:
                out[:n].copy_(part.index_select(0, torch.from_numpy(rows)))

    @property
    def features(self) -> np.ndarray:
        return self._features[: self._filled]

    @property
    def hidden(self) -> np.ndarray | None:
        return None if self._hidden is None else self._hidden[: self._filled]

    @property
    def topk(self) -> TopK | None:
        top = self._topk
        return top and (top[0].numpy(), top[1].numpy(), top[2].numpy())

    def release(self) -> None:
        self._topk = None
        self._stage.give_back(self)


class HostStage:
    """Buffers for the rows of several steps, on a CPU."""

    def __init__(self, max_steps: int, layout: RunLayout) -> None:
        self._free = [HostRows(layout, self) for _ in range(max_steps)]

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
            rows: int32 [n], row numbers.
            topk: Ids int32 [m, k], log-probabilities [m, k], tail [m] of all logits; or
                None.

        Returns:
            The rows, or None, without an effect, if no buffer is free.
        """
        if not self._free:
            return None
        self._free[-1].fill(aux, hidden, rows, topk)
        return self._free.pop()

    def warm_up(self, dtype: torch.dtype) -> None:
        """Do nothing; a `DeviceStage` compiles its kernel here."""

    def give_back(self, rows: HostRows) -> None:
        """Release a step's memory. Idempotent."""
        if rows not in self._free:
            self._free.append(rows)

    def close(self) -> None:
        """Do nothing; a `DeviceStage` releases its host memory here."""


class PinnedBytes:
    """Page-locked memory for asynchronous copies of a GPU.

    Mapped pages are registered with the runtime, because Torch's pinned allocator uses
    sizes of powers of two and never frees. `torch.cuda.cudart` has the same names on
    ROCm, where they call HIP.

    Attributes:
        bytes: uint8 [num_bytes], page-aligned; invalid after `close`.

    Raises:
        RuntimeError: The system cannot lock more pages.
    """

    def __init__(self, num_bytes: int) -> None:
        pages = mmap.mmap(-1, max(num_bytes, 1))
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        try:
            error = int(runtime.cudaHostRegister(address, len(memory), _PORTABLE))
        except AttributeError:  # not in this build of Torch
            error = -1
        self._undo = None
        if not error:
            self.bytes = memory[:num_bytes]
            self._undo = weakref.finalize(self, runtime.cudaHostUnregister, address)
            return
        logger.info(
            "vllm_tide: %.0f MiB cannot be registered with the GPU's runtime (error "
            "%d): using Torch's pinned memory",
            len(memory) / 2**20,
            error,
        )
        # Clear the error, which the runtime reports again at the next kernel launch.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def close(self) -> None:
        """Unregister the pages; no copy may be pending. Idempotent."""
        if self._undo is not None:
            self._undo()


@dataclass(slots=True, eq=False)
class Run:
    """An allocated run of bytes.

    Attributes:
        free: Whether it was released; it is reused after all earlier runs.
    """

    start: int
    end: int
    free: bool = False


class RunRing:
    """Circular allocator of runs of bytes in fixed memory.

    A step takes one run for all its rows, so the memory fits many short steps or few
    long ones. The offsets are valid for device memory and for its mirror on the host.
    """

    def __init__(self, num_bytes: int, align: int = 256) -> None:
        self.num_bytes = num_bytes
        self._align = align
        self._out: deque[Run] = deque()

    def take(self, num_bytes: int) -> Run | None:
        """Allocate a contiguous run of `num_bytes`; None if there is no space."""
        size = -(-num_bytes // self._align) * self._align
        start = self._free_start(size)
        if start is None:
            return None
        run = Run(start, start + size)
        self._out.append(run)
        return run

    def give_back(self, run: Run) -> None:
        """Release a run. Idempotent."""
        run.free = True
        while self._out and self._out[0].free:
            self._out.popleft()

    def _free_start(self, size: int) -> int | None:
        if not self._out:
            return 0 if size <= self.num_bytes else None
        tail, head = self._out[0].start, self._out[-1].end
        if self._out[-1].start < tail:  # wrapped around
            return head if size <= tail - head else None
        if size <= self.num_bytes - head:
            return head
        return 0 if size <= tail else None


def top_k_teacher(
    logits: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the target's most likely tokens, and one bucket for all others.

    Args:
        logits: [n, V], raw.
        most: k, limited to V.

    Returns:
        Ids int32 [n, k], log-probabilities float32 [n, k], log-probability of all
        others float32 [n].
    """
    k = min(most, logits.shape[-1])
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top, ids = logprobs.topk(k, dim=-1)
    tail = torch.log1p(-top.exp().sum(dim=-1).clamp(max=1.0))
    return ids.to(torch.int32), top, tail


def wire_view(tensor: torch.Tensor) -> np.ndarray:
    """Return a NumPy view of a CPU tensor in the record's format.

    bfloat16 has no NumPy type; the view contains its bits (uint16).
    """
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    plain: np.ndarray = tensor.numpy()
    return plain
