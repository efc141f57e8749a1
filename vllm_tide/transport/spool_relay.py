"""The relay: copies records of one engine's ring to a spool, and drafts back.

It is a separate process on the engine's host. If the storage is slow or unavailable,
only the ring fills up. For the engine, the relay is a trainer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_tide.config import SpoolConfig
from vllm_tide.transport.admin import AdminSocket, Answer
from vllm_tide.transport.identity import identity_of
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.record import tenant_of
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    reclaim_orphans,
)
from vllm_tide.transport.ring import Collect, RingReader
from vllm_tide.transport.shm import TransportError, sanitize_for_log
from vllm_tide.transport.spool import (
    BEAT_S,
    EngineEntry,
    EngineFolder,
    EngineState,
    HeartbeatMonitor,
    failure_message,
)
from vllm_tide.transport.spool_models import upload_models
from vllm_tide.transport.spool_store import Store
from vllm_tide.transport.spool_writer import SpoolWriter
from vllm_tide.transport.tenant import purged_tenant
from vllm_tide.transport.weights import WeightsRefused, WeightsWriter

logger = logging.getLogger("vllm_tide.relay")

IDLE_SLEEP_S = 0.05
POLL_S = 0.5
"""Interval between checks for drafts, trainers and purges (s)."""
_DRAIN_BATCH = 256
_DRAIN_LIMIT_S = 1.0
# Limit, as the engine may write records faster than the relay drains them.
_EMPTY_LIMIT_S = 2.0


class Relay:
    """Connects one engine of this host, announced in `run_dir`, to a spool.

    Raises:
        TransportError: Ring, weights segment or spool cannot be used.
    """

    def __init__(
        self,
        manifest: EngineManifest,
        run_dir: Path,
        store: Store,
        config: SpoolConfig,
    ) -> None:
        self._manifest, self._run_dir = manifest, run_dir
        self._folder = EngineFolder(store, manifest.engine_id)
        self._reader = RingReader.attach(manifest.ring)
        try:
            self._weights = WeightsWriter.attach(manifest.weights)
        except BaseException:
            self._reader.close()
            raise
        self._admin = AdminSocket("relay", run_dir)
        try:
            spec, identity = self._reader.spec, identity_of(manifest)
            self._writer = SpoolWriter(self._folder, config)
            identity["rows"] = upload_models(self._folder, manifest)
            self._folder.write_engine(EngineEntry(manifest, spec, identity))
        except BaseException:
            self.close()
            raise
        self._purged = 0
        self._state = EngineState()
        self._state_time = 0.0
        self._next_poll = 0.0
        self._readers: dict[str, HeartbeatMonitor] = {}
        self._seen_draft = self._weights.latest_version
        self._refused = (0, "")
        self._stopping = False
        self._failing = ""

    def stop(self) -> None:
        """Request the loop to end; safe in a signal handler."""
        self._stopping = True

    def run(self) -> str:
        """Run; return "stopped" or "engine_gone"."""
        try:
            while not self._stopping and not self._gone():
                if not self.tick():
                    time.sleep(IDLE_SLEEP_S)
        except TransportError:
            if not self._gone():
                raise
        finally:
            gone = self._gone()
            self._finish()
            self.close()
            if gone:
                # A killed engine could not unlink its segments.
                reclaim_orphans(self._run_dir)
        return "engine_gone" if gone else "stopped"

    def _gone(self) -> bool:
        """Return whether the engine is dead or its shared memory was truncated."""
        intact = self._reader.intact and self._weights.intact
        return not (intact and self._reader.producer_alive())

    def tick(self) -> int:
        """Run one iteration; return the number of records read from the ring.

        Errors of the spool are logged and retried.
        """
        self._reader.heartbeat()
        taken = self._drain()
        now = time.monotonic()
        full = self._writer.due() and not self._writer.blocked
        if full or now >= self._next_poll:
            self._next_poll = now + POLL_S
            # Purges first: purged records must not be written.
            if self._storage_works(self._answer_purges, self._exchange):
                self._failing = ""
        return taken

    def close(self) -> None:
        """Detach from ring and weights segment. Idempotent."""
        self._reader.close()
        self._weights.close()
        self._admin.close()

    def _drain(self) -> int:
        until = time.monotonic() + _DRAIN_LIMIT_S
        taken = 0
        # Read nothing while a shard waits for the storage: this bounds the memory.
        while not self._writer.blocked and time.monotonic() < until:
            for _ in range(_DRAIN_BATCH):
                body = self._reader.take()
                if body is None:
                    return taken
                self._writer.add(body)
                taken += 1
                if self._writer.due():
                    break
            if self._writer.due():
                break
        return taken

    def _empty_ring(self, *purged: int | None) -> bool:
        """Drain the ring, drop records of purged tenants; return whether it is empty.

        Memory is bounded by the ring and the records that an engine writes in 2 s.
        """
        until = time.monotonic() + _EMPTY_LIMIT_S
        while time.monotonic() < until:
            body = self._reader.take()
            if body is None:
                return True
            if None in purged or tenant_of(body) in purged:
                self._purged += 1
            else:
                self._writer.add(body)
        return False

    def _answer_purges(self) -> None:
        self._admin.poll(self._execute)

    def _execute(self, request: dict[str, Any]) -> Answer | None:
        """Purge the ring and the buffers; the operator's command purges the spool."""
        if request["do"] != "purge":
            return {"ok": False, "error": "a relay executes the command purge only"}
        tenant = purged_tenant(request)
        self._purged += self._writer.purge(tenant)
        if not self._empty_ring(tenant):
            return None  # repeated in the next iteration
        removed, self._purged = self._purged, 0
        engine = self._folder.engine_id
        logger.info("engine %s: a purge removed %d records", engine, removed)
        return {"ok": True, "removed": {"records": removed}, "engines": [engine]}

    def _exchange(self) -> None:
        """Exchange shards, drafts and states with the storage."""
        if self._writer.due():
            self._writer.flush()
        self._writer.enforce_bounds()
        self._forward_draft()
        self._update_collect()
        self._write_state()

    def _forward_draft(self) -> None:
        """Copy the newest draft to the weights segment."""
        last = self._seen_draft
        version = self._folder.latest_draft(last)
        if version <= self._seen_draft:
            return
        self._seen_draft = version
        try:
            blob = self._folder.read_draft(last, self._weights.max_bytes)
            # It may be newer than `version`.
            self._seen_draft = version = blob.version
            blob.verify()
        except WeightsRefused as refusal:
            self._refuse(version, refusal.reason, refusal.sentence)
            return
        except TransportError:
            self._seen_draft = self._weights.latest_version  # retry
            raise
        try:
            self._weights.put(blob)
        except TransportError as error:
            # Permanent: the draft does not fit into the segment.
            self._refuse(version, "segment", str(error))
        else:
            logger.info(
                "engine %s: draft %d published", self._folder.engine_id, version
            )

    def _refuse(self, version: int, reason: str, message: str) -> None:
        self._refused = (version, reason)
        logger.warning(
            "engine %s: draft %d of the spool is refused: %s",
            self._folder.engine_id,
            version,
            sanitize_for_log(message),
        )

    def _update_collect(self) -> None:
        """Set the largest request of the live trainers; full rows if there is none.

        Without a live trainer, rows are spooled for the next one unless the last one
        was paused.
        """
        requests = set()
        for name, state in self._folder.read_readers().items():
            heartbeat = self._readers.setdefault(name, HeartbeatMonitor())
            heartbeat.observe(state.unix)
            if state.paused:
                requests.add(Collect.NOTHING)
            elif state.running and heartbeat.fresh:
                requests.add(Collect.FULL if state.collect else Collect.METADATA)
        order = (Collect.FULL, Collect.METADATA, Collect.NOTHING)
        mode = next((each for each in order if each in requests), Collect.FULL)
        self._reader.set_collect(mode)

    def _write_state(self, *, running: bool = True) -> None:
        feedback = self._weights.feedback()
        refused, reason = feedback.refused_version, feedback.refused_reason
        if self._refused[0] > refused:
            refused, reason = self._refused
        state = EngineState(
            unix=self._state_time,
            running=running,
            first_shard=self._writer.first,
            last_shard=self._writer.last,
            published_version=self._weights.latest_version,
            installed_version=feedback.installed_version,
            refused_version=refused,
            refused_reason=reason,
            swap_pause_ms=feedback.swap_pause_ms_last,
            rows=self._writer.rows,
            dropped_rows=self._reader.stats().dropped_rows,
        )
        now = steady_unix()  # the clock of the shards' timestamps
        if state == self._state and abs(now - self._state_time) < BEAT_S:
            return
        self._folder.write_state(replace(state, unix=now))
        self._state_time = now
        self._state = replace(state, unix=now)

    def _finish(self) -> None:
        """Write the remaining records; they are lost if the spool fails."""
        self._storage_works(self._answer_purges, self._flush_all, self._write_end)

    def _flush_all(self) -> None:
        if self._writer.blocked:
            self._writer.flush()
        self._empty_ring()
        while self._writer.flush():
            pass

    def _write_end(self) -> None:
        self._write_state(running=False)

    def _storage_works(self, *steps: Callable[[], None]) -> bool:
        """Run all steps, also after a failure; return whether all succeeded."""
        works = True
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - continue to drain the ring
                works = False
                message = failure_message(error)
                if message != self._failing:  # log once per cause, not per attempt
                    logger.error("engine %s: %s", self._folder.engine_id, message)
                self._failing = message
        return works
