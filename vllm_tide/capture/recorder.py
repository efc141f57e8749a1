"""Writes of a step's rows into the ring, for both model runners.

On a CPU a step's records are written synchronously. On a GPU a separate thread writes
them in order, because the launching thread must not wait for a copy of tens of
megabytes. The launching thread prepares each write, and processes its result at a later
step. If a record of a request is not written, the thread drops all later records of
that request, because they would follow a gap.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from vllm_tide.capture.policy import (
    CUT_SHORT,
    FIRST_SLOT,
    NO_TICKET,
    NOT_CAPTURED,
    OVER_BUDGET,
    OVERLOAD,
    CapturePolicy,
    RowBudget,
    Ticket,
)
from vllm_tide.capture.step import Step, end_records, lay_out
from vllm_tide.config import CaptureConfig
from vllm_tide.transport.record import Frames, Status
from vllm_tide.transport.ring import Collect, RingWriter

BACKLOG = 16
"""Most pending writes: a step and an end record each, of eight steps."""
DRAIN_S = 5.0


@dataclass(slots=True, eq=False)
class Write:
    """A pending write of records.

    Attributes:
        tickets: Tickets of the requests.
        of: Index of the ticket of each record.
        full: Whether the records have rows; None for end records.
        staged: Memory of the rows, released after the write; None if not used.
        size: Upper bound of the bytes in the ring, while the write is pending.
    """

    ring: RingWriter
    frames: Frames
    tickets: list[Ticket]
    of: np.ndarray
    full: bool | None
    staged: Any = None
    size: int = 0


class Recorder:
    """Writer of live traffic's rows into the ring.

    Args:
        ring: Destination of the records; drops and counts records that do not fit.
        tenant_key: Key for hashing tenant names; see `CapturePolicy`.

    Attributes:
        rows: Rows written to the ring so far, without metadata-only records.
        dropped: Rows (requests for the `REFUSALS` of `policy`) that were not written,
            by reason; `ids_only` are the rows of metadata-only records.
        budget: Admission of requests within the ring's capacity.
        draft_version: Version of the live draft; set by the owner at each swap.
        off: Whether capture is switched off, regardless of the consumer's mode.
    """

    def __init__(
        self,
        ring: RingWriter,
        config: CaptureConfig,
        tenant_key: bytes | None = None,
        threaded: bool = False,
    ) -> None:
        self._ring = ring
        self._topk = config.teacher_topk if config.teacher != "hidden" else 0
        self._policy = CapturePolicy(
            config.sample_rate, consent=config.consent, tenant_key=tenant_key
        )
        self._tickets: dict[str, Ticket] = {}
        self._salted: set[str] = set()
        self.budget = RowBudget()
        self._drafted_by: int | None = None  # draft version of the previous step
        self.rows = 0
        self.requests = 0
        self.dropped: Counter[str] = Counter()
        self.draft_version = 0
        self.off = False
        self._thread = ThreadPoolExecutor(1, "tide-ring") if threaded else None
        self._under_way: deque[tuple[Future[None], Write]] = deque()
        self._fault: BaseException | None = None  # of the thread
        self._cut: set[int] = set()  # keys; used by the writing thread only

    @property
    def collect_mode(self) -> Collect:
        return Collect.NOTHING if self.off else self._ring.collect_mode

    def close(self) -> None:
        """Finish the pending writes, within some seconds, and accept no others.

        The ring must still exist.
        """
        self._drain()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def resume(self) -> None:
        """Resume after a suspension: the last step's draft version is unknown."""
        self._drafted_by = None

    def forget(self, req_ids: Sequence[str]) -> None:
        """Remove ended requests (finished or aborted), and write their end records."""
        popped = [self._tickets.pop(req_id, None) for req_id in req_ids]
        self._salted.difference_update(req_ids)
        self._leave([ticket for ticket in popped if ticket is not None])
        self._settle()
        self._raise_fault()

    def _leave(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self.budget.end(ticket)
        tickets = [ticket for ticket in tickets if ticket.started]
        if not tickets:
            return
        for ticket in tickets:
            ticket.started = False
        ring = self._ring
        frames = end_records(tickets, self.draft_version, ring.spec, self._topk)
        self._submit(Write(ring, frames, tickets, np.arange(len(tickets)), None))

    def keep_out(self, req_ids: Sequence[str]) -> None:
        """Exclude requests with a `cache_salt`; call it before their admission."""
        self._salted.update(req_ids)

    def _admit(self, req_id: str, params: Any, supported: bool) -> Ticket:
        """Decide whether a new request is captured, and count a refusal."""
        extra = params.extra_args if params is not None else None
        ticket = self._policy.admit(extra, supported, req_id in self._salted)
        ticket.sampled = params is not None and params.temperature > 1e-5
        self._tickets[req_id] = ticket
        if ticket.refusal is not None:
            self.dropped[ticket.refusal] += 1
        return ticket

    def _end_records(self, tickets: list[Ticket], counts: list[int]) -> None:
        """End the records of requests, which do not resume after the pause."""
        ended = [ticket for ticket in tickets if ticket.refusal is None]
        for ticket in ended:
            ticket.refusal = "paused"
        self._leave(ended)
        for ticket, count in zip(tickets, counts, strict=True):
            if ticket.refusal == "paused":
                self.dropped["paused"] += count

    def _take(self, step: Step, counts: np.ndarray) -> np.ndarray:
        """Return the requests with full rows, int64, and count rows of the others.

        Args:
            counts: int64 [n], rows of the step's requests.
        """
        tickets = list(map(self._tickets.get, step.req_ids, repeat(NO_TICKET)))
        slots = self.budget.take(tickets, counts, step.num_prompt_tokens)
        taken = np.flatnonzero(slots >= FIRST_SLOT)
        if len(taken) < len(slots):
            for reason, slot in zip(OVERLOAD, (OVER_BUDGET, CUT_SHORT), strict=True):
                if rows := int(counts[slots == slot].sum()):
                    self.dropped[reason] += rows
            if (slots == NOT_CAPTURED).any():
                # Requests without their first rows stay out.
                paused = [ticket.refusal == "paused" for ticket in tickets]
                if rows := int(counts[paused].sum()):
                    self.dropped["paused"] += rows
        return taken

    def _write(self, tickets: list[Ticket], table: np.ndarray, step: Step) -> bool:
        """Write records of a step's requests.

        Args:
            table: `REQUEST` [n].

        Returns:
            Whether a thread writes them, which then releases the step's rows.
        """
        full = step.full
        if padding := int(table["padding"].sum()):
            self.dropped["placeholder"] += padding
        if not tickets:
            return False
        if len(self._under_way) >= BACKLOG:
            self.dropped["behind"] += int(table["count"].sum())
            return False
        for ticket, start in zip(tickets, table["start"].tolist(), strict=True):
            if not ticket.started:
                ticket.started = True
                self.requests += 1
                # Rows of a cached prefix are not computed; the record's `start` shows
                # that they are missing.
                if full:
                    self.dropped["prefix_cached"] += start
                    self.budget.skip(ticket, start)
        ring = self._ring
        if self._thread is not None:
            step.token_ids = np.array(step.token_ids)  # the buffer is reused
        frames, of = lay_out(table, step, ring.spec, self._topk, ring.max_rows)
        write = Write(ring, frames, tickets, of, bool(full), step.staged, step.size)
        return self._submit(write)

    def _submit(self, write: Write) -> bool:
        """Write records; return whether a thread does it."""
        if self._thread is None:
            self._put(write)
            self._count_result(write)
            return False
        self._under_way.append((self._thread.submit(self._put, write), write))
        self.budget.staged += write.size
        return True

    def _put(self, write: Write) -> None:
        """Write records, except of requests that were cut short, in the thread."""
        frames, full = write.frames, write.full
        keys = frames.metas["key"]
        if full is None:
            self._cut.difference_update(keys.tolist())
        elif self._cut:
            cut = np.fromiter(self._cut, np.uint64, len(self._cut))
            frames.status[np.isin(keys, cut)] = Status.SKIPPED
        write.ring.write(frames)
        if full and frames.status.any():
            self._cut.update(keys[frames.status != Status.WRITTEN].tolist())

    def _settle(self) -> None:
        """Process the results of finished writes."""
        while self._under_way and self._under_way[0][0].done():
            done, write = self._under_way.popleft()
            self.budget.staged -= write.size
            if write.staged is not None:
                write.staged.release()
            if (fault := done.exception()) is None:
                self._count_result(write)
            else:
                self._fault = fault

    def _raise_fault(self) -> None:
        """Raise the thread's exception, once; called last, after all other work."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _count_result(self, write: Write) -> None:
        frames, full = write.frames, write.full
        num_rows = write.ring.count(frames)
        if full is None:
            return
        if not full:
            self.dropped["ids_only"] += num_rows
            return
        self.rows += num_rows
        written = frames.status == Status.WRITTEN
        if written.all():
            return
        rows = frames.metas["rows"]
        for i in np.unique(write.of[~written]).tolist():
            self.budget.refuse(write.tickets[i], "cut_short")
        skipped = rows[frames.status == Status.SKIPPED]
        self.dropped["cut_short"] += int(skipped.sum())

    def _drain(self) -> None:
        wait([done for done, _ in self._under_way], DRAIN_S)
        self._settle()
