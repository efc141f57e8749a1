"""Keeps what the draft has not seen while drafting was off, and shows it to it later.

A step without drafting leaves the draft's KV cache without the step's tokens. Upstream
runs the draft's first pass all the same; we keep the features (the tensors that the
target's forward made, which on a CPU nothing writes again) and feed them in one batched
pass when drafting resumes. The memory is bounded: what is dropped leaves a hole, which
costs acceptance of the requests it belongs to and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_tide.config import MIB


@dataclass(frozen=True, slots=True)
class _Step:
    """Rows of one skipped step: row `row[i] + j` holds position `start[i] + j`."""

    first: int  # number of the step's first row since the start
    features: Sequence[torch.Tensor]
    slots: np.ndarray
    row: np.ndarray
    count: np.ndarray
    start: np.ndarray


class DraftBacklog:
    """Features of positions that are missing in the draft's KV cache.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or its CPU subclass.
        mib: Most memory for features (MiB).

    Attributes:
        missing: int64 [capacity] positions to catch up, by slot.
        holes: Positions that were dropped before they were caught up (total).
    """

    def __init__(
        self, runner: Any, mib: int, num_aux: int, hidden_size: int, capacity: int
    ) -> None:
        self._runner = runner
        row = num_aux * hidden_size * runner.dtype.itemsize
        self._size = mib * MIB // row  # rows
        self._written = 0
        self._steps: deque[_Step] = deque()
        # Rows of a slot before this one are caught up or belong to another request.
        self._since = np.zeros(capacity, np.int64)
        self.missing = np.zeros(capacity, np.int64)
        self.holes = 0

    def forget(self, slot: int) -> None:
        """The slot's request ended, or the slot begins anew."""
        self.seen(np.array([slot]))

    def seen(self, slots: np.ndarray) -> None:
        """The draft is about to see all rows of these requests."""
        self._since[slots] = self._written
        self.missing[slots] = 0
        while self._steps and not self._waiting(self._steps[0]).any():
            self._steps.popleft()

    def keep(
        self,
        features: Sequence[torch.Tensor],
        slots: np.ndarray,
        row: np.ndarray,
        count: np.ndarray,
        start: np.ndarray,
        num_rows: int,
    ) -> None:
        """Keep the rows of a step that the draft does not run for, and the arrays.

        Args:
            features: num_aux tensors [>= num_rows, H]. They are held; only a part of
                something larger, as of a buffer that is used again, is copied.
            slots: [n] the requests.
            row: [n] first row of each request.
            count: [n] rows that were committed (accepted tokens).
            start: [n] position of each first row.
        """
        if num_rows > self._size:  # a step is kept whole
            self.holes += int(count.sum())
            return
        held = [
            layer if layer.untyped_storage().nbytes() == layer.nbytes else layer.clone()
            for layer in features
        ]
        step = _Step(self._written, held, slots, row, count, start)
        self.missing[slots] += count
        self._written += len(held[0])
        self._steps.append(step)
        while self._steps and self._written - self._steps[0].first > self._size:
            step = self._steps.popleft()
            lost = np.where(self._waiting(step), step.count, 0)
            self.missing[step.slots] -= lost
            self.holes += int(lost.sum())

    def _waiting(self, step: _Step) -> np.ndarray:
        """Requests of a step whose rows the draft has not seen, bool [n]."""
        return np.asarray(self._since[step.slots] <= step.first)

    def catch_up(
        self,
        indices: np.ndarray,
        slots: np.ndarray,
        attention: Any,
        newest: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Run the draft over the missing positions of some requests.

        The token after each position is read from the runner's own table, which is not
        written: it gets a step's tokens only after drafting.

        Args:
            indices: [m] the requests' indices in the runner's batch.
            slots: [m] their slots.
            newest: [m] the token after each request's last position, where that is of
                this step.

        Returns:
            [m, H] the draft's last hidden state at each request's last position; rows
            of requests that missed nothing are zero.
        """
        spans = [self._span(int(slot)) for slot in slots]
        drafter = self._runner.drafter
        last = torch.zeros((len(spans), drafter.hidden_size), dtype=drafter.dtype)
        limit = int(drafter.max_num_tokens)
        todo = [(i, 0) for i, (_, rows) in enumerate(spans) if len(rows)]
        while todo:
            pieces: list[tuple[int, int, int]] = []
            left = limit
            while todo and left:
                i, begin = todo.pop()
                end = min(len(spans[i][1]), begin + left)
                pieces.append((i, begin, end))
                left -= end - begin
                if end < len(spans[i][1]):
                    todo.append((i, end))
                    break
            self._pass(pieces, spans, indices, attention, last, newest)
        self.seen(slots)
        return last

    def _span(self, slot: int) -> tuple[int, np.ndarray]:
        parts: list[np.ndarray] = []
        first = expected = -1
        for step in reversed(self._steps):
            if step.first < self._since[slot]:
                break
            found = np.nonzero(step.slots == slot)[0]
            if len(found) == 0:
                continue
            i = int(found[0])
            start, count = int(step.start[i]), int(step.count[i])
            if expected not in (-1, start + count):
                break
            low = step.first + int(step.row[i])
            parts.append(np.arange(low, low + count))
            first = expected = start
        if not parts:
            return 0, np.empty(0, np.int64)
        return first, np.concatenate(parts[::-1])

    def _pass(
        self,
        pieces: list[tuple[int, int, int]],
        spans: list[tuple[int, np.ndarray]],
        indices: np.ndarray,
        attention: Any,
        last: torch.Tensor,
        newest: np.ndarray | None,
    ) -> None:
        from vllm.forward_context import set_forward_context

        runner, drafter = self._runner, self._runner.drafter
        rows = np.concatenate([spans[i][1][b:e] for i, b, e in pieces])
        positions = np.concatenate(
            [spans[i][0] + np.arange(b, e) for i, b, e in pieces]
        )
        tokens = np.concatenate(
            [
                runner.input_batch.token_ids_cpu[
                    indices[i], spans[i][0] + b + 1 : spans[i][0] + e + 1
                ]
                for i, b, e in pieces
            ]
        )
        ends = np.cumsum([e - b for _, b, e in pieces]) - 1
        if newest is not None:
            for (i, _, e), end in zip(pieces, ends, strict=True):
                if e == len(spans[i][1]):
                    tokens[end] = newest[i]
        num_rows = len(rows)
        metadata = self._metadata(pieces, spans, indices, positions, attention)
        features = self._features(rows)
        drafter.hidden_states[:num_rows] = drafter.model.combine_hidden_states(features)
        drafter.input_ids[:num_rows] = torch.from_numpy(tokens)
        drafter._set_positions(num_rows, torch.from_numpy(positions))
        _, per_layer = drafter.build_per_group_and_layer_attn_metadata(metadata)
        mode, padded, across = drafter._determine_batch_execution_and_padding(num_rows)
        inputs, size = drafter.build_model_inputs_first_pass(num_rows, padded, None)
        with set_forward_context(
            per_layer,
            drafter.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=drafter._get_slot_mapping(size, metadata.slot_mapping),
        ):
            hidden = drafter.model(**inputs)
        if drafter.model_returns_tuple():
            hidden = hidden[0]
        owners = torch.tensor([i for i, _, _ in pieces])
        last[owners] = hidden[torch.from_numpy(ends)]

    def _features(self, rows: np.ndarray) -> torch.Tensor:
        """[len(rows), num_aux * H], of rows by their number since the start."""
        firsts = np.fromiter((step.first for step in self._steps), np.int64)
        found = firsts.searchsorted(rows, "right") - 1
        used, of = np.unique(found, return_inverse=True)
        parts = [self._steps[int(place)].features for place in used]
        ends = np.cumsum([0, *(len(part[0]) for part in parts)])
        at = torch.from_numpy(rows - firsts[found] + ends[of])
        layers = [torch.cat(layer)[at] for layer in zip(*parts, strict=True)]
        return torch.cat(layers, dim=-1)

    def _metadata(
        self,
        pieces: list[tuple[int, int, int]],
        spans: list[tuple[int, np.ndarray]],
        indices: np.ndarray,
        positions: np.ndarray,
        attention: Any,
    ) -> Any:
        """Attention of the pass: each piece is a chunk of its request's prefill."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = np.array([e - b for _, b, e in pieces], np.int32)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
        starts = starts.to(torch.int32)
        lengths = np.array([spans[i][0] + e for i, _, e in pieces], np.int32)
        owners = torch.from_numpy(indices[[i for i, _, _ in pieces]])
        table = attention.block_table_tensor[owners]
        block = int(self._runner.drafter.block_size)
        row_owner = np.repeat(np.arange(len(pieces)), counts)
        blocks = table[
            torch.from_numpy(row_owner), torch.from_numpy(positions // block)
        ]
        slots = blocks.long() * block + torch.from_numpy(positions % block)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(lengths),
            num_reqs=len(pieces),
            num_actual_tokens=len(positions),
            max_query_len=int(counts.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            causal=True,
        )
