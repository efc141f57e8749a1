"""Turns one request's rows of one step into a record: the same for both model runners.

An adapter says where the rows lie and what the target decided; everything that a
trainer will read off a record is decided here, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_tide.capture.policy import OVERLOAD, CapturePolicy, RowBudget, Ticket
from vllm_tide.config import CaptureConfig
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.ring import RingWriter
from vllm_tide.transport.ring_format import Collect

_NO_FLOATS = np.empty(0, np.float32)
_NO_TOKENS = np.empty(0, np.int32)

TopK = tuple[np.ndarray, np.ndarray, np.ndarray]
TEACHERS = (
    "teacher_hidden",
    "teacher_topk_ids",
    "teacher_topk_logprobs",
    "teacher_tail_logprob",
)


@dataclass(slots=True)
class StepRows:
    """Rows that a step computed, in wire types.

    Attributes:
        features: [>= rows, num_aux * H]; any number of rows and 0 columns while
            records are light.
        hidden: [>= rows, H], or None if not stored.
        topk: ids int32 [logits, k], log-probabilities float32 [logits, k] and tail
            float32 [logits] of the sampled rows; None if not stored.
        full: False while the trainer collects ids and counts only.
        drafted_by: The one that drafted what the step verified; None is the same.
    """

    features: np.ndarray
    hidden: np.ndarray | None
    topk: TopK | None
    full: bool
    version: int
    drafted_by: int | None = None
    concurrency: int = 0
    cost: float = 1.0


@dataclass(slots=True)
class RequestRows:
    """One request's part of a step.

    Attributes:
        low: Its first row among those of `StepRows`.
        drafts: Drafted tokens, in the last of them.
        padding: Placeholders: scheduled to keep a graph's shape, they are no tokens and
            their rows say nothing about the model.
        token_ids: int32 [>= count], input token of each row.
        sampled: Tokens committed; empty for a prefill chunk that is not the last.
        logit_end: End of the request's rows in the logits.
    """

    low: int
    count: int
    drafts: int
    padding: int
    start: int
    num_prompt_tokens: int
    token_ids: np.ndarray
    sampled: Sequence[int]
    logit_end: int
    verify_chance: float = 1.0


class Recorder:
    """Writes rows of live traffic into the ring.

    Args:
        ring: Where records go; it drops and counts what does not fit.
        features_like: [0, num_aux * H] in the wire's type, for records without rows.
        hidden_like: [0, H] in the wire's type, or None if no hidden state is stored.
        tenant_key: Secret that hides the tenants' names; see `CapturePolicy`.

    Attributes:
        rows: Rows written to the ring so far, those of light records left out.
        dropped: Rows (requests for the `REFUSALS` of `policy`) that were not written,
            by reason; `ids_only` are the rows of light records.
        budget: Which requests' full rows the ring has room for.
        draft_version: Version of the live draft; set by the owner at each swap.
        off: Capture is switched off here, whatever the consumer wants.
    """

    def __init__(
        self,
        ring: RingWriter,
        config: CaptureConfig,
        features_like: np.ndarray,
        hidden_like: np.ndarray | None,
        tenant_key: bytes | None = None,
    ) -> None:
        self._ring = ring
        self._topk = config.teacher_topk if config.teacher != "hidden" else 0
        self._policy = CapturePolicy(
            config.sample_rate, consent=config.consent, tenant_key=tenant_key
        )
        self._features_like = features_like
        self._hidden_like = hidden_like
        self._tickets: dict[str, Ticket] = {}
        self._salted: set[str] = set()
        self.budget = RowBudget()
        self._drafted_by: int | None = None  # version that the step before drafted with
        self.rows = 0
        self.requests = 0
        self.dropped: Counter[str] = Counter()
        self.draft_version = 0
        self.off = False

    @property
    def wish(self) -> Collect:
        return Collect.NOTHING if self.off else self._ring.wish

    def use_ring(self, ring: RingWriter) -> None:
        """Write to another ring from now on: the one before was cut short."""
        self._ring = ring

    def resume(self) -> None:
        """Capture was left out for some steps: who drafted last is not known."""
        self._drafted_by = None

    def forget(self, req_ids: Sequence[str]) -> None:
        """Requests ended (finished or aborted): say so to the trainer, drop state."""
        for req_id in req_ids:
            ticket = self._tickets.pop(req_id, None)
            self._salted.discard(req_id)
            if ticket is not None:
                self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        self.budget.end(ticket)
        if ticket.started:
            ticket.started = False
            self._ring.try_write(self._farewell(ticket))

    def keep_out(self, req_ids: Sequence[str]) -> None:
        """Requests that have a `cache_salt`: before they are decided about."""
        self._salted.update(req_ids)

    def _admit(self, req_id: str, params: Any, supported: bool) -> Ticket:
        """Decide about a new request, and count why it is not captured.

        Args:
            params: vLLM's `SamplingParams`, or None.
        """
        extra = params.extra_args if params is not None else None
        ticket = self._policy.admit(extra, supported, req_id in self._salted)
        ticket.sampled = params is not None and params.temperature > 1e-5
        self._tickets[req_id] = ticket
        if ticket.refusal is not None:
            self.dropped[ticket.refusal] += 1
        return ticket

    def _end_records(self, ticket: Ticket, num_rows: int) -> None:
        """Nothing may leave now: of this request nothing ever will again."""
        if ticket.refusal is None:
            ticket.refusal = "paused"
            self._leave(ticket)
        if ticket.refusal == "paused":
            self.dropped["paused"] += num_rows

    def _takes(self, ticket: Ticket | None, count: int, prompt: int) -> bool:
        """True if full rows of a request are to be staged; see `RowBudget`.

        Args:
            count: Its rows in this step, at most.
        """
        if ticket is None:
            return False
        if ticket.refusal is None:
            ticket.refusal = self.budget.take(ticket, count, prompt)
        if ticket.refusal in OVERLOAD:
            self.dropped[ticket.refusal] += count
        return ticket.refusal is None

    def _write(self, ticket: Ticket, rows: RequestRows, step: StepRows) -> None:
        low, count, full = rows.low, rows.count, step.full
        if rows.padding:
            self.dropped["placeholder"] += rows.padding
        high = low + count
        verify = rows.drafts > 0 or count == 1
        committed = count - 1 - rows.drafts
        num_accepted = committed + max(len(rows.sampled) - 1, 0)
        # What follows the last real row; a placeholder may be accepted by chance.
        last = min(len(rows.sampled) - 1, rows.drafts)
        if not ticket.started:
            ticket.started = True
            self.requests += 1
            # A prefix-cache hit never computes these rows: they are missing, and
            # the record's start says so.
            if full:
                self.dropped["prefix_cached"] += rows.start
                ticket.prompt = max(ticket.prompt - rows.start, 0)  # owed
        teacher_start, topk = self._teacher(rows, step) if full else (count, None)
        hidden = step.hidden if full else None
        record = Record(
            key=ticket.key,
            phase=Phase.VERIFY if verify else Phase.PREFILL,
            start=rows.start,
            num_prompt_tokens=rows.num_prompt_tokens,
            num_accepted=min(num_accepted, count - 1),
            next_token=rows.sampled[last] if rows.sampled else -1,
            draft_version=(
                step.drafted_by
                if verify and step.drafted_by is not None
                else step.version
            ),
            token_ids=rows.token_ids[:count],
            features=step.features[low:high],
            teacher_start=teacher_start,
            teacher_hidden=(
                None if hidden is None else hidden[low + teacher_start : high]
            ),
            teacher_topk_ids=None if topk is None else topk[0],
            teacher_topk_logprobs=None if topk is None else topk[1],
            teacher_tail_logprob=None if topk is None else topk[2],
            tenant=ticket.tenant,
            sampled=ticket.sampled,
            concurrency=step.concurrency,
            cost=step.cost,
            verify_chance=rows.verify_chance,
        )
        for part in self._parts(record, committed) if full else (record,):
            if not self._ring.try_write(part):
                # What came after would follow a hole.
                if full:
                    ticket.refusal = "cut_short"
                    self.budget.end(ticket)
                break
            if full:
                self.rows += part.num_rows
            else:
                self.dropped["ids_only"] += part.num_rows

    def _parts(self, record: Record, committed: int) -> Iterator[Record]:
        """The record in pieces of which many fit into the ring: rows of a long prompt.

        Args:
            committed: Rows before the last of what needs no verification.
        """
        low = 0
        while record.num_rows - low > self._ring.max_rows and committed > low:
            high = min(low + self._ring.max_rows, committed)
            yield self._part(record, slice(low, high))
            low = high
        if not low:
            yield record
            return
        yield replace(
            self._part(record, slice(low, record.num_rows)),
            phase=record.phase,
            num_accepted=record.num_accepted - low,
            next_token=record.next_token,
        )

    @staticmethod
    def _part(record: Record, rows: slice) -> Record:
        first = record.teacher_start
        teachers = slice(max(rows.start - first, 0), max(rows.stop - first, 0))
        arrays: dict[str, Any] = {
            name: None if (array := getattr(record, name)) is None else array[teachers]
            for name in TEACHERS
        }
        return replace(
            record,
            phase=Phase.PREFILL,
            start=record.start + rows.start,
            num_accepted=rows.stop - rows.start - 1,
            next_token=-1,
            token_ids=record.token_ids[rows],
            features=record.features[rows],
            teacher_start=min(max(first, rows.start), rows.stop) - rows.start,
            **arrays,
        )

    def _teacher(self, rows: RequestRows, step: StepRows) -> tuple[int, TopK | None]:
        """First row with a teacher, and the rows' top-k slices.

        Only sampled rows have logits (the last of a prefill, all of a verification),
        so a top-k teacher starts later than a hidden one.
        """
        if step.topk is None:
            return rows.count if self._topk else 0, None
        start = max(rows.count - 1 - rows.drafts, 0)
        end = rows.logit_end - rows.padding
        low = end - (rows.count - start)
        ids, top, tail = (array[low:end] for array in step.topk)
        return start, (ids, top, tail)

    def _farewell(self, ticket: Ticket) -> Record:
        topk = self._topk
        return Record(
            key=ticket.key,
            phase=Phase.VERIFY,
            start=0,
            num_prompt_tokens=0,
            num_accepted=0,
            next_token=-1,
            draft_version=self.draft_version,
            token_ids=_NO_TOKENS,
            features=self._features_like,
            teacher_start=0,
            teacher_hidden=self._hidden_like,
            teacher_topk_ids=np.empty((0, topk), np.int32) if topk else None,
            teacher_topk_logprobs=np.empty((0, topk), np.float32) if topk else None,
            teacher_tail_logprob=_NO_FLOATS if topk else None,
            finished=True,
            tenant=ticket.tenant,
        )
