"""Where a pass over the training buffer stands, without the data itself.

A checkpoint never holds captured text or features: it would outlive a purge. It holds
a name for every document; when the buffer holds the same documents again (a spool read
from its cursor, offline data), the pass goes on where it was, else a new one begins.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_tide.train.reservoir import SampleBuffer
from vllm_tide.train.sample import Sample

_NAME_BYTES = 16


def document_name(sample: Sample) -> str:
    """Digest of one document: request, positions, tokens, mask, outer feature rows.

    Hashing every feature would read the whole buffer (24 KiB a row at hidden 4096).
    """
    digest = hashlib.blake2b(digest_size=_NAME_BYTES)
    numbers = (sample.key, sample.start, sample.num_tokens, len(sample.branches))
    digest.update(repr(numbers).encode())
    rows = sample.features[:: max(1, sample.num_tokens - 1)]
    for tensor in (sample.tokens, sample.valid, rows):
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def buffer_digest(samples: Iterable[Sample]) -> str:
    """Digest of documents in order."""
    digest = hashlib.blake2b(digest_size=_NAME_BYTES)
    for sample in samples:
        digest.update(document_name(sample).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class DataCursor:
    """The rest of a pass, and what decides the next one.

    Attributes:
        train: `buffer_digest` of the training side.
        holdout: `buffer_digest` of the held-out side.
        queue: Names of the documents left in this pass, in order.
        fresh: Names of the documents that no pass has begun with yet.
        shuffle: State of the generator that orders passes (`random.Random`).
        new_tokens: Rows added since the last cycle began.
    """

    train: str
    holdout: str
    queue: list[str]
    fresh: list[str]
    shuffle: list[Any]
    new_tokens: int

    @classmethod
    def of(cls, buffer: SampleBuffer, queue: Iterable[Sample]) -> DataCursor:
        """The cursor of a trainer between two steps."""
        return cls(
            train=buffer_digest(buffer.train),
            holdout=buffer_digest(buffer.holdout),
            queue=[document_name(s) for s in queue],
            fresh=[document_name(s) for s in buffer.fresh],
            shuffle=list(buffer._random.getstate()),
            new_tokens=buffer.new_tokens,
        )

    def to_json(self) -> dict[str, Any]:
        """For `TrainState.data`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DataCursor:
        """Inverse of `to_json`."""
        return cls(**value)

    def resume(self, buffer: SampleBuffer) -> deque[Sample] | None:
        """The rest of the pass over `buffer`, whose order is set as it was.

        Returns:
            None, and nothing is changed, when the buffer holds other documents than
            at the time of the checkpoint: begin a new pass.
        """
        if buffer_digest(buffer.train) != self.train:
            return None
        if buffer_digest(buffer.holdout) != self.holdout:
            return None
        held: dict[str, deque[Sample]] = {}
        for sample in buffer.train:
            held.setdefault(document_name(sample), deque()).append(sample)
        if not held.keys() >= {*self.queue, *self.fresh}:
            return None
        version, numbers, gauss = self.shuffle
        buffer._random.setstate((version, tuple(numbers), gauss))
        buffer.fresh = _take(self.fresh, held)
        buffer.new_tokens = self.new_tokens
        return deque(_take(self.queue, held))


def _take(names: list[str], held: dict[str, deque[Sample]]) -> list[Sample]:
    out = []
    for name in names:
        out.append(held[name][0])
        held[name].rotate(-1)  # equal documents in turn
    return out


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
