"""What a trainer needs of one engine, whatever carries it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from vllm_tide.transport.publication import Publication, TensorInput
from vllm_tide.transport.record import Record
from vllm_tide.transport.rendezvous import EngineManifest
from vllm_tide.transport.ring_format import Collect, RingSpec
from vllm_tide.transport.weights import WeightsFeedback


class Feed(Protocol):
    """Records of one engine in, heads for it out. One thread uses it.

    Any method may raise TransportError when the engine or its storage is lost for good;
    what merely is not there yet is None, zero or empty.

    Attributes:
        id: The engine.
        manifest: What it announced.
        spec: What its records have in common.
        latest_version: Newest head sent to it, by this trainer or one before; 0 if
            none was.
    """

    id: str
    manifest: EngineManifest
    spec: RingSpec

    @property
    def identity(self) -> dict[str, str]:
        """What an engine must share with it, see ``transport.spool_identity``."""

    @property
    def latest_version(self) -> int:
        """See the class."""

    def models(self) -> tuple[Path, Path]:
        """Directories on this host: the target (or its rows), the first draft."""

    def read(self, limit: int, max_rows: int | None = None) -> list[Record]:
        """Take records out, in order; never waits.

        Args:
            limit: Most records.
            max_rows: Stop after the record that reaches so many rows.
        """

    def heartbeat(self) -> bool:
        """Say that the trainer lives; call it at least once a second.

        Returns:
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
        """Send a head; the engine swaps it in when it is ready.

        Args:
            tensors: By name: dtype as torch names it, shape, and its bytes.
            version: Greater than :attr:`latest_version`.
            parent_version: The version it was trained from.
            meta: JSON-able facts for the log.
        """

    def latest(self) -> Publication | None:
        """The newest head sent to it, to go on from after a restart."""

    def set_collect(self, wanted: Collect) -> None:
        """Ask the engine for full rows, for light records, or for nothing."""

    def purge(self, tenant: int | None = None) -> int:
        """Forget what was fetched ahead of :meth:`read`; the records dropped.

        Args:
            tenant: Only this tenant's; None is everybody's.
        """

    def stats(self) -> dict[str, int]:
        """Counters for the status: rows dropped, shards skipped, and so on."""

    def close(self) -> None:
        """Let the engine go. Idempotent, never raises."""
