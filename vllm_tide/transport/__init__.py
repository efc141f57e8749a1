"""Transport between the engine and the trainer; its failures never stop serving.

Contains the signal ring (rows of live traffic, engine to trainer), the weights segment
(drafts, trainer to engine), the run directory (discovery of engines and trainers), and
the spool (records and drafts through storage). NumPy only: no torch, vLLM or pickle.

Threat model, for every reader and writer here:

* Processes of the same user are trusted: a process that can write to a segment, the run
  directory or the spool can also trace the engine. Modes 0600 and 0700 exclude other
  users. Segments and run directories of another user are refused. A spool trusts every
  member of the group of its root directory.
* A crash at any instruction is harmless: partially written data are never read, and the
  kernel releases the locks on segments and manifests of dead processes.
* Data that fail a check (checksum, digest, size, bounds) are dropped and counted.
* Data of another format version are refused with an error message.
* Nothing is repaired.

Used by the vLLM worker (``RingWriter``, ``WeightsSegment``: never block, and raise only
the documented ``WeightsRefused``) and by the sidecar (``RingReader``,
``WeightsWriter``: may raise ``TransportError``, with a message for the operator).

Known limit: a process that shrinks a segment between the size check and the access
terminates the reader with SIGBUS. vllm_tide never shrinks a segment.
"""

from vllm_tide.transport.draft_weights import DraftWeights, WeightsRefused
from vllm_tide.transport.record import Phase, Record, RingSpec
from vllm_tide.transport.ring import RingReader, RingStats, RingWriter
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.weights import (
    WeightsFeedback,
    WeightsSegment,
    WeightsWriter,
)

__all__ = [
    "DraftWeights",
    "Phase",
    "Record",
    "RingReader",
    "RingSpec",
    "RingStats",
    "RingWriter",
    "TransportError",
    "WeightsFeedback",
    "WeightsRefused",
    "WeightsSegment",
    "WeightsWriter",
]
