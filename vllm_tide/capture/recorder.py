"""Writing a step's rows into the ring: the same for both model runners.

On a CPU a step's records are written at once. Where the launching thread must not wait
for a copy of tens of megabytes, a thread of its own writes them, in order, and does
nothing else: what a step needs is prepared here, and what became of it is learnt here,
at the next step. A request of which a record was not written gets none after it, which
would follow a hole: the thread sees to that, as records may be on their way to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_tide.capture.policy import OVERLOAD, CapturePolicy, RowBudget, Ticket
from vllm_tide.capture.step import RequestRows, Step, end_records, lay_out
from vllm_tide.config import CaptureConfig
from vllm_tide.transport.record import Frames, Status
from vllm_tide.transport.ring import Collect, RingWriter

BACKLOG = 16
"""Writes under way, at most: a step and an end record each, of eight steps."""
DRAIN_S = 5.0


@dataclass(slots=True, eq=False)
class Write:
    """Records on their way to the ring, and what happens once they are there.

    Attributes:
        tickets: Of each request; `of` says which one a record is of.
        full: Whether the records carry rows; None for end records.
        staged: Where their rows lie, let go once written; None if that is not ours.
        size: Bytes of the ring that they may take, while they are on their way.
    """

    ring: RingWriter
    frames: Frames
    tickets: list[Ticket]
    of: np.ndarray
    full: bool | None
    staged: Any = None
    size: int = 0


class Recorder:
    """Writes rows of live traffic into the ring.

    Args:
        ring: Where records go; it drops and counts what does not fit.
        tenant_key: Secret that hides the tenants' names; see `CapturePolicy`.

    Attributes:
        rows: Rows written to the ring so far, those of metadata-only records left out.
        dropped: Rows (requests for the `REFUSALS` of `policy`) that were not written,
            by reason; `ids_only` are the rows of metadata-only records.
        budget: Which requests' full rows the ring has room for.
        draft_version: Version of the live draft; set by the owner at each swap.
        off: Capture is switched off here, whatever the consumer wants.
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
        self._drafted_by: int | None = None  # version that the step before drafted with
        self.rows = 0
        self.requests = 0
        self.dropped: Counter[str] = Counter()
        self.draft_version = 0
        self.off = False
        self._thread = ThreadPoolExecutor(1, "tide-ring") if threaded else None
        self._under_way: deque[tuple[Future[None], Write]] = deque()
        self._fault: BaseException | None = None  # of the thread
        self._cut: set[int] = set()  # keys; only the thread has it, where there is one

    @property
    def wish(self) -> Collect:
        return Collect.NOTHING if self.off else self._ring.wish

    def close(self) -> None:
        """Write what is under way, for some seconds at most; nothing is written after.

        The ring must still be there.
        """
        self._drain()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def resume(self) -> None:
        """Capture was left out for some steps: who drafted last is not known."""
        self._drafted_by = None

    def forget(self, req_ids: Sequence[str]) -> None:
        """Requests ended (finished or aborted): say so to the trainer, drop state."""
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
        """Requests that have a `cache_salt`: before they are decided about."""
        self._salted.update(req_ids)

    def _admit(self, req_id: str, params: Any, supported: bool) -> Ticket:
        """Decide about a new request, and count why it is not captured."""
        extra = params.extra_args if params is not None else None
        ticket = self._policy.admit(extra, supported, req_id in self._salted)
        ticket.sampled = params is not None and params.temperature > 1e-5
        self._tickets[req_id] = ticket
        if ticket.refusal is not None:
            self.dropped[ticket.refusal] += 1
        return ticket

    def _end_records(self, tickets: list[Ticket], counts: list[int]) -> None:
        """Nothing may leave now: of these requests nothing ever will again."""
        ended = [ticket for ticket in tickets if ticket.refusal is None]
        for ticket in ended:
            ticket.refusal = "paused"
        self._leave(ended)
        for ticket, count in zip(tickets, counts, strict=True):
            if ticket.refusal == "paused":
                self.dropped["paused"] += count

    def _takes(self, ticket: Ticket | None, count: int, prompt: int) -> bool:
        """True if full rows of a request are to be staged; see `RowBudget`."""
        if ticket is None:
            return False
        if ticket.refusal is None:
            ticket.refusal = self.budget.take(ticket, count, prompt)
        if ticket.refusal in OVERLOAD:
            self.dropped[ticket.refusal] += count
        return ticket.refusal is None

    def _write(self, requests: RequestRows, step: Step) -> bool:
        """Write records of a step's requests.

        Returns:
            Whether a thread of its own writes them: it lets the step's rows go.
        """
        tickets, table, full = requests.tickets, requests.table, step.full
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
                # A prefix-cache hit never computes these rows: they are missing, and
                # the record's start says so.
                if full:
                    self.dropped["prefix_cached"] += start
                    ticket.prompt = max(ticket.prompt - start, 0)  # owed
        ring = self._ring
        if self._thread is not None:
            step.token_ids = np.array(step.token_ids)  # the buffer is filled again
        frames, of = lay_out(requests, step, ring.spec, self._topk, ring.max_rows)
        write = Write(ring, frames, tickets, of, bool(full), step.staged, step.size)
        return self._submit(write)

    def _submit(self, write: Write) -> bool:
        """Have records written; whether a thread of its own does it."""
        if self._thread is None:
            self._put(write)
            self._learn(write)
            return False
        self._under_way.append((self._thread.submit(self._put, write), write))
        self.budget.staged += write.size
        return True

    def _put(self, write: Write) -> None:
        """Write, leaving out requests that were cut short: all that the thread does."""
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
        """Learn what became of writes that are done."""
        while self._under_way and self._under_way[0][0].done():
            done, write = self._under_way.popleft()
            self.budget.staged -= write.size
            if write.staged is not None:
                write.staged.release()
            if (fault := done.exception()) is None:
                self._learn(write)
            else:
                self._fault = fault

    def _raise_fault(self) -> None:
        """Raise what the thread raised, once; last, so that nothing is left out."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _learn(self, write: Write) -> None:
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
            write.tickets[i].refusal = "cut_short"
            self.budget.end(write.tickets[i])
        skipped = rows[frames.status == Status.SKIPPED]
        self.dropped["cut_short"] += int(skipped.sum())

    def _drain(self) -> None:
        wait([done for done, _ in self._under_way], DRAIN_S)
        self._settle()
