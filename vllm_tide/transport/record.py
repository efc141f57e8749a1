"""One request in one engine step, its bytes, and what all records of a ring share.

A record is encoded by copying its arrays straight into the mapped ring (one pass, in
C++, with the checksum) and decoded as views of a private copy. Decoding trusts
nothing: every length is checked against the bytes there are and against each other.

Body of a record, little-endian, each array starting at a multiple of 8 bytes (byte 71
is the format; format 1 had a 0 there)::

    meta (96 bytes) | token_ids | features | teacher_hidden
    | teacher_topk_ids | teacher_topk_logprobs | teacher_tail_logprob
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, get_args

import numpy as np
from pydantic import TypeAdapter

FORMAT_VERSION = 5

Teacher = Literal["hidden", "topk"]

FEATURE_DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(np.uint16),  # the bits: NumPy has no bfloat16
    "float32": np.dtype(np.float32),
}
"""NumPy type of each ``feature_dtype`` of a ring's header."""

_I32 = np.dtype(np.int32)
_F32 = np.dtype(np.float32)

_FIELDS = """key:u8 draft_version:u8 start:i8 num_prompt_tokens:i8 next_token:i8
num_accepted:i4 rows:u4 padding:u4 feature_width:u4 teacher_start:u4 hidden_width:u4
topk:u4 phase:u1 flags:u1 dtype:u1 format:u1 tenant:u8 concurrency:u4 cost:f4
verify_chance:f4 end:u4"""
META = np.dtype(
    [
        (name, "<" + kind)
        for name, _, kind in (f.partition(":") for f in _FIELDS.split())
    ]
)
"""The fixed part of a record."""
META_BYTES = META.itemsize
_FORMAT_AT = 71
DTYPE_CODES = {"bfloat16": 0, "float32": 2}  # 1 was float16
_DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}

FINISHED, HIDDEN, TOPK, SAMPLED, MEMORY = 1, 2, 4, 8, 16
_ALL_FLAGS = FINISHED | HIDDEN | TOPK | SAMPLED | MEMORY
_ALIGN = 8


class Phase(IntEnum):
    """Kind of the rows of a record."""

    PREFILL = 0
    """Rows of the prompt, or recomputed tokens."""
    VERIFY = 1
    """The last sampled token, then drafted tokens."""


# Looking a member up in an enum class takes longer than the rest of a check.
_PREFILL, _VERIFY = int(Phase.PREFILL), int(Phase.VERIFY)


class RecordError(ValueError):
    """A record contradicts itself or its bytes do; it is dropped and counted."""


@dataclass(slots=True, frozen=True)
class Record:
    """One request in one engine step; n rows, h hidden size, w feature width.

    A VERIFY record with a = num_accepted commits ``token_ids[0..a]`` at positions
    ``start..start+a``, then ``next_token`` at ``start+a+1`` (which comes again as row 0
    of the next record). Rows after a hold rejected tokens: what was computed there is
    conditioned on the wrong prefix.

    Args:
        key: Random u64 of the request, made by the engine; never the client's id.
        num_prompt_tokens: Length of the prompt; token t is generated iff t >= it.
        num_accepted: VERIFY: rows 0..num_accepted are committed. PREFILL: n - 1.
        next_token: Token sampled after row num_accepted; -1 if none was.
        draft_version: Version of the draft that made ``token_ids[1:]``.
        token_ids: int32 [n], input token of each row.
        features: [n, w] of the ring's dtype; bfloat16 as its bits in uint16. [n, 0] in
            a metadata-only record.
        teacher_start: First row that has a teacher; n if none has.
        teacher_hidden: [n - teacher_start, h], dtype of features; after the final norm.
        teacher_topk_ids: int32 [n - teacher_start, k].
        teacher_topk_logprobs: float32 [n - teacher_start, k], descending.
        teacher_tail_logprob: float32 [n - teacher_start], log of the mass outside the
            top k; may be -inf.
        finished: Last record of the request (one with no rows may just say so).
        tenant: u64 name of who sent the request (``tenant.tenant_id``); 0 is nobody.
        concurrency: Requests of the step; 0 is unknown.
        cost: Predicted seconds of the step over those of a step without drafts at the
            same batch and context; 1 where nothing is predicted, 0 where a fault keeps
            control from drafting, or the request caps its drafts: such a step says
            nothing of the draft.
        verify_chance: Chance, drawn without regard to its confidence, with which the
            first drafted token was verified: 1 where control wanted it verified, its
            share of exploration where only that verified it, 0 where it was cut where
            the chance is not known.
        memory: Its drafts were the memory's (`tide.test_time.memory`) instead of the
            draft's, or the draft was left out for them: the step says nothing of it.
    """

    key: int
    phase: int
    start: int
    num_prompt_tokens: int
    num_accepted: int
    next_token: int
    draft_version: int
    token_ids: np.ndarray
    features: np.ndarray
    teacher_start: int
    teacher_hidden: np.ndarray | None = None
    teacher_topk_ids: np.ndarray | None = None
    teacher_topk_logprobs: np.ndarray | None = None
    teacher_tail_logprob: np.ndarray | None = None
    finished: bool = False
    tenant: int = 0
    sampled: bool = False
    concurrency: int = 0
    cost: float = 1.0
    verify_chance: float = 1.0
    memory: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def metadata_only(self) -> bool:
        """True if it carries ids and counts only: no features, no teacher."""
        return bool(self.features.shape[1] == 0)


