"""Staging of a step's rows on a GPU and their asynchronous copy to the host.

The model's stream packs the rows into a run of a device buffer. At the end of the step
a low-priority stream copies the run to the same offset in page-locked host memory,
during the next steps: copies to the host are queued, and the step's few bytes (tokens,
confidences) come first. The model's stream waits for neither the copy nor the host: a
run is reused only after an event query has shown that its copy is complete. A step
without a free run is not captured. All memory, streams and events are created at start;
a step allocates nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from vllm_tide.engine.staging import (
    HostStage,
    PinnedBytes,
    Run,
    RunLayout,
    RunRing,
    StagedRows,
    TopRows,
)

logger = logging.getLogger("vllm.tide")

STAGED_STEPS = 3
"""Capacity in steps of the largest size: one is packed, one copied, one written."""


class DeviceRows(StagedRows):
    """Run of a step and its events."""

    def __init__(self, stage: DeviceStage, layout: RunLayout) -> None:
        self._stage = stage
        # Row numbers: written by the host, read by the device when the step runs.
        self.indices = torch.empty(layout.num_rows, dtype=torch.int32, pin_memory=True)
        with torch.cuda.device(stage.device):
            self.ended = torch.cuda.Event()
            self.landed = torch.cuda.Event()
        self.run: Run | None = None
        self.on_device: torch.Tensor | None = None  # until it is sent

    def send(self) -> None:
        """Enqueue the copy, after all of the step on the current stream."""
        if self.on_device is not None:
            on_device, self.on_device = self.on_device, None
            self._stage.send(self, on_device)

    def filled(self) -> bool:
        """Return whether no copy is pending; does not block."""
        return self.on_device is not None or bool(self.landed.query())

    def release(self) -> None:
        self._stage.give_back(self)


class DeviceStage:
    """`HostStage` for a CUDA or ROCm device.

    Args:
        max_steps: Most steps in flight.
        ring_bytes: Capacity of the ring, and the most that is staged at once.
    """

    def __init__(
        self, max_steps: int, layout: RunLayout, device: torch.device, ring_bytes: int
    ) -> None:
        self.device, self._layout, max_rows = device, layout, layout.num_rows
        most = min(STAGED_STEPS * layout.num_bytes, 2 * ring_bytes)
        self._ring = RunRing(most + STAGED_STEPS * 256)
        size = self._ring.num_bytes
        self._device_bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._pinned = PinnedBytes(size)
        self._host_bytes = self._pinned.bytes
        self._all = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._some = torch.empty_like(self._all)
        lowest, _ = torch.cuda.Stream.priority_range()
        self._copies = torch.cuda.Stream(device, priority=lowest)
        self._free = [DeviceRows(self, layout) for _ in range(max_steps)]
        logger.info(
            "vllm_tide: capture stages rows in %.0f MiB on %s and as much on the host",
            size / 2**20,
            device,
        )

    def fill(
        self,
        aux: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        rows: np.ndarray,
        topk: TopRows | None,
    ) -> DeviceRows | None:
        """Enqueue packing and copying of rows; see `HostStage.fill`."""
        layout = self._layout.of(rows, topk)
        run = self._ring.take(layout.num_bytes) if self._free else None
        if run is None:
            return None
        staged = self._free.pop()
        try:
            part = slice(run.start, run.start + layout.num_bytes)
            on_device, on_host = self._device_bytes[part], self._host_bytes[part]
            layout.fill(on_device, aux, hidden, self._upload(staged, rows), topk)
        except BaseException:
            self._ring.give_back(run)
            self._free.append(staged)
            raise
        staged.run, staged.layout, staged.host = run, layout, on_host
        staged.on_device = on_device
        return staged

    def send(self, staged: DeviceRows, on_device: torch.Tensor) -> None:
        """Enqueue the copy of packed rows to the host."""
        assert staged.host is not None  # noqa: S101 - set by `fill`
        staged.ended.record()
        self._copies.wait_event(staged.ended)
        with torch.cuda.stream(self._copies):
            staged.host.copy_(on_device, non_blocking=True)
            staged.landed.record()

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel with one row: no argument depends on their number."""
        width, num_aux = self._layout.hidden_size, self._layout.num_aux
        layer = torch.zeros(1, width, dtype=dtype, device=self.device)
        rows = np.zeros(1, np.int32)
        staged = self.fill([layer] * num_aux, layer, rows, None)
        if staged is not None:
            staged.send()
            staged.release()

    def give_back(self, rows: DeviceRows) -> None:
        """Release a step's run after its copy is complete. Idempotent."""
        if rows.run is not None:
            self._ring.give_back(rows.run)
            rows.run = rows.layout = rows.host = rows.on_device = None
            self._free.append(rows)

    def close(self) -> None:
        """Wait for pending copies and release the host memory, at shutdown."""
        self._copies.synchronize()
        self._free.clear()
        self._pinned.close()

    def _upload(self, staged: DeviceRows, rows: np.ndarray) -> torch.Tensor:
        """Return the row numbers on the device; copy none if they are 0 to n - 1.

        They are strictly ascending, so it suffices to check the last one.
        """
        n = len(rows)
        if rows[-1] == n - 1:
            return self._all[:n]
        staged.indices[:n].numpy()[:] = rows
        return self._some[:n].copy_(staged.indices[:n], non_blocking=True)


def make_stage(
    device: torch.device, max_steps: int, layout: RunLayout, ring_bytes: int
) -> HostStage | DeviceStage:
    """Create the stage for a device; `ring_bytes` is the capacity of the ring."""
    if device.type == "cpu":
        return HostStage(max_steps, layout)
    return DeviceStage(max_steps, layout, device, ring_bytes)
