"""A step: what capture, control and timing read of it, and its rows as records.

Both model runners fill a `Step` (`engine/worker_v1.py`, `engine/steps.py`). Records are
made of all its requests at once, without a copy of their rows; everything that a
trainer will read off a record is decided here, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_tide.capture.policy import Ticket
from vllm_tide.transport.record import (
    DTYPE_CODES,
    FEATURE_DTYPES,
    FINISHED,
    FORMAT_VERSION,
    HIDDEN,
    MEMORY,
    META,
    SAMPLED,
    TOPK,
    Frames,
    Phase,
    RingSpec,
    Status,
    sound_counts,
)

TopK = tuple[np.ndarray, np.ndarray, np.ndarray]
_TOKEN = np.dtype(np.int32)
_FLOAT = np.dtype(np.float32)
_COUNTS = ("phase", "rows", "num_accepted", "teacher_start")


@dataclass(slots=True)
class Timing:
    """Times of a step by one clock.

    Attributes:
        continues: Whether the engine cannot have idled since the step before.
        read: Its times once the step has landed (`StepSample`), or None.
    """

    continues: bool
    read: Callable[[], Any]


@dataclass(slots=True)
class Step:
    """One step. What the host knew at once, and, once landed, what the device decided.

    Attributes:
        req_ids: Requests in the order of the batch.
        bounds: int32 [n + 1], their rows. Where drafts are cut on the device, this,
            `drafts` and `logit_ends` are bounds from above until the step is read.
        drafts: int32 [n], drafted tokens that were verified, placeholders included.
        padding: int32 [n], placeholders among them: nothing had been drafted, they keep
            a graph's shape and their rows say nothing about the model.
        logit_ends: int32 [n], end of each request's rows in the logits.
        num_prompt_tokens: int32 [n].
        version: Version of the draft that runs after it.
        buffer: Its `StepBuffer`; None where all numbers are here (V1).
        drafted_by: Version that drafted what it verifies; None: `version`.
        steps: Draft steps that ran, for the next step's verification.
        whole: Whether all of it was enqueued, draft and copies included.
        cut: Whether drafts were cut on the device.
        trimmed: int32 [n], drafted tokens that were cut there, once read; without
            placeholders.
        after_gap: Whether the step before it was lost: what that one drafted for this
            one is not known.
        full: For capture: True if its rows were staged, False if it asks for ids and
            counts only, None if it is left out.
        staged: Its rows in wire types: `features` [rows, num_aux * H], `hidden`
            [rows, H] or None, `topk` of its logits or None.
        first: Of each request whose rows were staged: the first of them there.
        size: Bytes of the ring that they may take.
        timing: For control: what the clock says of it.
        cost: For capture: `Record.cost`, once control has learnt of the step.
        verify_chance: `Record.verify_chance` of requests that `explored` does not name.
        explored: The same of drafts that only exploration verified, by request.
        memory: bool [n], whether the verified drafts were the memory's instead of
            the draft's, once control has learnt of the step; None: nobody's were.
        ended: Requests that were known to have ended when the next step began; None
            before that.
    """

    req_ids: Sequence[str]
    bounds: np.ndarray
    drafts: np.ndarray
    padding: np.ndarray
    logit_ends: np.ndarray
    num_prompt_tokens: np.ndarray
    version: int
    buffer: Any = None
    drafted_by: int | None = None
    steps: int = 0
    whole: bool = False
    cut: bool = False
    trimmed: np.ndarray | None = None
    after_gap: bool = False
    full: bool | None = None
    staged: Any = None
    first: dict[int, int] = field(default_factory=dict)
    size: int = 0
    timing: Timing | None = None
    cost: float = 1.0
    verify_chance: float = 1.0
    explored: dict[str, float] = field(default_factory=dict)
    number: int = 0
    memory: np.ndarray | None = None
    ended: tuple[str, ...] | None = None
    seen: bool = False
    start: np.ndarray | None = None
    emitted: np.ndarray | None = None
    sampled: np.ndarray | None = None
    token_ids: np.ndarray | None = None
    confidence: np.ndarray | None = None
    drafted: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return int(self.bounds[-1])

    @property
    def real_drafts(self) -> np.ndarray:
        """int32 [n], those of the draft: neither placeholders nor the memory's."""
        drafts = self.drafts - self.padding
        return drafts if self.memory is None else np.where(self.memory, 0, drafts)

    def read(self) -> None:
        """Take the landed numbers: views of the buffer, good until it is given back.

        Sets `start` int64 [n] position of each request's first row, `emitted` int32
        [n] tokens committed (0 for a prefill chunk that is not the last), `sampled`
        int32 [n, 1 or K + 1], `token_ids` int32 [rows], `confidence` float32 [n, K]
        and `drafted` int32 [n], the first drafted token.
        """
        seq_lens, self.emitted, self.sampled, *rest = self.buffer.arrays()
        self.token_ids, self.confidence, self.drafted, *cuts = rest
        if self.cut:
            self.bounds, logit_bounds = cuts
            self.logit_ends = logit_bounds[1:]
            # One row of a request's logits is no draft's.
            verified = np.diff(logit_bounds) - 1
            self.trimmed = np.where(self.padding > 0, 0, self.drafts - verified)
            self.padding = np.minimum(self.padding, verified)
            self.drafts = verified
        self.start = seq_lens.astype(np.int64) - np.diff(self.bounds)


