"""What a purge leaves of a tenant in the relay and in the spool: nothing."""

import logging
import os
import time
from dataclasses import replace

import pytest

from tests.transport.samples import body_of, make_record, make_spec, write_record
from tests.transport.spool_toys import CONFIG, ToyEngine
from vllm_tide.transport import TransportError, spool_writer
from vllm_tide.transport.purge import Keeper, answers, ask, live_keepers
from vllm_tide.transport.spool import EngineFolder, EngineState
from vllm_tide.transport.spool_shard import SpoolReader
from vllm_tide.transport.spool_store import open_store
from vllm_tide.transport.spool_writer import SpoolWriter, purge_records

SPEC = make_spec()


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "spool"))


@pytest.fixture
def engine(tmp_path):
    made = ToyEngine(tmp_path / "e1")
    yield made
    made.close()


def of_tenant(seed, tenant):
    return replace(make_record(SPEC, seed), tenant=tenant)


def writer_of(store, tenants=()):
    writer = SpoolWriter(EngineFolder(store, "e1"), CONFIG)
    for seed, tenant in enumerate(tenants):
        writer.add(body_of(of_tenant(seed, tenant)))
    return writer


def tenants_in(store):
    """Tenants of all records of the spool, and how many shards it took."""
    folder = EngineFolder(store, "e1")
    reader = SpoolReader(folder, SPEC)
    found = []
    for _ in range(50):
        shard = reader.fetch(EngineState(last_shard=9))
        if shard is not None:
            found += [record.tenant for record in shard.records]
            named = folder.read_json(f"records/{shard.number:012d}.json")["tenants"]
            assert set(named) == {r.tenant for r in shard.records} - {0}
    return found


def bodies(store):
    names = store.sizes("engines/e1/records")
    return sorted(name for name in names if name.endswith(".safetensors"))


def failing(monkeypatch, store, method, what):
    """Let one of the store's calls fail for the names that end so."""
    works = getattr(store, method)

    def fails(name, *args, **kwargs):
        if name.endswith(what):
            raise TransportError("the storage is down")
        return works(name, *args, **kwargs)

    monkeypatch.setattr(store, method, fails)


# The writer


@pytest.mark.parametrize(("tenant", "left"), [(7, [0, 8]), (None, []), (9, [7, 0, 8])])
def test_records_in_the_open_shard_are_forgotten(store, tenant, left):
    writer = writer_of(store, [7, 0, 8])
    assert writer.purge(tenant) == 3 - len(left)
    writer.flush()
    assert tenants_in(store) == left
    assert writer.rows == 4 * len(left)


@pytest.mark.parametrize("written", ["nothing", "body", "all"])
@pytest.mark.parametrize(("tenant", "left"), [(7, [0, 8]), (None, []), (9, [7, 0, 8])])
def test_records_in_a_blocked_shard_are_forgotten_and_what_it_left(
    store, monkeypatch, written, tenant, left
):
    writer = writer_of(store, [7, 0, 8])
    write = store.write

    def fails(name, *parts, durable=True):
        manifest = name.endswith(".json")
        if written == "all" or (written == "body" and not manifest):
            write(name, *parts, durable=durable)
        if written == "nothing" or manifest:
            # With "all" it says that it failed, and it has not.
            raise TransportError("the storage is down")

    monkeypatch.setattr(store, "write", fails)
    with pytest.raises(TransportError):
        writer.flush()
    monkeypatch.undo()
    assert writer.purge(tenant) == 3 - len(left)
    assert writer.blocked == bool(left)
    if tenant != 9:
        assert bodies(store) == []
    writer.flush()
    assert tenants_in(store) == left


