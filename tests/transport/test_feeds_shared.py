"""Feeds of real engines, through rings of this host and through a spool."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tests.transport.feed_toys import FakeSource, publish, scan
from tests.transport.samples import identity, make_record, make_spec
from tests.transport.spool_toys import (
    CONFIG,
    head_tensors,
    make_models,
    settle,
)
from vllm_tide.transport import TransportError, publication
from vllm_tide.transport.feed import RingFeed, RunDirSource
from vllm_tide.transport.feed_spool import SpoolFeed, SpoolSource
from vllm_tide.transport.feeds import (
    Feeds,
    open_feeds,
)
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import SHM_DIR
from vllm_tide.transport.spool import EngineFolder
from vllm_tide.transport.spool_store import open_store

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
        assert got.version == version
        assert got.tensors["fc.weight"].data.view(np.float32)[0] == 7
    a.weights.report(version)
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
    assert again.latest().version == version
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
        feed.publish(head_tensors(version), version=version, parent_version=0, meta={})
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
        engine, store = toys(name), open_store(url)
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
    feed = SpoolFeed(s.store, "a", threaded=False)
    assert read_feed(feed) == want
    assert feed.alive()
    feed.publish(head_tensors(2), version=1, parent_version=0, meta={})
    feed.heartbeat()
    s.step()
    assert s.engine.weights.read().version == 1
    s.engine.weights.report(1, swap_pause_ms=2.0)
    s.step()
    feed.heartbeat()
    feedback = feed.feedback()
    assert (feedback.installed_version, feedback.swap_pause_ms_last) == (1, 2.0)
    assert feedback.engine_alive
    feed.set_collect(Collect.NOTHING)
    feed.heartbeat()
    s.step()
    assert s.engine.ring.collect_mode is Collect.NOTHING
    assert feed.latest().version == 1
    feed.close()
    s.step()
    # the pause outlives the trainer
    assert s.engine.ring.collect_mode is Collect.NOTHING
    again = SpoolFeed(s.store, "a", threaded=False)
    again.heartbeat()
    s.step()
    assert s.engine.ring.collect_mode is Collect.NOTHING
    again.set_collect(Collect.FULL)
    again.heartbeat()
    s.step()
    assert s.engine.ring.collect
    again.close()


def test_a_reader_resumes_at_its_own_cursor_and_others_read_all(spooled):
    s = spooled()
    want = serve_in(s.engine, range(10))
    s.step()
    first = SpoolFeed(s.store, "a", threaded=False)
    first.heartbeat()
    got = [identity(record) for record in first.read(4)]
    first.close()
    second = SpoolFeed(s.store, "a", threaded=False)
    assert got + read_feed(second) == want
    other = SpoolFeed(s.store, "a", reader="b", publishes=False, threaded=False)
    assert read_feed(other) == want
    more = serve_in(s.engine, range(10, 12))
    s.step()
    assert read_feed(second) == more
    assert read_feed(other) == more
    for feed in (second, other):
        feed.close()


def test_a_second_live_trainer_is_refused_in_one_line(spooled, monkeypatch):
    s = spooled()
    feed = SpoolFeed(s.store, "a", threaded=False)
    monkeypatch.setattr(
        "vllm_tide.transport.feed_spool.this_instance", lambda: "otherhost:1:2:3"
    )
    with pytest.raises(TransportError, match="already reads engine a"):
        SpoolFeed(s.store, "a", threaded=False)
    with pytest.raises(TransportError, match="already publishes engine a"):
        SpoolFeed(s.store, "a", reader="b", threaded=False)
    SpoolFeed(s.store, "a", reader="b", publishes=False, threaded=False).close()
    feed.close()
    SpoolFeed(s.store, "a", threaded=False).close()


def test_a_draft_of_another_trainer_ends_the_feed(spooled):
    s = spooled()
    feed = SpoolFeed(s.store, "a", threaded=False)
    feed.publish(head_tensors(1), version=3, parent_version=0, meta={})
    folder = EngineFolder(s.store, "a")
    folder.write_draft(publication.encode(head_tensors(9), 5, 0, {}))
    feed.heartbeat()
    with pytest.raises(TransportError, match="another trainer publishes"):
        feed.heartbeat()
    feed.close()
    assert folder.latest_draft() == 5


def test_records_of_a_dead_engine_are_read_before_its_feed_ends(spooled):
    s = spooled()
    feed = SpoolFeed(s.store, "a", threaded=False)
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


def test_a_silent_relay_ends_the_feed(spooled, monkeypatch):
    s = spooled()
    feed = SpoolFeed(s.store, "a", threaded=False)
    assert feed.alive()
    with monkeypatch.context() as later:
        later.setattr(feed._heartbeat, "_timeout_s", 0.0)
        feed.heartbeat()
        assert not feed.alive()
    s.relay.tick()
    s.relay._state_time = 0.0
    s.step()
    feed.heartbeat()
    assert feed.alive()
    feed.close()


def test_hanging_storage_stops_neither_the_trainer_nor_other_engines(
    spooled, toys, tmp_path, monkeypatch
):
    s = spooled()
    near = toys("near", tmp_path / "near")
    stuck, inside = threading.Event(), threading.Event()

    def hangs(*_):
        inside.set()
        stuck.wait()

    feed = SpoolFeed(s.store, "a")
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
    assert near.weights.read().version == 1
    feed._heartbeat._timeout_s = 0.0
    feed._reached = -1e9
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
    feeds.close()
    stuck.set()
