"""Data of one step for capture, control and timing, and its rows as records.

Both model runners fill a `Step` (`engine/worker_v1.py`, `engine/steps.py`). The records
of all its requests are made together, without a copy of the rows. This module defines
the contents of a record.
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
class Step:
    """Data of one step: known at launch, and results once it has landed.

    Attributes:
        req_ids: Requests in the order of the batch.
        bounds: int32 [n + 1], bounds of their rows. If drafts are cut on the device,
            this, `drafts` and `logit_ends` are upper bounds until `read`.
        drafts: int32 [n], verified draft tokens, placeholders included.
        padding: int32 [n], placeholders among them, which only keep a graph's shape;
            their rows are not valid.
        logit_ends: int32 [n], end of each request's rows in the logits.
        num_prompt_tokens: int32 [n].
        version: Version of the draft that runs after the target.
        buffer: Its `StepBuffer`; None if all numbers are on the host (V1).
        drafted_by: Version of the draft that made the verified drafts; None: `version`.
        steps: Draft passes run in this step; the next step verifies their tokens.
        whole: Whether all of the step was enqueued, draft and copies included.
        cut: Whether drafts were cut on the device.
        trimmed: int32 [n], drafted tokens that the device cut, without placeholders;
            set by `read`.
        after_gap: Whether the previous step was lost, so the source of the verified
            drafts is unknown.
        full: For capture: True if rows were staged, False for metadata-only records,
            None for no records.
        staged: Its rows in wire types: `features` [rows, num_aux * H], `hidden`
            [rows, H] or None, `topk` of its logits or None.
        taken: int64 [m], the requests with staged rows.
        size: Upper bound of the bytes of the staged rows in the ring.
        reading: For control: returns the times of the landed step (`StepSample`) or
            None; None if the engine was idle before the step.
        cost: For capture: `Record.cost`, set by control after the step has landed.
        verify_chance: `Record.verify_chance` of requests that are not in `explored`.
        explored: `Record.verify_chance` by request, of drafts verified to explore.
        memory: bool [n], whether the verified drafts are the n-gram memory's, set by
            control after the step has landed; None: none are.
        ended: Requests that had ended when the next step began; None before that.
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
    taken: np.ndarray | None = None
    size: int = 0
    reading: Callable[[], Any] | None = None
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
        """Verified tokens of the draft, int32 [n]; no placeholders, none of memory."""
        drafts = self.drafts - self.padding
        return drafts if self.memory is None else np.where(self.memory, 0, drafts)

    def read(self) -> None:
        """Read the landed results as views of the buffer, valid until its release.

        Sets `start` int64 [n] position of each request's first row, `emitted` int32
        [n] tokens committed (0 for a prefill chunk that is not the last), `sampled`
        int32 [n, 1 or K + 1], `token_ids` int32 [rows], `confidence` float32 [n, K]
        and `drafted` int32 [n], the first drafted token.
        """
        seq_lens, self.emitted, self.sampled, *others = self.buffer.arrays()
        self.token_ids, self.confidence, self.drafted, *cuts = others
        if self.cut:
            self.bounds, logit_bounds = cuts
            self.logit_ends = logit_bounds[1:]
            # One row of a request's logits has no draft token.
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
* `padding`: Placeholders, which only keep a graph's shape; their rows are not valid.
* `committed`: Sampled tokens; 0 for a prefill chunk that is not the last.
* `next_token`: The sampled token after the last valid row (a placeholder may be
  accepted by chance); -1 if nothing was sampled.
* `verify_chance`, `cost`: See `Record`.
"""


def request_table(tickets: list[Ticket], step: Step) -> np.ndarray:
    """Return `REQUEST` [n] of a step's captured requests, without their rows."""
    table = np.zeros(len(tickets), REQUEST)
    table["key"] = [ticket.key for ticket in tickets]
    table["tenant"] = [ticket.tenant for ticket in tickets]
    table["flags"] = [SAMPLED * ticket.sampled for ticket in tickets]
    table["cost"] = [0.0 if ticket.capped else step.cost for ticket in tickets]
    return table


def lay_out(
    requests: np.ndarray, step: Step, spec: RingSpec, topk: int, max_rows: int
) -> tuple[Frames, np.ndarray]:
    """Return the records of a step's requests, in their order.

    Args:
        requests: `REQUEST` [n].
        topk: k of a top-k teacher; 0 for hidden states.

    Returns:
        The records, and the request of each record, int64 [records].
    """
    staged = step.staged if step.full else None
    # For each part of a record: array, type, shape of a row.
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
        requests,
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
    """Return end records, which have no rows."""
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
    """Return `META` [n] with key and tenant only."""
    metas = np.zeros(len(tickets), META)
    metas["key"] = np.array([ticket.key for ticket in tickets], np.uint64)
    metas["tenant"] = np.array([ticket.tenant for ticket in tickets], np.uint64)
    metas["dtype"] = DTYPE_CODES[spec.feature_dtype]
    metas["format"] = FORMAT_VERSION
    return metas
