"""A feed through shared memory: the engine's ring and its weights segment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_tide.transport.header import TransportError
from vllm_tide.transport.publication import Publication, TensorInput
from vllm_tide.transport.record import Record
from vllm_tide.transport.rendezvous import EngineManifest
from vllm_tide.transport.ring import RingReader
from vllm_tide.transport.spool_identity import identity_of
from vllm_tide.transport.weights import (
    WeightsFeedback,
    WeightsRefused,
    WeightsSegment,
    WeightsWriter,
)

logger = logging.getLogger("vllm_tide.train")

_SPEC = ("hidden_size", "vocab_size", "feature_dtype", "teacher", "aux_layer_ids")


class RingFeed:
    """Attaches to an engine on this host; see ``feed.Feed``.

    Args:
        manifest: The engine.

    Raises:
        TransportError: A segment cannot be attached, or is not as announced.
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
            for name in _SPEC:
                ring, told = getattr(self.spec, name), getattr(manifest, name)
                if ring != told:
                    raise TransportError(
                        f"engine {self.id}: its ring says {name} is {ring!r}, its "
                        f"manifest {told!r}: restart it"
                    )
            self._writer = WeightsWriter.attach(manifest.weights)
        except BaseException:
            self._reader.close()
            raise

    @cached_property
    def identity(self) -> dict[str, str]:
        """See ``feed.Feed``.

        Raises:
            TransportError: If the engine's directories cannot be read.
        """
        return identity_of(self.manifest)

    @property
    def latest_version(self) -> int:
        """See ``feed.Feed``."""
        return self._writer.latest_version

    def models(self) -> tuple[Path, Path]:
        """See ``feed.Feed``: the engine's own directories."""
        return Path(self.manifest.target_path), Path(self.manifest.draft_path)

    def read(self, limit: int, max_rows: int | None = None) -> list[Record]:
        """See ``feed.Feed``."""
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
        """See ``feed.Feed``."""
        self._reader.heartbeat()
        self._writer.heartbeat()

    def alive(self) -> bool:
        """See ``feed.Feed``. What a dead engine left in its ring is read first."""
        if self._reader.producer_alive():
            return True
        if not self._orphaned:  # it may have written since the last read
            self._orphaned, self._drained = True, False
        return not self._drained

    def feedback(self) -> WeightsFeedback:
        """See ``feed.Feed``."""
        return self._writer.feedback()

    def publish(
        self,
        tensors: Mapping[str, TensorInput],
        *,
        version: int,
        parent_version: int,
        meta: dict[str, Any],
    ) -> None:
        """See ``feed.Feed``."""
        self._writer.publish(
            tensors, version=version, parent_version=parent_version, meta=meta
        )

    def latest(self) -> Publication | None:
        """See ``feed.Feed``."""
        if self._writer.latest_version == 0:
            return None
        segment = WeightsSegment.attach(self.manifest.weights)
        try:
            return segment.read()
        except WeightsRefused as refusal:
            logger.warning("engine %s: its latest head is lost: %s", self.id, refusal)
            return None
        finally:
            segment.close()

    def set_collect(self, wanted: bool) -> None:
        """See ``feed.Feed``."""
        self._reader.set_collect(wanted)

    def purge(self, tenant: int | None = None) -> int:
        """See ``feed.Feed``: nothing is fetched ahead."""
        return 0

    def stats(self) -> dict[str, int]:
        """See ``feed.Feed``."""
        held = self._reader.stats()
        return {
            "dropped_rows": held.dropped_rows,
            "corrupt_records": held.corrupt_records,
            "waiting_bytes": held.used_bytes,
        }

    def close(self) -> None:
        """See ``feed.Feed``."""
        self._reader.close()
        self._writer.close()
