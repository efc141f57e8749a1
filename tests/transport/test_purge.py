"""After a purge the relay, the spool and a feed contain nothing of a tenant."""

import json
import logging
import os
import time
from dataclasses import replace

import pytest

from tests.transport.samples import body_of, make_record, make_spec, write_record
from tests.transport.spool_toys import failing, writer_of
from vllm_tide.transport import RingReader, purge, spool_writer
from vllm_tide.transport.feed_spool import SpoolFeed
from vllm_tide.transport.process import Holder
from vllm_tide.transport.purge import (
    DataHolder,
    PurgeInbox,
    announce_relay,
    retract_relay,
)
from vllm_tide.transport.rendezvous import durable_folder
from vllm_tide.transport.spool import EngineFolder, EngineState
from vllm_tide.transport.spool_shard import SpoolReader
from vllm_tide.transport.spool_store import StoreError
from vllm_tide.transport.spool_writer import purge_records

SPEC = make_spec()
RELAY, TRAINER = (DataHolder(kind, *Holder.current()) for kind in ("relay", "trainer"))


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


# Requests and data holders


def test_every_data_holder_answers_a_request_once(tmp_path, monkeypatch):
    first, second = PurgeInbox(tmp_path), PurgeInbox(tmp_path, "relay")
    assert first.pending() == []
    old = purge.ask(tmp_path, 7)
    new = purge.ask(tmp_path, None)
    assert first.pending() == second.pending() == [old, new]
    first.done(old, {"tokens": 3})
    assert first.pending() == [new]
    assert second.pending() == [old, new]
    assert purge.answers(tmp_path, old) == {TRAINER: {"tokens": 3}}
    second.done(old, {})
    assert purge.answers(tmp_path, old) == {TRAINER: {"tokens": 3}, RELAY: {}}
    assert purge.answers(tmp_path, new) == {}
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    purge.withdraw(tmp_path, old)
    assert second.pending() == [new]
    later = time.time() + purge.MAX_AGE_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    # A forgotten request goes in the end, not unanswered: the clock may have stepped.
    assert second.pending() == [new]
    second.done(new, {})
    assert second.pending() == []
    assert list(tmp_path.iterdir()) == []
    nowhere = PurgeInbox(tmp_path / "gone")
    assert nowhere.pending() == []
    nowhere.done(new, {})


@pytest.mark.parametrize("text", ["", '{"tenant": 5, "asked_unix_s": 1}'])
def test_an_invalid_request_is_logged_once(tmp_path, text, caplog):
    (tmp_path / "purge-0.json").write_text(text)
    inbox = PurgeInbox(tmp_path)
    for _ in range(3):
        assert inbox.pending() == []
    assert caplog.text.count("is not a valid purge request") == 1


def test_live_trainers_are_those_with_a_fresh_status(tmp_path):
    now = time.time()
    for pid, state, updated in (
        (1, "waiting", now),
        (2, "stopped", now),
        (3, "waiting", now - purge.FRESH_S - 1),
    ):
        status = {"pid": pid, "state": state, "updated_unix": updated}
        (tmp_path / f"trainer-{pid}.json").write_text(json.dumps(status))
    (tmp_path / "trainer-d.json").write_text("{")
    assert purge.live_data_holders(tmp_path) == {DataHolder("trainer", 1)}


def trainer_says(run_dir, name="e", **changes):
    status = {
        **Holder.current()._asdict(),
        "state": "training",
        "updated_unix": time.time(),
    }
    (run_dir / f"trainer-{name}.json").write_text(json.dumps({**status, **changes}))


def test_a_trainer_is_live_by_pid_and_start_and_elsewhere_by_its_heartbeat(tmp_path):
    def live(**changes):
        trainer_says(tmp_path, **changes)
        return purge.live_data_holders(tmp_path)

    assert live() == {TRAINER}
    assert live(updated_unix=time.time() - 65) == {TRAINER}  # it hangs, and holds rows
    assert live(updated_unix=time.time() + 1e6) == {TRAINER}  # the clock stepped
    assert live(state="stopped") == {TRAINER}  # its memory goes with its process
    assert live(state="engine_gone") == set()  # it waits for another, without rows
    assert live(start=1) == set()  # dead, however young its status
    assert live(namespace=1) == {DataHolder("trainer", os.getpid(), TRAINER.start, 1)}
    assert live(namespace=1, updated_unix=0) == set()
    assert live(namespace=1, state="stopped") == set()


def test_data_holders_with_the_same_pid_are_distinguished(tmp_path):
    """Containers that share a run directory count their processes alike."""
    request = purge.ask(tmp_path, None)
    trainer_says(tmp_path)
    trainer_says(tmp_path, "f", namespace=1)
    PurgeInbox(tmp_path).done(request, {})
    silent = purge.live_data_holders(tmp_path) - set(purge.answers(tmp_path, request))
    assert [holder.namespace for holder in silent] == [1]


