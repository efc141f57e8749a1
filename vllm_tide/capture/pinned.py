"""Host memory that a GPU copies into and out of by itself.

Pages of our own are registered rather than taken from Torch's pinned allocator, which
rounds up to a power of two and never gives back. `torch.cuda.cudart` has the same names
on ROCm, where they are HIP's.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from typing import Any

import torch

logger = logging.getLogger("vllm.tide")

_PORTABLE = 1  # cudaHostRegisterPortable, hipHostRegisterPortable


def register(memory: torch.Tensor, owner: object, instead: str) -> Any:
    """Page-lock memory that is there already, so that a GPU copies to and from it.

    Args:
        memory: uint8 on the host, mapped for as long as it is registered.
        owner: It is undone at the latest when this goes.
        instead: For the log, should it be refused: what is done instead.

    Returns:
        Undoes it, when no copy is under way (idempotent); None if it was refused.
    """
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    try:
        refused = int(runtime.cudaHostRegister(address, len(memory), _PORTABLE))
    except AttributeError:  # a build of torch whose runtime does not offer it
        refused = -1
    if not refused:
        return weakref.finalize(owner, runtime.cudaHostUnregister, address)
    logger.info(
        "vllm_tide: %.0f MiB are not registered with the GPU's runtime (error %d): %s",
        len(memory) / 2**20,
        refused,
        instead,
    )
    # The runtime shows an error once more, to who launches a kernel next.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return None


class PinnedBytes:
    """Page-locked memory.

    Args:
        num_bytes: Its size.

    Attributes:
        bytes: uint8 [num_bytes], starting at a page; not to be used after `close`.

    Raises:
        RuntimeError: The machine locks no more pages.
    """

    def __init__(self, num_bytes: int) -> None:
        pages = mmap.mmap(-1, max(num_bytes, 1))
        held = torch.frombuffer(pages, dtype=torch.uint8)
        self._undo = register(held, self, "Torch's pinned memory is used")
        if self._undo is None:
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.bytes = held[:num_bytes]

    def close(self) -> None:
        """Let the pages go; no copy may be under way. Idempotent."""
        if self._undo is not None:
            self._undo()
