"""A feed through shared memory: the engine's ring and its weights segment."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_tide.transport.header import TransportError, said
from vllm_tide.transport.publication import Publication, TensorInput
from vllm_tide.transport.record import Record
from vllm_tide.transport.rendezvous import EngineManifest
from vllm_tide.transport.ring import RingReader
from vllm_tide.transport.ring_format import Collect
from vllm_tide.transport.spool_identity import identity_of
from vllm_tide.transport.weights import (
    WeightsFeedback,
    WeightsRefused,
    WeightsSegment,
    WeightsWriter,
)

logger = logging.getLogger("vllm_tide.train")

LOST_S = 30.0
"""After this (s) without a replacement for a lost segment the log says so."""
LOOK_S = 0.5
"""How often its manifest is looked at meanwhile (s)."""
FAR = 1 << 32
"""Versions further ahead than this were never published."""

_SPEC = ("hidden_size", "vocab_size", "feature_dtype", "teacher", "aux_layer_ids")


class RingFeed:
    """Attaches to an engine on this host; see ``feed.Feed``.

    Args:
        manifest: The engine.
        announced: Gives what it announces now; an engine whose segment was cut short
            replaces it.

    Raises:
        TransportError: A segment cannot be attached, or is not as announced.
    """

    def __init__(
        self,
        manifest: EngineManifest,
        announced: Callable[[], EngineManifest | None] = lambda: None,
    ) -> None:
        self._announced = announced
        self._told = WeightsFeedback(0, 0, "", True, 0.0)
        self._lost_at = self._looked = 0.0
        self._collect = Collect.FULL
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
                        f"engine {self.id}: its ring says {name} is {said(ring)}, its "
                        f"manifest {said(told)}: restart it"
                    )
            self._writer = WeightsWriter.attach(manifest.weights)
            self._told = self._writer.feedback()
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
        """See ``feed.Feed``. Numbers that the engine has seen are not given again.

        It looks at each number once, and a damaged publication, or one in a segment
        that is lost, has one too. A number out of all reason was damage.
        """
        latest, told = self._writer.latest_version, self._told
        seen = (told.installed_version, told.refused_version)
        return max([latest, *(v for v in seen if v - latest < FAR)])

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

    def heartbeat(self) -> bool:
        """See ``feed.Feed``. Follows an engine that replaced a segment.

        One that idles replaces it with its next step, so it is never given up.
        """
        resend = False
        if self._reader.lost or self._writer.lost:
            resend = self._follow(time.monotonic())
        self._reader.heartbeat()
        self._writer.heartbeat()
        return resend

    def alive(self) -> bool:
        """See ``feed.Feed``. What a dead engine left in its ring is read first."""
        if self._reader.producer_alive():
            return True
        if not self._orphaned:  # it may have written since the last read
            self._orphaned, self._drained = True, False
        return not self._drained

    def feedback(self) -> WeightsFeedback:
        """See ``feed.Feed``; the last one where the segment was cut short."""
        with contextlib.suppress(TransportError):
            self._told = self._writer.feedback()
        return self._told

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
        told = self.feedback()
        segment = WeightsSegment.attach(self.manifest.weights)
        try:
            found = self._whole(segment)
            # What is served is in the other slot if the newest was not taken, or if
            # damage made an old one look like the newest.
            served, refused = told.installed_version, told.refused_version
            if found is not None and served <= found.version != refused:
                return found
            return segment.read_version(served) if served else None
        finally:
            segment.close()

    def _whole(self, segment: WeightsSegment) -> Publication | None:
        try:
            return segment.read()
        except WeightsRefused as refusal:
            why = said(refusal)
            logger.warning("engine %s: its latest head is lost: %s", self.id, why)
            return None

    def set_collect(self, wanted: Collect) -> None:
        """See ``feed.Feed``."""
        self._collect = wanted
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

    def _follow(self, now: float) -> bool:
        """Attach to the segments that replace lost ones, once they are announced.

        Returns:
            Whether the weights segment is another now, with nothing in it.
        """
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        self._lost_at = self._lost_at or now
        another = False
        manifest = self._announced()
        if manifest is not None:
            try:
                another = self._attach_again(manifest)
            except TransportError as error:  # it, too, is damaged: wait for the next
                logger.warning("engine %s: %s", self.id, error)
        if not (self._reader.lost or self._writer.lost):
            self._lost_at = 0.0
            logger.info("engine %s replaced a segment that was lost", self.id)
        elif now - self._lost_at > LOST_S:
            self._lost_at = now
            logger.warning(
                "a segment of engine %s is lost; it makes another with its next step, "
                "or, with tensor parallelism, when it is restarted",
                self.id,
            )
        return another

    def _attach_again(self, manifest: EngineManifest) -> bool:
        if self._reader.lost and manifest.ring != self._reader.name:
            reader = RingReader.attach(manifest.ring)
            reader.set_collect(self._collect)
            self._reader.close()
            self._reader, self.manifest = reader, manifest
        if self._writer.lost and manifest.weights != self._writer.name:
            writer = WeightsWriter.attach(manifest.weights)
            self._writer.close()
            self._writer, self.manifest = writer, manifest
            return True
        return False
