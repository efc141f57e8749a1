"""Records of one engine and drafts to it, through shared memory; where it is found."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tide.transport.identity import identity_of
from vllm_tide.transport.publication import Publication, TensorInput
from vllm_tide.transport.record import Phase, Record, RingSpec
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    group_of,
    read_manifests,
    reclaim_orphans,
)
from vllm_tide.transport.ring import Collect, RingReader
from vllm_tide.transport.shm import TransportError, said
from vllm_tide.transport.weights import (
    WeightsFeedback,
    WeightsRefused,
    WeightsSegment,
    WeightsWriter,
)

_FAR = 1 << 40
"""No request is as long (tokens)."""
# Bits of the largest magnitude that a row may hold: what is larger, infinite or no
# number has larger ones. 1e9, whose square a sum can take.
_LARGEST = {"bfloat16": 0x4E6E, "float32": 0x4E6E6B28}


def hostile(record: Record, spec: RingSpec, vocab_size: int) -> bool:
    """True if a record holds what no engine computes and training cannot bear."""
    ids, count = record.token_ids, record.num_rows
    if not count:
        return False
    committed = count if record.phase == Phase.PREFILL else record.num_accepted + 1
    if ids.min() < 0:  # vLLM pads a short draft, and from there nothing is used
        count = int(np.argmax(ids < 0))
    taught = slice(max(count - record.teacher_start, 0))
    hidden = record.teacher_hidden
    places = record.start, record.num_prompt_tokens
    if (
        count < committed
        or not (min(places) >= 0 and max(places) < _FAR)
        or not -1 <= record.next_token < vocab_size
        or ids[:count].max() >= vocab_size
        or _too_large(record.features[:count], spec)
        or (hidden is not None and _too_large(hidden[taught], spec))
    ):
        return True
    top, logprobs = record.teacher_topk_ids, record.teacher_topk_logprobs
    tail = record.teacher_tail_logprob
    if top is None or logprobs is None or tail is None or not top[taught].size:
        return False
    return not (
        top[taught].min() >= 0
        and top[taught].max() < vocab_size
        and logprobs[taught].min() > -1e9  # False also where one is no number
        and logprobs[taught].max() <= 1
        and tail[taught].max() <= 1
    )


def _too_large(rows: np.ndarray, spec: RingSpec) -> bool:
    size, largest = rows.dtype.itemsize, _LARGEST[spec.feature_dtype]
    negative = 1 << (8 * size - 1)
    return bool(rows.size) and bool(
        rows.view(f"i{size}").max() > largest
        or rows.view(f"u{size}").max() > negative | largest
    )


logger = logging.getLogger("vllm_tide.train")

LOST_S = 30.0
"""After this (s) without a replacement for a lost segment the log says so."""
LOOK_S = 0.5
"""Interval at which its manifest is read meanwhile (s)."""

_SPEC = ("hidden_size", "vocab_size", "feature_dtype", "teacher", "aux_layer_ids")


class RingFeed:
    """Attaches to an engine on this host: its records in, drafts out.

    One thread uses it. Any method may raise TransportError when the engine or its
    storage is lost for good; what merely is not there yet is None, zero or empty.
    `SpoolFeed` offers the same; `spec` is what an engine's records have in common.

    Args:
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
        """Identity that an engine must share with it, see ``transport.identity``.

        Raises:
            TransportError: If the engine's directories cannot be read.
        """
        return identity_of(self.manifest)

    @property
    def latest_version(self) -> int:
        """Newest draft sent to it; 0 if none was.

        Numbers that the engine has seen are not given again: it looks at each once, and
        one in a segment that is lost has a number too.
        """
        told = self._told
        versions = (told.installed_version, told.refused_version)
        return max(self._writer.latest_version, *versions)

    def models(self) -> tuple[Path, Path]:
        """The engine's own directories."""
        return Path(self.manifest.target_path), Path(self.manifest.draft_path)

    def read(self, limit: int, max_rows: int | None = None) -> list[Record]:
        """Take records out, in order; never waits.

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

    def heartbeat(self) -> bool:
        """Say that the trainer lives; call it at least once a second.

        True once if what was published last is lost and has to be sent again: an engine
        that replaced a segment is followed.

        One that idles replaces it with its next step, so it is never given up.
        """
        resend = False
        if self._reader.lost or self._writer.lost:
            resend = self._follow(time.monotonic())
        self._reader.heartbeat()
        self._writer.heartbeat()
        return resend

    def alive(self) -> bool:
        """True if the engine lives, or left records that were not read yet."""
        if self._reader.producer_alive():
            return True
        if not self._orphaned:  # it may have written since the last read
            self._orphaned, self._drained = True, False
        return not self._drained

    def feedback(self) -> WeightsFeedback:
        """Feedback of the engine; the last known where the segment was cut short."""
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
        """Send a draft, newer than the latest; the engine swaps it in when it is ready.

        Tensors by name: dtype as torch names it, shape, and its bytes.
        """
        self._writer.publish(
            tensors, version=version, parent_version=parent_version, meta=meta
        )

    def latest(self) -> Publication | None:
        """The draft sent to it last, or what it serves where it refused that one."""
        told, version = self.feedback(), self._writer.latest_version
        if version == told.refused_version:
            version = told.installed_version
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

    def set_collect(self, wanted: Collect) -> None:
        """Ask the engine for full rows, for metadata-only records, or for nothing."""
        self._collect = wanted
        self._reader.set_collect(wanted)

    def purge(self, tenant: int | None = None) -> int:
        """Forget what was fetched ahead of `read`: nothing is."""
        return 0

    def stats(self) -> dict[str, int]:
        """Counters for the status: rows dropped, shards skipped, and so on."""
        held = self._reader.stats()
        return {
            "dropped_rows": held.dropped_rows,
            "corrupt_records": held.corrupt_records,
            "waiting_bytes": held.used_bytes,
        }

    def close(self) -> None:
        """Let the engine go. Idempotent, never raises."""
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


class RunDirSource:
    """Engines of a run directory: all, or one engine or group (`engine_id`).

    A source finds live engines and opens feeds to them; it never waits for storage.
    """

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
        """An engine's identity, without attaching; TransportError if there is none."""
        if engine_id not in self._identities:
            self._identities[engine_id] = identity_of(self._manifests[engine_id])
        return self._identities[engine_id]

    def open(self, engine_id: str) -> RingFeed:
        """Attach to an engine; None while that goes on: ask again."""

        def announced() -> EngineManifest | None:
            found = read_manifests(self._run_dir)
            return next((m for m in found if m.engine_id == engine_id), None)

        return RingFeed(self._manifests[engine_id], announced)

    def gone(self, engine_id: str) -> None:
        """An engine killed outright could not unlink its segments."""
        self._identities.pop(engine_id, None)
        reclaim_orphans(self._run_dir)

    def close(self) -> None: ...
