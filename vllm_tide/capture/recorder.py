"""Turns one request's rows of one step into a record: the same for both model runners.

An adapter says where the rows lie and what the target decided; everything that a
trainer will read off a record is decided here, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_tide.capture.policy import CapturePolicy, Ticket
from vllm_tide.config import CaptureConfig
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.ring import RingWriter, Slot
from vllm_tide.transport.ring_format import Collect

_NO_FLOATS = np.empty(0, np.float32)
_NO_TOKENS = np.empty(0, np.int32)

TopK = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(slots=True)
class StepRows:
    """What a step computed, in wire types.

    Attributes:
        features: [>= rows, num_aux * H]; any number of rows and 0 columns while
            records are light.
        hidden: [>= rows, H], or None if not stored.
        topk: ids int32 [logits, k], log-probabilities float32 [logits, k] and tail
            float32 [logits] of the sampled rows; None if not stored.
        full: False while the trainer collects ids and counts only.
        version: The draft that was live.
        concurrency: Requests of the step.
        cost: Of the step, as `Record.cost`.
    """

    features: np.ndarray
    hidden: np.ndarray | None
    topk: TopK | None
    full: bool
    version: int
    concurrency: int = 0
    cost: float = 1.0


@dataclass(slots=True)
class Extent:
    """Which rows of a step are a request's: known before the step has run.

    Attributes:
        low: First row.
        high: End of its rows; the last `num_drafts` of them hold drafted tokens.
        num_drafts: Drafted tokens that were scheduled, placeholders included.
        padding: How many of them are placeholders, which are no tokens.
    """

    low: int
    high: int
    num_drafts: int
    padding: int

    @property
    def count(self) -> int:
        """Rows of its record."""
        return self.high - self.padding - self.low

    @property
    def drafts(self) -> int:
        """Drafted tokens among them."""
        return self.num_drafts - self.padding

    @property
    def verifies(self) -> bool:
        """Whether its record is a verification."""
        return self.drafts > 0 or self.count == 1


@dataclass(slots=True)
class RequestRows(Extent):
    """One request's part of a step.

    Attributes:
        start: Position of the first row.
        num_prompt_tokens: Of the request.
        token_ids: int32 [>= high - low], input token of each row.
        sampled: Tokens committed; empty for a prefill chunk that is not the last.
        logit_end: End of the request's rows in the logits.
        verify_chance: Of its drafts, as `Record.verify_chance`.
    """

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
        config: `tide.capture`.
        features_like: [0, num_aux * H] in the wire's type, for records without rows.
        hidden_like: [0, H] in the wire's type, or None if no hidden state is stored.
        tenant_key: Secret that hides the tenants' names; see `CapturePolicy`.

    Attributes:
        rows: Rows written to the ring so far, those of light records left out.
        requests: Requests with at least one record.
        dropped: Rows (requests for the `REFUSALS` of `policy`) that were not written,
            by reason; `ids_only` are the rows of light records.
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
        # What the previous step drafted: request id -> (probabilities, version).
        self._drafted: dict[str, tuple[np.ndarray, int]] = {}
        self.rows = 0
        self.requests = 0
        self.dropped: Counter[str] = Counter()
        self.draft_version = 0
        self.off = False

    @property
    def wish(self) -> Collect:
        """What may leave the engine now."""
        return Collect.NOTHING if self.off else self._ring.wish

    def use_ring(self, ring: RingWriter) -> None:
        """Write to another ring from now on: the one before was cut short."""
        self._ring = ring

    def resume(self) -> None:
        """Capture was left out for some steps: what the last one drafted is old."""
        self._drafted = {}

    def forget(self, req_ids: Sequence[str]) -> None:
        """Requests ended (finished or aborted): say so to the trainer, drop state."""
        for req_id in req_ids:
            ticket = self._tickets.pop(req_id, None)
            self._salted.discard(req_id)
            self._drafted.pop(req_id, None)
            if ticket is not None and ticket.started:
                self._ring.try_write(self._farewell(ticket))

    def keep_out(self, req_ids: Sequence[str]) -> None:
        """Requests that have a `cache_salt`: before they are decided about."""
        self._salted.update(req_ids)

    def _admit(self, req_id: str, params: Any, supported: bool) -> Ticket:
        """Decide about a new request, and count why it is not captured.

        Args:
            req_id: The request.
            params: vLLM's `SamplingParams`, or None.
            supported: See `CapturePolicy.admit`.
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
            if ticket.started:
                ticket.started = False
                self._ring.try_write(self._farewell(ticket))
        if ticket.refusal == "paused":
            self.dropped["paused"] += num_rows

    def _write(
        self,
        ticket: Ticket,
        rows: RequestRows,
        drafted: tuple[np.ndarray, int] | None,
        step: StepRows,
        slot: Slot | None = None,
    ) -> None:
        """Write one record.

        Args:
            ticket: The request's.
            rows: Its rows.
            drafted: Probabilities float32 [>= drafts] of its drafted tokens and the
                version of the draft that gave them; None if unknown.
            step: What the step computed.
            slot: Of `_promise`, if its rows have landed there.
        """
        low, full = rows.low, step.full
        if rows.padding:
            self.dropped["placeholder"] += rows.padding
        count, verify = rows.count, rows.verifies
        high = low + count
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
        probs, version = self._probs(count - 1, drafted) if verify else (None, None)
        teacher_start, topk = self._teacher(rows, step) if full else (count, None)
        hidden = step.hidden if full else None
        record = Record(
            key=ticket.key,
            phase=Phase.VERIFY if verify else Phase.PREFILL,
            start=rows.start,
            num_prompt_tokens=rows.num_prompt_tokens,
            num_accepted=min(num_accepted, count - 1),
            next_token=rows.sampled[last] if rows.sampled else -1,
            draft_version=step.version if version is None else version,
            token_ids=rows.token_ids[:count],
            draft_probs=_NO_FLOATS if probs is None else probs,
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
        if self._ring.try_write(record, slot):
            if full:
                self.rows += count
            else:
                self.dropped["ids_only"] += count

    @staticmethod
    def _probs(
        num_drafts: int, drafted: tuple[np.ndarray, int] | None
    ) -> tuple[np.ndarray, int | None]:
        if drafted is None or drafted[0].shape[0] < num_drafts:
            return np.full(num_drafts, np.nan, np.float32), None
        return drafted[0][:num_drafts].astype(np.float32, copy=False), drafted[1]

    def _promise(self, rows: Extent, topk: bool) -> Slot | None:
        """Room in the ring for a full record, or None; `topk`: as `RingWriter`."""
        num_probs = rows.count - 1 if rows.verifies else 0
        start = self._teacher_start(rows, topk)
        return self._ring.reserve(rows.count, num_probs, start, topk)

    def _teacher_start(self, rows: Extent, topk: bool) -> int:
        """First row with a teacher.

        Only sampled rows have logits (the last of a prefill, all of a verification),
        so a top-k teacher starts later than a hidden one; with both kinds stored the
        record starts where both exist.
        """
        if not topk:
            return rows.count if self._topk else 0
        return max(rows.count - 1 - rows.drafts, 0)

    def _teacher(self, rows: RequestRows, step: StepRows) -> tuple[int, TopK | None]:
        """First row with a teacher, and the rows' top-k slices."""
        start = self._teacher_start(rows, step.topk is not None)
        if step.topk is None:
            return start, None
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
            draft_probs=_NO_FLOATS,
            features=self._features_like,
            teacher_start=0,
            teacher_hidden=self._hidden_like,
            teacher_topk_ids=np.empty((0, topk), np.int32) if topk else None,
            teacher_topk_logprobs=np.empty((0, topk), np.float32) if topk else None,
            teacher_tail_logprob=_NO_FLOATS if topk else None,
            finished=True,
            tenant=ticket.tenant,
        )
