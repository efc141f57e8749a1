"""Fixed buffers between the model's tensors and the ring: no allocation per step.

Host memory that a GPU copies into and out of by itself consists of pages of our own
that are registered: Torch's pinned allocator rounds up to a power of two and never
gives back. `torch.cuda.cudart` has the same names on ROCm, where they are HIP's.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

logger = logging.getLogger("vllm.tide")

_PORTABLE = 1  # cudaHostRegisterPortable, hipHostRegisterPortable


class PinnedBytes:
    """Page-locked memory.

    Attributes:
        bytes: uint8 [num_bytes], starting at a page; not to be used after `close`.

    Raises:
        RuntimeError: The machine locks no more pages.
    """

    def __init__(self, num_bytes: int) -> None:
        pages = mmap.mmap(-1, max(num_bytes, 1))
        held = torch.frombuffer(pages, dtype=torch.uint8)
        runtime, address = torch.cuda.cudart(), held.data_ptr()
        try:
            refused = int(runtime.cudaHostRegister(address, len(held), _PORTABLE))
        except AttributeError:  # a build of torch whose runtime does not offer it
            refused = -1
        self._undo = None
        if not refused:
            self.bytes = held[:num_bytes]
            self._undo = weakref.finalize(self, runtime.cudaHostUnregister, address)
            return
        logger.info(
            "vllm_tide: %.0f MiB are not registered with the GPU's runtime (error %d): "
            "Torch's pinned memory is used",
            len(held) / 2**20,
            refused,
        )
        # The runtime shows an error once more, to who launches a kernel next.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def close(self) -> None:
        """Let the pages go; no copy may be under way. Idempotent."""
        if self._undo is not None:
            self._undo()


@dataclass(slots=True, eq=False)
class Run:
    """A run that was handed out.

    Attributes:
        free: Whether it was given back; it is reused once all before it were.
    """

    start: int
    end: int
    free: bool = False


class RunRing:
    """Runs of bytes in one fixed piece of memory, handed out in a circle.

    A step takes one run for all its rows, so the memory holds many short steps or few
    long ones. The memory may be a device's, its mirror on the host, or both.

    Args:
        align: Each run starts at a multiple of this.
    """

    def __init__(self, num_bytes: int, align: int = 256) -> None:
        self.num_bytes = num_bytes
        self._align = align
        self._out: deque[Run] = deque()

    def take(self, num_bytes: int) -> Run | None:
        """A run of `num_bytes`, in one piece; None if there is no such room now."""
        size = -(-num_bytes // self._align) * self._align
        start = self._room(size)
        if start is None:
            return None
        run = Run(start, start + size)
        self._out.append(run)
        return run

    def give_back(self, run: Run) -> None:
        """The run's bytes are nobody's any more. Idempotent."""
        run.free = True
        while self._out and self._out[0].free:
            self._out.popleft()

    def _room(self, size: int) -> int | None:
        if not self._out:
            return 0 if size <= self.num_bytes else None
        tail, head = self._out[0].start, self._out[-1].end
        if self._out[-1].start < tail:  # it has come round
            return head if size <= tail - head else None
        if size <= self.num_bytes - head:
            return head
        return 0 if size <= tail else None


def top_k_teacher(
    logits: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's most likely tokens, and one bucket for the rest.

    Args:
        logits: [n, V], raw.
        most: k; at most V of it is used.

    Returns:
        Ids int32 [n, k], log-probabilities float32 [n, k], log-probability of all
        others float32 [n].
    """
    k = min(most, logits.shape[-1])
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top, ids = logprobs.topk(k, dim=-1)
    tail = torch.log1p(-top.exp().sum(dim=-1).clamp(max=1.0))
    return ids.to(torch.int32), top, tail


WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def wire_view(tensor: torch.Tensor) -> np.ndarray:
    """NumPy view of a CPU tensor as it goes over the wire.

    bfloat16 has no NumPy type, so it is seen as its bits (uint16).
    """
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    plain: np.ndarray = tensor.numpy()
    return plain
