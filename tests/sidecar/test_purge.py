"""The purge command: its recipients, its waits, its output."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from tests.transport.samples import make_record, write_record
from tests.transport.spool_toys import SPEC, ToyEngine, failing, settle, writer_of
from vllm_tide.cli import EXIT_ERROR, EXIT_NO, purge
from vllm_tide.cli import trainer as command
from vllm_tide.transport import RingReader
from vllm_tide.transport.admin import AdminSocket
from vllm_tide.transport.rendezvous import durable_folder
from vllm_tide.transport.spool import EngineFolder, Store
from vllm_tide.transport.spool_shard import ShardReader
from vllm_tide.transport.tenant import key_id, tenant_id, tenant_key


@pytest.fixture(autouse=True)
def state(tmp_path_factory, monkeypatch):
    """Return the path of the tenants' key."""
    monkeypatch.setattr(purge, "POLL_S", 0.01)
    path = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    return path / "vllm_tide"


class Trainer:
    """Answers commands like a trainer of some engines, in a thread, until it is closed.

    Args:
        purged: Returns the counts of a purge of a tenant; None delays the answer.
    """

    def __init__(self, run_dir, *engines, keys=(), purged=lambda tenant: {}):
        self._socket, self._ending = AdminSocket("trainer", run_dir), threading.Event()
        self.engines, self._keys, self._purged = list(engines), list(keys), purged
        self._thread = background(self._loop)

    def _loop(self):
        while not self._ending.wait(0.005):
            self._socket.poll(self._execute)

    def _execute(self, request):
        if request["do"] == "status":
            return {"ok": True, "status": {"tenant_keys": self._keys}}
        given = request["tenant"]
        counts = self._purged(None if given is None else int(given, 16))
        if counts is None:
            return None
        return {"ok": True, "removed": counts, "engines": self.engines}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._ending.set()
        self._thread.join()
        self._socket.close()


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
    return Store(str(tmp_path / "spool"))


def serve(engine, *tenants):
    for tenant in tenants:
        record = replace(make_record(engine.spec, tenant % 99), tenant=tenant)
        assert write_record(engine.ring, record)


def tenants_in(store):
    """Return the tenants of the records of a spool."""
    reader, tenants = ShardReader(EngineFolder(store, "e1"), SPEC), set()
    while (shard := reader.fetch(99)) is not None:
        tenants |= {record.tenant for record in shard[1]}
    return tenants


def test_the_command_waits_for_the_trainers(tmp_path, capsys):
    acme, seen = tenant_id("acme", tenant_key(tmp_path)), []
    arguments = (
        (["--tenant", "acme"], acme),
        (["--tenant-id", "00ff"], 255),
        (["--all"], None),
    )

    def purged(tenant):
        seen.append(tenant)
        # In a cycle first.
        return {"samples": 2, "tokens": 40} if len(seen) % 3 == 0 else None

    with Trainer(tmp_path, purged=purged):
        for more, _ in arguments:
            assert call(tmp_path, *more) == 0
    assert seen == [tenant for _, tenant in arguments for _ in range(3)]
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
    assert tenants_in(store) == {tenant}
    # The same if only a trainer's buffers have such data.
    run_dir.mkdir(mode=0o700, exist_ok=True)
    assert call(run_dir, "--tenant", "acme") == EXIT_NO
    with Trainer(run_dir, keys=[key_id(before)]):
        assert call(run_dir, "--tenant", "acme") == EXIT_ERROR
    hung = AdminSocket("trainer", run_dir)
    assert call(run_dir, "--tenant", "acme", "--timeout", "0.05") == EXIT_ERROR
    assert "nothing was removed" in capsys.readouterr().err
    hung.close()
    assert call(run_dir, "--tenant-id", f"{tenant:016x}", *where) == 1
    assert tenants_in(store) == set()
    assert call(run_dir, "--tenant", "acme", *where) == EXIT_NO


def test_the_command_waits_for_the_relay_and_no_record_follows(
    engine, store, capsys, monkeypatch
):
    serve(engine, 7, 255)
    relay, announced = engine.relay(store), threading.Event()
    with monkeypatch.context() as full:
        full.setattr(store, "write", failing(store, "write", "records"))
        settle(relay)
    assert relay._writer.blocked
    relay._next_poll = 0.0
    serve(engine, 8, 255)  # in the ring

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
    assert f"relay {os.getpid()}: removed 2 records\n" in out
    assert "vllm-tide purge --tenant-id 00000000000000ff" in out
    assert tenants_in(store) == {7, 8}
    assert "spool: removed 0 shards" in out  # the relay had written nothing of it
    assert not list(engine.run_dir.glob("relay-*"))