def test_a_purge_of_a_blocked_shard_is_not_over_while_the_storage_is_down(
    store, monkeypatch
):
    writer = writer_of(store, [7])
    failing(monkeypatch, store, "write", ".json")
    with pytest.raises(TransportError):
        writer.flush()
    failing(monkeypatch, store, "remove", ".safetensors")
    for _ in range(2):
        with pytest.raises(TransportError):
            writer.purge(7)
        assert writer._closed is None  # it is out of memory
        assert writer.blocked
    assert len(bodies(store)) == 1
    monkeypatch.undo()
    assert writer.purge(7) == 0
    assert not writer.blocked
    assert bodies(store) == []


# The spool


@pytest.mark.parametrize("tenant", [7, None])
def test_a_body_without_a_manifest_is_removed_however_young(store, tenant):
    writer = writer_of(store, [7])
    writer.flush()
    at = "engines/e1/records/"
    store.remove(at + "000000000001.json")  # its writer died between the two
    assert purge_records(store, tenant=tenant, grace_s=0.0) == 1
    assert bodies(store) == []


def test_a_body_whose_manifest_follows_stays(store, monkeypatch):
    writer = writer_of(store, [8])
    writer.flush()
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


def test_a_body_that_a_manifest_of_its_number_does_not_name_is_removed(store):
    writer_of(store, [8]).flush()
    store.write("engines/e1/records/000000000001-5.safetensors", b"another relay's")
    assert purge_records(store, tenant=7, grace_s=0.0) == 1
    assert tenants_in(store) == [8]


# The relay


def test_a_relay_answers_and_keeps_what_is_not_asked_for(
    store, engine, caplog, monkeypatch
):
    monkeypatch.setattr(spool_writer, "SHARD_SECONDS", 1e9)
    caplog.set_level(logging.INFO)
    relay = engine.relay(store)
    for seed, tenant in enumerate([7, 8]):
        assert write_record(engine.ring, of_tenant(seed, tenant))
    relay.tick()  # now they are in the open shard
    assert live_keepers(engine.run_dir) == {Keeper("relay", os.getpid())}
    request = ask(engine.run_dir, 7)
    relay._next_poll = 0.0
    relay._drain = lambda: 0  # what comes before the purge stays in the ring
    for seed, tenant in enumerate([7, 9, 7]):
        assert write_record(engine.ring, of_tenant(seed, tenant))
    relay.tick()
    counts = {Keeper("relay", os.getpid()): {"records": 3}}
    assert answers(engine.run_dir, request) == counts
    assert engine.ring.stats().used_bytes == 0
    assert "a purge removed 3 records" in caplog.text
    relay.stop()
    relay.run()
    assert tenants_in(store) == [8, 9]
    assert live_keepers(engine.run_dir) == set()


def test_a_request_from_before_its_start_is_answered_before_anything_is_written(
    store, engine
):
    assert write_record(engine.ring, of_tenant(1, 7))
    request = ask(engine.run_dir, None)
    relay = engine.relay(store)
    relay.tick()
    assert len(answers(engine.run_dir, request)) == 1
    relay.close()
    assert tenants_in(store) == []
    assert bodies(store) == []


def test_a_relay_that_ends_answers_first(store, engine):
    relay = engine.relay(store)
    assert write_record(engine.ring, of_tenant(1, 7))
    request = ask(engine.run_dir, 7)
    relay.stop()
    relay.run()
    assert len(answers(engine.run_dir, request)) == 1
    assert tenants_in(store) == []


def test_a_relay_answers_only_when_the_ring_was_empty(store, engine, monkeypatch):
    relay = engine.relay(store)
    monkeypatch.setattr("vllm_tide.transport.spool_relay._EMPTY_LIMIT_S", 0.02)
    relay._drain = lambda: 0
    take = relay._reader.take
    relay._reader.take = lambda: body_of(of_tenant(1, 7))  # an engine that never pauses
    request = ask(engine.run_dir, 7)
    relay.tick()
    assert answers(engine.run_dir, request) == {}
    relay._reader.take = take
    relay._next_poll = 0.0
    relay.tick()
    (counts,) = answers(engine.run_dir, request).values()
    assert counts["records"] > 0
    relay.close()
