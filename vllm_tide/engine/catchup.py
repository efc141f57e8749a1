"""Backlog of features for the draft's KV cache while drafting is off.

A step without drafting leaves its tokens out of the draft's KV cache. Upstream avoids
that by running the draft's first pass anyway. Here the target's features are stored (on
a CPU their tensors are not overwritten) and passed to the draft in one batched pass
when drafting resumes. DFlash's entries need the features only, and no pass. The memory
is bounded. Dropped features leave a hole, which only lowers acceptance of the affected
requests.
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
    """Rows of one skipped step; row `row[i] + j` has position `start[i] + j`."""

    first: int  # running number of the step's first row
    features: Sequence[torch.Tensor]
    slots: np.ndarray
    row: np.ndarray
    count: np.ndarray
    start: np.ndarray


class DraftBacklog:
    """Features of positions that are missing in the draft's KV cache.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or its CPU subclass.
        mib: Limit of the memory for features (MiB).

    Attributes:
        missing: int64 [capacity], positions in the backlog by slot.
        holes: Total number of positions dropped from the backlog.
    """

    def __init__(
        self, runner: Any, mib: int, num_aux: int, hidden_size: int, capacity: int
    ) -> None:
        self._runner = runner
        row = num_aux * hidden_size * runner.dtype.itemsize
        self._size = mib * MIB // row  # rows
        self._written = 0
        self._steps: deque[_Step] = deque()
        # Rows of a slot before this one are in the KV cache or of another request.
        self._since = np.zeros(capacity, np.int64)
        self.missing = np.zeros(capacity, np.int64)
        self.holes = 0

    def forget(self, slot: int) -> None:
        """Drop the rows of a slot, when its request changes."""
        self.seen(np.array([slot]))

    def seen(self, slots: np.ndarray) -> None:
        """Mark all rows of these slots as in the draft's KV cache."""
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
        """Store the rows of a step without drafting. The arrays are not copied.

        Args:
            features: num_aux tensors [>= num_rows, H]. A view of a larger tensor is
                copied, because that may be a buffer which is reused.
            slots: [n], slots of the requests.
            row: [n], first row of each request.
            count: [n], committed rows (accepted tokens).
            start: [n], position of each first row.
        """
        if num_rows > self._size:  # a step is stored completely or not at all
            self.holes += int(count.sum())
            return
        layers = [
            layer if layer.untyped_storage().nbytes() == layer.nbytes else layer.clone()
            for layer in features
        ]
        step = _Step(self._written, layers, slots, row, count, start)
        self.missing[slots] += count
        self._written += len(layers[0])
        self._steps.append(step)
        while self._steps and self._written - self._steps[0].first > self._size:
            step = self._steps.popleft()
            lost = np.where(self._waiting(step), step.count, 0)
            self.missing[step.slots] -= lost
            self.holes += int(lost.sum())

    def _waiting(self, step: _Step) -> np.ndarray:
        """Return which requests of a step still need their rows, bool [n]."""
        return np.asarray(self._since[step.slots] <= step.first)

    def catch_up(
        self,
        indices: np.ndarray,
        slots: np.ndarray,
        attention: Any,
        newest: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Run the draft over the missing positions of some requests.

        The token after each position is read from the runner's token table, which does
        not contain the tokens of this step before drafting.

        Args:
            indices: [m], indices of the requests in the runner's batch.
            slots: [m], their slots.
            newest: [m], token after each request's last position if it is of this step.

        Returns:
            [m, H], the draft's last hidden state at each request's last position; zero
            for requests without missing positions, and with DFlash.
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
            matches = np.nonzero(step.slots == slot)[0]
            if len(matches) == 0:
                continue
            i = int(matches[0])
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
        if self._runner.speculative_config.parallel_drafting:
            context = drafter.model.combine_hidden_states(features)
            drafter.model.precompute_and_store_context_kv(
                context, torch.from_numpy(positions), metadata.slot_mapping
            )
            return
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
        """Return features [len(rows), num_aux * H] of rows by their running number."""
        firsts = np.fromiter((step.first for step in self._steps), np.int64)
        places = firsts.searchsorted(rows, "right") - 1
        used, of = np.unique(places, return_inverse=True)
        parts = [self._steps[int(place)].features for place in used]
        ends = np.cumsum([0, *(len(part[0]) for part in parts)])
        at = torch.from_numpy(rows - firsts[places] + ends[of])
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
        """Build attention metadata: each piece is a prefill chunk of its request."""
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
