"""The purge command: its recipients, its waits, its output."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from tests.transport.samples import make_record, write_record
from tests.transport.spool_toys import SPEC, ToyEngine, failing, writer_of
from vllm_tide.cli import EXIT_ERROR, EXIT_NO
from vllm_tide.cli import trainer as command
from vllm_tide.transport import RingReader
from vllm_tide.transport.process import Holder, pid_namespace, start_time
from vllm_tide.transport.purge import PurgeInbox, announce_relay
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import EngineFolder
from vllm_tide.transport.spool_store import open_store
from vllm_tide.transport.tenant import key_id, tenant_id, tenant_key


@pytest.fixture(autouse=True)
def state(tmp_path_factory, monkeypatch):
    """Return the path of the tenants' key."""
    monkeypatch.setattr(command, "POLL_S", 0.01)
    path = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    return path / "vllm_tide"


def trainer_says(run_dir, pid=None, keys=(), name="e"):
    holder = Holder.current() if pid is None else Holder(pid, start_time(pid) or 0, 0)
    fields = {
        **holder._asdict(),
        "state": "waiting",
        "updated_unix": time.time(),
        "tenant_keys": list(keys),
    }
    (run_dir / f"trainer-{name}.json").write_text(json.dumps(fields))


def call(run_dir, *more):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, "purge")
    args = parser.parse_args(["--run-dir", str(run_dir), *more])
    return command.run(args)


def background(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def engine(tmp_path):
    made = ToyEngine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "spool"))


def serve(engine, *tenants):
    for tenant in tenants:
        record = replace(make_record(engine.spec, tenant % 99), tenant=tenant)
        assert write_record(engine.ring, record)


def tenants_in(store):
    """Return tenants of the shards of a spool, by their manifests."""
    folder = EngineFolder(store, "e1")
    names = [n for n in store.sizes(folder.path("records")) if n.endswith(".json")]
    return {t for n in names for t in folder.read_json(f"records/{n}")["tenants"]}


def test_the_command_waits_for_the_trainers_and_cleans_up(tmp_path, capsys):
    acme, seen = tenant_id("acme", tenant_key(tmp_path)), []
    trainer_says(tmp_path)
    arguments = (
        (["--tenant", "acme"], acme),
        (["--tenant-id", "00ff"], 255),
        (["--all"], None),
    )

    def answer():
        inbox = PurgeInbox(tmp_path)
        while len(seen) < len(arguments):
            for request in inbox.pending():
                seen.append(request.tenant)
                inbox.done(request, {"samples": 2, "tokens": 40})
            time.sleep(0.01)

    trainer = background(answer)
    for more, _ in arguments:
        assert call(tmp_path, *more) == 0
        assert not list(tmp_path.glob("purge*"))
    trainer.join()
    assert seen == [tenant for _, tenant in arguments]
    out = capsys.readouterr().out
    assert f"purge of tenant {acme:016x}" in out
    assert out.count(f"trainer {os.getpid()}: removed 2 samples, 40 tokens") == 3
    assert "acme" not in out


def test_a_name_is_refused_where_another_key_has_named_the_tenants(
    tmp_path, store, capsys, state
):
    """The key was lost, and an engine that started later has made another."""
    run_dir, where = tmp_path / "trainer", ["--spool", str(tmp_path / "spool")]
    before = tenant_key(run_dir)
    tenant = tenant_id("acme", before)
    engine = ToyEngine(tmp_path, tenant_key_id=key_id(before))
    serve(engine, tenant)
    relay = engine.relay(store)
    relay.tick()
    relay._writer.flush()
    relay.close()
    engine.close()
    (state / "tenants.key").unlink()
    assert call(run_dir, "--tenant", "acme", *where) == EXIT_ERROR
    assert "no tenant key" in capsys.readouterr().err
    now = tenant_key(run_dir)
    assert call(run_dir, "--tenant", "acme", *where) == EXIT_ERROR
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert "nothing was removed, as the tenants' key is" in captured.err
    assert key_id(before) in captured.err and key_id(now) in captured.err
    assert tenants_in(store) == {tenant} and not list(run_dir.glob("purge*"))
    # The same if only a trainer's buffers have such data.
    run_dir.mkdir(mode=0o700, exist_ok=True)
    assert call(run_dir, "--tenant", "acme") == EXIT_NO
    trainer_says(run_dir, keys=[key_id(before)])
    assert call(run_dir, "--tenant", "acme") == EXIT_ERROR
    (run_dir / "trainer-e.json").unlink()
    assert call(run_dir, "--tenant-id", f"{tenant:016x}", *where) == 1
    assert tenants_in(store) == set()
    assert call(run_dir, "--tenant", "acme", *where) == EXIT_NO


