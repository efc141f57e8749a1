"""Protocols of the spool: shards, bounds, purges, drafts, trainers, the relay."""

from __future__ import annotations

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
    enforce,
    feed_of,
    head_tensors,
    seeds_in,
    write_shards,
    writer_of,
)
from vllm_tide.transport import feed_spool, spool_shard
from vllm_tide.transport.draft_weights import DraftWeights, WeightsRefused
from vllm_tide.transport.rendezvous import ABANDONED_S, reclaim_orphans
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import (
    EngineEntry,
    EngineFolder,
    EngineState,
    HeartbeatMonitor,
    Store,
    TrainerState,
    engine_folders,
)
from vllm_tide.transport.spool_shard import ShardReader, purge_shards

OURS, THEIRS = 7, 8


class Spool(Protocol):
    """A protocol of the engine e1's part of a spool."""

    def begin(self) -> None:
        Store(str(self.folder / "spool"))

    @property
    def store(self) -> Store:
        return Store(str(self.folder / "spool"))

    @property
    def engine(self) -> EngineFolder:
        return EngineFolder(self.store, "e1")

    def purge(self, tenant: int | None = None) -> None:
        purge_shards(engine_folders(self.store), tenant)

    def tidy(self) -> None:
        """A relay enforces the bounds."""
        self.engine.remove_unfinished(ABANDONED_S)


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
        self.engine.write_state(EngineState(last_shard=writer.last))
        enforce(self.store)
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
        self.purge()
        left = list((self.folder / "spool" / "engines" / "e1" / "records").iterdir())
        assert not left, f"purged, and there is {left}"


class OldShards(Spool):
    """The oldest shards are replaced by the newest, to keep the bounds."""

    def begin(self) -> None:
        write_shards(self.store, [[0], [1], [2], [3]])
        self._size = max(self.engine.shards().values())

    def act(self) -> bool:
        enforce(self.store, max_gib=self._size * 2.5 / 2**30)
        return len(self.engine.shards()) == 2

    def check(self, done: bool) -> None:
        stored = seeds_in(self.store)
        assert all(stored[number] == [number - 1] for number in stored)
        assert {3, 4} <= set(stored)
        assert not done or len(stored) == 2


class DeadEngine(Spool):
    """The folder of an engine without a heartbeat for the maximum age is removed."""

    def begin(self) -> None:
        write_shards(self.store, [[1], [2]])
        write_shards(self.store, [[5]], engine="e2")
        toy = ToyEngine(self.folder / "toy")
        self.engine.write_engine(EngineEntry(toy.manifest, SPEC, {"a": "b"}))
        toy.close()
        self.engine.write_draft(DraftWeights.encode(head_tensors(1.0), 1))
        self.engine.write_state(EngineState(unix=1.0, last_shard=2))

    def act(self) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeartbeatMonitor, "fresh", False)
            enforce(self.store, "e2", max_age_s=60.0)
        return not list((self.folder / "spool/engines").glob("e1/*"))

    def check(self, done: bool) -> None:
        assert EngineFolder(self.store, "e2").shards()
        assert not done or not list((self.folder / "spool/engines").glob("e1/*"))

    def tidy(self) -> None:
        self.act()


def of_tenant(seed: int, tenant: int) -> np.ndarray:
    return body_of(replace(make_record(SPEC, seed), tenant=tenant))


class TenantPurge(Spool):
    """A purge of one tenant's records removes no other."""

    def begin(self) -> None:
        writer = writer_of(self.store)
        for seed, tenant in enumerate((THEIRS, OURS, THEIRS, OURS)):
            writer.add(of_tenant(seed, tenant))
            writer.flush()

    def act(self) -> bool:
        self.purge(OURS)
        return True

    def check(self, done: bool) -> None:
        stored = seeds_in(self.store)
        assert stored.pop(1) == [0] and stored.pop(3) == [2]
        assert stored.items() <= {2: [1], 4: [3]}.items()
        if done:
            assert not stored
            assert len(os.listdir(self.folder / "spool/engines/e1/records")) == 2


