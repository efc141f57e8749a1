"""Purge from the command to the last byte of the buffers."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from dataclasses import replace

import pytest

from tests.transport.samples import body_of, make_record, make_spec, write_record
from tests.transport.spool_toys import CONFIG, ToyEngine
from vllm_tide.cli import trainer as command
from vllm_tide.transport import purge, spool_writer
from vllm_tide.transport.feed_spool import SpoolFeed
from vllm_tide.transport.purge import Keeper, PurgeInbox, announce_relay, retract_relay
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import EngineFolder
from vllm_tide.transport.spool_store import open_store
from vllm_tide.transport.spool_writer import SpoolWriter
from vllm_tide.transport.tenant import key_id, tenant_id, tenant_key


def test_a_request_is_answered_once_by_every_keeper(tmp_path):
    first, second = PurgeInbox(tmp_path), PurgeInbox(tmp_path, "relay")
    assert first.pending() == []
    old = purge.ask(tmp_path, 7)
    new = purge.ask(tmp_path, None)
    assert first.pending() == second.pending() == [old, new]
    first.done(old, {"tokens": 3})
    assert first.pending() == [new]
    assert second.pending() == [old, new]
    trainer = Keeper("trainer", os.getpid())
    assert purge.answers(tmp_path, old) == {trainer: {"tokens": 3}}
    second.done(old, {})
    relay = Keeper("relay", os.getpid())
    assert purge.answers(tmp_path, old) == {trainer: {"tokens": 3}, relay: {}}
    assert purge.answers(tmp_path, new) == {}
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    purge.withdraw(tmp_path, old)
    assert second.pending() == [new]
    purge.withdraw(tmp_path, new)
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_request_is_removed_in_the_end(tmp_path, monkeypatch):
    purge.ask(tmp_path, 7)
    later = time.time() + purge.MAX_AGE_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert PurgeInbox(tmp_path).pending() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"tenant": 5, "asked_unix_s": 1}', '{"tenant": null}',
     '{"tenant": "x", "asked_unix_s": 1}', '{"tenant": null, "asked_unix_s": NaN}'],
)  # fmt: skip
def test_what_is_no_request_is_said_once(tmp_path, text, caplog):
    (tmp_path / "purge-0.json").write_text(text)
    inbox = PurgeInbox(tmp_path)
    for _ in range(3):
        assert inbox.pending() == []
    assert caplog.text.count("is no purge request") == 1


@pytest.fixture(autouse=True)
def state(tmp_path_factory, monkeypatch):
    """Where the tenants' key lies."""
    path = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    return path / "vllm_tide"


def test_a_run_dir_that_is_gone_has_no_requests(tmp_path):
    inbox = PurgeInbox(tmp_path / "gone")
    assert inbox.pending() == []
    inbox.done(purge.PurgeRequest("x", None, 0.0), {})


def status(run_dir, name="e", state="waiting", age_s=0.0, pid=None, keys=()):
    fields = {
        "pid": os.getpid() if pid is None else pid,
        "state": state,
        "updated_unix": time.time() - age_s,
        "tenant_keys": list(keys),
    }
    (run_dir / f"trainer-{name}.json").write_text(json.dumps(fields))


def test_live_trainers_are_those_that_say_so(tmp_path):
    status(tmp_path, "a", pid=1)
    status(tmp_path, "b", pid=2, state="stopped")
    status(tmp_path, "c", pid=3, age_s=purge.FRESH_S + 1)
    (tmp_path / "trainer-d.json").write_text("{")
    assert purge.live_keepers(tmp_path) == {Keeper("trainer", 1)}


def test_live_relays_are_told_by_their_pid_and_elsewhere_by_their_word(tmp_path):
    announce_relay(tmp_path, "e")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    me, found = Keeper("relay", os.getpid()), json.loads(path.read_text())

    def said(**changes):
        path.write_text(json.dumps({**found, **changes}))
        return purge.live_keepers(tmp_path)

    assert said() == {me}
    assert said(updated_unix=0) == {me}  # it hangs, and still holds rows
    assert said(namespace=1) == {me}
    assert said(namespace=1, updated_unix=0) == set()
    assert said(start=1) == set()
    assert not path.exists()  # a dead one's word is removed
    path.write_text("{")
    assert purge.live_keepers(tmp_path) == set()
    announce_relay(tmp_path, "e")
    retract_relay(tmp_path, "e")
    assert list(tmp_path.iterdir()) == []


def call(run_dir, *more):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, "purge")
    args = parser.parse_args(["--run-dir", str(run_dir), *more])
    return command.run(args)


