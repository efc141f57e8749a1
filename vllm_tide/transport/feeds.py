"""Feeds of all engines of a trainer: records in fair shares, one draft for all engines.

An engine joins when it is discovered and compatible. It is dropped when it dies or its
storage is lost; the others are not affected. A new draft is sent to all engines at
once, and each swaps it in asynchronously.

Version numbers are shared by all engines. If an engine already has a higher version
(from another trainer), a draft is sent to it under a higher engine-specific version.
Versions in this module are the trainer's unless stated otherwise.
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

MAX_FAST_VERSIONS = 4096
"""Number of fast-draft versions remembered per engine."""
SHARE_ROWS = 256
"""Rows read from one engine before the next engine is read."""
SCAN_PERIOD_S = 1.0
"""Interval between scans for engines (s)."""
RETRY_S = 10.0
"""Delay before another attempt to attach an engine (s)."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class EngineVersions:
    """Draft versions of one engine, in the trainer's numbering."""

    published: int  # newest version sent, 0 if none
    installed: int  # being served; 0 is the initial draft
    refused: int  # last refused version, 0 if none
    refused_reason: str
    swap_pause_ms: float  # pause of serving in the last installation
    # State of a fast draft: "sent", "served" or "refused"; empty if there is none or
    # the base was sent again. With a fast draft the versions above are its base's.
    adaptation: str = ""
    serves_fast: bool = False


