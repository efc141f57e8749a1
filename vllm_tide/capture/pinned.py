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

import torch

logger = logging.getLogger("vllm.tide")

_PORTABLE = 1  # cudaHostRegisterPortable, hipHostRegisterPortable


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
