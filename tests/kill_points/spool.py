"""Protocols of the spool: shards, bounds, purges, drafts, readers, the relay."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from tests.kill_points.memory import assert_whole
from tests.kill_points.points import Protocol
from tests.transport.samples import body_of, identity, make_record
from tests.transport.spool_toys import (
    CONFIG,
    SPEC,
    ToyEngine,
    head_tensors,
    seeds_in,
    settle,
    write_shards,
    writer_of,
)
from vllm_tide.config import SpoolConfig
from vllm_tide.transport import publication, spool_writer
from vllm_tide.transport.feed_spool import SpoolFeed
from vllm_tide.transport.rendezvous import reclaim_orphans
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import EngineEntry, EngineFolder, EngineState
from vllm_tide.transport.spool_store import open_store
from vllm_tide.transport.spool_writer import Bounds, purge_records

OURS, THEIRS = 7, 8


class Spool(Protocol):
    """A protocol of the engine e1's part of a spool."""

    def begin(self) -> None:
        open_store(str(self.folder / "spool"))

    @property
    def store(self):
        return open_store(str(self.folder / "spool"))

    @property
    def engine(self) -> EngineFolder:
        return EngineFolder(self.store, "e1")

    def tidy(self) -> None:
        """Another process lists the folders."""
        for part in ("records", "heads", "readers", "draft", ""):
            self.store.sizes(self.engine.path(part))


class Shards(Spool):
    """A relay appends shards to an existing one; another relay continues."""

    def begin(self) -> None:
        write_shards(self.store, [[0, 1]])

    def act(self) -> bool:
        self._writer = writer_of(self.store, [2, 3])
        self._number = 2
        return self._flush()

    def again(self) -> bool:
        if not hasattr(self, "_writer"):
            return self.act()
        return self._flush()

    def _flush(self) -> bool:
        writer = self._writer
        if self._number == 2:
            writer.flush()
            self._number = 4
            writer.add(body_of(make_record(SPEC, 4)))
        writer.flush()
        state = EngineState(first_shard=writer.first, last_shard=writer.last)
        self.engine.write_state(state)
        writer.enforce_bounds(now=True)
        return True

    def check(self, done: bool) -> None:
        stored = seeds_in(self.store)
        assert stored[1] == [0, 1]
        seeds = [stored[number] for number in sorted(stored)[1:]]
        assert all(each in ([2, 3], [4]) for each in seeds)
        state = self.engine.read_state()
        if done:
            assert seeds[-2:] == [[2, 3], [4]]
            assert state is not None and state.last_shard == max(stored)


class PurgedRemains(Shards):
    """After a relay stopped anywhere, a purge of everything leaves no byte of it."""

    def check(self, done: bool) -> None:
        with suppress(TransportError):
            purge_records(self.store, before_unix=math.inf, grace_s=0.0)
        left = list((self.folder / "spool" / "engines" / "e1" / "records").iterdir())
        assert not left, f"purged, and there is {left}"


class OldShards(Spool):
    """The oldest shards are replaced by the newest, to keep the bounds."""

    def begin(self) -> None:
        write_shards(self.store, [[0], [1], [2], [3]])
        sizes = self.store.sizes("engines/e1/records")
        self._size = max(sizes.values())

    def act(self) -> bool:
        config = SpoolConfig(max_gib=self._size * 2.5 / 2**30)
        return Bounds(self.store, config).enforce("e1") == 3

    def check(self, done: bool) -> None:
        stored = seeds_in(self.store)
        assert all(stored[number] == [number - 1] for number in stored)
        assert {3, 4} <= set(stored)
        names = os.listdir(self.folder / "spool/engines/e1/records")
        assert not done or len(names) == 4


