"""Many engines, one trainer: their records in fair shares, one draft for all of them.

An engine joins when it is found and fits, and is dropped when it dies or its storage is
lost; the others never notice. Each gets a new draft at once and swaps it in when it is
ready; nobody waits for anybody.

Drafts are numbered across engines. An engine that is ahead of the numbers (it had
another trainer before) gets a draft under a higher version of its own; what this module
says about versions is always in the trainer's numbers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vllm_tide.transport.feed import RunDirSource
from vllm_tide.transport.feed_spool import Feed, Source, SpoolSource
from vllm_tide.transport.identity import difference
from vllm_tide.transport.publication import Publication, TensorInput
from vllm_tide.transport.record import Record, RingSpec
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.weights import WeightsFeedback

logger = logging.getLogger("vllm_tide.train")

FAST_KEPT = 4096
"""Publications of fast drafts to an engine whose records are still recognised."""
TURN_ROWS = 256
"""Rows an engine may send before it is the next one's turn."""
LOOK_S = 1.0
"""How often engines are looked for (s)."""
RETRY_S = 10.0
"""An engine that could not be attached is tried again after this (s)."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class EngineVersions:
    """Drafts of one engine, in the trainer's numbers."""

    published: int  # newest sent to it, 0 if none was
    installed: int  # the one that serves; 0 is the draft it started with
    refused: int  # the last one, 0 if none
    refused_reason: str
    swap_pause_ms: float  # how long the last installation held serving up
    # Of a fast draft on its base: "sent", "served", "refused"; empty without one, and
    # when the base is on its way back. All versions above are the base's then.
    adaptation: str = ""
    serves_fast: bool = False


@dataclass(frozen=True)
class Changes:
    """Engines that came or went since the last look."""

    joined: tuple[str, ...]
    left: dict[str, str]  # and why


@dataclass(frozen=True)
class _Draft:
    version: int
    parent_version: int
    meta: dict[str, Any]
    tensors: Mapping[str, TensorInput]


@dataclass
class _Member:
    feed: Feed
    source: Source


