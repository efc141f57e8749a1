"""Rows of a step on a GPU: packed behind the step, copied to the host beside the next.

On the model's stream the rows are packed into a run of a device buffer; a stream of low
priority then copies the run to the same offset in page-locked host memory. The model's
stream waits for neither the copy nor the host: bytes of a run are written again only
after an event query, steps later, has said that the copy is done. Without a free run a
step's rows are left out. All memory, streams and events are made at the start; a step
allocates nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from vllm_tide.engine.staging import (
    PinnedBytes,
    Run,
    RunLayout,
    RunRing,
    StagedRows,
    TopRows,
)
from vllm_tide.kernels.pack_rows import NUM_LAYERS, pack_rows

logger = logging.getLogger("vllm.tide")

STEPS_HELD = 3
"""Steps of the largest size that fit: one packed, one copied, one that is written."""


class DeviceRows(StagedRows):
    """A step's memory: its run and the events that follow it."""

    def __init__(self, stage: DeviceStage, layout: RunLayout) -> None:
        self._stage = stage
        # Which rows: written by the host, read by the device once the step runs.
        self.wanted = torch.empty(layout.num_rows, dtype=torch.int32, pin_memory=True)
        with torch.cuda.device(stage.device):
            self.packed = torch.cuda.Event()
            self.landed = torch.cuda.Event()
        self.run: Run | None = None

    def filled(self) -> bool:
        """True if the copy is done; a query, no wait."""
        return bool(self.landed.query())

    def release(self) -> None:
        self._stage.give_back(self)


class DeviceStage:
    """`HostStage` for a CUDA or ROCm device.

    Args:
        max_steps: Steps under way, at most.
        room: Bytes of the ring: no more are staged at once, so twice them suffice.
    """

    def __init__(
        self, max_steps: int, layout: RunLayout, device: torch.device, room: int
    ) -> None:
        self.device, self._layout, max_rows = device, layout, layout.num_rows
        most = min(STEPS_HELD * layout.num_bytes, 2 * room)
        self._ring = RunRing(most + STEPS_HELD * 256)
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
        """Every call only enqueues."""
        layout = self._layout.of(rows, topk)
        run = self._ring.take(layout.num_bytes) if self._free else None
        if run is None:
            return None
        staged = self._free.pop()
        try:
            part = slice(run.start, run.start + layout.num_bytes)
            on_device, on_host = self._device_bytes[part], self._host_bytes[part]
            wanted = self._upload(staged, rows)
            if len(aux) == NUM_LAYERS:
                pack_rows(aux, wanted, layout.features(on_device))
                aux = ()
            layout.fill(on_device, aux, hidden, wanted, topk)
            staged.packed.record()
            self._copies.wait_event(staged.packed)
            with torch.cuda.stream(self._copies):
                on_host.copy_(on_device, non_blocking=True)
                staged.landed.record()
        except BaseException:
            self._ring.give_back(run)
            self._free.append(staged)
            raise
        staged.run, staged.layout, staged.host = run, layout, on_host
        return staged

    def warm_up(self, dtype: torch.dtype) -> None:
        """No argument of the kernel depends on the number of rows."""
        width, num_aux = self._layout.hidden_size, self._layout.num_aux
        layer = torch.zeros(1, width, dtype=dtype, device=self.device)
        rows = np.zeros(1, np.int32)
        staged = self.fill([layer] * num_aux, layer, rows, None)
        if staged is not None:
            staged.release()

    def give_back(self, rows: DeviceRows) -> None:
        """A step's run is free again, once its copy is done. Idempotent."""
        if rows.run is not None:
            self._ring.give_back(rows.run)
            rows.run = rows.layout = rows.host = None
            self._free.append(rows)

    def close(self) -> None:
        """Wait for the copies under way and let the host memory go; at shutdown."""
        self._copies.synchronize()
        self._free.clear()
        self._pinned.close()

    def _upload(self, staged: DeviceRows, rows: np.ndarray) -> torch.Tensor:
        """The rows' numbers on the device; nothing is copied where they are the first.

        Strictly ascending, so the last one tells.
        """
        n = len(rows)
        if rows[-1] == n - 1:
            return self._all[:n]
        staged.wanted[:n].numpy()[:] = rows
        return self._some[:n].copy_(staged.wanted[:n], non_blocking=True)
