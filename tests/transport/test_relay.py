"""The relay between an engine and its spool: transfer, purge, start and end."""

import argparse
import logging
import os
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.transport.commands import Command, purge
from tests.transport.samples import make_record, make_spec, write_record
from tests.transport.spool_toys import (
    CONFIG,
    failing,
    head_tensors,
    read_all,
    seeds_in,
    settle,
)
from vllm_tide.cli import relay as cli_relay
from vllm_tide.config import parse_tide, starts_trainer
from vllm_tide.transport import TransportError, spool_shard
from vllm_tide.transport.admin import sockets
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import SHM_DIR
from vllm_tide.transport.spool import EngineFolder, TrainerState


def read_seeds(store):
    return sum(seeds_in(store).values(), [])


def send(folder, version, tensors=None):
    """Store a draft as a trainer does; return its file's path."""
    blob = DraftWeights.encode(tensors or head_tensors(version), version, {"g": 1})
    name = folder.write_draft(blob)
    folder.write_trainer(TrainerState("i", unix=time.time(), draft=name))
    return folder.path("drafts", name), blob


# Between ring and spool


def test_the_relay_carries_records_drafts_and_feedback(store, engine):
    engine.serve(range(5))
    relay, folder = engine.relay(store), engine.folder(store)
    settle(relay)
    state = folder.read_state()
    assert state.running and state.last_shard >= 1
    assert sum(read_all(store, last=state.last_shard)[0].values(), []) == list(range(5))
    _, blob = send(folder, 3)
    settle(relay)
    got = engine.weights.read()
    assert (got.version, got.meta) == (3, {"g": 1})
    slots = [engine.weights._read_slot(slot, 3) for slot in (0, 1)]
    assert [bytes(other.data) for other in slots if other] == [blob.data]
    assert folder.read_state().published_version == 3
    engine.weights.report(3, swap_pause_ms=1.5)
    settle(relay)
    assert folder.read_state().installed_version == 3
    assert folder.read_state().swap_pause_ms == 1.5
    engine.weights.report(3, 4, "norm")
    settle(relay)
    assert folder.read_state().refused_version == 4
    assert folder.read_state().refused_reason == "norm"


def test_the_relay_refuses_a_damaged_unfit_or_implausible_draft(disk, engine):
    relay, folder = engine.relay(disk), engine.folder(disk)
    big = {"fc.weight": ("float32", (1 << 19,), np.zeros(1 << 19, np.float32))}
    for version, tensors, reason in ((1, None, "sha256"), (2, big, "segment")):
        path, blob = send(folder, version, tensors)
        if reason == "sha256":
            disk.write(path, blob.data[:-1])
        settle(relay)
        state = folder.read_state()
        assert (state.refused_version, state.refused_reason) == (version, reason)
        assert engine.weights.latest_version() == 0
    send(folder, 2**63 - 1)
    settle(relay)
    assert engine.weights.latest_version() == 0
    send(folder, 3)
    settle(relay)
    assert engine.weights.latest_version() == 3
    assert folder.read_state().refused_version == 2


def test_a_draft_that_cannot_be_read_yet_is_retried(disk, engine):
    relay, folder = engine.relay(disk), engine.folder(disk)
    path, blob = send(folder, 1)
    disk.remove(path)
    settle(relay)
    assert folder.read_state().refused_version == 0
    disk.write(path, blob.data)
    settle(relay)
    assert engine.weights.latest_version() == 1


def test_the_rows_are_those_that_a_live_trainer_requests(disk, engine):
    relay, folder = engine.relay(disk), engine.folder(disk)
    settle(relay)
    assert engine.ring.collect_mode is Collect.FULL  # stored for the next trainer
    for state, mode in (
        (TrainerState("i", 1.0, True, Collect.METADATA), Collect.METADATA),
        (TrainerState("i", 2.0, False, Collect.METADATA), Collect.FULL),
        (TrainerState("i", 3.0, False, Collect.NOTHING), Collect.NOTHING),
    ):
        folder.write_trainer(state)
        settle(relay)
        assert engine.ring.collect_mode is mode


def test_failing_storage_stops_nothing_and_loses_nothing(
    disk, engine, monkeypatch, caplog
):
    relay = engine.relay(disk)
    monkeypatch.setattr(disk, "write", failing(disk, "write", ""))
    engine.serve(range(3))
    settle(relay)
    engine.serve(range(3, 6))
    settle(relay)
    assert engine.ring.stats().used_bytes > 0  # not taken: memory stays bounded
    assert sum("no space left" in r.message for r in caplog.records) == 1
    monkeypatch.undo()
    settle(relay, 0.05)
    assert read_seeds(disk) == list(range(6))