def test_a_trainer_is_asked_again_after_the_spool_was_purged(tmp_path, store, capsys):
    for tenant in (7, 255, 8):
        record = replace(make_record(SPEC, tenant), tenant=tenant)
        writer_of(store, [record]).flush()
    left = []

    def purged(tenant):
        left.append(tenants_in(store))  # read before it answers, at most
        return {"records": 1}

    with Trainer(tmp_path, purged=purged):
        spool = ["--spool", store.url, "--timeout", "20"]
        assert call(tmp_path, "--tenant-id", "ff", *spool) == 0
        assert left == [{7, 8, 255}, {7, 8}]
        assert call(tmp_path, "--all", *spool) == 0
    assert left[2:] == [{7, 8}, set()] and tenants_in(store) == set()
    out = capsys.readouterr().out
    assert "spool: removed 1 shards" in out and "spool: removed 2 shards" in out


def test_a_wrong_spool_is_refused_before_anything_is_removed(tmp_path, capsys):
    asked, typo = [], tmp_path / "typo"
    with Trainer(tmp_path, purged=lambda tenant: asked.append(tenant) or {}):
        assert call(tmp_path, "--all", "--spool", str(typo)) == EXIT_ERROR
    assert f"there is no spool at {typo}" in capsys.readouterr().err
    assert not asked and not typo.exists()


def test_the_removals_before_a_failure_of_the_spool_are_printed(
    tmp_path, store, capsys, monkeypatch
):
    writer_of(store, [replace(make_record(SPEC, 7), tenant=7)]).flush()
    monkeypatch.setattr(Store, "remove", lambda store, *names: list(names))
    with Trainer(tmp_path, purged=lambda tenant: {"rows": 3}):
        assert call(tmp_path, "--all", "--spool", store.url) == EXIT_NO
    out, err = capsys.readouterr()
    assert "removed 3 rows" in out and "spool: removed" not in out
    assert "spool: 1 of 1 shards could not be removed" in err


def test_without_a_trainer_nothing_was_removed(tmp_path, capsys):
    assert call(tmp_path, "--all", "--json", "--timeout", "0.05") == EXIT_NO
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (
        answer["removed"] == []
        and "no engine, trainer or relay runs" in answer["missing"]
    )
    assert answer["missing"] in err


def test_a_hanging_trainer_is_named_though_another_one_answers(tmp_path, capsys):
    """Also if its engine is dead and its run directory was removed meanwhile."""
    hung = AdminSocket("trainer", durable_folder(tmp_path, None))
    asked = []
    with Trainer(tmp_path, purged=lambda tenant: asked.append(tenant) or {"rows": 1}):
        assert call(tmp_path, "--all", "--timeout", "0.3") == EXIT_NO
        out, err = capsys.readouterr()
        assert out.count("removed 1 rows") == 1
        assert f"trainer {hung.name[8:-5]}: has not answered in 0." in err
        assert asked == [None]
        hung.close()
        assert call(tmp_path, "--all") == 0


@pytest.mark.parametrize("killed", [False, True])
def test_the_reader_of_a_ring_must_answer(engine, capsys, killed):
    """Without a socket: it starts, or its socket was removed while it hung."""
    name, tell = engine.ring.name, os.pipe()
    pid = os.fork()
    if pid == 0:
        reader = RingReader.attach(name)
        os.write(tell[1], b"x")
        time.sleep(60)
        os._exit(reader.capacity)
    os.read(tell[0], 1)
    try:
        with Trainer(engine.run_dir, "another"):
            if killed:
                os.kill(pid, signal.SIGKILL)
                assert call(engine.run_dir, "--all", "--timeout", "1") == 0
            else:
                assert call(engine.run_dir, "--all", "--timeout", "0.3") == EXIT_NO
                err = capsys.readouterr().err
                assert f"trainer {pid}, which reads engine e1, has not answered" in err
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in tell:
            os.close(fd)


def test_a_trainer_that_starts_is_waited_for(engine):
    reader = RingReader.attach(engine.ring.name)
    with contextlib.ExitStack() as stack:

        def start():
            stack.enter_context(Trainer(engine.run_dir, "e1"))

        starting = threading.Timer(0.2, start)
        starting.start()
        assert call(engine.run_dir, "--all", "--timeout", "20") == 0
        starting.join()
    reader.close()


def test_a_ring_without_a_reader_is_not_purged(engine, capsys):
    """Its trainer died, and the next one reads its records."""
    serve(engine, 255)
    arguments = ["--tenant-id", "ff", "--timeout", "0.2"]
    with Trainer(engine.run_dir):
        assert call(engine.run_dir, *arguments) == EXIT_NO
        assert "ring of engine e1 is not empty and has no" in capsys.readouterr().err
        reader = RingReader.attach(engine.ring.name)
        assert reader.read().tenant == 255
        reader.close()
        assert call(engine.run_dir, *arguments) == 0


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
