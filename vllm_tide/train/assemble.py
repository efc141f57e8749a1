"""Assembly of ring records into documents; a later record replaces earlier positions.

Memory is bounded: open requests hold at most `max_open_rows` rows. Above that, the
least recently seen request is closed early. Every dropped row is counted.

A metadata-only record (ids and counts, no features) closes the document of its request;
its rows are counted as `not_collected`.

Tokens, features and teacher come from the target, whichever draft is live.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_tide.train.sample import Branch, Sample, TopK
from vllm_tide.transport.process import steady_unix

if TYPE_CHECKING:
    from vllm_tide.transport.record import Record

VERIFY = 1
MAX_BRANCHES = 64
"""Rejected branches stored per request; those of a long request are similar."""
_TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class _Open:
    num_prompt_tokens: int
    seen: float
    tenant: int = 0
    sampled: bool = False
    loss_from: int = 0
    records: list[Record] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    num_rows: int = 0
    end: int = 0  # position after the last committed one
    verify_steps: int = 0  # with tokens of the draft


class Assembler:
    """Builds samples from records.

    Args:
        max_request_rows: Rows after which a request is split into a further document.
        context_rows: Rows repeated as context after a split.
        idle_s: `flush_idle` closes a request without a record for this long (s).
        max_branches: Rejected branches stored per request; 0 stores none.
    """

    def __init__(
        self,
        feature_size: int,
        feature_dtype: str = "bfloat16",
        *,
        max_open_rows: int = 65536,
        max_request_rows: int = 4096,
        context_rows: int = 256,
        idle_s: float = 30.0,
        max_branches: int = 0,
    ) -> None:
        self.feature_size, self.dtype = feature_size, _TORCH[feature_dtype]
        self.max_open_rows, self.max_request_rows = max_open_rows, max_request_rows
        self.context_rows, self.idle_s = context_rows, idle_s
        self.max_branches = max_branches
        self.skipped: Counter[str] = Counter()
        self.num_holes = 0
        self.num_early = 0
        self.open_rows = 0
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def add(self, record: Record, now: float) -> list[Sample]:
        """Add a record; return the documents that it closes. `now` is monotonic (s)."""
        count = len(record.token_ids)
        if count and record.features.shape[-1] == 0:
            self.skipped["not_collected"] += count
            return self._close(record.key) if record.key in self._open else []
        if not self._well_formed(record, count):
            self.skipped["malformed"] += max(1, count)
            return []
        request = self._open.get(record.key)
        if count:
            if request is None:
                request = _Open(record.num_prompt_tokens, now, record.tenant)
                self._open[record.key] = request
            self._append(request, record, count)
            request.seen = now
            self._open.move_to_end(record.key)
        out: list[Sample] = []
        if request is None:
            return out
        if record.finished:
            out += self._close(record.key)
        elif request.num_rows > self.max_request_rows:
            out += self._cut(record.key, request)
        while self.open_rows > self.max_open_rows and self._open:
            self.num_early += 1
            out += self._close(next(iter(self._open)))
        return out

    def flush_idle(self, now: float) -> list[Sample]:
        """Close requests without a record for `idle_s`: their end was not captured."""
        idle = [k for k, r in self._open.items() if now - r.seen >= self.idle_s]
        return [sample for key in idle for sample in self._close(key)]

    def flush(self) -> list[Sample]:
        return self.flush_idle(float("inf"))

    def purge(self, tenant: int | None = None) -> int:
        """Remove open requests of a tenant (None: of all); return the rows removed."""
        removed = 0
        for key, request in list(self._open.items()):
            if tenant is None or request.tenant == tenant:
                removed += request.num_rows
                del self._open[key]
        self.open_rows -= removed
        return removed

    def long_requests(self, min_tokens: int) -> dict[int, int]:
        """Return the next position of each open request with `min_tokens` generated."""
        return {
            key: request.end
            for key, request in self._open.items()
            if request.end - request.num_prompt_tokens >= min_tokens
        }

    def window(self, key: int, since: int, context: int) -> list[Sample]:
        """Return rows of an open request without closing it; changes no counter.

        One document per run of consecutive positions with a row to train at `since` or
        later, preceded by `context` rows.
        """
        return self._last_rows(key, self._open[key].records, since, context)

    def num_verify_steps(self, key: int) -> int:
        """Return how many verify steps of an open request had tokens of the draft."""
        return self._open[key].verify_steps

    def last_verify_step(self, key: int, context: int) -> Sample | None:
        """Return the last drafted verify step of an open request, with rejected tokens.

        The row before `loss_from` is the drafting row; `context` rows precede it. The
        bonus token and all drafted tokens but the last follow, each with the teacher
        of the next token.
        """
        records = self._open[key].records
        drafted = [i for i, record in enumerate(records) if _num_drafted(record) > 0]
        if not drafted:
            return None
        before, last = records[: drafted[-1]], records[drafted[-1]]
        first = last.start
        last = replace(last, num_accepted=_num_drafted(last) - 1)
        rows = self._last_rows(key, [*before, last], first, context + 1)
        return rows[-1] if rows and rows[-1].start < first else None

    def _last_rows(
        self, key: int, records: list[Record], since: int, context: int
    ) -> list[Sample]:
        low, request = since - context, self._open[key]
        records = [r for r in records if r.start + r.num_committed > low]
        documents = self._documents(key, request, records, since) if records else []
        rows = [
            s.window(max(0, low - s.start), s.num_tokens, since)
            for s in documents
            if s.start + s.num_tokens > low
        ]
        return [sample for sample in rows if sample.num_trained]

    def _well_formed(self, record: Record, count: int) -> bool:
        if count == 0:
            return True
        taught = count - record.teacher_start
        teachers = (
            record.teacher_hidden,
            record.teacher_topk_ids,
            record.teacher_topk_logprobs,
            record.teacher_tail_logprob,
        )
        return (
            record.features.shape == (count, self.feature_size)
            and record.start >= 0
            and 0 <= record.num_accepted < count
            and 0 <= record.teacher_start <= count
            and all(t is None or len(t) == taught for t in teachers)
        )

    def _append(self, request: _Open, record: Record, count: int) -> None:
        request.sampled |= record.sampled
        committed = record.num_committed
        request.records.append(record)
        request.num_rows += count
        request.end = max(request.end, record.start + committed)
        request.verify_steps += _num_drafted(record) > 0
        self.open_rows += count
        rejected = committed < count and not record.memory  # the draft proposed them
        if rejected and len(request.branches) < self.max_branches:
            branch = self._branch(record, committed)
            if branch is not None:
                request.branches.append(branch)

    def _branch(self, record: Record, first: int) -> Branch | None:
        """Return the rows from `first`; None if the first one is a placeholder."""
        ids = record.token_ids[first:]
        unknown = np.flatnonzero(ids < 0)  # vLLM's padding of a short draft
        size = int(unknown[0]) if unknown.size else len(ids)
        if not size:
            return None
        rows = slice(first, first + size)
        hidden, topk = record.teacher_hidden, record.teacher_topk_ids
        logprobs, tail = record.teacher_topk_logprobs, record.teacher_tail_logprob
        skip = first - record.teacher_start
        taught = slice(skip, skip + size)
        return Branch(
            position=record.start + first - 1,
            tokens=torch.tensor(ids[:size], dtype=torch.int32),
            features=self._floats(record.features[rows]).clone(),
            teacher_hidden=None
            if hidden is None or skip < 0
            else self._floats(hidden[taught]).clone(),
            teacher_topk=None
            if topk is None or logprobs is None or tail is None or skip < 0
            else TopK(
                torch.tensor(topk[taught]),
                torch.tensor(logprobs[taught]),
                torch.tensor(tail[taught]),
            ),
        )

    def _close(self, key: int) -> list[Sample]:
        request = self._open.pop(key)
        self.open_rows -= request.num_rows
        return self._build(key, request)

    def _cut(self, key: int, request: _Open) -> list[Sample]:
        out = self._build(key, request)
        last = request.records[-1]
        end = last.start + last.num_committed
        context: list[Record] = []
        rows = 0
        for record in reversed(request.records):
            context.append(record)
            rows += record.num_rows
            if rows >= self.context_rows:
                break
        if rows > self.max_request_rows:  # one large prefill chunk: no context
            context, rows = [], 0
        request.records = context[::-1]
        request.branches = []
        request.loss_from = end
        self.open_rows += rows - request.num_rows
        request.num_rows = rows
        return out

    def _build(self, key: int, request: _Open) -> list[Sample]:
        if not request.records:
            return []
        samples = self._documents(key, request, request.records, request.loss_from)
        for before, after in pairwise(samples):
            self.num_holes += after.start - before.start - before.num_tokens
        for sample in samples:
            if not sample.num_trained:
                self.skipped["nothing_to_train"] += sample.num_tokens
        return [sample for sample in samples if sample.num_trained]

    def _documents(
        self, key: int, request: _Open, records: list[Record], loss_from: int
    ) -> list[Sample]:
        """Build one document per run of consecutive positions."""
        written = np.concatenate(
            [np.arange(r.start, r.start + r.num_committed) for r in records]
        )
        positions, rows = _last_write(written)
        tokens = np.concatenate([r.token_ids[: r.num_committed] for r in records])
        features = torch.cat(
            [self._floats(r.features[: r.num_committed]) for r in records]
        )
        by_memory = np.concatenate(
            [np.full(r.num_committed, r.memory) for r in records]
        )
        taught, hidden, topk = self._teachers(records, written, positions)
        captured_unix_s = steady_unix()
        out: list[Sample] = []
        breaks = np.flatnonzero(np.diff(positions) > 1) + 1
        for lo, hi in zip([0, *breaks], [*breaks, len(positions)], strict=True):
            start, run = int(positions[lo]), slice(int(lo), int(hi))
            index = torch.from_numpy(rows[run])
            sample = Sample(
                key=key,
                start=start,
                num_prompt_tokens=request.num_prompt_tokens,
                tokens=torch.from_numpy(tokens[rows[run]].astype(np.int32)),
                features=features[index],
                has_teacher=taught[run],
                teacher_hidden=None if hidden is None else hidden[run],
                teacher_topk=None if topk is None else topk[run],
                by_memory=torch.from_numpy(by_memory[rows[run]]),
                loss_from=loss_from,
                tenant=request.tenant,
                captured_unix_s=captured_unix_s,
                sampled=request.sampled,
                branches=tuple(
                    b
                    for b in request.branches
                    if start <= b.position < positions[hi - 1] + 1
                ),
            )
            out.append(sample)
        return out

    def _teachers(
        self, records: list[Record], written: np.ndarray, positions: np.ndarray
    ) -> tuple[Tensor, Tensor | None, TopK | None]:
        """Return the teacher captured last for each position.

        A recomputed row without a teacher does not replace an earlier teacher.
        """
        has = np.concatenate(
            [np.arange(r.num_committed) >= r.teacher_start for r in records]
        )
        owner, source = _last_write(written[has])
        at = np.searchsorted(positions, owner)
        taught = torch.zeros(len(positions), dtype=torch.bool)
        taught[torch.from_numpy(at)] = True
        place, index = torch.from_numpy(at), torch.from_numpy(source)

        def spread(name: str) -> Tensor | None:
            parts = []
            for record in records:
                value = getattr(record, name)
                count = record.num_committed - record.teacher_start
                if value is None and count > 0:
                    return None
                if value is not None and count > 0:
                    parts.append(value[:count])
            if not parts:
                return None
            packed = self._floats(np.concatenate(parts))
            out = torch.zeros(len(positions), *packed.shape[1:], dtype=packed.dtype)
            out[place] = packed[index]
            return out

        hidden = spread("teacher_hidden")
        if hidden is not None:
            return taught, hidden, None
        ids, logprobs = spread("teacher_topk_ids"), spread("teacher_topk_logprobs")
        tail = spread("teacher_tail_logprob")
        if ids is None or logprobs is None or tail is None:
            return torch.zeros(len(positions), dtype=torch.bool), None, None
        return taught, None, TopK(ids, logprobs, tail)

    def _floats(self, array: np.ndarray) -> Tensor:
        """Convert a wire array to torch; uint16 is viewed as the header's dtype."""
        if array.dtype == np.uint16:
            bits = np.ascontiguousarray(array).view(np.int16)
            return torch.from_numpy(bits).view(self.dtype)
        return torch.from_numpy(np.ascontiguousarray(array))


def _num_drafted(record: Record) -> int:
    """Count the verified tokens of the draft in a record."""
    if record.phase != VERIFY or record.memory:
        return 0
    unknown = np.flatnonzero(record.token_ids < 0)  # vLLM's padding of a short draft
    return (int(unknown[0]) if unknown.size else len(record.token_ids)) - 1


def _last_write(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted distinct positions and the index of each one's last occurrence."""
    distinct, first = np.unique(positions[::-1], return_index=True)
    return distinct, len(positions) - 1 - first