def test_a_relay_outlives_an_unexpected_exception(disk, engine, monkeypatch, caplog):
    relay = engine.relay(disk)

    def fails(*_):
        raise MemoryError("so much")

    monkeypatch.setattr(relay._folder, "read_trainer", fails)
    settle(relay)
    assert "so much" in caplog.text
    monkeypatch.undo()
    engine.serve([1])
    settle(relay)
    assert seeds_in(disk) == {1: [1]}


def test_the_last_records_go_into_shards_of_the_usual_size(disk, engine, monkeypatch):
    monkeypatch.setattr(spool_shard, "SHARD_SECONDS", 1e9)
    monkeypatch.setattr(spool_shard, "SHARD_BYTES", 1 << 10)
    relay = engine.relay(disk)
    engine.serve(range(50))
    relay.stop()
    relay.run()
    assert read_seeds(disk) == list(range(50))
    assert len(seeds_in(disk)) > 3


# Purges


def serve_tenants(engine, *tenants):
    for tenant in tenants:
        record = replace(make_record(make_spec(), tenant), tenant=tenant)
        assert write_record(engine.ring, record)


def test_a_purge_removes_a_tenant_from_ring_memory_and_spool(
    disk, engine, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    relay = engine.relay(disk)
    serve_tenants(engine, 7, 6)
    settle(relay)
    serve_tenants(engine, 8)
    settle(relay)
    monkeypatch.setattr(spool_shard, "SHARD_SECONDS", 1e9)
    serve_tenants(engine, 7, 8)
    relay.tick()  # now they are in the open shard
    serve_tenants(engine, 7, 9, 7)
    command = purge(engine.run_dir, 7, "relay")
    relay._drain = lambda: 0  # what comes before the purge stays in the ring
    relay._next_poll = 0.0
    relay.tick()
    removed = {"records": 3, "shards": 1}
    assert command.answer == {"ok": True, "removed": removed, "engines": ["e1"]}
    assert engine.ring.stats().used_bytes == 0
    assert "a purge removed 3 records and 1 shards" in caplog.text
    assert relay.purge(7) == {"records": 0, "shards": 0}
    relay.stop()
    relay.run()
    assert read_seeds(disk) == [8, 8, 9]
    assert sockets([engine.run_dir], "relay") == {}


@pytest.mark.parametrize("ends", [False, True])
def test_a_starting_or_ending_relay_answers_before_it_stores(disk, engine, ends):
    relay = engine.relay(disk)
    serve_tenants(engine, 7)
    command = purge(engine.run_dir, 7, "relay")
    if ends:
        relay.stop()
        relay.run()
    else:
        relay.tick()
    assert command.answer["ok"]
    relay.close()
    assert seeds_in(disk) == {}


def test_a_purge_succeeds_only_when_the_ring_was_empty(disk, engine, monkeypatch):
    monkeypatch.setattr("vllm_tide.transport.spool_relay._EMPTY_LIMIT_S", 0.02)
    relay = engine.relay(disk)
    serve_tenants(engine, 7)
    body = relay._reader.take()
    with monkeypatch.context() as busy:
        busy.setattr(relay._reader, "take", lambda: body)
        with pytest.raises(TransportError, match="not empty"):
            relay.purge(7)
    assert relay.purge(7) == {"records": 0, "shards": 0}


@pytest.mark.parametrize(
    ("request_", "message"),
    [({"do": "pause"}, "purge only"), ({"do": "purge"}, "'' is not a hexadecimal id"),
     ({"do": "purge", "tenant": "x"}, "not a hexadecimal id"),
     ({"do": "purge", "tenant": 7}, "not a hexadecimal id")],
)  # fmt: skip
def test_a_relay_refuses_another_command(disk, engine, request_, message):
    relay = engine.relay(disk)
    serve_tenants(engine, 7)
    command = Command(engine.run_dir, kind="relay", **request_)
    relay._drain = lambda: 0
    relay.tick()
    assert not command.answer["ok"] and message in command.answer["error"]
    assert engine.ring.stats().used_bytes > 0


def test_a_purge_of_a_relay_without_its_storage_is_refused(disk, engine, monkeypatch):
    """The shard that it could not remove is read until the command is repeated."""
    relay = engine.relay(disk)
    serve_tenants(engine, 7)
    settle(relay)
    with monkeypatch.context() as down:
        down.setattr(disk, "remove", failing(disk, "remove", "records"))
        command = purge(engine.run_dir, 7, "relay")
        relay._next_poll = 0.0
        relay.tick()
        assert not command.answer["ok"] and command.answer["error"]
    command = purge(engine.run_dir, 7, "relay")
    relay._next_poll = 0.0
    relay.tick()
    assert command.answer["ok"] and seeds_in(disk) == {}


# Its end


@pytest.mark.parametrize("which", ["ring", "weights"])
def test_a_relay_with_truncated_memory_ends(disk, engine, which):
    relay = engine.relay(disk)
    engine.serve(range(2))
    relay.tick()
    os.truncate(f"{SHM_DIR}/{getattr(engine.manifest, which)}", 0)
    assert relay.run() == "engine_gone"
    assert read_seeds(disk) == [0, 1]


@pytest.mark.parametrize("full", [False, True])
def test_the_relay_writes_an_end_state(disk, engine, monkeypatch, full):
    engine.serve(range(2))
    relay = engine.relay(disk)
    if full:
        monkeypatch.setattr(disk, "write", failing(disk, "write", "records"))
    relay.stop()
    assert relay.run() == "stopped"
    assert not engine.folder(disk).read_state().running
    assert read_seeds(disk) == [[0, 1], []][full]
    assert not engine.ring.stats().consumer_alive


def test_a_serving_engine_does_not_keep_a_relay_from_ending(disk, engine):
    relay = engine.relay(disk)
    flush, seeds = relay._writer.flush, iter(range(100))

    def busy():
        engine.serve([next(seeds)])  # the ring is never empty when a drain begins
        return flush()

    relay._writer.flush = busy
    engine.serve([next(seeds)])
    relay.stop()
    assert relay.run() == "stopped"
    assert next(seeds) < 5
    state = engine.folder(disk).read_state()
    assert not state.running
    assert seeds_in(disk)[state.last_shard][0] == 0


# Its start


@pytest.mark.parametrize("spool", [{}, {"spool": {"url": "/s"}}])
def test_a_server_has_a_trainer_or_a_relay_if_that_gets_rows_and_sends_drafts(spool):
    assert starts_trainer(parse_tide(spool))
    assert starts_trainer(parse_tide({**spool, "train": {"autostart": False}})) == bool(
        spool
    )
    for nobody in (
        {"preset": "control"},
        {"preset": "observe"},
        {"capture": {"enabled": False}},
        {"swap": {"enabled": False}},
    ):
        assert not starts_trainer(parse_tide({**nobody, **spool}))


def test_a_restarted_relay_does_not_store_the_draft_again(disk, engine, monkeypatch):
    written = []
    write = disk.write

    def note(name, data):
        written.append(name.split("/")[2])
        write(name, data)

    monkeypatch.setattr(disk, "write", note)
    for expected in (["state.json", "initial", "initial", "engine.json"],
                     ["state.json", "engine.json"]):  # fmt: skip
        relay = engine.relay(disk)
        relay.tick()
        relay.close()
        assert written == expected
        written.clear()


def relay_command(run_dir, *argv):
    parser = argparse.ArgumentParser()
    cli_relay.add_arguments(parser)
    return cli_relay.run(parser.parse_args(["--run-dir", str(run_dir), *argv]))


def test_permanent_errors_are_reported_at_once(
    engine, disk, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cli_relay, "_prepare", lambda _config: None)
    relay, run_dir = engine.relay(disk), engine.run_dir
    for argv, sentence in (
        ((tmp_path / "none",), "no live engine"),
        ((run_dir,), "tide.spool.url"),
        ((run_dir, "--spool", "nosuch://x"), "Protocol not known"),
        ((run_dir, "--spool", disk.url), "already the reader"),
    ):
        assert relay_command(*argv) == (1 if sentence == "no live engine" else 2)
        assert sentence in capsys.readouterr().err
    relay.close()
    engine.relay(disk).close()


def test_an_unreachable_spool_is_retried_while_the_engine_lives(
    engine, tmp_path, monkeypatch, caplog
):
    """Meanwhile the relay answers a purge of the ring when the spool is back."""
    (tmp_path / "spool").write_text("")  # a mount that is missing
    engine.serve([1])
    relay = engine.relay(cli_relay.Store(str(tmp_path / "spool")), CONFIG)
    settle(relay)
    assert sum("cannot be opened" in r.message for r in caplog.records) == 1
    assert len(sockets([engine.run_dir], "relay")) == 1
    (tmp_path / "spool").unlink()
    settle(relay)
    assert seeds_in(cli_relay.Store(str(tmp_path / "spool"))) == {1: [1]}


def test_an_unreachable_spool_is_given_up_when_the_engine_is_gone(
    engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(cli_relay, "_prepare", lambda _config: None)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cli_relay.Relay, "_gone", lambda _relay: True)
    assert relay_command(engine.run_dir, "--spool", str(tmp_path / "file")) == 0
    assert sockets([engine.run_dir], "relay") == {}


def test_the_folder_of_an_engine_has_no_other_name(disk):
    with pytest.raises(TransportError, match="engine"):
        EngineFolder(disk, "../e1")
