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

from vllm_tide import _shm
from vllm_tide.capture.policy import Ticket
from vllm_tide.transport.record import (
    DTYPE_CODES,
    FEATURE_DTYPES,
    FINISHED,
    FORMAT_VERSION,
    HIDDEN,
    META,
    SAMPLED,
    TOPK,
    Frames,
    Phase,
    RingSpec,
    Status,
)

TopK = tuple[np.ndarray, np.ndarray, np.ndarray]
_TOKEN = np.dtype(np.int32)
_FLOAT = np.dtype(np.float32)


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


REQUEST = np.dtype(
    [("key", np.uint64), ("tenant", np.uint64)]
    + [
        (name, np.int64)
        for name in (
            "flags", "low", "first", "count", "drafts", "padding", "start",
            "num_prompt_tokens", "logit_end", "committed", "next_token",
        )
    ]
    + [("verify_chance", np.float64), ("cost", np.float64)]
)  # fmt: skip
"""A captured request of a step (csrc/step.h).

* `flags`: SAMPLED and MEMORY of its records.
* `low`: Its first row among the staged ones; `first`: the same among `Step.token_ids`.
* `drafts`: Drafted tokens, in the last of its `count` rows.
* `padding`: Placeholders: scheduled to keep a graph's shape, they are no tokens and
  their rows say nothing about the model.
* `committed`: Tokens that were sampled; 0 for a prefill chunk that is not the last.
* `next_token`: The sampled one that follows the last real row (a placeholder may be
  accepted by chance); -1 if nothing was sampled.
* `verify_chance`, `cost`: See `Record`.
"""


@dataclass(slots=True)
class RequestRows:
    """The requests of a step that are captured.

    Attributes:
        table: `REQUEST` [n].
    """

    tickets: list[Ticket]
    table: np.ndarray

    @classmethod
    def of(cls, tickets: list[Ticket], step: Step) -> RequestRows:
        """Requests of a step, without their rows."""
        table = np.zeros(len(tickets), REQUEST)
        table["key"] = [ticket.key for ticket in tickets]
        table["tenant"] = [ticket.tenant for ticket in tickets]
        table["flags"] = [SAMPLED * ticket.sampled for ticket in tickets]
        table["cost"] = [0.0 if ticket.capped else step.cost for ticket in tickets]
        return cls(tickets, table)


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
    # Array, type, and shape of a row, of each part of a record.
    parts: list[tuple[np.ndarray, np.dtype, tuple[int, ...]]] = [
        (np.asarray(step.token_ids), _TOKEN, ())
    ]
    flags = hidden_width = topk_width = taught = 0
    if staged is not None:
        wire = FEATURE_DTYPES[spec.feature_dtype]
        parts.append((staged.features, wire, (spec.feature_width,)))
        taught = 0 if topk else 2
        if (hidden := staged.hidden) is not None:
            flags, hidden_width = HIDDEN, spec.hidden_size
            parts.append((hidden, wire, (hidden_width,)))
        if (top := staged.topk) is not None:
            # Only sampled rows have logits (the last of a prefill, all of a
            # verification), so a top-k teacher starts later than a hidden one.
            flags, topk_width, taught = flags | TOPK, spec.teacher_topk, 1
            shapes = ((topk_width,), (topk_width,), ())
            parts += zip(top, (_TOKEN, _FLOAT, _FLOAT), shapes, strict=True)
    drafted_by = step.version if step.drafted_by is None else step.drafted_by
    metas, spans, follows, sound, of = _shm.lay_out(
        requests.table,
        step.version,
        drafted_by,
        len(step.req_ids),
        DTYPE_CODES[spec.feature_dtype],
        FORMAT_VERSION,
        flags,
        0 if staged is None else spec.feature_width,
        hidden_width,
        topk_width,
        taught,
        0 if staged is None else max_rows,
        tuple(dtype.itemsize * math.prod(shape) for _, dtype, shape in parts),
    )
    fits = all(a.dtype == dtype and a.shape[1:] == shape for a, dtype, shape in parts)
    frames = Frames(
        np.frombuffer(metas, META),
        np.frombuffer(spans, np.int64).reshape(-1, len(parts), 2),
        np.frombuffer(follows, np.bool_),
        tuple(np.ascontiguousarray(array) for array, *_ in parts),
        np.where(
            np.frombuffer(sound, np.bool_) & fits, Status.WRITTEN, Status.INVALID
        ).astype(np.uint8),
    )
    return frames, np.frombuffer(of, np.int64)


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