def test_the_reader_of_a_ring_is_asked_before_its_first_status(engine):
    """It starts, or the run directory vanished while it hung."""
    assert purge.live_data_holders(engine.run_dir) == set()
    reader = RingReader.attach(engine.ring.name)
    assert purge.live_data_holders(engine.run_dir) == {TRAINER}
    announce_relay(engine.run_dir, "e1")  # it was a relay
    assert purge.live_data_holders(engine.run_dir) == {RELAY}
    retract_relay(engine.run_dir, "e1")
    reader.close()
    assert purge.live_data_holders(engine.run_dir) == set()


def test_a_trainer_outlives_its_run_directory_and_its_engine(tmp_path):
    """It hung meanwhile: nothing in the run directory names it any more."""
    run_dir, state_dir = tmp_path / "run", str(tmp_path / "state")
    folder = durable_folder(run_dir, state_dir)
    assert purge.live_data_holders(run_dir, state_dir) == set()
    (path,) = purge.announce_trainer([folder])
    assert path.stat().st_mode & 0o777 == 0o600
    assert purge.live_data_holders(run_dir, state_dir) == {TRAINER}
    assert purge.live_data_holders(tmp_path / "another", state_dir) == set()
    path.write_text("")  # its name is enough
    assert purge.live_data_holders(run_dir, state_dir) == {TRAINER}
    dead = folder / f"trainer-1-1-{TRAINER.namespace}"
    dead.touch()
    assert purge.live_data_holders(run_dir, state_dir) == {TRAINER}
    purge.announce_trainer([folder, tmp_path / "state" / "x"])
    assert sorted(folder.iterdir()) == [path]
    path.unlink()
    (tmp_path / "file").touch()
    assert purge.announce_trainer([tmp_path / "file" / "x"])  # it is logged


def test_a_relay_is_live_by_its_pid_and_elsewhere_by_its_heartbeat(tmp_path):
    announce_relay(tmp_path, "e")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    status = json.loads(path.read_text())

    def live_with(**changes):
        path.write_text(json.dumps({**status, **changes}))
        return purge.live_data_holders(tmp_path)

    assert live_with() == {RELAY}
    assert live_with(updated_unix=0) == {RELAY}  # it hangs, and still holds rows
    assert live_with(namespace=1) == {replace(RELAY, namespace=1)}
    assert live_with(namespace=1, updated_unix=0) == set()
    assert live_with(start=1) == set()
    assert not path.exists()  # a dead one's status is removed
    path.write_text("{")
    assert purge.live_data_holders(tmp_path) == set()
    announce_relay(tmp_path, "e")
    retract_relay(tmp_path, "e")
    assert list(tmp_path.iterdir()) == []


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
    assert purge.live_data_holders(engine.run_dir) == {RELAY}
    request = purge.ask(engine.run_dir, 7)
    relay._next_poll = 0.0
    relay._drain = lambda: 0  # what comes before the purge stays in the ring
    serve(engine, 7, 9, 7)
    relay.tick()
    assert purge.answers(engine.run_dir, request) == {RELAY: {"records": 3}}
    assert engine.ring.stats().used_bytes == 0
    assert "a purge removed 3 records" in caplog.text
    relay.stop()
    relay.run()
    assert tenants_in(store) == [8, 9]
    assert purge.live_data_holders(engine.run_dir) == set()


@pytest.mark.parametrize("ends", [False, True])
def test_a_starting_or_ending_relay_answers_before_it_writes(store, engine, ends):
    relay = engine.relay(store) if ends else None
    serve(engine, 7)
    request = purge.ask(engine.run_dir, 7)
    relay = relay or engine.relay(store)
    if ends:
        relay.stop()
        relay.run()
    else:
        relay.tick()
    assert len(purge.answers(engine.run_dir, request)) == 1
    relay.close()
    assert tenants_in(store) == []
    assert bodies(store) == []


def test_a_relay_answers_only_when_the_ring_was_empty(store, engine, monkeypatch):
    relay = engine.relay(store)
    monkeypatch.setattr("vllm_tide.transport.spool_relay._EMPTY_LIMIT_S", 0.02)
    relay._drain = lambda: 0
    take, body = relay._reader.take, body_of(*of_tenants(7))
    relay._reader.take = lambda: body  # an engine that never pauses
    request = purge.ask(engine.run_dir, 7)
    relay.tick()
    assert purge.answers(engine.run_dir, request) == {}
    relay._reader.take = take
    relay._next_poll = 0.0
    relay.tick()
    (counts,) = purge.answers(engine.run_dir, request).values()
    assert counts["records"] > 0


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
