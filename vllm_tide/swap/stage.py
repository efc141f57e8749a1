"""Watches the weights segment and keeps the newest verified draft at hand.

A thread of the worker: copying out, hashing and checking take place here, never on
the thread that runs the model. It hands over one `StagedDraft` at a time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_tide.swap.device_room import DeviceRoom
from vllm_tide.swap.verify import FLOATS, DraftContract, DraftRefused
from vllm_tide.transport.weights import Publication, WeightsRefused, WeightsSegment

logger = logging.getLogger("vllm.tide")

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class StagedDraft:
    """A verified draft in private memory, ready to be installed.

    Attributes:
        version: Of the publication.
        tensors: On the host.
        norms: Of its floating-point tensors.
        on_device: Where it is installed from, if the model runs elsewhere.
        facts: What the trainer says of it.
    """

    version: int
    tensors: dict[str, torch.Tensor]
    norms: dict[str, float]
    on_device: dict[str, torch.Tensor] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def tensors_of(publication: Publication) -> dict[str, torch.Tensor]:
    """Tensors over the publication's own bytes (no copy).

    Raises:
        DraftRefused: A type is not one of F32, F16, BF16, I64.
    """
    known = {**FLOATS, "I64": torch.int64, "int64": torch.int64, "BOOL": torch.bool}
    tensors = {}
    for name, item in publication.tensors.items():
        kind = known.get(item.dtype)
        if kind is None:
            raise DraftRefused("dtype", f"tensor {name!r} has type {item.dtype}.")
        flat = torch.from_numpy(item.data).view(kind)
        tensors[name] = flat.view(item.shape)
    return tensors


class Stager:
    """The thread and what it knows.

    Args:
        segment: The engine's weights segment.
        contract: What a publication must look like.
        cpus: Cores this thread may use; it must stay off the model's cores.
        room: Where drafts wait on the device; None on a CPU.

    Attributes:
        refused: Number of refused publications by reason.
        beat: Called at every look, so that an engine without requests, which makes no
            steps, still shows that it lives; None for nothing.
    """

    def __init__(
        self,
        segment: WeightsSegment,
        contract: DraftContract,
        cpus: set[int] | None = None,
        room: DeviceRoom | None = None,
    ) -> None:
        self._room = room
        self._segment = segment
        self._contract = contract
        self._cpus = cpus
        self._seen = 0
        self._staged: StagedDraft | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.refused: Counter[str] = Counter()
        self.beat: Callable[[], None] | None = None
        self.last_refused_version = 0
        self.last_refusal = ""
        self._thread = threading.Thread(
            target=self._watch, name="vllm-tide-stage", daemon=True
        )

    def use_segment(self, segment: WeightsSegment) -> None:
        """Watch another segment from now on; its versions begin anew."""
        self._segment = segment
        self._seen = 0

    def start(self) -> None:
        """Begin to watch."""
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

    def take(self, version: int) -> StagedDraft | None:
        """The staged draft if it is exactly `version`."""
        staged = self._staged
        return staged if staged is not None and staged.version == version else None

    def done(self, staged: StagedDraft) -> None:
        """`staged` was installed (or failed): forget it unless a newer one came."""
        with self._lock:
            if self._staged is staged:
                self._staged = None

    def refuse(self, version: int, reason: str, sentence: str) -> None:
        """Count and report a refusal; also used by the installer."""
        self.refused[reason] += 1
        self.last_refused_version = version
        self.last_refusal = reason
        logger.warning("vllm_tide: draft version %d refused: %s", version, sentence)

    def check_now(self) -> None:
        """Look once; called by the thread, and by tests."""
        if self._room is not None and self._staged is not None:
            return  # the room holds one draft until it is installed
        version = self._segment.latest_version()
        if version == self._seen or version == 0:
            return
        # One look per version: a corrupt one is not hashed again and again.
        self._seen = version
        try:
            publication = self._segment.read()
            tensors = tensors_of(publication)
            norms = self._contract.check(tensors)
        except WeightsRefused as refusal:
            self.refuse(version, refusal.reason, str(refusal))
            return
        except DraftRefused as refusal:
            self.refuse(version, refusal.reason, str(refusal))
            return
        self._seen = publication.version
        on_device = None if self._room is None else self._room.bring(tensors)
        with self._lock:
            self._staged = StagedDraft(
                publication.version, tensors, norms, on_device, publication.meta
            )

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
                self.check_now()
            except Exception as error:  # noqa: BLE001 - the serving boundary
                self.refuse(
                    self._seen, "fault", f"{type(error).__name__} while checking it."
                )
