"""Feeds of real engines, through rings of this host and through a spool."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tests.transport.feed_toys import FakeSource, publish, scan
from tests.transport.samples import identity, make_record, make_spec
from tests.transport.spool_toys import (
    CONFIG,
    feed_of,
    head_tensors,
    make_models,
    settle,
    writer_of,
)
from tests.transport.test_spool_shards import of_tenants
from vllm_tide.transport import TransportError, feed_spool, spool_relay
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.feed import RingFeed, RunDirSource
from vllm_tide.transport.feed_spool import SpoolSource
from vllm_tide.transport.feeds import (
    Feeds,
    open_feeds,
)
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import SHM_DIR
from vllm_tide.transport.spool import EngineFolder, EngineState, Store
from vllm_tide.transport.spool_shard import purge_shards
from vllm_tide.transport.versions import first_version

SPEC = make_spec()


# Rings


def serve_in(engine, numbers):
    engine.serve(numbers)
    return [identity(make_record(SPEC, n)) for n in numbers]


def until(check, what):
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def drain(feeds, engines=(), seconds=5.0, count=None):
    """Return identities of records by engine; `count` records or until none come."""
    identities = {name: [] for name in engines}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        feeds.poll()
        feeds.heartbeat()
        for name, records in feeds.read():
            identities.setdefault(name, []).extend(identity(r) for r in records)
        if count is not None and sum(map(len, identities.values())) >= count:
            break
        time.sleep(0.005)
    return identities


@pytest.fixture
def toys(engines, tmp_path):
    """Return engines with the same models."""
    return partial(engines, models=make_models(tmp_path / "models"))


def test_two_engines_of_one_host_feed_one_trainer(toys, tmp_path):
    a, b = toys("a", tmp_path / "host"), toys("b", tmp_path / "host")
    want = {"a": serve_in(a, range(9)), "b": serve_in(b, range(20, 25))}
    feeds = open_feeds(tmp_path / "host" / "run")
    assert drain(feeds, count=14) == want
    version = publish(feeds, 7)
    for engine in (a, b):
        got = engine.weights.read()
        assert got.version == first_version(version)
        assert got.tensors["fc.weight"].data.view(np.float32)[0] == 7
    a.weights.report(first_version(version))
    versions = feeds.versions()
    assert (versions["a"].installed, versions["b"].installed) == (1, 0)
    feeds.set_collect(Collect.METADATA)
    assert not a.ring.collect
    assert not b.ring.collect
    # A later trainer continues from this draft.
    feeds.close()
    only = open_feeds(tmp_path / "host" / "run", engine_id="a")
    assert only.poll().joined == ("a",)
    only.close()
    again = open_feeds(tmp_path / "host" / "run")
    again.poll()
    assert again.latest().version == first_version(version)
    again.close()


def test_an_engine_without_capture_is_refused_in_one_line(toys):
    engine = toys("a", ring="")
    with pytest.raises(TransportError, match="tide.capture.enabled"):
        RingFeed(engine.manifest)


@pytest.mark.parametrize("segment", ["ring", "weights"])
def test_an_engine_with_truncated_memory_is_dropped(toys, segment):
    engine = toys("a")
    feeds = open_feeds(engine.run_dir)
    feeds.poll()
    os.truncate(f"{SHM_DIR}/{getattr(engine, segment).name}", 0)
    feeds.heartbeat()
    assert feeds.ids == []
    assert "restart its server" in feeds.poll().left["a"]
    feeds.close()


def test_versions_that_an_engine_refused_are_skipped(toys):
    """Also a version that was never published: its number was damage."""
    engine = toys("a")
    feed = RingFeed(engine.manifest)
    for version in (1, 2):
        feed.publish(DraftWeights.encode(head_tensors(version), version))
    engine.weights.report(1, 2, "norm")
    assert feed.latest().version == 1
    engine.weights.report(1, 7, "sha256")
    feed.feedback()
    assert feed.latest_version == 7
    feed.close()


# Spools


@pytest.fixture
def spooled(toys, tmp_path):
    """Return an engine, its relay, the store, and a step of the relay."""

    def make(name="a", url=str(tmp_path / "spool")):
        engine, store = toys(name), Store(url)
        relay = engine.relay(store, CONFIG)

        def step():
            settle(relay)

        step()
        return SimpleNamespace(engine=engine, relay=relay, store=store, step=step)

    return make


def read_feed(feed, limit=1000):
    feed.heartbeat()
    return [identity(record) for record in feed.read(limit)]


def test_a_feed_through_a_spool_behaves_like_any_other(spooled):
    s = spooled()
    want = serve_in(s.engine, range(7))
    s.step()
    feed = feed_of(s.store, "a")
    assert read_feed(feed) == want
    assert feed.alive()
    feed.publish(DraftWeights.encode(head_tensors(2), 1))
    feed.heartbeat()
    s.step()
    assert s.engine.weights.read().version == 1
    s.engine.weights.report(1, swap_pause_ms=2.0)
    s.step()
    feed.heartbeat()
    feedback = feed.feedback()
    assert (feedback.installed_version, feedback.swap_pause_ms_last) == (1, 2.0)
    assert feedback.engine_alive
    assert feed.latest().version == 1
    with pytest.raises(TransportError, match="not newer"):
        feed.publish(DraftWeights.encode(head_tensors(1), 1))
    with pytest.raises(TransportError, match="exceeds the maximum"):
        feed.publish(DraftWeights.encode(head_tensors(3), 2**63))
    feed.set_collect(Collect.NOTHING)
    feed.heartbeat()
    s.step()
    assert s.engine.ring.collect_mode is Collect.NOTHING
    feed.close()
    s.step()
    # the pause outlives the trainer
    assert s.engine.ring.collect_mode is Collect.NOTHING
    again = feed_of(s.store, "a")
    again.heartbeat()
    s.step()
    assert s.engine.ring.collect_mode is Collect.NOTHING
    assert again.latest().version == again.latest_version == 1
    again.set_collect(Collect.FULL)
    again.heartbeat()
    s.step()
    assert s.engine.ring.collect
    again.close()


def test_a_trainer_resumes_at_the_cursor_of_the_last_one(spooled):
    s = spooled()
    want = serve_in(s.engine, range(10))
    s.step()
    first = feed_of(s.store, "a")
    first.heartbeat()
    got = [identity(record) for record in first.read(4)]
    first.close()
    second = feed_of(s.store, "a")
    assert got + read_feed(second) == want
    more = serve_in(s.engine, range(10, 12))
    s.step()
    assert read_feed(second) == more
    second.close()


def test_a_second_trainer_is_refused_while_the_first_is_alive(spooled, monkeypatch):
    monkeypatch.setattr(feed_spool, "BEAT_S", 0.0)
    monkeypatch.setattr(feed_spool, "POLL_S", 0.02)
    s = spooled()
    first = feed_of(s.store, "a", threaded=True)
    until(lambda: first.heartbeat() or first.ready, "no trainer")
    second = feed_of(s.store, "a")
    assert not second.ready
    message = r"the trainer \S+:\d+:\w+ already trains engine a in .*: stop it first"
    with pytest.raises(TransportError, match=message):
        second.heartbeat()
    second.close()
    first.close()
    third = feed_of(s.store, "a")
    assert third.ready
    third.close()


def test_a_trainer_that_hung_ends_when_another_has_replaced_it(spooled, monkeypatch):
    monkeypatch.setattr(feed_spool, "TAKEOVER_S", 0.0)
    s = spooled()
    feed = feed_of(s.store, "a")
    second = feed_of(s.store, "a")
    second.publish(DraftWeights.encode(head_tensors(9), 5))
    second.heartbeat()
    feed.publish(DraftWeights.encode(head_tensors(1), 3))
    feed.heartbeat()
    with pytest.raises(TransportError, match="has replaced this one for engine a"):
        feed.heartbeat()
    feed.close()
    s.step()
    assert s.engine.weights.latest_version() == 5
    second.heartbeat()
    second.close()


def test_records_of_a_dead_engine_are_read_before_its_feed_ends(spooled):
    s = spooled()
    feed = feed_of(s.store, "a")
    want = serve_in(s.engine, range(5))
    s.relay.stop()
    s.relay.run()
    feed.heartbeat()
    assert feed.alive()
    got = []
    while feed.alive():
        got += read_feed(feed, 2)
    assert got == want
    assert not feed.feedback().engine_alive
    feed.close()


def test_removed_shards_of_a_dead_engine_are_not_awaited_forever(spooled, monkeypatch):
    s = spooled()
    feed = feed_of(s.store, "a")
    serve_in(s.engine, range(5))
    s.relay.stop()
    s.relay.run()
    purge_shards([EngineFolder(s.store, "a")], None)
    feed.heartbeat()
    assert feed.alive()  # the folder may be listed as it was
    monkeypatch.setattr(feed_spool, "UNREAD_S", 0.0)
    assert not feed.alive()
    feed.close()


def test_a_silent_relay_ends_the_feed(spooled, monkeypatch):
    s = spooled()
    feed = feed_of(s.store, "a")
    feed.heartbeat()
    assert feed.alive()
    with monkeypatch.context() as later:
        later.setattr(feed._heartbeat, "_timeout_s", 0.0)
        feed.heartbeat()
        assert not feed.alive()
    monkeypatch.setattr(spool_relay, "BEAT_S", 0.0)
    s.step()
    feed.heartbeat()
    assert feed.alive()
    feed.close()


@pytest.mark.parametrize("tenant", [255, None])
def test_a_feed_forgets_its_prefetched_records(spooled, tenant):
    s = spooled()
    writer_of(s.store, of_tenants(7, 255, 8, 255), "a").flush()
    EngineFolder(s.store, "a").write_state(EngineState(unix=1.0, last_shard=1))
    feed = feed_of(s.store, "a")
    feed.heartbeat()
    (first,) = feed.read(1)
    assert first.tenant == 7
    assert feed.purge(tenant) == (2 if tenant else 3)
    # The others stay at their place in the shard.
    assert [r.tenant for r in feed.read(1)] == ([8] if tenant else [])
    feed.close()
    trainer = EngineFolder(s.store, "a").read_trainer()
    assert (trainer.shard, trainer.index) == (1, 3 if tenant else 1)


def test_a_shard_in_reading_during_a_purge_is_not_returned(spooled, monkeypatch):
    s = spooled()
    writer_of(s.store, of_tenants(7, 255, 8, 255), "a").flush()
    EngineFolder(s.store, "a").write_state(EngineState(unix=1.0, last_shard=1))
    feed = feed_of(s.store, "a")
    read, purged = s.store.read, []

    def slow(name, max_bytes):
        body = read(name, max_bytes)
        if name.endswith(".safetensors") and not purged:
            purged.append(feed.purge(255))
        return body

    monkeypatch.setattr(s.store, "read", slow)
    feed.heartbeat()
    assert purged == [0]
    assert [r.tenant for r in feed.read(9)] == [7, 8]
    feed.close()


@pytest.mark.parametrize("threaded", [True, False])
def test_an_unexpected_exception_is_logged_and_ends_the_feed(spooled, threaded):
    s = spooled()
    feed = feed_of(s.store, "a", threaded=threaded)

    def fails(*_):
        raise MemoryError

    feed._folder.read_state = fails
    end = time.monotonic() + 10
    with pytest.raises(TransportError, match="MemoryError"):
        while time.monotonic() < end:
            feed.heartbeat()
            time.sleep(0.01)
    feed.close()


def test_a_failing_scan_is_logged_and_repeated(spooled, monkeypatch, caplog):
    s = spooled()
    monkeypatch.setattr(feed_spool, "SCAN_S", 0.01)
    source = SpoolSource(s.store.url)
    assert source.find() == ["a"]
    failed = []

    def fails(*_):
        failed.append(1)
        raise RecursionError("too deep")

    with monkeypatch.context() as odd:
        odd.setattr(source, "_alive", fails)
        until(lambda: len(failed) > 1, "no scan")
    assert "too deep" in caplog.text
    source._entries = {}
    until(lambda: source.find() == ["a"], "a is not found")
    source.close()


def test_hanging_storage_stops_neither_the_trainer_nor_other_engines(
    spooled, toys, tmp_path, monkeypatch
):
    s = spooled()
    near = toys("near", tmp_path / "near")
    stuck, inside = threading.Event(), threading.Event()

    def hangs(*_):
        inside.set()
        stuck.wait()

    feed = feed_of(s.store, "a", threaded=True)
    until(lambda: feed.ready, "no trainer")
    monkeypatch.setattr(s.store, "read", hangs)
    feeds = Feeds([RunDirSource(tmp_path / "near" / "run")])
    feeds.poll()
    source = FakeSource()
    source.feeds["a"] = feed
    feed.dead, feed._check = False, lambda _name: None
    source.identity = lambda _id: near.identity
    feeds._sources.append(source)
    assert scan(feeds).joined == ("a",)
    assert inside.wait(60)
    want = serve_in(near, range(5))
    publish(feeds)
    assert drain(feeds, count=5) == {"near": want}
    assert near.weights.read().version == first_version(1)
    feed._heartbeat._timeout_s = 0.0
    feed._reached = feed._progress = -1e9
    feeds.poll()
    assert feeds.ids == ["near"]
    stuck.set()
    feeds.close()


def test_live_engines_of_a_spool_join_and_stopped_ones_do_not(spooled, tmp_path):
    a, b = spooled("a"), spooled("b")
    b.relay.stop()
    b.relay.run()
    source = SpoolSource(str(tmp_path / "spool"), threaded=False)
    feeds = Feeds([source])
    assert feeds.poll().joined == ("a",)
    c = spooled("c")
    assert scan(feeds).joined == ("c",)
    want = {"a": serve_in(a.engine, range(3)), "c": serve_in(c.engine, range(3, 9))}
    a.step()
    c.step()
    assert drain(feeds, count=9) == want
    feeds.close()


def test_an_engine_without_its_target_here_is_not_the_reference(spooled, tmp_path):
    s = spooled()
    entry = EngineFolder(s.store, "a").read_engine()
    ghost = EngineFolder(s.store, "zz")  # the last name is scanned first
    away = replace(entry.manifest, engine_id="zz", target_path="/nowhere")
    ghost.write_engine(replace(entry, manifest=away, identity={"target": "other"}))
    ghost.write_state(EngineState(unix=time.time()))
    feeds = Feeds([SpoolSource(s.store.url, cache=tmp_path, threaded=False)])
    feeds.poll()
    assert feeds.ids == ["a"]
    assert "--model" in feeds.refused["zz"]
    feeds.close()


@pytest.mark.parametrize("call", ["read", "folders", "write"])
def test_an_engine_joins_while_the_trainers_thread_does_not_wait(
    spooled, toys, tmp_path, monkeypatch, call
):
    """`read` and `folders` hang during the scan, `write` while it is opened."""
    s = spooled()
    toys("near", tmp_path / "near")
    source = SpoolSource(str(tmp_path / "spool"))
    until(lambda: s.step() or source.find() == ["a"], "a is not found")
    stuck, inside = threading.Event(), threading.Event()
    real = getattr(source._store, call)

    def hangs(*args, **more):
        inside.set()
        stuck.wait()
        return real(*args, **more)

    monkeypatch.setattr(source._store, call, hangs)
    feeds = Feeds([source, RunDirSource(tmp_path / "near" / "run")])
    while not (inside.is_set() and "near" in feeds.ids):
        s.step()  # the relay continues its heartbeat
        scan(feeds)
        time.sleep(0.01)
    for _ in range(20):
        scan(feeds)
        feeds.read()
        feeds.heartbeat()
    assert "near" in feeds.ids
    stuck.set()
    feeds.close()