@dataclass(frozen=True)
class Changes:
    """Engines that joined or left since the last poll."""

    joined: tuple[str, ...]
    left: dict[str, str]  # engine to reason


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

    The first engine with available models is the reference: all others must match its
    identity. Of several engines in the same scan the newest is first.

    Attributes:
        refused: By engine, why a live engine cannot join.
        failed_publications: Drafts that could not be sent, over all engines.
        opening: Whether a discovered engine is being opened and may join next time.
        tenant_keys: Ids of the tenant keys of all engines, current and former.
        has_fast_draft: Whether `latest` found a fast draft of an earlier trainer.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._members: dict[str, _Member] = {}
        self._read_order: deque[str] = deque()  # engines; the next to read is first
        self._reference: tuple[str, dict[str, str]] | None = None
        self._spec: RingSpec | None = None  # common to all engines
        self._barred: set[str] = set()
        self._retry_at: dict[str, float] = {}
        self._next_scan = 0.0
        self._left: dict[str, str] = {}
        self._draft: _Draft | None = None
        self._counter = 0
        # Engine-specific version -> the trainer's number, where they differ.
        self._numbers: dict[str, dict[int, int]] = {}
        # Engine-specific versions of fast drafts (True) and of bases sent again
        # (False), and the version of their base.
        self._fast: dict[str, dict[int, bool]] = {}
        self._bases: dict[str, int] = {}
        self.has_fast_draft = False
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
        """The feed that the trainer is created from; None if there is no engine."""
        if self._reference is not None and self._reference[0] in self._members:
            return self._members[self._reference[0]].feed
        return next((member.feed for member in self._members.values()), None)

    def poll(self) -> Changes:
        """Drop dead engines and attach new ones; cheap enough for every step."""
        joined: list[str] = []
        for member in list(self._members.values()):
            if self._call(member, member.feed.alive) is False:
                self._drop(member, "its process has exited")
                member.source.gone(member.feed.id)
                for versions in (self._numbers, self._fast, self._bases):
                    versions.pop(member.feed.id, None)  # do not reuse for a new engine
        now = time.monotonic()
        if now >= self._next_scan:
            self._next_scan = now + SCAN_PERIOD_S
            self.opening = False
            for source in self._sources:
                # Newest first: it becomes the reference.
                for engine_id in reversed(source.find()):
                    if self._may_join(engine_id, now) and self._join(source, engine_id):
                        joined.append(engine_id)
        left, self._left = self._left, {}
        return Changes(tuple(joined), left)

    def read(
        self, limit: int = 256, max_rows: int | None = None
    ) -> list[tuple[str, list[Record]]]:
        """Remove and return records, cycling through the engines; never waits.

        While all engines have enough records, each contributes `SHARE_ROWS` rows and at
        most one more record per cycle. The next call continues with the next engine.
        """
        result: dict[str, list[Record]] = {}
        waiting, rows = set(self._read_order), 0
        while waiting and limit > 0 and (max_rows is None or rows < max_rows):
            name = self._read_order[0]
            quota = SHARE_ROWS if max_rows is None else min(SHARE_ROWS, max_rows - rows)
            # A partial share does not count: the engine stays first.
            if name not in waiting or quota == SHARE_ROWS:
                self._read_order.rotate(-1)
            if name not in waiting:
                continue
            member = self._members[name]
            records = self._call(member, partial(member.feed.read, limit, quota))
            if records is None:  # the engine was dropped
                waiting.discard(name)
                continue
            size = sum(max(record.num_rows, 1) for record in records)
            limit, rows = limit - len(records), rows + size
            result.setdefault(name, []).extend(records)
            if size < quota:  # it has no more records
                waiting.discard(name)
        return [(name, taken) for name, taken in result.items() if taken]

    def heartbeat(self) -> None:
        """Renew the trainer's heartbeat for every engine."""
        for member in list(self._members.values()):
            self._call(member, member.feed.heartbeat)

    def set_collect(self, mode: Collect) -> None:
        """Set the requested rows for all engines, including those that join later."""
        self._collect = mode
        for member in list(self._members.values()):
            self._call(member, partial(member.feed.set_collect, mode))

    @property
    def next_version(self) -> int:
        """Version of the next draft, greater than all versions sent to any engine."""
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
        """Send a draft to all engines, current and future, or to `engines` only.

        The tensors are referenced until the next publication: do not modify them.

        Returns:
            The version of the draft.

        Raises:
            TransportError: The draft could not be sent to any engine; it is discarded.
            ValueError: The size or dtype of a tensor is invalid.
        """
        version = self.next_version
        draft = _Draft(version, parent_version, meta, tensors)
        self._counter = version
        failed = ""
        sent = 0
        for engine_id, member in list(self._members.items()):
            if engines is not None and engine_id not in engines:
                continue
            error = self._send(member, draft)
            sent += not error
            failed = error or failed
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
        """Send one engine a fast draft for the base it serves, or the base again.

        Requests served by it are attributed to version `base`, but its steps are not
        used to measure that version (`is_fast`). `latest` ignores fast drafts, and
        engines that join do not receive them.

        Args:
            meta: `adaptation["fast"]` is True for a fast draft, False for a base.

        Raises:
            TransportError: The draft cannot be sent; nothing is changed.
        """
        feed = self._members[engine_id].feed
        fast = self._fast.setdefault(engine_id, {})
        numbers = self._numbers.setdefault(engine_id, {})
        installed = feed.feedback().installed_version
        own = self._bases[engine_id] if installed in fast else installed
        version = self.next_version
        adaptation = meta["adaptation"]
        meta = meta | {"adaptation": adaptation | {"base": own}}
        feed.publish(tensors, version=version, parent_version=own, meta=meta)
        self._counter = version
        self._bases[engine_id] = own
        fast[version], numbers[version] = adaptation["fast"], base
        for old in list(fast)[:-MAX_FAST_VERSIONS]:
            del fast[old], numbers[old]

    def _adaptation(self, engine_id: str, last: WeightsFeedback, latest: int) -> str:
        fast = self._fast.get(engine_id, {})
        refused = latest == last.refused_version
        if latest == last.installed_version or refused and not fast.get(latest):
            return "served" if self.is_fast(engine_id, last.installed_version) else ""
        if not fast.get(latest):
            return ""
        return "refused" if refused else "sent"

    def versions(self) -> dict[str, EngineVersions]:
        result: dict[str, EngineVersions] = {}
        for engine_id, member in list(self._members.items()):
            feedback = self._call(member, member.feed.feedback)
            if feedback is None:
                continue
            latest, refused = member.feed.latest_version, feedback.refused_version
            if refused in self._fast.get(engine_id, ()):
                refused = 0  # the fast draft was refused, not its base
            result[engine_id] = EngineVersions(
                published=self.number_of(engine_id, latest),
                installed=self.number_of(engine_id, feedback.installed_version),
                refused=self.number_of(engine_id, refused),
                refused_reason=feedback.refused_reason,
                swap_pause_ms=feedback.swap_pause_ms_last,
                adaptation=self._adaptation(engine_id, feedback, latest),
                serves_fast=self.is_fast(engine_id, feedback.installed_version),
            )
        return result

    def number_of(self, engine_id: str, version: int) -> int:
        """Return the trainer's version for an engine-specific version."""
        return self._numbers.get(engine_id, {}).get(version, version)

    def is_fast(self, engine_id: str, version: int) -> bool:
        """Return whether an engine-specific version is a fast draft."""
        return self._fast.get(engine_id, {}).get(version, False)

    def latest(self) -> Publication | None:
        """Return the newest draft that was not refused, to resume from after a restart.

        It is sent to engines that have an older or a fast draft, and to those that join
        later.
        """
        newest: Publication | None = None
        behind: set[str] = set()
        for member in list(self._members.values()):
            stored = self._call(member, member.feed.latest)
            feedback = self._call(member, member.feed.feedback)
            if stored is None or feedback is None:
                continue
            if stored.version == feedback.refused_version:
                continue
            adaptation = stored.meta.get("adaptation", {})
            if adaptation.get("fast") or "delta" in stored.meta:
                self.has_fast_draft = True
                behind.add(member.feed.id)
                # All versions since the base may be fast drafts.
                own = self._bases[member.feed.id] = int(adaptation.get("base", 0))
                first = max(own, stored.version - MAX_FAST_VERSIONS)
                since = range(first, stored.version)
                self._fast[member.feed.id] = {v + 1: True for v in since}
                self._numbers[member.feed.id] = {v + 1: own for v in since}
                continue
            if newest is None or stored.version > newest.version:
                newest = stored
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
        """Drop prefetched records; return how many."""
        dropped = 0
        for member in list(self._members.values()):
            dropped += self._call(member, partial(member.feed.purge, tenant)) or 0
        return dropped

    def stats(self) -> dict[str, dict[str, int]]:
        return {name: member.feed.stats() for name, member in self._members.items()}

    def close(self) -> None:
        """Detach from every engine. Idempotent."""
        for source in self._sources:
            source.close()
        for member in list(self._members.values()):
            member.feed.close()
        self._members.clear()
        self._read_order.clear()

    def _may_join(self, engine_id: str, now: float) -> bool:
        if engine_id in self._members or engine_id in self._barred:
            return False
        return now >= self._retry_at.get(engine_id, 0.0)

    def _join(self, source: Source, engine_id: str) -> bool:
        try:
            identity = source.identity(engine_id)
            if self._reference is not None:
                reason = difference(engine_id, identity, *self._reference)
                if reason:  # permanent: the identity of an engine does not change
                    self._barred.add(engine_id)
                    raise TransportError(reason)
            feed = source.open(engine_id)
            if feed is None:
                self.opening = True
                return False
            try:
                spec = replace(feed.spec, engine_id="")
                if spec != (self._spec or spec):
                    raise TransportError(
                        f"engine {engine_id} sends rows of a different shape"
                    )
                if self._reference is None:
                    feed.models()  # raises if no trainer can be created from it
            except TransportError:
                feed.close()
                raise
        except TransportError as error:
            self._retry_at[engine_id] = time.monotonic() + RETRY_S
            if self.refused.get(engine_id) != str(error):
                logger.warning("engine %s cannot join: %s", engine_id, error)
            self.refused[engine_id] = str(error)
            return False
        self._reference = self._reference or (engine_id, identity)
        self._spec = self._spec or spec
        self.refused.pop(engine_id, None)
        member = _Member(feed, source)
        self._members[engine_id] = member
        self._read_order.append(engine_id)
        self.tenant_keys.add(feed.manifest.tenant_key_id)
        logger.info("engine %s joined: %d now", engine_id, len(self._members))
        if self._collect is not None:
            self._call(member, partial(feed.set_collect, self._collect))
        draft = self._draft
        if draft is not None and self._sent_version(feed) != draft.version:
            self._send(member, draft)
        return engine_id in self._members

    def _sent_version(self, feed: Feed) -> int:
        return self.number_of(feed.id, feed.latest_version)

    def _send(self, member: _Member, draft: _Draft) -> str:
        """Send a draft; return the error message, if any. The engine is not dropped."""
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

    def _call(self, member: _Member, function: Callable[[], _Result]) -> _Result | None:
        """Call a method of a feed; drop the engine and return None if it fails."""
        if member.feed.id not in self._members:
            return None
        try:
            return function()
        except TransportError as error:
            self._drop(member, str(error))
            return None

    def _drop(self, member: _Member, reason: str) -> None:
        engine_id = member.feed.id
        del self._members[engine_id]
        self._read_order.remove(engine_id)
        self._left[engine_id] = reason
        self._retry_at[engine_id] = time.monotonic() + RETRY_S
        logger.warning(
            "engine %s is dropped: %s; %d left", engine_id, reason, len(self._members)
        )
        member.feed.close()


def open_feeds(
    run_dir: Path | None = None,
    spool: str | None = None,
    engine_id: str | None = None,
    *,
    model: str | None = None,
) -> Feeds:
    """Create feeds for a run directory, a spool or both, or for one engine in them.

    Args:
        model: The target of the engines of the spool (`spool_models.find_models`).
    """
    sources: list[Source] = []
    if run_dir is not None:
        sources.append(RunDirSource(run_dir, engine_id))
    if spool is not None:
        sources.append(SpoolSource(spool, engine_id, model=model))
    return Feeds(sources)