class DeadEngine(Spool):
    """The folder of an engine without a heartbeat for the maximum age is removed."""

    def begin(self) -> None:
        write_shards(self.store, [[0], [1]])
        write_shards(self.store, [[5]], engine="e2")
        manifest = ToyEngine(self.folder / "toy")
        self.engine.write_engine(EngineEntry(manifest.manifest, SPEC, {"a": "b"}))
        manifest.close()
        self.engine.write_state(EngineState(unix=1.0, last_shard=2))

    def act(self) -> bool:
        bounds = Bounds(self.store, replace_age(60.0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spool_writer, "HeartbeatMonitor", Stale)
            bounds.enforce("e2")
        return not list((self.folder / "spool/engines").glob("e1/*"))

    def check(self, done: bool) -> None:
        assert list(self.store.sizes("engines/e2/records"))
        assert not done or not list((self.folder / "spool/engines").glob("e1/*"))

    def tidy(self) -> None:
        self.act()


class Stale(spool_writer.HeartbeatMonitor):
    """Simulate a heartbeat that has not changed for ever."""

    fresh = False  # type: ignore[assignment]


def replace_age(seconds: float) -> SpoolConfig:
    return SpoolConfig(max_age_s=seconds)


def of_tenant(seed: int, tenant: int) -> np.ndarray:
    return body_of(replace(make_record(SPEC, seed), tenant=tenant))


class TenantPurge(Spool):
    """A purge of one tenant's records removes no other."""

    def begin(self) -> None:
        writer = writer_of(self.store)
        for seed, tenant in enumerate((THEIRS, OURS, THEIRS, OURS)):
            writer.add(of_tenant(seed, tenant))
            writer.flush()
        self.engine.write_state(EngineState(last_shard=4))

    def act(self) -> bool:
        purge_records(self.store, tenant=OURS, grace_s=0.0)
        return True

    def check(self, done: bool) -> None:
        stored = seeds_in(self.store)
        assert stored.pop(1) == [0] and stored.pop(3) == [2]
        assert stored.items() <= {2: [1], 4: [3]}.items()
        if done:
            assert not stored
            names = os.listdir(self.folder / "spool/engines/e1/records")
            assert len(names) == 4


class PurgedRelay(Spool):
    """A relay forgets a tenant's records, also of a half-written shard."""

    def begin(self) -> None:
        write_shards(self.store, [[0]])

    def act(self) -> bool:
        self._writer = writer = writer_of(self.store)
        for seed, tenant in ((1, OURS), (2, THEIRS)):
            writer.add(of_tenant(seed, tenant))
        with suppress(TransportError):
            writer.flush()
        return self._purge()

    def again(self) -> bool:
        return self._purge() if hasattr(self, "_writer") else self.act()

    def _purge(self) -> bool:
        self._writer.purge(OURS)
        purge_records(self.store, tenant=OURS, grace_s=0.0)
        while self._writer.blocked or self._writer.due():
            self._writer.flush()
        return True

    def check(self, done: bool) -> None:
        stored = seeds_in(self.store)
        assert stored.pop(1) == [0]
        assert all(seeds in ([1, 2], [2]) for seeds in stored.values())
        assert not done or [1, 2] not in stored.values()


class Draft(Spool):
    """A trainer stores a draft, which its engine's relay reads."""

    def begin(self) -> None:
        for version in range(1, 4):
            self.engine.write_draft(self._blob(version))

    def _blob(self, version: int) -> publication.DraftBlob:
        return publication.encode(head_tensors(float(version)), version, 0, {})

    def act(self) -> bool:
        self._next = self._blob(self.engine.latest_draft() + 1)
        return self.again()

    def again(self) -> bool:
        """The same draft is sent again."""
        if not hasattr(self, "_next"):
            return self.act()
        self.engine.write_draft(self._next)
        return True

    def check(self, done: bool) -> None:
        blob = self.engine.read_draft()
        blob.verify()
        assert_whole(publication.decode(blob))
        assert blob.version >= (4 if done else 3)


class Reader(Spool):
    """A trainer reads an engine's shards, sends a draft, and the next one continues."""

    def begin(self) -> None:
        toy = ToyEngine(self.folder / "toy")
        self.engine.write_engine(EngineEntry(toy.manifest, SPEC, {"a": "b"}))
        toy.close()
        write_shards(self.store, [[0, 1], [2, 3]])
        self.engine.write_state(EngineState(unix=1.0, last_shard=2))

    def act(self) -> bool:
        self._feed = SpoolFeed(self.store, "e1", threaded=False)
        self._version = self._feed.latest_version + 1
        return self.again()

    def again(self) -> bool:
        if not hasattr(self, "_feed"):
            return self.act()
        feed = self._feed
        for _ in range(4):  # three reads of a shard that cannot be read
            feed.heartbeat()
        for record in feed.read(3):
            want = make_record(SPEC, record.draft_version)
            assert identity(record) == identity(want)
        if feed.latest_version < self._version:
            tensors = head_tensors(float(self._version))
            feed.publish(tensors, version=self._version, parent_version=0, meta={})
        feed.heartbeat()
        feed.close()
        feed._closing.clear()  # it is asked again where its last write failed
        return feed._pending is None and not feed._failing

    def check(self, done: bool) -> None:
        reader = self.engine.read_reader("trainer")
        assert reader is None or reader.shard in (1, 2, 3)
        if self.engine.latest_draft():
            blob = self.engine.read_draft()
            blob.verify()
            assert_whole(publication.decode(blob))
        assert not done or self.engine.latest_draft() >= 1


class Relayed(Spool):
    """A relay carries records and a draft between an engine and the spool."""

    def begin(self) -> None:
        super().begin()
        self._engine = ToyEngine(self.folder)
        self._engine.serve(range(4))
        tensors = head_tensors(1.0)
        self.engine.write_draft(publication.encode(tensors, 1, 0, {}))

    def act(self) -> bool:
        relay = self._engine.relay(self.store, CONFIG)
        try:
            settle(relay)
        finally:
            relay._finish()
            relay.close()
        state = self.engine.read_state()
        return state is not None and not state.running

    def check(self, done: bool) -> None:
        stored = seeds_in(self.store)
        seeds = [seed for number in sorted(stored) for seed in stored[number]]
        assert seeds == sorted(set(seeds))
        assert set(seeds) <= set(range(4))
        with suppress(publication.WeightsRefused):
            assert_whole(self._engine.weights.read())
        assert not done or self._engine.weights.latest_version() == 1

    def tidy(self) -> None:
        """Another relay and another engine start, a process lists the folders."""
        self.act()
        reclaim_orphans(self._engine.run_dir)
        super().tidy()

    def close(self) -> None:
        self._engine.close()


PROTOCOLS: list[type[Protocol]] = [
    *(Shards, PurgedRemains, OldShards, DeadEngine, TenantPurge, PurgedRelay),
    *(Draft, Reader, Relayed),
]
