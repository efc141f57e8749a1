"""After a purge the relay, the spool and a feed contain nothing of a tenant."""

import logging
import time
from dataclasses import replace

import pytest

from tests.transport.commands import Command, purge
from tests.transport.samples import body_of, make_record, make_spec, write_record
from tests.transport.spool_toys import failing, writer_of
from vllm_tide.transport import spool_writer
from vllm_tide.transport.admin import sockets
from vllm_tide.transport.feed_spool import SpoolFeed
from vllm_tide.transport.spool import EngineFolder, EngineState
from vllm_tide.transport.spool_shard import SpoolReader
from vllm_tide.transport.spool_store import StoreError
from vllm_tide.transport.spool_writer import purge_records

SPEC = make_spec()


@pytest.fixture
def store(disk):
    return disk


def of_tenants(*tenants):
    return [
        replace(make_record(SPEC, seed), tenant=tenant)
        for seed, tenant in enumerate(tenants)
    ]


def serve(engine, *tenants):
    for record in of_tenants(*tenants):
        assert write_record(engine.ring, record)


def tenants_in(store):
    """Return the tenants of all records of the spool."""
    folder = EngineFolder(store, "e1")
    reader = SpoolReader(folder, SPEC)
    tenants = []
    for _ in range(50):
        shard = reader.fetch(EngineState(last_shard=9))
        if shard is not None:
            tenants += [record.tenant for record in shard.records]
            named = folder.read_json(f"records/{shard.number:012d}.json")["tenants"]
            assert set(named) == {r.tenant for r in shard.records} - {0}
    return tenants


def bodies(store):
    names = store.sizes("engines/e1/records")
    return sorted(name for name in names if name.endswith(".safetensors"))


# The writer


@pytest.mark.parametrize("written", ["open", "nothing", "body", "all"])
@pytest.mark.parametrize(("tenant", "left"), [(7, [0, 8]), (None, []), (9, [7, 0, 8])])
def test_unspooled_records_and_their_partial_files_are_forgotten(
    store, monkeypatch, written, tenant, left
):
    """In the open shard, and in one that was partly written when it failed."""
    writer = writer_of(store, of_tenants(7, 0, 8))
    if written != "open":
        part = {"nothing": "records", "body": ".json", "all": ".json"}[written]
        fails = failing(store, "write", part, after=written == "all")
        monkeypatch.setattr(store, "write", fails)
        with pytest.raises(StoreError):
            writer.flush()
        monkeypatch.undo()
    assert writer.purge(tenant) == 3 - len(left)
    assert writer.blocked == (written != "open" and bool(left))
    if tenant != 9:
        assert bodies(store) == []
    writer.flush()
    assert tenants_in(store) == left
    assert writer.rows == 4 * len(left)


def test_a_purge_of_a_blocked_shard_waits_for_the_storage(store, monkeypatch):
    writer = writer_of(store, of_tenants(7))
    monkeypatch.setattr(store, "write", failing(store, "write", ".json"))
    with pytest.raises(StoreError):
        writer.flush()
    monkeypatch.setattr(store, "remove", failing(store, "remove", ".safetensors"))
    for _ in range(2):
        with pytest.raises(StoreError):
            writer.purge(7)
        assert writer._closed is None  # it is out of memory
        assert writer.blocked
    assert len(bodies(store)) == 1
    monkeypatch.undo()
    assert writer.purge(7) == 0
    assert not writer.blocked
    assert bodies(store) == []


# The spool


def test_shards_of_a_tenant_or_older_than_a_time_are_removed(store):
    writer = writer_of(store)
    for record in of_tenants(0, 77, 5, 77):
        writer.add(body_of(record))
        writer.flush()
    assert purge_records(store, tenant=77) == 2
    assert tenants_in(store) == [0, 5]
    assert purge_records(store, before_unix=time.time() + 10) == 2
    assert store.sizes("engines/e1/records") == {}


@pytest.mark.parametrize("tenant", [7, None])
def test_a_body_without_a_manifest_is_removed_at_any_age(store, tenant):
    writer = writer_of(store, of_tenants(7))
    writer.flush()
    at = "engines/e1/records/"
    store.remove(at + "000000000001.json")  # its writer died between the two
    writer.add(body_of(*of_tenants(8)))
    writer.flush()
    store.write(at + "000000000002-5.safetensors", b"another relay's")
    assert purge_records(store, tenant=tenant, grace_s=0.0) == 2
    assert len(bodies(store)) == 1
    assert tenants_in(store) == [8]


def test_a_body_with_a_later_manifest_stays(store, monkeypatch):
    writer_of(store, of_tenants(8)).flush()
    at = "engines/e1/records/000000000001.json"
    manifest = store.read(at)
    store.remove(at)
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        store.write(at, manifest)

    monkeypatch.setattr(time, "sleep", sleep)
    assert purge_records(store, tenant=7) == 0
    assert len(waited) == 1
    assert tenants_in(store) == [8]


# The relay