class Feeds:
    """The engines of one trainer.

    The first engine whose models are to be had decides what the others must have in
    common with it; of several found at once that is the newest.

    Attributes:
        refused: Sentences about engines that are live and cannot join.
        failed_publications: Drafts that could not be sent, over all engines.
        opening: Whether an engine that was found may join at the next look.
        tenant_keys: Ids of keys that name tenants of engines here, now or before.
        found_fast: `latest` met a fast draft, which another trainer has left.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._members: dict[str, _Member] = {}
        self._turns: deque[str] = deque()  # the engines, the next one first
        self._reference: tuple[str, dict[str, str]] | None = None
        self._spec: RingSpec | None = None  # of all of them
        self._barred: set[str] = set()
        self._retry_at: dict[str, float] = {}
        self._next_look = 0.0
        self._left: dict[str, str] = {}
        self._draft: _Draft | None = None
        self._counter = 0
        # version an engine knows -> the trainer's number, where they differ
        self._numbers: dict[str, dict[int, int]] = {}
        # Versions an engine knows of fast drafts (True) and of bases sent again, and
        # the version of the base that they stand on.
        self._fast: dict[str, dict[int, bool]] = {}
        self._bases: dict[str, int] = {}
        self.found_fast = False
        self._collect: Collect | None = None
        self.refused: dict[str, str] = {}
        self.failed_publications = 0
        self.opening = False
        self.tenant_keys: set[str] = set()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def ids(self) -> list[str]:
        return list(self._members)

    def feed(self, engine_id: str) -> Feed:
        return self._members[engine_id].feed

    @property
    def reference(self) -> Feed | None:
        """The feed a trainer is made from; None while there is no engine."""
        if self._reference is not None and self._reference[0] in self._members:
            return self._members[self._reference[0]].feed
        return next((member.feed for member in self._members.values()), None)

    def poll(self) -> Changes:
        """Drop engines that died, take in those that came; cheap."""
        joined: list[str] = []
        for member in list(self._members.values()):
            if self._try(member, member.feed.alive) is False:
                self._drop(member, "its engine is gone")
                member.source.gone(member.feed.id)
                for known in (self._numbers, self._fast, self._bases):
                    known.pop(member.feed.id, None)  # one of that name is another
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self.opening = False
            for source in self._sources:
                # The newest first, so that it is the reference.
                for engine_id in reversed(source.find()):
                    if self._may_join(engine_id, now) and self._join(source, engine_id):
                        joined.append(engine_id)
        left, self._left = self._left, {}
        return Changes(tuple(joined), left)

    def read(
        self, limit: int = 256, max_rows: int | None = None
    ) -> list[tuple[str, list[Record]]]:
        """Take records out in turns; never waits.

        While engines have more than is asked for, each sends `TURN_ROWS` a turn and at
        most one record beyond; the next call goes on with the engine whose turn it is.
        """
        found: dict[str, list[Record]] = {}
        waiting, rows = set(self._turns), 0
        while waiting and limit > 0 and (max_rows is None or rows < max_rows):
            name = self._turns[0]
            asked = TURN_ROWS if max_rows is None else min(TURN_ROWS, max_rows - rows)
            if name not in waiting or asked == TURN_ROWS:  # a cut turn is not its turn
                self._turns.rotate(-1)
            if name not in waiting:
                continue
            member = self._members[name]
            records = self._try(member, partial(member.feed.read, limit, asked))
            if records is None:  # its engine is lost
                waiting.discard(name)
                continue
            size = sum(max(record.num_rows, 1) for record in records)
            limit, rows = limit - len(records), rows + size
            found.setdefault(name, []).extend(records)
            if size < asked:  # it has no more
                waiting.discard(name)
        return [(name, taken) for name, taken in found.items() if taken]

    def heartbeat(self) -> None:
        """Say to every engine that the trainer lives."""
        for member in list(self._members.values()):
            self._try(member, member.feed.heartbeat)

    def set_collect(self, wanted: Collect) -> None:
        """Ask every engine, and those that join later."""
        self._collect = wanted
        for member in list(self._members.values()):
            self._try(member, partial(member.feed.set_collect, wanted))

    @property
    def next_version(self) -> int:
        """Number of the next draft: newer than anything any engine was sent."""
        latest = [member.feed.latest_version for member in self._members.values()]
        return max([self._counter, *latest]) + 1

    def publish(
        self,
        tensors: Mapping[str, TensorInput],
        *,
        parent_version: int,
        meta: dict[str, Any],
        engines: Collection[str] | None = None,
    ) -> int:
        """Send a draft to all engines, also later ones, or only to some; its number.

        Tensors are kept: do not change them.

        Raises:
            TransportError: If no engine could be sent it; then none will be later.
            ValueError: If a tensor contradicts itself.
        """
        version = self.next_version
        draft = _Draft(version, parent_version, meta, tensors)
        self._counter = version
        failed = ""
        sent = 0
        for engine_id, member in list(self._members.items()):
            if engines is not None and engine_id not in engines:
                continue
            sentence = self._send(member, draft)
            sent += not sentence
            failed = sentence or failed
        if failed and not sent:
            raise TransportError(failed)
        if engines is None:
            self._draft = draft
        return version

    def send_fast(
        self,
        engine_id: str,
        tensors: Mapping[str, TensorInput],
        meta: dict[str, Any],
        *,
        base: int,
    ) -> None:
        """Send one engine a fast draft over the base that it serves, or the base again.

        Its requests count as `base`'s, its steps say nothing of that (`is_fast`);
        `latest` and engines that join never see a fast draft.

        Args:
            meta: Of the publication; `adaptation` says in `fast` which of both it is.

        Raises:
            TransportError: It cannot be sent it; nothing is changed.
        """
        feed = self._members[engine_id].feed
        known = self._fast.setdefault(engine_id, {})
        numbers = self._numbers.setdefault(engine_id, {})
        installed = feed.feedback().installed_version
        own = self._bases[engine_id] if installed in known else installed
        version = self.next_version
        told = meta["adaptation"]
        meta = meta | {"adaptation": told | {"base": own}}
        feed.publish(tensors, version=version, parent_version=own, meta=meta)
        self._counter = version
        self._bases[engine_id] = own
        known[version], numbers[version] = told["fast"], base
        for old in list(known)[:-FAST_KEPT]:
            del known[old], numbers[old]

    def _adaptation(self, engine_id: str, told: WeightsFeedback, latest: int) -> str:
        known = self._fast.get(engine_id, {})
        refused = latest == told.refused_version
        if latest == told.installed_version or refused and not known.get(latest):
            return "served" if self.is_fast(engine_id, told.installed_version) else ""
        if not known.get(latest):
            return ""
        return "refused" if refused else "sent"

    def versions(self) -> dict[str, EngineVersions]:
        told: dict[str, EngineVersions] = {}
        for engine_id, member in list(self._members.items()):
            feedback = self._try(member, member.feed.feedback)
            if feedback is None:
                continue
            latest, refused = member.feed.latest_version, feedback.refused_version
            if refused in self._fast.get(engine_id, ()):
                refused = 0  # it is not the base that was refused
            told[engine_id] = EngineVersions(
                published=self.number_of(engine_id, latest),
                installed=self.number_of(engine_id, feedback.installed_version),
                refused=self.number_of(engine_id, refused),
                refused_reason=feedback.refused_reason,
                swap_pause_ms=feedback.swap_pause_ms_last,
                adaptation=self._adaptation(engine_id, feedback, latest),
                serves_fast=self.is_fast(engine_id, feedback.installed_version),
            )
        return told

    def number_of(self, engine_id: str, version: int) -> int:
        """The trainer's number of a version as an engine's records say it."""
        return self._numbers.get(engine_id, {}).get(version, version)

    def is_fast(self, engine_id: str, version: int) -> bool:
        """True if what an engine's records call so is a fast draft."""
        return self._fast.get(engine_id, {}).get(version, False)

    def latest(self) -> Publication | None:
        """The newest draft that no engine refused: to go on from after a restart.

        Engines that have an older one or a fast draft, and those that join later, are
        sent it.
        """
        newest: Publication | None = None
        behind: set[str] = set()
        for member in list(self._members.values()):
            found = self._try(member, member.feed.latest)
            feedback = self._try(member, member.feed.feedback)
            if found is None or feedback is None:
                continue
            if found.version == feedback.refused_version:
                continue
            told = found.meta.get("adaptation", {})
            if told.get("fast") or "delta" in found.meta:
                self.found_fast = True
                behind.add(member.feed.id)
                # Its steps still say nothing of the base; all since may be fast drafts.
                own = self._bases[member.feed.id] = int(told.get("base", 0))
                since = range(max(own, found.version - FAST_KEPT), found.version)
                self._fast[member.feed.id] = {v + 1: True for v in since}
                self._numbers[member.feed.id] = {v + 1: own for v in since}
                continue
            if newest is None or found.version > newest.version:
                newest = found
        if newest is not None:
            meta = {k: v for k, v in newest.meta.items() if k != "adaptation"}
            self._draft = _Draft(
                newest.version, newest.parent_version, meta, newest.tensors
            )
            self._counter = max(self._counter, newest.version)
            for member in list(self._members.values()):
                latest = member.feed.latest_version
                if latest < newest.version or member.feed.id in behind:
                    self._send(member, self._draft)
        return newest

    def purge(self, tenant: int | None = None) -> int:
        """Forget what was fetched ahead of `read`; the records dropped."""
        dropped = 0
        for member in list(self._members.values()):
            dropped += self._try(member, partial(member.feed.purge, tenant)) or 0
        return dropped

    def stats(self) -> dict[str, dict[str, int]]:
        return {name: member.feed.stats() for name, member in self._members.items()}

    def close(self) -> None:
        """Let every engine go. Idempotent."""
        for source in self._sources:
            source.close()
        for member in list(self._members.values()):
            member.feed.close()
        self._members.clear()
        self._turns.clear()

    def _may_join(self, engine_id: str, now: float) -> bool:
        if engine_id in self._members or engine_id in self._barred:
            return False
        return now >= self._retry_at.get(engine_id, 0.0)

    def _join(self, source: Source, engine_id: str) -> bool:
        try:
            identity = source.identity(engine_id)
            if self._reference is not None:
                other = difference(engine_id, identity, *self._reference)
                if other:  # it will not change while it lives
                    self._barred.add(engine_id)
                    raise TransportError(other)
            feed = source.open(engine_id)
            if feed is None:
                self.opening = True
                return False
            try:
                spec = replace(feed.spec, engine_id="")
                if spec != (self._spec or spec):
                    raise TransportError(
                        f"engine {engine_id} sends rows of another shape"
                    )
                if self._reference is None:
                    feed.models()  # else no trainer can be made from it
            except TransportError:
                feed.close()
                raise
        except TransportError as error:
            self._retry_at[engine_id] = time.monotonic() + RETRY_S
            if self.refused.get(engine_id) != str(error):
                logger.warning("engine %s does not join: %s", engine_id, error)
            self.refused[engine_id] = str(error)
            return False
        self._reference = self._reference or (engine_id, identity)
        self._spec = self._spec or spec
        self.refused.pop(engine_id, None)
        member = _Member(feed, source)
        self._members[engine_id] = member
        self._turns.append(engine_id)
        self.tenant_keys.add(feed.manifest.tenant_key_id)
        logger.info("engine %s joins: %d now", engine_id, len(self._members))
        if self._collect is not None:
            self._try(member, partial(feed.set_collect, self._collect))
        draft = self._draft
        if draft is not None and self._holds(feed) != draft.version:
            self._send(member, draft)
        return engine_id in self._members

    def _holds(self, feed: Feed) -> int:
        return self.number_of(feed.id, feed.latest_version)

    def _send(self, member: _Member, draft: _Draft) -> str:
        """Send a draft; the sentence if it failed. The engine stays: it still feeds."""
        feed = member.feed
        version = draft.version
        if version <= feed.latest_version:
            version = self.next_version
            self._counter = version
            self._numbers.setdefault(feed.id, {})[version] = draft.version
        try:
            feed.publish(
                draft.tensors,
                version=version,
                parent_version=draft.parent_version,
                meta=draft.meta,
            )
        except TransportError as error:
            self.failed_publications += 1
            logger.error("engine %s: draft %d: %s", feed.id, draft.version, error)
            return str(error)
        return ""

    def _try(self, member: _Member, function: Callable[[], _Result]) -> _Result | None:
        """Call a feed; one that fails is dropped, the others go on."""
        if member.feed.id not in self._members:
            return None
        try:
            return function()
        except TransportError as error:
            self._drop(member, str(error))
            return None

    def _drop(self, member: _Member, why: str) -> None:
        engine_id = member.feed.id
        del self._members[engine_id]
        self._turns.remove(engine_id)
        self._left[engine_id] = why
        self._retry_at[engine_id] = time.monotonic() + RETRY_S
        logger.warning(
            "engine %s is dropped: %s; %d left", engine_id, why, len(self._members)
        )
        member.feed.close()


def open_feeds(
    run_dir: Path | None = None,
    spool: str | None = None,
    engine_id: str | None = None,
    *,
    reader: str = "trainer",
) -> Feeds:
    """The engines of a run directory, of a spool, or of both; all that fit, or one."""
    sources: list[Source] = []
    if run_dir is not None:
        sources.append(RunDirSource(run_dir, engine_id))
    if spool is not None:
        sources.append(SpoolSource(spool, engine_id, reader=reader))
    return Feeds(sources)
