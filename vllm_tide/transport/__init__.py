"""Transport between the engine and the trainer that cannot hurt serving.

Owns the signal ring (rows of live traffic, engine to trainer), the weights segment
(drafts, trainer to engine) and the run directory where the two find each other.
NumPy only: no torch, no vLLM, no pickle.

Runs in the vLLM worker (``RingWriter``, ``WeightsSegment``: never block, never raise
but the documented ``WeightsRefused``) and in the sidecar (``RingReader``,
``WeightsWriter``: may raise ``TransportError``, one sentence an operator can act on).
What lies in shared memory is never trusted: it is bounds-checked, checksummed, or
copied out first.

Known limit: a process of the same user may shrink a segment between the size check
and the access that follows; Linux then sends SIGBUS. Nothing of ours ever shrinks one.
"""

from vllm_tide.transport.record import Phase, Record, RingSpec
from vllm_tide.transport.ring import RingReader, RingStats, RingWriter
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.weights import (
    Publication,
    TensorBytes,
    WeightsFeedback,
    WeightsRefused,
    WeightsSegment,
    WeightsWriter,
)

__all__ = [
    "Phase",
    "Publication",
    "Record",
    "RingReader",
    "RingSpec",
    "RingStats",
    "RingWriter",
    "TensorBytes",
    "TransportError",
    "WeightsFeedback",
    "WeightsRefused",
    "WeightsSegment",
    "WeightsWriter",
]
