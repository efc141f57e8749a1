"""The newest verified draft, ready to be installed.

A thread of the worker watches the weights segment. It copies, hashes and checks drafts
(names, shapes, types, finiteness, norms), so the model's thread does not. On a GPU the
thread uploads the draft piece by piece, through a small page-locked buffer and on a
separate stream; installation then copies within the device. The device buffer is
allocated at start, because the KV cache may take all remaining memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_tide.draft.config import DraftError, read_config
from vllm_tide.draft.kind import draft_config
from vllm_tide.draft.probe import probe_rows
from vllm_tide.draft.tensor_bytes import from_bytes
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.engine.staging import PinnedBytes
from vllm_tide.transport.draft_weights import WeightsRefused
from vllm_tide.transport.versions import version_name
from vllm_tide.transport.weights import WeightsSegment

logger = logging.getLogger("vllm.tide")


PIECE_BYTES = 8 << 20
_POLL_SECONDS = 5e-4


class DeviceBuffer:
    """Tensors with the shapes of a draft on a CUDA or ROCm device.

    Args:
        reference: Checkpoint of the served draft; gives names and shapes.
        shared: Names of the target's tensors, which are not published.
        dtype: Data type of the draft's computation, and of floating-point tensors here.
    """

    def __init__(
        self,
        reference: Mapping[str, torch.Tensor],
        shared: frozenset[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self._tensors = {
            name: torch.empty(
                tensor.shape,
                dtype=dtype if tensor.dtype.is_floating_point else tensor.dtype,
                device=device,
            )
            for name, tensor in reference.items()
            if name not in shared
        }
        self._pinned = PinnedBytes(PIECE_BYTES)
        lowest, _ = torch.cuda.Stream.priority_range()
        self._stream = torch.cuda.Stream(device, priority=lowest)
        with torch.cuda.device(device):
            self._copied, self._installed = torch.cuda.Event(), torch.cuda.Event()

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy a draft to the device; return when the copy is complete.

        Blocks; only for the staging thread.

        Args:
            tensors: On the host, with the reference's names and shapes.

        Returns:
            The tensors on the device, valid until the next call.
        """
        # The last draft may still be being copied into the model.
        self._stream.wait_event(self._installed)
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                self._upload_one(tensor.reshape(-1), self._tensors[name].view(-1))
        return {name: self._tensors[name] for name in tensors}

    def installed(self) -> None:
        """Record that the copies into the model are on the current stream."""
        self._installed.record()

    def close(self) -> None:
        """Release the host memory; no upload may follow."""
        self._stream.synchronize()
        self._pinned.close()

    def _upload_one(self, source: torch.Tensor, target: torch.Tensor) -> None:
        piece = self._pinned.bytes.view(target.dtype)
        for start in range(0, len(target), len(piece)):
            count = min(len(piece), len(target) - start)
            piece[:count].copy_(source[start : start + count])
            target[start : start + count].copy_(piece[:count], non_blocking=True)
            self._copied.record()
            while not self._copied.query():
                time.sleep(_POLL_SECONDS)


