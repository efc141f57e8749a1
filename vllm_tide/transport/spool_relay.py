"""The relay: one engine's ring into a spool, and drafts out of it.

A process of its own on the engine's host: storage may be slow or gone, and then only
the ring fills. To the engine it is a trainer like any other.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vllm_tide.config import SpoolConfig
from vllm_tide.transport.identity import identity_of
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.purge import (
    ANNOUNCE_S,
    PurgeInbox,
    PurgeRequest,
    announce_relay,
    retract_relay,
)
from vllm_tide.transport.record import tenant_of
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    reclaim_orphans,
)
from vllm_tide.transport.ring import Collect, RingReader
from vllm_tide.transport.shm import TransportError, said
from vllm_tide.transport.spool import (
    BEAT_S,
    EngineEntry,
    EngineFolder,
    EngineState,
    Freshness,
    why_failed,
)
from vllm_tide.transport.spool_models import upload_models
from vllm_tide.transport.spool_store import Store
from vllm_tide.transport.spool_writer import SpoolWriter
from vllm_tide.transport.weights import WeightsRefused, WeightsWriter

logger = logging.getLogger("vllm_tide.relay")

IDLE_SLEEP_S = 0.05
POLL_S = 0.5
"""How often drafts and trainers are looked for (s)."""
_DRAIN_BATCH = 256
_DRAIN_LIMIT_S = 1.0
# What is served while the relay ends, or purges, may come without end.
_EMPTY_LIMIT_S = 2.0


class Relay:
    """Between one engine of this host, announced in `run_dir`, and a spool.

    Raises:
        TransportError: If ring, weights segment or spool cannot be used.
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
        try:
            spec, identity = self._reader.spec, identity_of(manifest)
            self._writer = SpoolWriter(self._folder, config)
            identity["rows"] = upload_models(self._folder, manifest)
            self._folder.write_engine(EngineEntry(manifest, spec, identity))
        except BaseException:
            self.close()
            raise
        self._purges = PurgeInbox(run_dir, "relay")
        self._purged: Counter[str] = Counter()
        self._next_announcement = 0.0
        self._state = EngineState()
        self._said = 0.0
        self._next_poll = 0.0
        self._readers: dict[str, Freshness] = {}
        self._seen_draft = self._weights.latest_version
        self._refused = (0, "")
        self._stopping = False
        self._failing = ""

    def stop(self) -> None:
        """Ask the loop to end; safe in a signal handler."""
        self._stopping = True

    def run(self) -> str:
        """Work until stopped, or the engine is gone; "stopped" or "engine_gone"."""
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
                # An engine killed outright could not unlink its segments.
                reclaim_orphans(self._run_dir)
        return "engine_gone" if gone else "stopped"

    def _gone(self) -> bool:
        """True if the engine died, or its shared memory was cut short."""
        intact = self._reader.intact and self._weights.intact
        return not (intact and self._reader.producer_alive())

    def tick(self) -> int:
        """One round; the number of records taken from the ring.

        Raises TransportError if another process took ring or segment over. A spool that
        fails is only logged: it is tried again.
        """
        self._hold()
        taken = self._drain()
        now = time.monotonic()
        full = self._writer.due() and not self._writer.blocked
        if full or now >= self._next_poll:
            self._next_poll = now + POLL_S
            # Purges first: what is asked for must not be written any more.
            if self._storage_works(self._answer_purges, self._exchange):
                self._failing = ""
        return taken

    def close(self) -> None:
        """Let the ring and the weights segment go. Idempotent."""
        self._reader.close()
        self._weights.close()
        retract_relay(self._run_dir, self._folder.engine_id)

    def _hold(self) -> None:
        """Say that the relay lives; raises TransportError if the claim was lost."""
        self._reader.heartbeat()
        self._weights.heartbeat()

    def _drain(self) -> int:
        until = time.monotonic() + _DRAIN_LIMIT_S
        taken = 0
        # While a shard waits for the storage nothing is taken: memory stays bounded.
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

    def _empty_ring(self, purge: PurgeRequest | None = None) -> bool:
        """Take all that is in the ring, but what a purge names; False if too much came.

        That is bounded by the ring, and by what an engine writes in two seconds.
        """
        until = time.monotonic() + _EMPTY_LIMIT_S
        while time.monotonic() < until:
            body = self._reader.take()
            if body is None:
                return True
            if purge is not None and purge.tenant in (None, tenant_of(body)):
                self._purged[purge.id] += 1
            else:
                self._writer.add(body)
        return False

    def _answer_purges(self) -> None:
        """Forget what is asked for, in the ring and here; the spool is the asker's."""
        now = time.monotonic()
        if now >= self._next_announcement:
            self._next_announcement = now + ANNOUNCE_S
            announce_relay(self._run_dir, self._folder.engine_id)
        for request in self._purges.pending():
            self._purged[request.id] += self._writer.purge(request.tenant)
            if not self._empty_ring(request):
                continue  # at the next look
            removed = self._purged.pop(request.id)
            self._purges.done(request, {"records": removed})
            logger.info(
                "engine %s: a purge removed %d records",
                self._folder.engine_id,
                removed,
            )

    def _exchange(self) -> None:
        """Everything that needs the storage."""
        if self._writer.due():
            self._writer.flush()
        self._writer.keep_bounds()
        self._take_draft()
        self._ask_for_rows()
        self._say()

    def _take_draft(self) -> None:
        """Pass the newest draft on as it is."""
        known = self._seen_draft
        version = self._folder.latest_draft(known)
        if version <= self._seen_draft:
            return
        self._seen_draft = version
        try:
            blob = self._folder.read_draft(known, self._weights.max_bytes)
            # A newer one may have come since.
            self._seen_draft = version = blob.version
            blob.verify()
        except WeightsRefused as refusal:
            self._refuse(version, refusal.reason, refusal.sentence)
            return
        except TransportError:
            self._seen_draft = self._weights.latest_version  # try again
            raise
        try:
            self._weights.put(blob)
        except TransportError as error:
            # It does not fit the segment, and never will.
            self._refuse(version, "segment", str(error))
        else:
            logger.info(
                "engine %s: draft %d published", self._folder.engine_id, version
            )

    def _refuse(self, version: int, reason: str, sentence: str) -> None:
        self._refused = (version, reason)
        logger.warning(
            "engine %s: draft %d of the spool is refused: %s",
            self._folder.engine_id,
            version,
            said(sentence),
        )

    def _ask_for_rows(self) -> None:
        """What the live trainers want at most; full rows if there is none to ask.

        What is spooled while no trainer lives is for the next one, unless the last one
        was paused.
        """
        wishes = set()
        for name, state in self._folder.read_readers().items():
            seen = self._readers.setdefault(name, Freshness())
            seen.look(state.unix)
            if state.paused:
                wishes.add(Collect.NOTHING)
            elif state.running and seen.fresh:
                wishes.add(Collect.FULL if state.collect else Collect.METADATA)
        order = (Collect.FULL, Collect.METADATA, Collect.NOTHING)
        wanted = next((wish for wish in order if wish in wishes), Collect.FULL)
        self._reader.set_collect(wanted)

    def _say(self, *, running: bool = True) -> None:
        feedback = self._weights.feedback()
        refused, reason = feedback.refused_version, feedback.refused_reason
        if self._refused[0] > refused:
            refused, reason = self._refused
        state = EngineState(
            unix=self._said,
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
        now = steady_unix()  # what the shards are dated by
        if state == self._state and abs(now - self._said) < BEAT_S:
            return
        self._folder.write_state(replace(state, unix=now))
        self._said = now
        self._state = replace(state, unix=now)

    def _finish(self) -> None:
        """Bring in what is left; a spool that fails now loses it."""
        try:
            self._hold()
        except TransportError as error:
            # Another relay writes to this engine's part of the spool now.
            logger.warning(
                "engine %s: %s; what this relay still held is lost",
                self._folder.engine_id,
                error,
            )
            return
        self._storage_works(self._answer_purges, self._flush_all, self._say_ended)

    def _flush_all(self) -> None:
        if self._writer.blocked:
            self._writer.flush()
        self._empty_ring()
        while self._writer.flush():
            pass

    def _say_ended(self) -> None:
        self._say(running=False)

    def _storage_works(self, *steps: Callable[[], None]) -> bool:
        """Take each step, whether the one before failed or not; whether none did."""
        works = True
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the ring is drained on
                works = False
                sentence = why_failed(error)
                if sentence != self._failing:  # once per cause, not per try
                    logger.error("engine %s: %s", self._folder.engine_id, sentence)
                self._failing = sentence
        return works