def test_a_relay_answers_and_keeps_records_of_other_tenants(
    store, engine, caplog, monkeypatch
):
    monkeypatch.setattr(spool_writer, "SHARD_SECONDS", 1e9)
    caplog.set_level(logging.INFO)
    relay = engine.relay(store)
    serve(engine, 7, 8)
    relay.tick()  # now they are in the open shard
    command = purge(engine.run_dir, 7, "relay")
    relay._next_poll = 0.0
    relay._drain = lambda: 0  # what comes before the purge stays in the ring
    serve(engine, 7, 9, 7)
    relay.tick()
    assert command.answer == {
        "ok": True, "removed": {"records": 3}, "engines": ["e1"],
    }  # fmt: skip
    assert engine.ring.stats().used_bytes == 0
    assert "a purge removed 3 records" in caplog.text
    relay.stop()
    relay.run()
    assert tenants_in(store) == [8, 9]
    assert sockets([engine.run_dir], "relay") == {}


@pytest.mark.parametrize("ends", [False, True])
def test_a_starting_or_ending_relay_answers_before_it_writes(store, engine, ends):
    serve(engine, 7)
    relay = engine.relay(store)
    command = purge(engine.run_dir, 7, "relay")
    if ends:
        relay.stop()
        relay.run()
    else:
        relay.tick()
    assert command.answer["ok"]
    relay.close()
    assert tenants_in(store) == []
    assert bodies(store) == []


def test_a_relay_answers_only_when_the_ring_was_empty(store, engine, monkeypatch):
    relay = engine.relay(store)
    monkeypatch.setattr("vllm_tide.transport.spool_relay._EMPTY_LIMIT_S", 0.02)
    relay._drain = lambda: 0
    take, body = relay._reader.take, body_of(*of_tenants(7))
    relay._reader.take = lambda: body  # an engine that never pauses
    command = purge(engine.run_dir, 7, "relay")
    relay.tick()
    assert command.answer is None
    relay._reader.take = take
    relay._next_poll = 0.0
    relay.tick()
    assert command.answer["removed"]["records"] > 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [({"do": "pause"}, "purge only"), ({"do": "purge"}, "'' is not a hexadecimal id"),
     ({"do": "purge", "tenant": "x"}, "not a hexadecimal id"),
     ({"do": "purge", "tenant": 7}, "not a hexadecimal id")],
)  # fmt: skip
def test_a_relay_refuses_another_command(store, engine, request_, message):
    relay = engine.relay(store)
    serve(engine, 7)
    command = Command(engine.run_dir, kind="relay", **request_)
    relay._drain = lambda: 0
    relay.tick()
    assert not command.answer["ok"] and message in command.answer["error"]
    assert engine.ring.stats().used_bytes > 0


def test_a_purge_of_a_relay_without_its_storage_is_refused(store, engine, monkeypatch):
    """The shard that it could not remove may be read until the command is repeated."""
    relay = engine.relay(store)
    serve(engine, 7)
    relay.tick()
    monkeypatch.setattr(store, "write", failing(store, "write", ".json"))
    with pytest.raises(StoreError):
        relay._writer.flush()
    monkeypatch.setattr(store, "remove", failing(store, "remove", ".safetensors"))
    command = purge(engine.run_dir, 7, "relay")
    relay._next_poll = 0.0
    relay.tick()
    assert not command.answer["ok"] and command.answer["error"]
    monkeypatch.undo()
    command = purge(engine.run_dir, 7, "relay")
    relay._next_poll = 0.0
    relay.tick()
    assert command.answer["ok"] and bodies(store) == []


# A trainer's feed


def spooled(store, engine):
    """Return a relay that has written a shard."""
    relay = engine.relay(store)
    serve(engine, 7, 255, 8, 255)
    relay.tick()
    relay._writer.flush()
    relay._next_poll = 0.0
    relay.tick()
    return relay


@pytest.mark.parametrize("tenant", [255, None])
def test_a_feed_forgets_its_prefetched_records(store, engine, tenant):
    spooled(store, engine)
    feed = SpoolFeed(store, "e1", threaded=False)
    feed.heartbeat()
    (first,) = feed.read(1)
    assert first.tenant == 7
    assert feed.purge(tenant) == (2 if tenant else 3)
    # The cursor counts what was purged: the others stay at their place in the shard.
    assert [r.tenant for r in feed.read(1)] == ([8] if tenant else [])
    assert feed._cursor == ((1, 3) if tenant else (2, 0))
    feed.close()


def test_a_shard_in_reading_during_a_purge_is_not_returned(store, engine, monkeypatch):
    spooled(store, engine)
    feed = SpoolFeed(store, "e1", threaded=False)
    read, purged = store.read, []

    def slow(name, most=None):
        body = read(name, most)
        if name.endswith(".safetensors") and not purged:
            purged.append(feed.purge(255))
        return body

    monkeypatch.setattr(store, "read", slow)
    feed.heartbeat()
    assert purged == [0]
    assert [r.tenant for r in feed.read(9)] == [7, 8]
    feed.close()
