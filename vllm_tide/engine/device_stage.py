"""Rows of a step on a GPU: packed behind the step, copied to the host beside the next.

On the model's stream the rows are packed into a run of a device buffer; a stream of low
priority then copies the run to the same place in page-locked host memory. The model's
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

from vllm_tide.capture.pinned import PinnedBytes
from vllm_tide.capture.recorder import TopK
from vllm_tide.capture.run_ring import Run, RunRing
from vllm_tide.capture.staging import wire_view
from vllm_tide.engine.row_stage import TopRows
from vllm_tide.engine.run_layout import RunLayout
from vllm_tide.kernels.pack_rows import NUM_LAYERS, pack_rows

logger = logging.getLogger("vllm.tide")

STEPS_HELD = 3
"""Steps of the largest size that fit: one packed, one copied, one that is written."""


class DeviceRows:
    """A step's place: its run and the events that follow it.

    Args:
        stage: Where it goes back to.
        max_rows: Most rows of a step.
        device: Where the model runs.
    """

    def __init__(self, stage: DeviceStage, max_rows: int, device: torch.device) -> None:
        self._stage = stage
        # Which rows: written by the host, read by the device once the step runs.
        self.wanted = torch.empty(max_rows, dtype=torch.int32, pin_memory=True)
        with torch.cuda.device(device):
            self.packed = torch.cuda.Event()
            self.landed = torch.cuda.Event()
        self.run: Run | None = None
        self.layout: RunLayout | None = None
        self.host: torch.Tensor | None = None

    @property
    def features(self) -> np.ndarray:
        """See `StagedRows`."""
        layout, host = self._held()
        return wire_view(layout.features(host))

    @property
    def hidden(self) -> np.ndarray | None:
        """See `StagedRows`."""
        layout, host = self._held()
        hidden = layout.hidden_states(host)
        return None if hidden is None else wire_view(hidden)

    @property
    def topk(self) -> TopK | None:
        """See `StagedRows`."""
        layout, host = self._held()
        top = layout.top(host)
        if top is None:
            return None
        return top[0].numpy(), top[1].numpy(), top[2].numpy()

    def filled(self) -> bool:
        """Whether the copy is done; a query, no wait."""
        return bool(self.landed.query())

    def release(self) -> None:
        """See `StagedRows`."""
        self._stage.give_back(self)

    def _held(self) -> tuple[RunLayout, torch.Tensor]:
        if self.layout is None or self.host is None:
            raise RuntimeError("rows were read after they were released")
        return self.layout, self.host


class DeviceStage:
    """`RowStage` on a CUDA or ROCm device.

    Args:
        places: Steps under way, at most.
        max_rows: Most rows of a step.
        num_aux: Number of captured layers.
        hidden_size: H.
        dtype: Of features and hidden states.
        hidden: Whether hidden teachers are staged too.
        max_logits: Most rows of logits of a step.
        topk: Tokens of a top-k teacher; 0 for none.
        device: Where the model runs.
        room: Bytes of the ring: no more are staged at once, so twice them suffice.
    """

    def __init__(
        self,
        places: int,
        max_rows: int,
        num_aux: int,
        hidden_size: int,
        dtype: torch.dtype,
        hidden: bool,
        max_logits: int,
        topk: int,
        device: torch.device,
        room: int,
    ) -> None:
        self._device = device
        self._kind = (num_aux, hidden_size, dtype, hidden, topk)
        largest = RunLayout(max_rows, max_logits if topk else 0, *self._kind)
        most = min(STEPS_HELD * largest.num_bytes, 2 * room)
        self._ring = RunRing(most + STEPS_HELD * 256)
        size = self._ring.num_bytes
        self._device_bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._pinned = PinnedBytes(size)
        self._host_bytes = self._pinned.bytes
        self._all = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._some = torch.empty_like(self._all)
        lowest, _ = torch.cuda.Stream.priority_range()
        self._copies = torch.cuda.Stream(device, priority=lowest)
        self._free = [DeviceRows(self, max_rows, device) for _ in range(places)]
        empty = torch.empty(0, num_aux * hidden_size, dtype=dtype)
        teacher = wire_view(torch.empty(0, hidden_size, dtype=dtype))
        self._like = wire_view(empty), teacher if hidden else None
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
        """See `RowStage`. Every call only enqueues."""
        logits = 0 if topk is None else len(topk[0])
        layout = RunLayout(len(rows), logits, *self._kind)
        run = self._ring.take(layout.num_bytes) if self._free else None
        if run is None:
            return None
        place = self._free.pop()
        try:
            part = slice(run.start, run.start + layout.num_bytes)
            on_device, on_host = self._device_bytes[part], self._host_bytes[part]
            wanted = self._upload(place, rows)
            self._pack(layout, on_device, aux, hidden, wanted, topk)
            place.packed.record()
            self._copies.wait_event(place.packed)
            with torch.cuda.stream(self._copies):
                on_host.copy_(on_device, non_blocking=True)
                place.landed.record()
        except BaseException:
            self._ring.give_back(run)
            self._free.append(place)
            raise
        place.run, place.layout, place.host = run, layout, on_host
        return place

    def warm_up(self, dtype: torch.dtype) -> None:
        """See `RowStage`. No argument of the kernel depends on the number of rows."""
        num_aux, width, *_ = self._kind
        layer = torch.zeros(1, width, dtype=dtype, device=self._device)
        rows = np.zeros(1, np.int32)
        place = self.fill([layer] * num_aux, layer, rows, None)
        if place is not None:
            place.release()

    def like(self) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RowStage`."""
        return self._like

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

    def _upload(self, place: DeviceRows, rows: np.ndarray) -> torch.Tensor:
        """The rows' numbers on the device; nothing is copied where they are the first.

        Strictly ascending, so the last one tells.
        """
        n = len(rows)
        if rows[-1] == n - 1:
            return self._all[:n]
        place.wanted[:n].numpy()[:] = rows
        return self._some[:n].copy_(place.wanted[:n], non_blocking=True)

    def _pack(
        self,
        layout: RunLayout,
        block: torch.Tensor,
        aux: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        rows: torch.Tensor,
        topk: TopRows | None,
    ) -> None:
        width, features = layout.hidden_size, layout.features(block)
        if len(aux) == NUM_LAYERS:
            pack_rows(aux, rows, features)
        else:
            for i, part in enumerate(aux):
                columns = features[:, i * width : (i + 1) * width]
                columns.copy_(part.index_select(0, rows))
        states, top = layout.hidden_states(block), layout.top(block)
        if states is not None:
            if states.dtype == hidden.dtype:
                torch.index_select(hidden, 0, rows, out=states)
            else:
                states.copy_(hidden.index_select(0, rows))
        if top is not None and topk is not None:
            for out, part in zip(top, topk, strict=True):
                out.copy_(part)
