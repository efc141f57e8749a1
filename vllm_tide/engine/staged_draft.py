"""The newest verified draft, ready to be installed.

A thread of the worker watches the weights segment: copying out, hashing and checking
(names, shapes, types, finiteness, norms) take place here, never on the thread that runs
the model. On a GPU the thread uploads the draft piece by piece, through a little
page-locked memory and on a stream of its own; installing is then copies within the
device. That buffer is there from the start: after the KV cache there may be none left.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_tide.draft.config import DraftError
from vllm_tide.draft.delta import Base, apply
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.engine.staging import PinnedBytes
from vllm_tide.transport.weights import Publication, WeightsRefused, WeightsSegment

logger = logging.getLogger("vllm.tide")


PIECE_BYTES = 8 << 20
_POLL_SECONDS = 5e-4


class DeviceBuffer:
    """Tensors of a draft's shapes on a CUDA or ROCm device.

    Args:
        reference: The served draft's checkpoint; gives names and shapes.
        shared: Names that are the target's and never published.
        dtype: What the draft computes in; floating-point tensors are kept in it.
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
        """Copy a draft in; returns when all of it is there.

        Only for the thread that stages: it sleeps, and nothing else waits.

        Args:
            tensors: On the host, of the reference's names and shapes.

        Returns:
            The tensors on the device, good until the next call.
        """
        # What is there may still be on its way into the model.
        self._stream.wait_event(self._installed)
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                self._bring_one(tensor.reshape(-1), self._tensors[name].view(-1))
        return {name: self._tensors[name] for name in tensors}

    def installed(self) -> None:
        """The copies into the model were enqueued on the current stream."""
        self._installed.record()

    def close(self) -> None:
        """Let the host memory go; nothing is brought any more."""
        self._stream.synchronize()
        self._pinned.close()

    def _bring_one(self, source: torch.Tensor, room: torch.Tensor) -> None:
        piece = self._pinned.bytes.view(room.dtype)
        for start in range(0, len(room), len(piece)):
            count = min(len(piece), len(room) - start)
            piece[:count].copy_(source[start : start + count])
            room[start : start + count].copy_(piece[:count], non_blocking=True)
            self._copied.record()
            while not self._copied.query():
                time.sleep(_POLL_SECONDS)


_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}