@dataclass(slots=True)
class RequestRows:
    """The requests of a step that are captured; arrays are int64 [n] if not said.

    Attributes:
        low: First row of each among the staged ones.
        first: The same among `Step.token_ids`.
        drafts: Drafted tokens, in the last of them.
        padding: Placeholders: scheduled to keep a graph's shape, they are no tokens and
            their rows say nothing about the model.
        committed: Tokens that were sampled; 0 for a prefill chunk that is not the last.
        next_token: The sampled one that follows the last real row (a placeholder may be
            accepted by chance); -1 if nothing was sampled.
        verify_chance: float [n]; see `Record`.
        memory: bool [n]; see `Record`. None: False of all.
    """

    tickets: list[Ticket]
    low: np.ndarray
    first: np.ndarray
    count: np.ndarray
    drafts: np.ndarray
    padding: np.ndarray
    start: np.ndarray
    num_prompt_tokens: np.ndarray
    logit_end: np.ndarray
    committed: np.ndarray
    next_token: np.ndarray
    verify_chance: np.ndarray
    memory: np.ndarray | None = None


def lay_out(
    requests: RequestRows, step: Step, spec: RingSpec, topk: int, max_rows: int
) -> tuple[Frames, np.ndarray]:
    """Records of a step's requests, in their order.

    Args:
        topk: k of the ring's teacher; 0 if that is the hidden state.

    Returns:
        The records, and int64 [records], which request each is of.
    """
    staged = step.staged if step.full else None
    top = None if staged is None else staged.topk
    count, drafts = requests.count, requests.drafts
    before = count - 1 - drafts  # the last of what needs no verification
    most = int(count.max(initial=1)) if staged is None else max_rows
    of, low, high = _pieces(count, before, most)
    rows, final = high - low, high == count[of]
    verify = (drafts > 0) | (count == 1)
    accepted = np.minimum(before + np.maximum(requests.committed - 1, 0), count - 1)
    # Only sampled rows have logits (the last of a prefill, all of a verification), so a
    # top-k teacher starts later than a hidden one.
    if top is not None:
        teacher = np.maximum(before, 0)
    else:
        teacher = count if topk or staged is None else np.zeros_like(count)
    taught = np.clip(teacher[of], low, high)
    metas = _blank(requests.tickets, spec)[of]
    metas["draft_version"] = step.version
    if step.drafted_by is not None:
        metas["draft_version"][verify[of]] = step.drafted_by
    metas["start"] = requests.start[of] + low
    metas["num_prompt_tokens"] = requests.num_prompt_tokens[of]
    metas["next_token"] = np.where(final, requests.next_token[of], -1)
    metas["num_accepted"] = np.where(final, accepted[of] - low, rows - 1)
    metas["rows"] = rows
    metas["teacher_start"] = taught - low
    metas["phase"] = np.where(final & verify[of], Phase.VERIFY, Phase.PREFILL)
    metas["flags"] = SAMPLED * np.array([t.sampled for t in requests.tickets])[of]
    if requests.memory is not None:
        metas["flags"] |= np.where(requests.memory[of], MEMORY, 0).astype(np.uint8)
    metas["concurrency"] = len(step.req_ids)
    capped = np.array([t.capped for t in requests.tickets])[of]
    metas["cost"] = np.where(capped, 0.0, step.cost)
    metas["verify_chance"] = requests.verify_chance[of]

    # Array, type, shape of a row, first row of each record and how many.
    parts: list[tuple[np.ndarray, np.dtype, tuple[int, ...], Any, Any]] = [
        (np.asarray(step.token_ids), _TOKEN, (), requests.first[of] + low, rows)
    ]
    if staged is not None:
        wire, at = FEATURE_DTYPES[spec.feature_dtype], requests.low[of]
        metas["feature_width"] = width = spec.feature_width
        parts.append((staged.features, wire, (width,), at + low, rows))
        if staged.hidden is not None:
            metas["flags"] |= HIDDEN
            metas["hidden_width"] = width = spec.hidden_size
            parts.append((staged.hidden, wire, (width,), at + taught, high - taught))
        if top is not None:
            metas["flags"] |= TOPK
            metas["topk"] = width = spec.teacher_topk
            at = (requests.logit_end - requests.padding - count)[of] + taught
            for array, dtype, shape in zip(
                top,
                (_TOKEN, _FLOAT, _FLOAT),
                ((width,), (width,), ()),
                strict=True,
            ):
                parts.append((array, dtype, shape, at, high - taught))
    spans = np.empty((len(of), len(parts), 2), np.int64)
    fits = sound_counts(*(metas[name] for name in _COUNTS))
    for j, (array, dtype, shape, begin, length) in enumerate(parts):
        fits &= array.dtype == dtype and array.shape[1:] == shape
        row_bytes = dtype.itemsize * math.prod(shape)
        # No rows lie nowhere: logits, of which a piece of a prompt may have none.
        spans[:, j, 0] = np.where(length > 0, begin, 0) * row_bytes
        spans[:, j, 1] = length * row_bytes
    status = np.where(fits, Status.WRITTEN, Status.INVALID).astype(np.uint8)
    sources = tuple(np.ascontiguousarray(array) for array, *_ in parts)
    return Frames(metas, spans, low > 0, sources, status), of


