"""What a trainer needs of one engine, whatever carries it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vllm_tide.transport.publication import Publication, TensorInput
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.rendezvous import EngineManifest
from vllm_tide.transport.ring_format import Collect, RingSpec
from vllm_tide.transport.weights import WeightsFeedback


class Feed(Protocol):
    """Records of one engine in, heads for it out. One thread uses it.

    Any method may raise TransportError when the engine or its storage is lost for good;
    what merely is not there yet is None, zero or empty. `spec` is what its records have
    in common.
    """

    id: str
    manifest: EngineManifest
    spec: RingSpec

    @property
    def identity(self) -> dict[str, str]:
        """What an engine must share with it, see ``transport.spool_identity``."""

    @property
    def latest_version(self) -> int:
        """Newest head sent to it, by this trainer or one before; 0 if none was."""

    def models(self) -> tuple[Path, Path]:
        """Directories on this host: the target (or its rows), the first draft."""

    def read(self, limit: int, max_rows: int | None = None) -> list[Record]:
        """Take records out, in order; never waits.

        Stops after the record that reaches `max_rows`.
        """

    def heartbeat(self) -> bool:
        """Say that the trainer lives; call it at least once a second.

        True once if what was published last is lost and has to be sent again.
        """

    def alive(self) -> bool:
        """Whether the engine lives, or left records that were not read yet."""

    def feedback(self) -> WeightsFeedback:
        """What the engine did with the heads."""

    def publish(
        self,
        tensors: Mapping[str, TensorInput],
        *,
        version: int,
        parent_version: int,
        meta: dict[str, Any],
    ) -> None:
        """Send a head, newer than the latest; the engine swaps it in when it is ready.

        Tensors by name: dtype as torch names it, shape, and its bytes.
        """

    def latest(self) -> Publication | None:
        """The newest head sent to it, to go on from after a restart."""

    def set_collect(self, wanted: Collect) -> None:
        """Ask the engine for full rows, for light records, or for nothing."""

    def purge(self, tenant: int | None = None) -> int:
        """Forget what was fetched ahead of :meth:`read`; the records dropped."""

    def stats(self) -> dict[str, int]:
        """Counters for the status: rows dropped, shards skipped, and so on."""

    def close(self) -> None:
        """Let the engine go. Idempotent, never raises."""


_FAR = 1 << 40
"""No request is as long (tokens)."""
# Bits of the largest magnitude that a row may hold: what is larger, infinite or no
# number has larger ones. 1e9, whose square a sum can take, or float16's largest.
_LARGEST = {"bfloat16": 0x4E6E, "float16": 0x7BFF, "float32": 0x4E6E6B28}


def hostile(record: Record, spec: RingSpec, vocab_size: int) -> bool:
    """True if a record holds what no engine computes and training cannot bear."""
    ids, count = record.token_ids, record.num_rows
    if not count:
        return False
    committed = count if record.phase == Phase.PREFILL else record.num_accepted + 1
    if ids.min() < 0:  # vLLM pads a short draft, and from there nothing is used
        count = int(np.argmax(ids < 0))
    taught = slice(max(count - record.teacher_start, 0))
    hidden = record.teacher_hidden
    places = record.start, record.num_prompt_tokens
    if (
        count < committed
        or not (min(places) >= 0 and max(places) < _FAR)
        or not -1 <= record.next_token < vocab_size
        or ids[:count].max() >= vocab_size
        or _too_large(record.features[:count], spec)
        or (hidden is not None and _too_large(hidden[taught], spec))
    ):
        return True
    top, logprobs = record.teacher_topk_ids, record.teacher_topk_logprobs
    tail = record.teacher_tail_logprob
    if top is None or logprobs is None or tail is None or not top[taught].size:
        return False
    return not (
        top[taught].min() >= 0
        and top[taught].max() < vocab_size
        and logprobs[taught].min() > -1e9  # False also where one is no number
        and logprobs[taught].max() <= 1
        and tail[taught].max() <= 1
    )


def _too_large(rows: np.ndarray, spec: RingSpec) -> bool:
    size, largest = rows.dtype.itemsize, _LARGEST[spec.feature_dtype]
    negative = 1 << (8 * size - 1)
    return bool(rows.size) and bool(
        rows.view(f"i{size}").max() > largest
        or rows.view(f"u{size}").max() > negative | largest
    )