def answering(run_dir, seen, times=1):
    """A trainer's loop: answers so many requests."""
    inbox = PurgeInbox(run_dir)
    while len(seen) < times:
        for request in inbox.pending():
            seen.append(request.tenant)
            inbox.done(request, {"samples": 2, "tokens": 40})
        time.sleep(0.01)


def test_the_command_waits_for_the_trainers_and_cleans_up(tmp_path, capsys):
    key, seen = tenant_key(tmp_path), []
    status(tmp_path)
    trainer = threading.Thread(target=answering, args=(tmp_path, seen))
    trainer.start()
    assert call(tmp_path, "--tenant", "acme") == 0
    trainer.join()
    assert seen == [tenant_id("acme", key)]
    out = capsys.readouterr().out
    assert f"purge of tenant {seen[0]:016x}" in out
    assert f"trainer {os.getpid()}: removed 2 samples, 40 tokens" in out
    assert "acme" not in out
    assert not list(tmp_path.glob("purge*"))


def test_a_name_is_refused_where_another_key_has_named_the_tenants(
    tmp_path, capsys, state
):
    """The key was lost, and an engine that started since has made another."""
    run_dir, where = tmp_path / "trainer", ["--spool", str(tmp_path / "spool")]
    before = tenant_key(run_dir)
    tenant = tenant_id("acme", before)
    engine = ToyEngine(tmp_path, "e1", tenant_key_id=key_id(before))
    store = open_store(str(tmp_path / "spool"))
    record = replace(make_record(engine.spec, 1), tenant=tenant)
    assert write_record(engine.ring, record)
    relay = engine.relay(store)
    relay.tick()
    relay._writer.flush()
    relay.close()
    engine.close()
    (state / "tenants.key").unlink()
    assert call(run_dir, "--tenant", "acme", *where) == command.EXIT_ERROR
    assert "no engine has named tenants" in capsys.readouterr().err
    now = tenant_key(run_dir)
    assert call(run_dir, "--tenant", "acme", *where) == command.EXIT_ERROR
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert "the tenants' key is another one" in said.err
    assert key_id(before) in said.err and key_id(now) in said.err
    assert tenants_in(store) == {tenant} and not list(run_dir.glob("purge*"))
    # The same where only a trainer's buffers hold such data.
    run_dir.mkdir(exist_ok=True)
    assert call(run_dir, "--tenant", "acme") == command.EXIT_REFUSED
    status(run_dir, keys=[key_id(before)])
    assert call(run_dir, "--tenant", "acme") == command.EXIT_ERROR
    (run_dir / "trainer-e.json").unlink()
    assert call(run_dir, "--tenant-id", f"{tenant:016x}", *where) == 1
    assert tenants_in(store) == set()
    assert call(run_dir, "--tenant", "acme", *where) == command.EXIT_REFUSED


def test_the_command_takes_an_id_and_everything(tmp_path):
    status(tmp_path)
    for more, wanted in ((["--tenant-id", "00ff"], 255), (["--all"], None)):
        seen: list[int | None] = []
        trainer = threading.Thread(target=answering, args=(tmp_path, seen))
        trainer.start()
        assert call(tmp_path, *more) == 0
        trainer.join()
        assert seen == [wanted]


def test_the_command_removes_shards_of_a_spool(tmp_path, capsys):
    store = open_store(str(tmp_path / "spool"))
    writer = SpoolWriter(EngineFolder(store, "e1"), CONFIG)
    for tenant in (1, 2, 255):
        writer.add(body_of(replace(make_record(make_spec(), tenant), tenant=tenant)))
        writer.flush()
    run_dir, spool = tmp_path / "run", str(tmp_path / "spool")
    call(run_dir, "--tenant-id", "ff", "--spool", spool)
    assert "spool: removed 1 shards" in capsys.readouterr().out
    call(run_dir, "--all", "--spool", spool)
    assert "spool: removed 2 shards" in capsys.readouterr().out


def served(tmp_path, name="e1"):
    """An engine with records of the tenants 7, 8 and 255, its relay and the spool."""
    engine = ToyEngine(tmp_path, name)
    store = open_store(str(tmp_path / "spool"))
    for tenant in (7, 255, 8, 255):
        record = replace(make_record(engine.spec, tenant), tenant=tenant)
        assert write_record(engine.ring, record)
    return engine, engine.relay(store), store


def tenants_in(store, name="e1"):
    """Tenants of the shards of a spool, by their manifests."""
    folder = EngineFolder(store, name)
    names = [n for n in store.sizes(folder.path("records")) if n.endswith(".json")]
    return {t for n in names for t in folder.read_json(f"records/{n}")["tenants"]}