class DraftRefused(ValueError):
    """A publication cannot be installed.

    Attributes:
        reason: Short label for the counter (`shape`, `dtype`, `names`, ...).
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class DraftContract:
    """Names, shapes and bounds that every published draft must have.

    Args:
        reference: Tensors of the checkpoint that the server started with, by name.
        max_norm_ratio: Largest norm of a tensor relative to the checkpoint's.
        shared: Names of tensors that the draft shares with the target. They may not be
            published, because loading them would change the target.
        vocab_size: Vocabulary of the target; None leaves `d2t` unchecked.
    """

    def __init__(
        self,
        reference: Mapping[str, torch.Tensor],
        max_norm_ratio: float,
        shared: frozenset[str] = frozenset(),
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._shapes = {
            name: tuple(tensor.shape)
            for name, tensor in reference.items()
            if name not in shared
        }
        self._integer = {
            name: tensor.dtype
            for name, tensor in reference.items()
            if not tensor.dtype.is_floating_point and name not in shared
        }
        self._norms = norms_of(reference)
        self._ratio = max_norm_ratio
        self._shared = shared

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check the tensors of a publication.

        Raises:
            DraftRefused: One sentence with the name of the tensor.
        """
        extra = sorted(set(tensors) - set(self._shapes))
        if extra and extra[0] in self._shared:
            raise DraftRefused(
                "shared",
                f"tensor {extra[0]!r} belongs to the target model and may not be "
                "published.",
            )
        missing = sorted(set(self._shapes) - set(tensors))
        if missing or extra:
            which = f"lacks {missing[0]!r}" if missing else f"has unknown {extra[0]!r}"
            raise DraftRefused("names", f"the publication {which}.")
        for name, tensor in tensors.items():
            self._check_one(name, tensor)
        if self._vocab_size is not None and "d2t" in tensors:
            try:
                VocabMap.from_d2t(tensors["d2t"], self._vocab_size)
            except DraftError as error:
                raise DraftRefused("vocabulary", str(error)) from None

    def _check_one(self, name: str, tensor: torch.Tensor) -> None:
        if tuple(tensor.shape) != self._shapes[name]:
            raise DraftRefused(
                "shape",
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the served draft "
                f"has {self._shapes[name]}.",
            )
        integer = self._integer.get(name)
        if integer is not None or not tensor.dtype.is_floating_point:
            if tensor.dtype != integer:
                raise DraftRefused(
                    "dtype", f"tensor {name!r} has type {tensor.dtype}, not {integer}."
                )
            return
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float32).item()
        if norm != norm or norm == float("inf"):
            raise DraftRefused("not_finite", f"tensor {name!r} has NaN or infinity.")
        bound = self._ratio * max(self._norms.get(name, 0.0), 1e-3)
        if norm > bound:
            raise DraftRefused(
                "norm",
                f"tensor {name!r} has norm {norm:.3g}, more than {bound:.3g}, "
                f"{self._ratio:g} times the checkpoint's.",
            )


