"""Rows of a step on a GPU: packed behind the step, copied to the host beside the next.

On the model's stream the rows are packed into a run of a device buffer; a stream of low
priority then copies the run to the same place in page-locked host memory. The model's
stream waits for neither the copy nor the host: bytes of a run are written again only
after an event query, steps later, has said that the copy is done. Without a free run a
step's rows are left out. All memory, streams and events are made at the start; a step
allocates nothing.

Rows of large records land in the shared-memory ring itself, whose pages are registered
with the runtime: the host then only reads them, for the checksum. Small ones come in
one copy with all others of their step and are copied on by the host: a copy call for
each of them would cost the model's thread more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_tide.capture.pinned import PinnedBytes, register
from vllm_tide.capture.recorder import TopK
from vllm_tide.capture.run_ring import Run, RunRing
from vllm_tide.capture.staging import wire_view
from vllm_tide.engine.row_stage import TopRows
from vllm_tide.engine.run_layout import Landing, RunLayout
from vllm_tide.kernels.pack_rows import pack_rows

logger = logging.getLogger("vllm.tide")

STEPS_HELD = 3
"""Steps of the largest size that fit: one packed, one copied, one that is written."""


class DeviceRows:
    """A step's place: its run and the events that follow it.

    Args:
        stage: Where it goes back to.
        device: Where the model runs.
    """

    def __init__(self, stage: DeviceStage, device: torch.device) -> None:
        self._stage = stage
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
    ) -> None:
        self._device = device
        self._kind = (num_aux, hidden_size, dtype, hidden, topk)
        largest = RunLayout(max_rows, max_logits if topk else 0, *self._kind)
        self._ring = RunRing(STEPS_HELD * largest.num_bytes + STEPS_HELD * 256)
        size = self._ring.num_bytes
        self._device_bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._pinned = PinnedBytes(size)
        self._host_bytes = self._pinned.bytes
        self._shared: torch.Tensor | None = None  # the ring's segment
        self._undo: Any = None
        lowest, _ = torch.cuda.Stream.priority_range()
        self._copies = torch.cuda.Stream(device, priority=lowest)
        self._free = [DeviceRows(self, device) for _ in range(places)]
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
        token_ids: torch.Tensor,
        aux: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        num_rows: int,
        topk: TopRows | None,
        landings: Sequence[Landing] = (),
    ) -> DeviceRows | None:
        """See `RowStage`. Every call only enqueues."""
        logits = 0 if topk is None else len(topk[0])
        layout = RunLayout(num_rows, logits, *self._kind)
        run = self._ring.take(layout.num_bytes) if self._free else None
        if run is None:
            return None
        rows = self._free.pop()
        try:
            part = slice(run.start, run.start + layout.num_bytes)
            on_device, on_host = self._device_bytes[part], self._host_bytes[part]
            self._pack(layout, on_device, token_ids, aux, hidden, num_rows, topk)
            rows.packed.record()
            self._copies.wait_event(rows.packed)
            with torch.cuda.stream(self._copies):
                for part, place in layout.copies(landings):
                    to = on_host[part] if place is None else self._landing(place)
                    to.copy_(on_device[part], non_blocking=True)
                rows.landed.record()
        except BaseException:
            self._ring.give_back(run)
            self._free.append(rows)
            if landings:  # their slots are given up: nothing may be on its way there
                self._copies.synchronize()
            raise
        rows.run, rows.layout, rows.host = run, layout, on_host
        return rows

    def use_ring(self, memory: memoryview) -> bool:
        """See `RowStage`. Once: registering waits for the device."""
        if self._shared is not None:
            return False
        held = torch.frombuffer(memory, dtype=torch.uint8)
        self._undo = register(held, self, "rows reach the ring through the host")
        if self._undo is None:
            return False
        self._shared = held
        return True

    def warm_up(self, dtype: torch.dtype) -> None:
        """See `RowStage`. No argument of the kernel depends on the number of rows."""
        num_aux, width, *_ = self._kind
        ids = torch.zeros(1, dtype=torch.int32, device=self._device)
        layer = torch.zeros(1, width, dtype=dtype, device=self._device)
        rows = self.fill(ids, [layer] * num_aux, layer, 1, None)
        if rows is not None:
            rows.release()

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
        if self._undo is not None:
            self._undo()
            self._shared = None  # which kept the segment mapped

    def _landing(self, place: slice) -> torch.Tensor:
        assert self._shared is not None  # noqa: S101 - `use_ring` said so
        return self._shared[place]

    def _pack(
        self,
        layout: RunLayout,
        block: torch.Tensor,
        token_ids: torch.Tensor,
        aux: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        num_rows: int,
        topk: TopRows | None,
    ) -> None:
        packed = layout.packed
        if packed is not None:
            pack_rows(
                [part[:num_rows] for part in aux],
                token_ids[:num_rows],
                packed,
                block[: packed.num_bytes],
            )
        else:
            width, features = layout.hidden_size, layout.features(block)
            for i, part in enumerate(aux):
                features[:, i * width : (i + 1) * width].copy_(part[:num_rows])
        states, top = layout.hidden_states(block), layout.top(block)
        if states is not None:
            states.copy_(hidden[:num_rows])
        if top is not None and topk is not None:
            for out, part in zip(top, topk, strict=True):
                out.copy_(part)