def background(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("held", ["ring", "open", "blocked"])
def test_the_command_waits_for_the_relay_and_nothing_comes_after(
    tmp_path, capsys, monkeypatch, held
):
    engine, relay, store = served(tmp_path)
    write, announced = store.write, threading.Event()
    if held != "ring":
        monkeypatch.setattr(spool_writer, "SHARD_SECONDS", 1e9)
        relay.tick()
    if held == "blocked":

        def full(name, *parts, durable=True):
            if "records" in name and name.endswith(".json"):
                raise TransportError("no space left")
            write(name, *parts, durable=durable)

        store.write = full
        with pytest.raises(TransportError):
            relay._writer.flush()
        assert relay._writer.blocked
        store.write = write
    announce_relay(engine.run_dir, "e1")

    def relaying():
        announced.wait()
        relay.run()

    thread = background(relaying)
    try:
        threading.Timer(0.1, announced.set).start()
        more = ["--tenant-id", "ff", "--spool", str(tmp_path / "spool")]
        assert call(engine.run_dir, *more) == 0
    finally:
        relay.stop()
        thread.join()
        engine.close()
    out = capsys.readouterr().out
    assert f"relay {os.getpid()}: removed 2 records" in out
    assert "vllm-tide purge --tenant-id 00000000000000ff" in out
    assert tenants_in(store) == {7, 8}
    assert "spool: removed 0 shards" in out  # the relay had written nothing of it
    assert not list(engine.run_dir.glob("purge*"))
    assert not list(engine.run_dir.glob("relay-*.json"))


def test_a_trainer_is_asked_again_after_the_spool_was_purged(tmp_path):
    engine, relay, store = served(tmp_path)
    relay.tick()
    relay._writer.flush()
    run_dir, left = tmp_path / "trainer", []
    run_dir.mkdir()
    status(run_dir)

    def trainer():
        inbox = PurgeInbox(run_dir)
        for _ in range(2):
            while not (asked := inbox.pending()):
                time.sleep(0.01)
            left.append(tenants_in(store))  # what it may read before it answers
            inbox.done(asked[0], {"records": 1})

    thread = background(trainer)
    more = ["--tenant-id", "ff", "--spool", str(tmp_path / "spool")]
    assert call(run_dir, *more, "--timeout", "20") == 0
    thread.join(timeout=5)
    assert left == [{7, 8, 255}, set()]
    relay.close()
    engine.close()


@pytest.mark.parametrize("tenant", [255, None])
def test_a_feed_forgets_what_it_fetched_ahead(tmp_path, tenant):
    engine, relay, store = served(tmp_path)
    relay.tick()
    relay._writer.flush()
    relay._next_poll = 0.0
    relay.tick()
    feed = SpoolFeed(store, "e1", threaded=False)
    feed.heartbeat()
    (first,) = feed.read(1)
    assert first.tenant == 7
    assert feed.purge(tenant) == (2 if tenant else 3)
    # The cursor counts what was purged: the others keep their places in the shard.
    assert [r.tenant for r in feed.read(1)] == ([8] if tenant else [])
    assert feed._cursor == ((1, 3) if tenant else (2, 0))
    feed.close()
    relay.close()
    engine.close()


def test_a_shard_that_was_being_read_during_a_purge_is_not_handed_out(
    tmp_path, monkeypatch
):
    engine, relay, store = served(tmp_path)
    relay.tick()
    relay._writer.flush()
    relay._next_poll = 0.0
    relay.tick()
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
    relay.close()
    engine.close()


def test_without_a_trainer_the_request_waits_for_one(tmp_path, capsys):
    assert call(tmp_path, "--all") == command.EXIT_REFUSED
    err = capsys.readouterr().err
    assert "no trainer is running" in err
    assert "no relay" in err
    assert len(PurgeInbox(tmp_path).pending()) == 1


def test_a_trainer_that_does_not_answer_is_named(tmp_path, capsys):
    status(tmp_path, pid=4242)
    assert call(tmp_path, "--all", "--timeout", "0.1") == command.EXIT_REFUSED
    assert "trainer 4242 has not answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ((), "whose data? give --tenant NAME, --tenant-id HEX, or --all"),
        (("--tenant", "acme"), "no engine has named tenants"),
        (("--tenant-id", "xyz"), "--tenant-id: 'xyz'"),
        (("--tenant-id", "1" * 17), "no id of 64 bits"),
        (("--tenant-id=-1",), "no id of 64 bits"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, capsys, more, sentence):
    assert call(tmp_path, *more) == command.EXIT_ERROR
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