def end_records(
    tickets: list[Ticket], version: int, spec: RingSpec, topk: int
) -> Frames:
    """Records without rows that say that requests ended."""
    metas = _blank(tickets, spec)
    metas["draft_version"] = version
    metas["next_token"] = -1
    metas["phase"] = Phase.VERIFY
    metas["flags"] = FINISHED | (TOPK if topk else HIDDEN)
    metas["feature_width"] = spec.feature_width
    metas["topk" if topk else "hidden_width"] = topk or spec.hidden_size
    metas["cost"] = metas["verify_chance"] = 1.0
    n = len(tickets)
    spans, status = np.empty((n, 0, 2), np.int64), np.zeros(n, np.uint8)
    return Frames(metas, spans, np.zeros(n, np.bool_), (), status)


def _blank(tickets: list[Ticket], spec: RingSpec) -> np.ndarray:
    """`META` [n] that say whose they are and no more."""
    metas = np.zeros(len(tickets), META)
    metas["key"] = np.array([ticket.key for ticket in tickets], np.uint64)
    metas["tenant"] = np.array([ticket.tenant for ticket in tickets], np.uint64)
    metas["dtype"] = DTYPE_CODES[spec.feature_dtype]
    metas["format"] = FORMAT_VERSION
    return metas


def _pieces(
    count: np.ndarray, before: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of a long prompt in pieces of which many fit into the ring.

    Args:
        count: int64 [n], rows of each request.
        before: int64 [n]: they may be cut up to here.

    Returns:
        Of each piece its request, its first row, and its end.
    """
    cuts = np.minimum(-(-count // most) - 1, -(-before // most)).clip(0)
    of = np.repeat(np.arange(len(count)), cuts + 1)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(cuts + 1) - cuts - 1, cuts + 1)
    low = np.minimum(nth * most, before[of].clip(0))
    high = np.minimum((nth + 1) * most, before[of])
    return of, low, np.where(nth < cuts[of], high, count[of])
