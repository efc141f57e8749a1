"""Room on a GPU for one draft that waits to be installed.

The thread that checks publications brings a draft here piece by piece, through a little
page-locked memory and on a stream of its own; installing is then copies within the
device. The room is there from the start: after the KV cache there may be none left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from vllm_tide.capture.pinned import PinnedBytes

PIECE_BYTES = 8 << 20
_POLL_SECONDS = 5e-4


class DeviceRoom:
    """Tensors of a draft's shapes on a CUDA or ROCm device.

    Args:
        reference: The served draft's checkpoint; gives names and shapes.
        shared: Names that are the target's and never published.
        dtype: What the draft computes in; floating-point tensors are kept in it.
        device: Where the model runs.

    Attributes:
        device: As given.
    """

    def __init__(
        self,
        reference: Mapping[str, torch.Tensor],
        shared: frozenset[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self._tensors = {
            name: torch.empty(
                tensor.shape,
                dtype=dtype if tensor.dtype.is_floating_point else tensor.dtype,
                device=device,
            )
            for name, tensor in reference.items()
            if name not in shared
        }
        self._pinned = PinnedBytes(PIECE_BYTES)
        lowest, _ = torch.cuda.Stream.priority_range()
        self._stream = torch.cuda.Stream(device, priority=lowest)
        with torch.cuda.device(device):
            self._copied, self._installed = torch.cuda.Event(), torch.cuda.Event()

    def bring(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy a draft in; returns when all of it is there.

        Only for the thread that stages: it sleeps, and nothing else waits.

        Args:
            tensors: On the host, of the reference's names and shapes.

        Returns:
            The tensors on the device, good until the next call.
        """
        # What is there may still be on its way into the model.
        self._stream.wait_event(self._installed)
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                self._bring_one(tensor.reshape(-1), self._tensors[name].view(-1))
        return {name: self._tensors[name] for name in tensors}

    def installed(self) -> None:
        """The copies into the model were enqueued on the current stream."""
        self._installed.record()

    def close(self) -> None:
        """Let the host memory go; nothing is brought any more."""
        self._stream.synchronize()
        self._pinned.close()

    def _bring_one(self, source: torch.Tensor, room: torch.Tensor) -> None:
        piece = self._pinned.bytes.view(room.dtype)
        for start in range(0, len(room), len(piece)):
            count = min(len(piece), len(room) - start)
            piece[:count].copy_(source[start : start + count])
            room[start : start + count].copy_(piece[:count], non_blocking=True)
            self._copied.record()
            while not self._copied.query():
                time.sleep(_POLL_SECONDS)