def test_the_command_waits_for_the_relay_and_no_record_follows(
    engine, store, capsys, monkeypatch
):
    serve(engine, 7, 255)
    relay, announced = engine.relay(store), threading.Event()
    relay.tick()
    with monkeypatch.context() as full:
        full.setattr(store, "write", failing(store, "write", ".json"))
        with pytest.raises(TransportError):
            relay._writer.flush()
    assert relay._writer.blocked
    serve(engine, 8, 255)  # in the ring
    announce_relay(engine.run_dir, "e1")

    def relaying():
        announced.wait()
        relay.run()

    thread = background(relaying)
    try:
        threading.Timer(0.05, announced.set).start()
        assert call(engine.run_dir, "--tenant-id", "ff", "--spool", store.url) == 0
    finally:
        relay.stop()
        thread.join()
    out = capsys.readouterr().out
    assert f"relay {os.getpid()}: removed 2 records" in out
    assert "vllm-tide purge --tenant-id 00000000000000ff" in out
    assert tenants_in(store) == {7, 8}
    assert "spool: removed 0 shards" in out  # the relay had written nothing of it
    assert not list(engine.run_dir.glob("purge*"))
    assert not list(engine.run_dir.glob("relay-*.json"))


def test_a_trainer_is_asked_again_after_the_spool_was_purged(tmp_path, store, capsys):
    for tenant in (7, 255, 8):
        record = replace(make_record(SPEC, tenant), tenant=tenant)
        writer_of(store, [record]).flush()
    trainer_says(tmp_path)
    left = []

    def trainer():
        inbox = PurgeInbox(tmp_path)
        while len(left) < 4:
            for request in inbox.pending():
                left.append(tenants_in(store))  # read before it answers, at most
                inbox.done(request, {"records": 1})
            time.sleep(0.01)

    thread = background(trainer)
    spool = ["--spool", store.url, "--timeout", "20"]
    assert call(tmp_path, "--tenant-id", "ff", *spool) == 0
    assert left == [{7, 8, 255}, {7, 8}]
    assert call(tmp_path, "--all", *spool) == 0
    thread.join(timeout=5)
    assert left[2:] == [{7, 8}, set()] and tenants_in(store) == set()
    out = capsys.readouterr().out
    assert "spool: removed 1 shards" in out and "spool: removed 2 shards" in out


def test_a_silent_data_holder_is_named_and_the_request_stays(tmp_path, capsys):
    assert call(tmp_path, "--all", "--json") == EXIT_NO
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["removed"] == [] and "no trainer is running" in answer["missing"]
    assert "no trainer is running" in err
    assert "no relay" in err
    trainer_says(tmp_path, pid=4242)
    assert call(tmp_path, "--all", "--timeout", "0.05") == EXIT_NO
    assert "trainer 4242 has not answered" in capsys.readouterr().err
    assert len(PurgeInbox(tmp_path).pending()) == 2


def test_a_hanging_trainer_is_waited_for(tmp_path, capsys):
    """Another one answers; the silent one is live, its status is an hour old."""
    with subprocess.Popen(["/bin/sleep", "9"]) as hung:
        trainer_says(tmp_path, hung.pid, name="f")
        path = tmp_path / "trainer-f.json"
        status = json.loads(path.read_text()) | {"namespace": pid_namespace()}
        status["updated_unix"] -= 3600
        path.write_text(json.dumps(status))
        trainer_says(tmp_path)

        def answer():
            inbox = PurgeInbox(tmp_path)
            while not (asked := inbox.pending()):
                time.sleep(0.01)
            inbox.done(asked[0], {})

        thread = background(answer)
        assert call(tmp_path, "--all", "--timeout", "1") == EXIT_NO
        thread.join()
        assert f"trainer {hung.pid} has not answered" in capsys.readouterr().err
        assert len(PurgeInbox(tmp_path).pending()) == 1
        hung.kill()
    assert call(tmp_path, "--all", "--timeout", "0.1") == EXIT_NO
    assert f"trainer {os.getpid()} has not answered" in capsys.readouterr().err


def test_a_ring_without_a_reader_is_not_purged(engine, capsys):
    """Its trainer died, and the next one reads its records."""
    serve(engine, 255)
    trainer_says(engine.run_dir)
    seen = []

    def answer():
        inbox = PurgeInbox(engine.run_dir)
        while len(seen) < 2:
            for request in inbox.pending():
                seen.append(request)
                inbox.done(request, {})
            time.sleep(0.01)

    thread = background(answer)
    arguments = ["--tenant-id", "ff", "--timeout", "0.5"]
    assert call(engine.run_dir, *arguments) == EXIT_NO
    assert "ring of engine e1 is not empty and has no" in capsys.readouterr().err
    reader = RingReader.attach(engine.ring.name)
    assert reader.read().tenant == 255
    reader.close()
    assert call(engine.run_dir, *arguments) == 0
    thread.join()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ((), "no data selected; give --tenant NAME, --tenant-id HEX, or --all"),
        (("--tenant", ""), "no data selected"),
        (("--tenant", "acme"), "no tenant key"),
        (("--tenant-id", "xyz"), "--tenant-id: 'xyz'"),
        (("--tenant-id", "1" * 17), "not a hexadecimal id of 64 bits"),
        (("--tenant-id=-1",), "not a hexadecimal id of 64 bits"),
    ],
)
def test_an_invalid_request_is_refused(tmp_path, capsys, more, sentence):
    assert call(tmp_path, *more) == EXIT_ERROR
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
