"""Transport between the engine and the trainer that cannot hurt serving.

Owns the signal ring (rows of live traffic, engine to trainer), the weights segment
(drafts, trainer to engine), the run directory where the two find each other, and the
spool, which carries the same through storage. NumPy only: no torch, no vLLM, no pickle.

Threat model, for every reader and writer here:

* Processes of this user are not hostile: who may write to a segment, the run directory
  or the spool could also trace the engine. Other users are kept out by modes 0600 and
  0700, and segments and run directories that are another user's are refused; a
  spool trusts whom its root's group lets in.
* A crash at any instruction harms nobody: what is half written is never read, and the
  claims and segments of the dead are taken over or removed.
* What fails a check (checksum, digest, size, bounds) is dropped and counted.
* Another version is refused with a sentence.
* Nothing is repaired.

Runs in the vLLM worker (``RingWriter``, ``WeightsSegment``: never block, never raise
but the documented ``WeightsRefused``) and in the sidecar (``RingReader``,
``WeightsWriter``: may raise ``TransportError``, one sentence an operator can act on).

Known limit: whoever shrinks a segment between the size check and the access that
follows ends a process by SIGBUS. Nothing of ours ever shrinks one.
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