class DraftRefused(ValueError):
    """A publication is not installed.

    Attributes:
        reason: Short label for the counter (`shape`, `dtype`, `names`, ...).
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class DraftContract:
    """Shape of every publication: that of the draft the server started with.

    Args:
        reference: Tensors of the served checkpoint, by their names in it.
        max_norm_ratio: Largest growth of a tensor's norm, however many drafts make it.
        shared: Names of tensors the draft shares with the target; they may not be
            published, because loading them would write into the target.
        vocab_size: The target's; None leaves `d2t` unchecked.
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
        """Refuse what cannot be served.

        Raises:
            DraftRefused: With one sentence naming the tensor.
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
    """Euclidean norm of every floating-point tensor, in fp32."""
    return {
        name: torch.linalg.vector_norm(tensor, dtype=torch.float32).item()
        for name, tensor in tensors.items()
        if tensor.dtype.is_floating_point
    }


POLL_SECONDS = 0.05
LOOK_SECONDS = 0.5
"""Between two publications that are read, at least: 120 a minute."""
SWAP_SHARE = 0.05
"""Of the time, at most, swaps hold serving up: 3 s of a minute."""


@dataclass(frozen=True, slots=True)
class StagedDraft:
    """A verified draft in private memory, ready to be installed.

    Attributes:
        on_device: Where it is installed from, if the model runs elsewhere.
        stands_on: Version of the base that a fast draft changes; None: it is a base.
    """

    version: int
    tensors: dict[str, torch.Tensor]
    on_device: dict[str, torch.Tensor] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    stands_on: int | None = None


def tensors_of(publication: Publication) -> dict[str, torch.Tensor]:
    """Tensors over the publication's own bytes (no copy).

    Raises:
        DraftRefused: A type is none of `_TYPES`.
    """
    tensors = {}
    for name, item in publication.tensors.items():
        kind = _TYPES.get(item.dtype)
        if kind is None:
            raise DraftRefused("dtype", f"tensor {name!r} has type {item.dtype}.")
        flat = torch.from_numpy(item.data).view(kind)
        tensors[name] = flat.view(item.shape)
    return tensors


class Stager:
    """The thread and what it knows.

    Args:
        cpus: Cores this thread may use; it must stay off the model's cores.
        room: Where drafts wait on the device; None on a CPU.
        base: See `Attributes`.
        probe: Raises `DraftRefused` for tensors that the contract allows and that
            cannot be served all the same.

    Attributes:
        base: What changes of low rank are made whole with: the draft installed last
            that was not a fast one. None, or another than the one they were made from:
            they are refused.
        serving: A real step has run. Before it graphs are captured, and a copy or a
            query of another thread ends a capture: nothing is staged on a device.
        beat: Called at every look, so that an engine without requests, which makes no
            steps, still shows that it lives; None for nothing.
    """

    def __init__(
        self,
        segment: WeightsSegment,
        contract: DraftContract,
        cpus: set[int] | None = None,
        room: DeviceBuffer | None = None,
        base: Base | None = None,
        probe: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    ) -> None:
        self._room, self.base, self._probe = room, base, probe
        self._next_look = 0.0
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
        """Stop watching; waits for the check under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    @property
    def staged_version(self) -> int:
        """Version that can be installed now, or 0."""
        staged = self._staged
        return 0 if staged is None else staged.version

    @property
    def staged_fast(self) -> bool:
        staged = self._staged
        return staged is not None and staged.stands_on is not None

    def take(self, version: int) -> StagedDraft | None:
        """The staged draft if it is exactly `version`."""
        staged = self._staged
        return staged if staged is not None and staged.version == version else None

    def done(self, staged: StagedDraft, seconds: float = 0.0) -> None:
        """`staged` was installed (or failed): forget it unless a newer one came.

        Args:
            seconds: What it held serving up.
        """
        self._next_look = time.monotonic() + max(LOOK_SECONDS, seconds / SWAP_SHARE)
        with self._lock:
            if self._staged is staged:
                self._staged = None

    def refuse(self, version: int, reason: str, sentence: str) -> None:
        """Count and report a refusal; also used by the installer."""
        self.refused[reason] += 1
        self.last_refused_version = version
        self.last_refusal = reason
        logger.warning("vllm_tide: draft version %d refused: %s", version, sentence)

    def poll(self, now: float) -> None:
        """Look if it is time: a writer in a hurry gets its newest draft served.

        Args:
            now: Monotonic (s).
        """
        if now >= self._next_look:
            self.check_now()

    def check_now(self) -> None:
        """Look once; called by the thread, and by tests."""
        if self._room is not None and (self._staged is not None or not self.serving):
            return  # the room holds one draft until it is installed
        version = self._segment.latest_version()
        if version == self._seen or version == 0:
            return
        # One look per version: a corrupt one is not hashed again and again.
        self._seen = version
        self._next_look = time.monotonic() + LOOK_SECONDS
        try:
            publication = self._segment.read()
            tensors = self._whole(publication)
            self._contract.check(tensors)
            if self._probe is not None:
                self._probe(tensors)
            adaptation = publication.meta.get("adaptation")
            stands_on = None if adaptation is None else int(adaptation["base"])
        except (WeightsRefused, DraftRefused) as refusal:
            self.refuse(version, refusal.reason, str(refusal))
            return
        self._seen = publication.version
        on_device = None if self._room is None else self._room.upload(tensors)
        with self._lock:
            self._staged = StagedDraft(
                publication.version,
                tensors,
                on_device,
                publication.meta,
                stands_on,
            )

    def _whole(self, publication: Publication) -> dict[str, torch.Tensor]:
        """All tensors of a publication, also of one that is a change."""
        tensors, change = tensors_of(publication), publication.meta.get("delta")
        if change is None:
            return tensors
        base = self.base
        if base is None or change["base"] != base.fingerprint:
            raise DraftRefused("base", "it changes a draft that is not served here.")
        try:
            return apply(base.tensors, tensors)
        except DraftError as error:
            raise DraftRefused("change", str(error)) from None

    def _watch(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        if self._room is not None:
            # A thread begins on device 0; leaving a stream of another one would make a
            # context there.
            torch.cuda.set_device(self._room.device)
        while not self._stop.wait(POLL_SECONDS):
            try:
                if self.beat is not None:
                    self.beat()
                self.poll(time.monotonic())
            except Exception as error:  # noqa: BLE001 - the serving boundary
                self.refuse(
                    self._seen, "fault", f"{type(error).__name__} while checking it."
                )