class PurgedRelay(Spool):
    """A relay forgets a tenant's records, also of a shard that it could not store."""

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
        self.purge(OURS)
        while self._writer.blocked or self._writer.due():
            self._writer.flush()
        return True

    def check(self, done: bool) -> None:
        stored = seeds_in(self.store)
        assert stored.pop(1) == [0]
        assert all(seeds in ([1, 2], [2]) for seeds in stored.values())
        assert not done or [1, 2] not in stored.values()


class Trainer(Spool):
    """A trainer reads an engine's shards, sends a draft, and the next one continues."""

    def begin(self) -> None:
        toy = ToyEngine(self.folder / "toy")
        self.engine.write_engine(EngineEntry(toy.manifest, SPEC, {"a": "b"}))
        toy.close()
        write_shards(self.store, [[0, 1], [2, 3]])
        self.engine.write_state(EngineState(unix=1.0, last_shard=2))

    def act(self) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feed_spool, "TAKEOVER_S", 0.0)
            self._feed = feed_of(self.store)
            return self.again()

    def again(self) -> bool:
        if not hasattr(self, "_feed"):
            return self.act()
        feed = self._feed
        feed.heartbeat()
        if not feed.ready:
            return False
        feed.heartbeat()
        for record in feed.read(3):
            want = make_record(SPEC, record.draft_version)
            assert identity(record) == identity(want)
        if not hasattr(self, "_version"):
            self._version = feed.latest_version + 1
            tensors = head_tensors(float(self._version))
            feed.publish(DraftWeights.encode(tensors, self._version))
        feed.heartbeat()
        feed.close()
        feed._closing.clear()  # it is asked again where its last write failed
        return feed._pending is None and not feed._failing

    def check(self, done: bool) -> None:
        trainer = self.engine.read_trainer() or TrainerState()
        assert trainer.shard in (1, 2, 3)
        if trainer.draft:
            blob = self.engine.read_draft(trainer.draft)
            blob.verify()
            assert_whole(blob.verify())
        assert not done or (trainer.draft and not trainer.running)


class Relayed(Spool):
    """A relay carries records and a draft between an engine and the spool."""

    def begin(self) -> None:
        super().begin()
        self._engine = ToyEngine(self.folder)
        self._engine.serve(range(4))
        blob = DraftWeights.encode(head_tensors(1.0), 1)
        draft = self.engine.write_draft(blob)
        self.engine.write_trainer(TrainerState("i", unix=1.0, draft=draft))

    def act(self) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spool_shard, "SHARD_SECONDS", 0.0)
            relay = self._engine.relay(self.store, CONFIG)
            try:
                for _ in range(2):  # the same operations each time
                    relay._next_poll = 0.0
                    relay.tick()
            finally:
                relay._finish()
                relay.close()
        state, entry = self.engine.read_state(), self.engine.read_engine()
        return entry is not None and state is not None and not state.running

    def check(self, done: bool) -> None:
        reader, seeds = ShardReader(self.engine, SPEC), []
        while (shard := reader.fetch(99)) is not None:
            seeds += [record.draft_version for record in shard[1]]
        assert not reader.skipped["damaged"]
        assert seeds == sorted(set(seeds)) and set(seeds) <= set(range(4))
        with suppress(WeightsRefused):
            assert_whole(self._engine.weights.read())
        assert not done or self._engine.weights.latest_version() == 1
        entry = self.engine.read_engine()
        for digest in entry.draft_files.values() if entry else ():
            assert self.store.read(self.engine.path("initial", digest), 1 << 20)

    def tidy(self) -> None:
        """Another relay and another engine start."""
        self.act()
        reclaim_orphans(self._engine.run_dir)
        super().tidy()

    def close(self) -> None:
        self._engine.close()


PROTOCOLS: list[type[Protocol]] = [
    *(Shards, PurgedRemains, OldShards, DeadEngine, TenantPurge, PurgedRelay),
    *(Trainer, Relayed),
]
