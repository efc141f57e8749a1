"""The relay: moves records of one engine's ring to a spool, and drafts back.

It is a separate process on the engine's host. If the storage is slow or unavailable,
only the ring fills up. For the engine, the relay is a trainer.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_tide.config import SpoolConfig
from vllm_tide.transport.admin import AdminSocket, Answer
from vllm_tide.transport.identity import identity_of, rows_fingerprint
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.record import tenant_of
from vllm_tide.transport.rendezvous import EngineManifest, reclaim_orphans
from vllm_tide.transport.ring import Collect, RingReader
from vllm_tide.transport.shm import TransportError, sanitize_for_log
from vllm_tide.transport.spool import (
    BEAT_S,
    INITIAL,
    EngineEntry,
    EngineFolder,
    EngineState,
    HeartbeatMonitor,
    Store,
    StoreError,
    draft_version,
)
from vllm_tide.transport.spool_shard import Bounds, ShardWriter, purge_shards
from vllm_tide.transport.tenant import purged_tenant
from vllm_tide.transport.versions import version_name
from vllm_tide.transport.weights import WeightsWriter

logger = logging.getLogger("vllm_tide.relay")

IDLE_SLEEP_S = 0.05
POLL_S = 0.5
"""Interval between accesses to the storage (s)."""
RETRY_S = 5.0
"""Interval between accesses to a storage that failed (s)."""
_DRAIN_LIMIT_S = 1.0
# Limit, as the engine may write records faster than the relay drains them.
_EMPTY_LIMIT_S = 2.0


class Relay:
    """Connects one engine of this host, announced in `run_dir`, to a spool.

    Raises:
        TransportError: Ring, weights segment or models of the engine cannot be read.
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
        rows = rows_fingerprint(Path(manifest.target_path))
        self._identity = identity_of(manifest) | {"rows": rows}
        self._reader = RingReader.attach(manifest.ring)
        try:
            self._weights = WeightsWriter.attach(manifest.weights)
        except BaseException:
            self._reader.close()
            raise
        self._writer = ShardWriter(self._folder)
        self._bounds = Bounds(self._folder, config)
        self._admin = AdminSocket("relay", run_dir)
        self._announced = self._stopping = False
        self._state = EngineState()  # written last
        self._trainer = HeartbeatMonitor()
        self._seen_draft = self._weights.latest_version
        self._refused = (0, "")
        self._next_poll = 0.0
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
        if now >= self._next_poll or (self._writer.due() and not self._failing):
            works = self._storage_works(self._answer_purges, self._exchange)
            self._next_poll = now + (POLL_S if works else RETRY_S)
        return taken

    def close(self) -> None:
        """Detach from ring and weights segment. Idempotent."""
        self._reader.close()
        self._weights.close()
        self._admin.close()

    def purge(self, tenant: int | None) -> dict[str, int]:
        """Remove a tenant's records (None: all) from ring, memory and spool.

        Returns:
            Number of records that were not stored yet, and of removed shards.

        Raises:
            TransportError: The storage failed, or the engine writes records faster
                than they are read: purge again.
        """
        records = self._writer.purge(tenant)
        until = time.monotonic() + _EMPTY_LIMIT_S
        while (record := self._reader.take()) is not None:
            if tenant in (None, tenant_of(record)):
                records += 1
            else:
                self._writer.add(record)
            if time.monotonic() >= until:
                raise TransportError(f"the ring is not empty after {_EMPTY_LIMIT_S} s")
        shards = purge_shards([self._folder], tenant)
        logger.info(
            "engine %s: a purge removed %d records and %d shards",
            self._folder.engine_id,
            records,
            shards,
        )
        return {"records": records, "shards": shards}

    def _answer_purges(self) -> None:
        self._admin.poll(self._execute)

    def _execute(self, request: dict[str, Any]) -> Answer:
        if request["do"] != "purge":
            return {"ok": False, "error": "a relay executes the command purge only"}
        tenant = purged_tenant(request)
        try:
            removed = self.purge(tenant)
        except TransportError as error:
            return {"ok": False, "error": str(error)}
        return {"ok": True, "removed": removed, "engines": [self._folder.engine_id]}

    def _drain(self) -> int:
        until = time.monotonic() + _DRAIN_LIMIT_S
        taken = 0
        # Read nothing while a shard waits for the storage: this bounds the memory.
        while not self._writer.due() and time.monotonic() < until:
            record = self._reader.take()
            if record is None:
                break
            self._writer.add(record)
            taken += 1
        return taken

    def _exchange(self) -> None:
        """Exchange shards, states and drafts with the storage."""
        if not self._announced:
            self._announce()
        if self._writer.due():
            self._bounds.note(self._writer.flush())
        self._write_state()
        if self._bounds.due():
            self._bounds.enforce()
        self._follow_trainer()

    def _announce(self) -> None:
        """Store the initial draft and the description of the engine."""
        self._writer.resume()
        self._write_state()  # a folder without a heartbeat is removed
        folder, draft = self._folder, Path(self._manifest.draft_path)
        stored = folder.store.sizes(folder.path(INITIAL))
        files = {}
        for path in (draft / "config.json", *sorted(draft.glob("*.safetensors"))):
            try:
                data = path.read_bytes()
            except OSError as error:
                raise TransportError(f"cannot read {path}: {error.strerror}") from error
            files[path.name] = digest = hashlib.sha256(data).hexdigest()
            if stored.get(digest) != len(data):
                folder.store.write(folder.path(INITIAL, digest), data)
        spec = self._reader.spec
        folder.write_engine(EngineEntry(self._manifest, spec, self._identity, files))
        self._announced = True

    def _follow_trainer(self) -> None:
        """Set the rows that the trainer requests, and copy its newest draft.

        Without a live trainer, full rows are spooled for the next one unless the last
        one was paused.
        """
        trainer = self._folder.read_trainer()
        if trainer is None:
            self._reader.set_collect(Collect.FULL)
            return
        self._trainer.observe((trainer.instance, trainer.unix))
        alive = trainer.running and self._trainer.fresh
        follow = alive or trainer.collect is Collect.NOTHING
        self._reader.set_collect(trainer.collect if follow else Collect.FULL)
        version = draft_version(trainer.draft, self._seen_draft)
        if version > self._seen_draft:
            self._forward_draft(trainer.draft, version)
            self._seen_draft = version

    def _forward_draft(self, name: str, version: int) -> None:
        try:
            weights = self._folder.read_draft(name, self._weights.max_bytes)
            self._weights.publish(weights.verify())
        except StoreError:  # retried
            raise
        except TransportError as error:
            self._refused = (version, getattr(error, "reason", "segment"))
            logger.warning(
                "engine %s: draft %s of the spool is refused: %s",
                self._folder.engine_id,
                version_name(version),
                sanitize_for_log(error),
            )
        else:
            message = "engine %s: draft %s published"
            logger.info(message, self._folder.engine_id, version_name(version))

    def _write_state(self, *, running: bool = True) -> None:
        feedback, now = self._weights.feedback(), steady_unix()
        refused = (feedback.refused_version, feedback.refused_reason)
        refused_version, reason = max(refused, self._refused)
        state = EngineState(
            unix=self._state.unix,
            running=running,
            last_shard=self._writer.last,
            published_version=self._weights.latest_version,
            installed_version=feedback.installed_version,
            refused_version=refused_version,
            refused_reason=reason,
            swap_pause_ms=feedback.swap_pause_ms_last,
            dropped_rows=self._reader.stats().dropped_rows,
        )
        if state != self._state or abs(now - state.unix) >= BEAT_S:
            state = replace(state, unix=now)
            self._folder.write_state(state)
            self._state = state

    def _finish(self) -> None:
        """Write the remaining records; they are lost if the spool fails."""
        self._storage_works(self._answer_purges, self._store_all)

    def _store_all(self) -> None:
        """Store what is in memory, then once what is in the ring, and an end state."""
        if not self._announced:
            self._announce()
        try:
            if self._writer.blocked:
                self._writer.flush()
            until = time.monotonic() + _EMPTY_LIMIT_S
            while time.monotonic() < until:
                record = self._reader.take()
                if record is None:
                    break
                self._writer.add(record)
            while self._writer.flush():
                pass
        finally:
            self._write_state(running=False)

    def _storage_works(self, *steps: Callable[[], None]) -> bool:
        """Run all steps, also after a failure; return whether all succeeded."""
        problem = ""
        for step in steps:
            try:
                step()
            except TransportError as error:
                problem = str(error)
            except Exception as error:  # noqa: BLE001 - continue to drain the ring
                kind, detail = type(error).__name__, sanitize_for_log(error)
                problem = f"the spool cannot be used ({kind}: {detail})"
            else:
                continue
            if problem != self._failing:  # log once per cause, not per attempt
                logger.error("engine %s: %s", self._folder.engine_id, problem)
            self._failing = problem
        if not problem:
            self._failing = ""
        return not problem
