"""The relay between an engine and its spool: transfer, start and end."""

import argparse
import os

import numpy as np
import pytest

from tests.transport.spool_toys import (
    CONFIG,
    failing,
    head_tensors,
    read_all,
    seeds_in,
    settle,
    write_shards,
    writer_of,
)
from vllm_tide.cli import relay as cli_relay
from vllm_tide.config import parse_tide, starts_trainer
from vllm_tide.transport import TransportError, publication, spool_writer
from vllm_tide.transport.admin import sockets
from vllm_tide.transport.shm import SHM_DIR
from vllm_tide.transport.spool import EngineFolder, ReaderState
from vllm_tide.transport.spool_store import StoreError, open_store


def read_seeds(store):
    return sum(seeds_in(store).values(), [])


# Between ring and spool


def test_the_relay_carries_records_drafts_and_feedback(store, engine):
    engine.serve(range(5))
    relay = engine.relay(store)
    settle(relay)
    folder = engine.folder(store)
    state = folder.read_state()
    assert state.running
    assert state.last_shard >= 1
    assert state.rows == 20
    records, _ = read_all(store, last=state.last_shard)
    assert sum(records.values(), []) == list(range(5))
    blob = publication.encode(head_tensors(3), 3, 0, {"g": 1})
    folder.write_draft(blob)
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


def test_the_relay_refuses_a_damaged_or_unfit_draft(disk, engine):
    relay = engine.relay(disk)
    folder = engine.folder(disk)
    big = {"fc.weight": ("float32", (1 << 19,), np.zeros(1 << 19, np.float32))}
    for version, tensors, harm, reason in (
        (1, head_tensors(1), True, "truncated"),
        (2, big, False, "segment"),
    ):
        folder.write_draft(publication.encode(tensors, version, 0, {}))
        if harm:
            at = folder.path("heads", f"{version:012d}.safetensors")
            disk.write(at, disk.read(at)[:-1])
        settle(relay)
        state = folder.read_state()
        assert (state.refused_version, state.refused_reason) == (version, reason)
        assert engine.weights.latest_version() == 0
    folder.write_draft(publication.encode(head_tensors(3), 3, 0, {}))
    settle(relay)
    assert engine.weights.latest_version() == 3


def test_a_draft_that_arrives_during_a_scan_is_passed_on_once(
    disk, engine, monkeypatch
):
    relay, folder = engine.relay(disk), engine.folder(disk)
    folder.write_draft(publication.encode(head_tensors(1), 1, 0, {}))
    read = EngineFolder.read_draft

    def late(self, *args):
        monkeypatch.undo()
        folder.write_draft(publication.encode(head_tensors(2), 2, 0, {}))
        return read(self, *args)

    monkeypatch.setattr(EngineFolder, "read_draft", late)
    settle(relay)
    settle(relay)
    assert engine.weights.latest_version() == 2
    assert folder.read_state().refused_version == 0


def test_full_rows_are_collected_while_any_live_trainer_requests_them(disk, engine):
    relay = engine.relay(disk)
    folder = engine.folder(disk)
    settle(relay)
    assert engine.ring.collect  # no trainer: stored for the next one
    for name, state, collect in (
        ("a", ReaderState("i", unix=1.0, collect=False), False),
        ("b", ReaderState("j", unix=1.0, collect=True), True),
        ("b", ReaderState("j", unix=2.0, running=False), False),
    ):
        folder.write_reader(name, state)
        settle(relay)
        assert engine.ring.collect is collect


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


def test_a_server_with_a_spool_always_has_a_relay():
    assert starts_trainer(parse_tide({}))
    for nobody in (
        {"preset": "control"},
        {"preset": "observe"},
        {"capture": {"enabled": False}},  # a trainer gets no rows
        {"train": {"autostart": False}},
    ):
        assert not starts_trainer(parse_tide(nobody))
        assert starts_trainer(parse_tide({**nobody, "spool": {"url": "/s"}}))


def relay_command(run_dir, *argv):
    parser = argparse.ArgumentParser()
    cli_relay.add_arguments(parser)
    return cli_relay.run(parser.parse_args(["--run-dir", str(run_dir), *argv]))


@pytest.fixture
def pauses(monkeypatch):
    """Return the command's sleeps; the seventh calls the function in `mend`."""
    slept, mend = [], []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 7:
            mend.pop()()

    monkeypatch.setattr(cli_relay.time, "sleep", sleep)
    monkeypatch.setattr(cli_relay, "_prepare", lambda _config: None)
    return slept, mend


def test_permanent_errors_are_reported_at_once(engine, disk, tmp_path, pauses, capsys):
    slept, _ = pauses
    relay, run_dir = engine.relay(disk), engine.run_dir
    for argv, sentence in (
        ((tmp_path / "none",), "no live engine"),
        ((run_dir,), "tide.spool.url"),
        ((run_dir, "--spool", "nosuch://x"), "Protocol not known"),
        ((run_dir, "--spool", disk.url), "already the trainer"),
    ):
        assert relay_command(*argv) == (1 if sentence == "no live engine" else 2)
        assert sentence in capsys.readouterr().err
    relay.close()
    assert slept == []
    engine.relay(disk).close()


def test_an_unreachable_spool_is_retried_while_the_engine_lives(
    engine, tmp_path, monkeypatch, pauses, caplog
):
    slept, mend = pauses
    down = ["is not mounted"]

    def opened(url):
        store = open_store(url)
        if down:
            error = StoreError(f"{url} {down[0]} {len(slept) // 4}")
            if len(slept) % 2:
                raise error
            store.write = failing(store, "write", "", error)
        return store

    monkeypatch.setattr(cli_relay, "open_store", opened)
    mend.append(down.clear)
    url = str(tmp_path / "spool")
    relay = cli_relay._connect(engine.manifest, engine.run_dir, url, CONFIG)
    assert slept == [1, 2, 4, 8, 16, 30, 30]
    assert sum("is not mounted" in r.message for r in caplog.records) == 2
    engine.serve([1])
    relay.tick()
    relay.stop()
    assert relay.run() == "stopped"
    assert seeds_in(open_store(url)) == {1: [1]}


def test_an_unreachable_spool_is_given_up_when_the_engine_is_gone(
    engine, tmp_path, pauses
):
    slept, mend = pauses
    (tmp_path / "file").write_text("")
    mend.append(lambda: (engine.run_dir / "engine-e1.json").unlink())
    assert relay_command(engine.run_dir, "--spool", str(tmp_path / "file")) == 0
    assert slept == [1, 2, 4, 8, 16, 30, 30]
    assert sockets([engine.run_dir], "relay") == {}


# A second relay in its place


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_shard_never_takes_the_number_of_another_relays(disk, monkeypatch, when):
    late = writer_of(disk, [1])
    write, hung = disk.write, []

    def hangs(name, *parts, durable=True):
        if name.endswith(".safetensors") and not hung:
            hung.append(name)
            with monkeypatch.context() as later:
                later.setattr(spool_writer, "steady_unix", lambda: 2e9)
                write_shards(disk, [[5]])
        write(name, *parts, durable=durable)

    if when == "before":
        write_shards(disk, [[5]])
    else:
        monkeypatch.setattr(disk, "write", hangs)
    with pytest.raises(TransportError, match="of another relay"):
        late.flush()
    assert seeds_in(disk) == {1: [5]}
    assert late.blocked
    assert late.flush() == 2  # its records are not lost
    assert seeds_in(disk) == {1: [5], 2: [1]}
    assert len(disk.sizes("engines/e1/records")) == 4  # and nothing is left over