@dataclass(frozen=True)
class RingSpec:
    """Facts that all records of a ring share; written to its header.

    Args:
        aux_layer_ids: Layers whose input is captured, in feature order.
        feature_dtype: "bfloat16" or "float32".
    """

    engine_id: str
    hidden_size: int
    aux_layer_ids: tuple[int, ...]
    vocab_size: int
    feature_dtype: str
    teacher: Teacher
    teacher_topk: int

    def __post_init__(self) -> None:
        """Refuse what no ring can carry.

        Raises:
            ValueError: On an unknown name or a size that is not positive.
        """
        if self.feature_dtype not in FEATURE_DTYPES:
            raise ValueError(f"feature_dtype: {self.feature_dtype!r} is unknown")
        if self.teacher not in get_args(Teacher):
            raise ValueError(f"teacher: {self.teacher!r} is unknown")
        if min(self.hidden_size, self.vocab_size, len(self.aux_layer_ids)) < 1:
            raise ValueError("hidden_size, vocab_size, aux_layer_ids: must be positive")

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> RingSpec:
        """Read the header's JSON; ValueError if it is not a spec."""
        return TypeAdapter(cls).validate_python(fields)

    @property
    def feature_width(self) -> int:
        """Width of a feature row: captured layers times hidden size."""
        return len(self.aux_layer_ids) * self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Most bytes of a row with all that it carries."""
        item = FEATURE_DTYPES[self.feature_dtype].itemsize
        if self.teacher == "topk":
            return self.feature_width * item + 8 * self.teacher_topk + 8
        return (self.feature_width + self.hidden_size) * item + 4

    def check(self, record: Record) -> None:
        """Compare a record's widths and teacher with this spec.

        Raises:
            RecordError: If they differ.
        """
        width = record.features.shape[1]
        if width != self.feature_width and width != 0:
            raise RecordError("features are not of this ring's width")
        if record.features.dtype != FEATURE_DTYPES[self.feature_dtype]:
            raise RecordError("features are not of this ring's dtype")
        hidden, ids = record.teacher_hidden, record.teacher_topk_ids
        if width == 0 and not (hidden is None and ids is None):
            raise RecordError("a metadata-only record has a teacher")
        if hidden is not None and (
            self.teacher == "topk" or hidden.shape[1] != self.hidden_size
        ):
            raise RecordError("teacher_hidden is not what this ring carries")
        if ids is not None and (
            self.teacher == "hidden" or ids.shape[1] != self.teacher_topk
        ):
            raise RecordError("the top-k teacher is not what this ring carries")


class Status(IntEnum):
    """Outcome of writing a record (csrc/shm.h has the first six)."""

    WRITTEN = 0
    FULL = 1
    TOO_LARGE = 2
    CURSOR = 3
    TRUNCATED = 4
    SKIPPED = 5
    """It continues one that was not written; it counts as no record."""
    CLOSED = 6
    INVALID = 7


@dataclass(slots=True)
class Frames:
    """Records whose arrays lie somewhere in a few larger ones.

    Attributes:
        metas: `META` [n].
        spans: int64 [n, S, 2], where each part begins in its source, and its length
            (bytes).
        follows: bool [n], whether a record continues the one before.
        sources: S C-contiguous arrays, in the order of a body.
        status: uint8 [n], a `Status`; WRITTEN also before it is.
    """

    metas: np.ndarray
    spans: np.ndarray
    follows: np.ndarray
    sources: tuple[np.ndarray, ...]
    status: np.ndarray

    def refuse(self, why: Status) -> None:
        """Set the status of records that are still to be written."""
        self.status[self.status == Status.WRITTEN] = why


def decode(body: memoryview) -> Record:
    """Read a record; its arrays are views of `body`, which must stay unchanged.

    Args:
        body: Private copy of the bytes whose checksum was right.

    Raises:
        RecordError: If the bytes are not exactly one well-formed record.
    """
    if len(body) > _FORMAT_AT and body[_FORMAT_AT] != FORMAT_VERSION:
        raise RecordError(
            f"a record of format {body[_FORMAT_AT] or 1}, this process speaks "
            f"{FORMAT_VERSION}: run the same vllm_tide on both sides"
        )
    if len(body) < META_BYTES:
        raise RecordError("shorter than its fixed part")
    fixed = np.frombuffer(body, META, 1).item()
    (key, draft_version, start, num_prompt_tokens, next_token, num_accepted, n, _,
     width, teacher_start, hidden_width, topk, phase, flags, code, _, tenant,
     concurrency, cost, verify_chance, _) = fixed  # fmt: skip
    if flags & ~_ALL_FLAGS or code not in _DTYPE_NAMES:
        raise RecordError("unknown flags or feature type")
    if not (0.0 <= cost < math.inf and 0.0 <= verify_chance <= 1.0):
        raise RecordError("cost or verify_chance out of range")
    _check_counts(phase, n, num_accepted, teacher_start)
    dtype = FEATURE_DTYPES[_DTYPE_NAMES[code]]
    rows, end = n - teacher_start, META_BYTES

    def take(dtype: np.dtype, *shape: int) -> np.ndarray:
        nonlocal end
        count, begin = math.prod(shape), end
        end += -(-count * dtype.itemsize // _ALIGN) * _ALIGN
        if end > len(body):
            raise RecordError("an array runs past the end")
        return np.frombuffer(body, dtype, count, begin).reshape(shape)

    token_ids = take(_I32, n)
    features = take(dtype, n, width)
    hidden = take(dtype, rows, hidden_width) if flags & HIDDEN else None
    ids = logprobs = tail = None
    if flags & TOPK:
        ids = take(_I32, rows, topk)
        logprobs = take(_F32, rows, topk)
        tail = take(_F32, rows)
    if end != len(body):
        raise RecordError("bytes left over after the last array")
    return Record(
        key, Phase(phase), start, num_prompt_tokens, num_accepted, next_token,
        draft_version, token_ids, features, teacher_start, hidden, ids, logprobs, tail,
        bool(flags & FINISHED), tenant, bool(flags & SAMPLED), concurrency, cost,
        verify_chance, bool(flags & MEMORY),
    )  # fmt: skip


def tenant_of(body: np.ndarray) -> int:
    """Tenant of a record's bytes."""
    return int(np.frombuffer(body, META, 1)["tenant"][0])


def _check_counts(phase: int, n: int, num_accepted: int, teacher_start: int) -> None:
    known = phase in (_PREFILL, _VERIFY)
    taught = 0 <= teacher_start <= n
    accepted = num_accepted == n - 1 if phase == _PREFILL else 0 <= num_accepted < n
    if not (known and taught and (n == 0 or accepted)):
        raise RecordError("phase, rows, num_accepted, teacher_start: contradictory")
