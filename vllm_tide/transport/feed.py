"""Feed of one engine through shared memory: its records in, drafts out."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path

from vllm_tide.transport.draft_weights import DraftWeights, WeightsRefused
from vllm_tide.transport.identity import identity_of
from vllm_tide.transport.record import Record
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    group_of,
    read_manifests,
    reclaim_orphans,
)
from vllm_tide.transport.ring import Collect, RingReader
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.weights import (
    WeightsFeedback,
    WeightsSegment,
    WeightsWriter,
)

logger = logging.getLogger("vllm_tide.train")


class RingFeed:
    """Reads records of an engine on this host and sends drafts to it.

    Not thread-safe. Any method may raise TransportError if the engine or its storage is
    permanently lost. Data that are not available yet are None, zero or empty.
    `SpoolFeed` has the same interface. `spec` describes the engine's records.

    Raises:
        TransportError: A segment cannot be attached.
    """

    def __init__(self, manifest: EngineManifest) -> None:
        self.id = manifest.engine_id
        self.manifest = manifest
        for name, knob in (("ring", "capture"), ("weights", "swap")):
            if not getattr(manifest, name):
                raise TransportError(
                    f"engine {self.id} has no {name} segment: set tide.{knob}.enabled "
                    "to true and restart it"
                )
        self._orphaned = self._drained = False
        self._reader = RingReader.attach(manifest.ring)
        self.spec = self._reader.spec
        try:
            self._writer = WeightsWriter.attach(manifest.weights)
            self._feedback = self._writer.feedback()
        except BaseException:
            self._reader.close()
            raise

    @cached_property
    def identity(self) -> dict[str, str]:
        """Identity that engines of one trainer must share, see ``transport.identity``.

        Raises:
            TransportError: The engine's directories cannot be read.
        """
        return identity_of(self.manifest)

    @property
    def latest_version(self) -> int:
        """Newest draft sent to the engine; 0 if none was.

        A version that the engine has seen is not reused: it handles each only once.
        """
        last = self._feedback
        return max(
            self._writer.latest_version, last.installed_version, last.refused_version
        )

    def models(self) -> tuple[Path, Path]:
        """Return the target and draft directories of the engine."""
        return Path(self.manifest.target_path), Path(self.manifest.draft_path)

    def read(self, limit: int, max_rows: int | None = None) -> list[Record]:
        """Remove and return records in order; never waits.

        Stops after the record that reaches `max_rows`.
        """
        records: list[Record] = []
        rows = 0
        while len(records) < limit and (max_rows is None or rows < max_rows):
            record = self._reader.read()
            if record is None:
                self._drained = True
                break
            records.append(record)
            rows += max(record.num_rows, 1)
        return records

    def heartbeat(self) -> None:
        """Renew the trainer's heartbeat; call it at least once a second."""
        if not (self._reader.intact and self._writer.intact):
            raise TransportError("its shared memory was truncated: restart its server")
        self._reader.heartbeat()

    def alive(self) -> bool:
        """Return whether the engine is alive or has left unread records."""
        if self._reader.producer_alive():
            return True
        if not self._orphaned:  # it may have written after the last read
            self._orphaned, self._drained = True, False
        return not self._drained

    def feedback(self) -> WeightsFeedback:
        self._feedback = self._writer.feedback()
        return self._feedback

    def publish(self, weights: DraftWeights) -> None:
        """Send a draft newer than the latest; the engine swaps it in asynchronously."""
        self._writer.publish(weights)

    def latest(self) -> DraftWeights | None:
        """Return the draft sent last or, if it was refused, the one being served."""
        feedback, version = self.feedback(), self._writer.latest_version
        if version == feedback.refused_version:
            version = feedback.installed_version
        if version == 0:
            return None
        segment = WeightsSegment.attach(self.manifest.weights)
        try:
            return segment.read_version(version)
        except WeightsRefused as refusal:
            logger.warning("engine %s: its latest draft is lost: %s", self.id, refusal)
            return None
        finally:
            segment.close()

    def set_collect(self, mode: Collect) -> None:
        """Request full rows, metadata-only records, or no records from the engine."""
        self._reader.set_collect(mode)

    def purge(self, tenant: int | None = None) -> int:
        """Drop prefetched records; this feed has none."""
        return 0

    def stats(self) -> dict[str, int]:
        """Return counters for the status: dropped rows, skipped shards and others."""
        ring = self._reader.stats()
        return {
            "dropped_rows": ring.dropped_rows,
            "corrupt_records": ring.corrupt_records,
            "waiting_bytes": ring.used_bytes,
        }

    def close(self) -> None:
        """Detach from the engine. Idempotent, never raises."""
        self._reader.close()
        self._writer.close()


class RunDirSource:
    """Engines of a run directory: all of them, or one engine or group (`engine_id`).

    A source lists live engines and opens feeds to them; it never waits for storage.
    """

    failing = ""  # see `SpoolSource`

    def __init__(self, run_dir: Path, engine_id: str | None = None) -> None:
        self._run_dir, self._engine_id = run_dir, engine_id
        self._manifests: dict[str, EngineManifest] = {}
        self._identities: dict[str, dict[str, str]] = {}

    def find(self) -> list[str]:
        self._manifests = {
            manifest.engine_id: manifest
            for manifest in read_manifests(self._run_dir)
            if self._engine_id in (None, manifest.engine_id, group_of(manifest))
        }
        return list(self._manifests)

    def identity(self, engine_id: str) -> dict[str, str]:
        """Return an engine's identity without attaching; may raise TransportError."""
        if engine_id not in self._identities:
            self._identities[engine_id] = identity_of(self._manifests[engine_id])
        return self._identities[engine_id]

    def open(self, engine_id: str) -> RingFeed:
        return RingFeed(self._manifests[engine_id])

    def gone(self, engine_id: str) -> None:
        """Forget an engine; unlink the segments that a killed engine left."""
        self._identities.pop(engine_id, None)
        reclaim_orphans(self._run_dir)

    def close(self) -> None: ...