def norms_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the Euclidean norm of every floating-point tensor, in fp32."""
    return {
        name: torch.linalg.vector_norm(tensor, dtype=torch.float32).item()
        for name, tensor in tensors.items()
        if tensor.dtype.is_floating_point
    }


def overflow_check(
    checkpoint: Path, vllm_config: Any
) -> Callable[[Mapping[str, torch.Tensor]], None] | None:
    """Return a check that runs a published draft on a few rows, on the host.

    Args:
        checkpoint: Directory of the draft that the server started with.

    Returns:
        A function that raises `DraftRefused` if logits are not finite; None if the
        trainer does not support the draft.
    """
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    dtype = vllm_config.speculative_config.draft_model_config.dtype
    try:
        raw = read_config(checkpoint)
        config = draft_config(raw, {"num_hidden_layers": layers})
    except DraftError:
        return None

    def check(tensors: Mapping[str, torch.Tensor]) -> None:
        if not bool(probe_rows(config, tensors, dtype).isfinite().all()):
            raise DraftRefused("not_finite", "the logits overflow.")

    return check


POLL_SECONDS = 0.05
READ_INTERVAL_S = 0.5
"""Smallest interval between two reads of publications (s)."""
SWAP_SHARE = 0.05
"""Largest share of time in which swaps block serving: 3 s of a minute."""


@dataclass(frozen=True, slots=True)
class StagedDraft:
    """A verified draft in private memory, ready to be installed.

    Attributes:
        on_device: The tensors on the model's device, if that is not the CPU.
    """

    version: int
    tensors: dict[str, torch.Tensor]
    on_device: dict[str, torch.Tensor] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Stager:
    """Background thread that verifies and stages new drafts.

    Args:
        cpus: Cores of this thread; they should not be the model's cores.
        buffer: Buffer for staged drafts on the device; None on a CPU.
        probe: Further check of tensors that pass the contract; raises `DraftRefused`.

    Attributes:
        serving: Whether a real step has run. Before that nothing is staged on a device,
            because a copy or query from another thread aborts a graph capture.
        beat: Called at every poll, also without requests; None for nothing.
    """

    def __init__(
        self,
        segment: WeightsSegment,
        contract: DraftContract,
        cpus: set[int] | None = None,
        buffer: DeviceBuffer | None = None,
        probe: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    ) -> None:
        self._buffer, self._probe = buffer, probe
        self._next_read = 0.0
        self._segment = segment
        self._contract = contract
        self._cpus = cpus
        self._seen = 0
        self._staged: StagedDraft | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.refused: Counter[str] = Counter()
        self.serving = False
        self.beat: Callable[[], None] | None = None
        self.last_refused_version = 0
        self.last_refusal = ""
        self._thread = threading.Thread(
            target=self._watch, name="vllm-tide-stage", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; wait for the current check."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    @property
    def staged_version(self) -> int:
        """Version of the staged draft, or 0."""
        staged = self._staged
        return 0 if staged is None else staged.version

    def take(self, version: int) -> StagedDraft | None:
        """Return the staged draft if it is exactly `version`."""
        staged = self._staged
        return staged if staged is not None and staged.version == version else None

    def done(self, staged: StagedDraft, seconds: float = 0.0) -> None:
        """Drop `staged` after its installation or failure, unless a newer one exists.

        Args:
            seconds: Time for which the installation blocked serving.
        """
        self._next_read = time.monotonic() + max(READ_INTERVAL_S, seconds / SWAP_SHARE)
        with self._lock:
            if self._staged is staged:
                self._staged = None

    def refuse(self, version: int, reason: str, sentence: str) -> None:
        """Count and report a refusal; also used by the installer."""
        self.refused[reason] += 1
        self.last_refused_version = version
        self.last_refusal = reason
        name = version_name(version)
        logger.warning("vllm_tide: draft version %s refused: %s", name, sentence)

    def upload_from_now(self) -> None:
        """Allow uploads to a device: a real step runs."""
        self.serving = True

    def poll(self, now: float) -> None:
        """Check for a new draft, unless `READ_INTERVAL_S` has not passed.

        Args:
            now: Monotonic time (s).
        """
        if now >= self._next_read:
            self.check_now()

    def check_now(self) -> None:
        """Check for a new draft; called by the thread, and by tests."""
        if self._buffer is not None and (self._staged is not None or not self.serving):
            return  # the buffer holds one draft until it is installed
        version = self._segment.latest_version()
        if version == self._seen or version == 0:
            return
        # One attempt per version, so that a corrupt one is hashed only once.
        self._seen = version
        self._next_read = time.monotonic() + READ_INTERVAL_S
        try:
            weights = self._segment.read()
            tensors = from_bytes(weights.tensors)
            self._contract.check(tensors)
            if self._probe is not None:
                self._probe(tensors)
        except (WeightsRefused, DraftRefused) as refusal:
            self.refuse(version, refusal.reason, str(refusal))
            return
        self._seen = weights.version
        on_device = None if self._buffer is None else self._buffer.upload(tensors)
        with self._lock:
            self._staged = StagedDraft(
                weights.version, tensors, on_device, weights.meta
            )

    def _watch(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        if self._buffer is not None:
            # A thread starts on device 0; exiting a stream of another device would
            # create a context there.
            torch.cuda.set_device(self._buffer.device)
        while not self._stop.wait(POLL_SECONDS):
            try:
                if self.beat is not None:
                    self.beat()
                self.poll(time.monotonic())
            except Exception as error:  # noqa: BLE001 - the serving boundary
                self.refuse(
                    self._seen, "fault", f"{type(error).__name__} while checking it."
                )
