"""A step's rows as records, without a copy of them: all requests of it at once.

An adapter says where the rows lie and what the target decided; everything that a
trainer will read off a record is decided here, once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
class StepRows:
    """Rows that a step computed, in wire types; they stay as they are until written.

    Attributes:
        token_ids: int32 [>= rows], input token of each row.
        features: [>= rows, num_aux * H]; None while records are light: ids and counts.
        hidden: [>= rows, H], or None if not stored.
        topk: ids int32 [logits, k], log-probabilities float32 [logits, k] and tail
            float32 [logits] of the sampled rows; None if not stored.
        drafted_by: The one that drafted what the step verified; None is the same.
    """

    token_ids: np.ndarray
    features: np.ndarray | None
    hidden: np.ndarray | None
    topk: TopK | None
    version: int
    drafted_by: int | None = None
    concurrency: int = 0
    cost: float = 1.0

    @property
    def full(self) -> bool:
        return self.features is not None


@dataclass(slots=True)
class RequestRows:
    """The requests of a step that are captured; arrays are int64 [n] if not said.

    Attributes:
        low: First row of each among `StepRows.features`, and `hidden`.
        first: The same among `StepRows.token_ids`.
        count: Its rows, without padding.
        drafts: Drafted tokens, in the last of them.
        padding: Placeholders: scheduled to keep a graph's shape, they are no tokens and
            their rows say nothing about the model.
        start: Position of its first row.
        logit_end: End of its rows in the logits, padding included.
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
    requests: RequestRows, step: StepRows, spec: RingSpec, topk: int, max_rows: int
) -> tuple[Frames, np.ndarray]:
    """Records of a step's requests, in their order.

    Args:
        topk: k of the ring's teacher; 0 if that is the hidden state.
        max_rows: Rows from which on a record is split.

    Returns:
        The records, and int64 [records], which request each is of.
    """
    count, drafts = requests.count, requests.drafts
    before = count - 1 - drafts  # the last of what needs no verification
    most = max_rows if step.full else int(count.max(initial=1))
    of, low, high = _pieces(count, before, most)
    rows, final = high - low, high == count[of]
    verify = (drafts > 0) | (count == 1)
    accepted = np.minimum(before + np.maximum(requests.committed - 1, 0), count - 1)
    # Only sampled rows have logits (the last of a prefill, all of a verification), so a
    # top-k teacher starts later than a hidden one.
    if step.full and step.topk is not None:
        teacher = np.maximum(before, 0)
    else:
        teacher = np.zeros_like(count) if step.full and not topk else count
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
    metas["concurrency"] = step.concurrency
    metas["cost"] = step.cost
    metas["verify_chance"] = requests.verify_chance[of]

    # Array, type, shape of a row, first row of each record and how many.
    parts: list[tuple[np.ndarray, np.dtype, tuple[int, ...], Any, Any]] = [
        (step.token_ids, _TOKEN, (), requests.first[of] + low, rows)
    ]
    if step.features is not None:
        wire, at = FEATURE_DTYPES[spec.feature_dtype], requests.low[of]
        metas["feature_width"] = width = spec.feature_width
        parts.append((step.features, wire, (width,), at + low, rows))
        if step.hidden is not None:
            metas["flags"] |= HIDDEN
            metas["hidden_width"] = width = spec.hidden_size
            parts.append((step.hidden, wire, (width,), at + taught, high - taught))
        if step.topk is not None:
            metas["flags"] |= TOPK
            metas["topk"] = width = spec.teacher_topk
            at = (requests.logit_end - requests.padding - count)[of] + taught
            for array, dtype, shape in zip(
                step.topk,
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


def farewells(tickets: list[Ticket], version: int, spec: RingSpec, topk: int) -> Frames:
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
