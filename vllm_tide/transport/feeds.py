"""Feeds of all engines of a trainer: records in fair shares, one draft for all engines.

An engine joins when it is discovered and compatible. It is dropped when it dies or its
storage is lost; the others are not affected. A new draft is sent to all engines at
once, and each swaps it in asynchronously.

Versions (`versions.py`) are shared by all engines: a new number is greater than every
number of any engine, also of one that another trainer has served. Numbers in this
module are those of drafts, without the step.
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

from vllm_tide.transport.draft_weights import DraftWeights, TensorBytes
from vllm_tide.transport.feed import RunDirSource
from vllm_tide.transport.feed_spool import Feed, Source, SpoolSource
from vllm_tide.transport.identity import difference
from vllm_tide.transport.record import Record, RingSpec
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.versions import (
    first_version,
    is_fast,
    next_step,
    number_of,
    step_of,
    version_name,
)
from vllm_tide.transport.weights import WeightsFeedback

logger = logging.getLogger("vllm_tide.train")

SHARE_ROWS = 256
"""Rows read from one engine before the next engine is read."""
SCAN_PERIOD_S = 1.0
"""Interval between scans for engines (s)."""
RETRY_S = 10.0
"""Delay before another attempt to attach an engine (s)."""

_Result = TypeVar("_Result")


class NoStepLeft(TransportError):
    """A draft needs a new number before a fast draft can be sent over it."""


@dataclass(frozen=True)
class EngineVersions:
    """Numbers of an engine's drafts, and its fast draft."""

    published: int  # newest draft sent, 0 if none
    installed: int  # being served; 0 is the initial draft
    refused: int  # last refused draft, 0 if none
    refused_reason: str
    swap_pause_ms: float  # pause of serving in the last installation
    # State of a fast draft: "sent", "served" or "refused"; empty if there is none or
    # its base was sent again.
    adaptation: str = ""

    @classmethod
    def of(cls, latest: int, feedback: WeightsFeedback) -> EngineVersions:
        """Return the numbers for the latest version sent and the engine's report."""
        installed, refused = feedback.installed_version, feedback.refused_version
        adaptation = "served" if is_fast(installed) else ""
        if latest not in (installed, refused):
            adaptation = "sent" if is_fast(latest) else ""
        elif latest == refused and is_fast(latest):
            adaptation = "refused"
        return cls(
            published=number_of(latest),
            installed=number_of(installed),
            # A refused step is no refusal of its base.
            refused=0 if step_of(refused) else number_of(refused),
            refused_reason=feedback.refused_reason,
            swap_pause_ms=feedback.swap_pause_ms_last,
            adaptation=adaptation,
        )


@dataclass(frozen=True)
class Changes:
    """Engines that joined or left since the last poll."""

    joined: tuple[str, ...]
    left: dict[str, str]  # engine to reason


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
        needs_new_number: Whether an engine has a higher version than the current draft,
            so that it receives this only under a new number.
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
        self._draft: DraftWeights | None = None
        self._number = 0  # of the last draft, sent or not
        self.has_fast_draft = self.needs_new_number = False
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
    def problems(self) -> list[str]:
        """Why engines cannot be found or cannot join."""
        failing = [source.failing for source in self._sources if source.failing]
        return failing + list(self.refused.values())

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

    def publish(
        self, tensors: Mapping[str, TensorBytes], meta: Mapping[str, Any]
    ) -> int:
        """Send a draft to all engines, current and future.

        Returns:
            The draft's number, greater than all numbers sent to any engine.

        Raises:
            TransportError: The draft could not be sent to any engine; it is discarded.
            ValueError: The size or dtype of a tensor is invalid.
        """
        feeds = [member.feed for member in self._members.values()]
        latest = [number_of(feed.latest_version) for feed in feeds]
        self._number = max([self._number, *latest]) + 1
        draft = DraftWeights.encode(tensors, first_version(self._number), meta)
        errors = [self._send(feed, draft) for feed in feeds]
        if errors and all(errors):
            raise TransportError(errors[-1])
        self._draft, self.needs_new_number = draft, False
        return self._number

    def send_step(
        self,
        engines: Collection[str],
        tensors: Mapping[str, TensorBytes],
        *,
        number: int,
        fast: bool,
    ) -> list[str]:
        """Send a fast draft over a draft that engines serve, or the draft again.

        Requests served by it are attributed to the draft's number. `latest` ignores
        fast drafts, and engines that join do not receive them.

        Returns:
            The engines that it was sent to.

        Raises:
            NoStepLeft: The draft has no step left, or an engine has a newer draft.
            TransportError: It could not be sent to any engine.
        """
        feeds = [self._members[engine].feed for engine in engines]
        latest = max(feed.latest_version for feed in feeds)
        version = next_step(max(latest, first_version(number)), fast=fast)
        if version is None or number_of(version) != number:
            raise NoStepLeft(f"version {number} needs a new number")
        draft = DraftWeights.encode(tensors, version)
        sent, error = [], ""
        for feed in feeds:
            try:
                feed.publish(draft)
                sent.append(feed.id)
            except TransportError as failure:
                error = f"engine {feed.id}: {failure}"
        if not sent:
            raise TransportError(error)
        return sent

    def versions(self) -> dict[str, EngineVersions]:
        result: dict[str, EngineVersions] = {}
        for engine_id, member in list(self._members.items()):
            feedback = self._call(member, member.feed.feedback)
            if feedback is not None:
                latest = member.feed.latest_version
                result[engine_id] = EngineVersions.of(latest, feedback)
        return result

    def latest(self) -> DraftWeights | None:
        """Return the newest draft that was not refused, to resume from after a restart.

        It is sent to engines that have an older one, and to those that join later.
        """
        newest: DraftWeights | None = None
        newer: set[int] = set()
        for member in list(self._members.values()):
            stored = self._call(member, member.feed.latest)
            feedback = self._call(member, member.feed.feedback)
            if stored is None or feedback is None:
                continue
            if stored.version == feedback.refused_version:
                continue
            newer.add(stored.version)
            if is_fast(stored.version):
                self.has_fast_draft = True
            elif newest is None or stored.version > newest.version:
                newest = stored
        if newest is not None:
            self._draft = newest
            self._number = max(self._number, number_of(newest.version))
            self.needs_new_number = max(newer) > newest.version
            for member in list(self._members.values()):
                if member.feed.latest_version < newest.version:
                    self._send(member.feed, newest)
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
        if self._draft is not None:
            latest, current = feed.latest_version, self._draft.version
            if latest < current:
                self._send(feed, self._draft)
            elif number_of(latest) > number_of(current):
                self.needs_new_number = True
        return engine_id in self._members

    def _send(self, feed: Feed, draft: DraftWeights) -> str:
        """Send a draft; return the error message, if any. The engine is not dropped."""
        try:
            feed.publish(draft)
        except TransportError as error:
            self.failed_publications += 1
            name = version_name(draft.version)
            logger.error("engine %s: draft %s: %s", feed.id, name, error)
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
    create_spool: bool = True,
) -> Feeds:
    """Create feeds for a run directory, a spool or both, or for one engine in them.

    Args:
        model: The target of the engines of the spool (`spool_models.find_models`).
        create_spool: Whether to create the spool's directory if it is missing.
    """
    sources: list[Source] = []
    if run_dir is not None:
        sources.append(RunDirSource(run_dir, engine_id))
    if spool is not None:
        sources.append(SpoolSource(spool, engine_id, model=model, create=create_spool))
    return Feeds(sources)
