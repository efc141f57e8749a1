"""What the relay carries between an engine and its spool."""

import argparse
import os

import numpy as np
import pytest

from tests.transport.samples import make_spec
from tests.transport.spool_toys import (
    head_tensors,
    read_all,
    settle,
)
from vllm_tide.cli import relay as cli_relay
from vllm_tide.config import parse_tide
from vllm_tide.engine.trainer_process import TrainerProcess
from vllm_tide.transport import TransportError, publication
from vllm_tide.transport.shm import SHM_DIR
from vllm_tide.transport.spool import EngineFolder, ReaderState

SPEC = make_spec()


# The relay


def test_the_relay_carries_records_drafts_and_feedback(store, engines):
    engine = engines()
    engine.serve(range(5))
    relay = engine.relay(store)
    settle(relay)
    folder = engine.folder(store)
    state = folder.read_state()
    assert state.running
    assert state.last_shard >= 1
    assert state.rows == 20
    found, _ = read_all(store, last=state.last_shard)
    assert sum(found.values(), []) == list(range(5))
    blob = publication.encode(head_tensors(3), 3, 0, {"g": 1})
    folder.write_draft(blob)
    settle(relay)
    got = engine.weights.read()
    assert (got.version, got.meta) == (3, {"g": 1})
    held = [engine.weights._read_slot(slot, 3) for slot in (0, 1)]
    assert [bytes(other.data) for other in held if other] == [blob.data]
    assert folder.read_state().published_version == 3
    engine.weights.report(3, swap_pause_ms=1.5)
    settle(relay)
    assert folder.read_state().installed_version == 3
    assert folder.read_state().swap_pause_ms == 1.5
    engine.weights.report(3, 4, "norm")
    settle(relay)
    assert folder.read_state().refused_version == 4
    assert folder.read_state().refused_reason == "norm"
    relay.close()


@pytest.mark.parametrize("which", ["ring", "weights"])
def test_a_relay_whose_memory_was_cut_short_ends(store, engines, which):
    engine = engines()
    relay = engine.relay(store)
    engine.serve(range(2))
    relay.tick()
    os.truncate(f"{SHM_DIR}/{getattr(engine.manifest, which)}", 0)
    assert relay.run() == "engine_gone"
    last = EngineFolder(store, engine.manifest.engine_id).read_state().last_shard
    found, _ = read_all(store, last=max(last, 1))
    assert sum(found.values(), []) == [0, 1]


def test_the_relay_refuses_a_draft_that_is_damaged_or_does_not_fit(store, engines):
    engine = engines()
    relay = engine.relay(store)
    folder = engine.folder(store)
    big = {"fc.weight": ("float32", (1 << 19,), np.zeros(1 << 19, np.float32))}
    for version, tensors, harm, reason in (
        (1, head_tensors(1), True, "truncated"),
        (2, big, False, "segment"),
    ):
        folder.write_draft(publication.encode(tensors, version, 0, {}))
        if harm:
            at = folder.path("heads", f"{version:012d}.safetensors")
            store.write(at, store.read(at)[:-1])
        settle(relay)
        state = folder.read_state()
        assert (state.refused_version, state.refused_reason) == (version, reason)
        assert engine.weights.latest_version() == 0
    folder.write_draft(publication.encode(head_tensors(3), 3, 0, {}))
    settle(relay)
    assert engine.weights.latest_version() == 3
    relay.close()


def test_a_draft_that_comes_amid_a_look_is_passed_on_once(store, engines, monkeypatch):
    engine = engines()
    relay, folder = engine.relay(store), engine.folder(store)
    folder.write_draft(publication.encode(head_tensors(1), 1, 0, {}))
    read = EngineFolder.read_draft

    def late(self):
        monkeypatch.undo()
        folder.write_draft(publication.encode(head_tensors(2), 2, 0, {}))
        return read(self)

    monkeypatch.setattr(EngineFolder, "read_draft", late)
    settle(relay)
    settle(relay)
    assert engine.weights.latest_version() == 2
    assert folder.read_state().refused_version == 0
    relay.close()


def test_full_rows_are_collected_while_any_live_trainer_wants_them(store, engines):
    engine = engines()
    relay = engine.relay(store)
    folder = engine.folder(store)
    settle(relay)
    assert engine.ring.collect  # nobody to ask: kept for the next trainer
    light = ReaderState("i", unix=1.0, collect=False)
    folder.write_reader("a", light)
    settle(relay)
    assert not engine.ring.collect
    folder.write_reader("b", ReaderState("j", unix=1.0, collect=True))
    settle(relay)
    assert engine.ring.collect
    folder.write_reader("b", ReaderState("j", unix=2.0, running=False))
    settle(relay)
    assert not engine.ring.collect
    relay.close()


def test_storage_that_fails_stops_nothing_and_loses_nothing(
    store, engines, monkeypatch, caplog
):
    engine = engines()
    relay = engine.relay(store)

    def down(*_args, **_kwargs):
        raise TransportError("the storage is down")

    monkeypatch.setattr(store, "write", down)
    engine.serve(range(3))
    settle(relay)
    engine.serve(range(3, 6))
    settle(relay)
    assert engine.ring.stats().used_bytes > 0  # not taken: memory stays bounded
    assert sum("is down" in r.message for r in caplog.records) == 1
    monkeypatch.undo()
    settle(relay, 0.1)
    found, _ = read_all(store, last=engine.folder(store).read_state().last_shard)
    assert sum(found.values(), []) == list(range(6))
    relay.close()


def test_the_relay_says_a_last_word(store, engines):
    engine = engines()
    engine.serve(range(2))
    relay = engine.relay(store)
    relay.stop()
    assert relay.run() == "stopped"
    state = engine.folder(store).read_state()
    assert not state.running
    found, _ = read_all(store, last=state.last_shard)
    assert sum(found.values(), []) == [0, 1]
    assert not engine.ring.stats().consumer_alive


def test_a_second_relay_or_trainer_of_the_same_engine_is_refused(store, engines):
    engine = engines()
    relay = engine.relay(store)
    with pytest.raises(TransportError, match="already the trainer"):
        engine.relay(store)
    relay.close()
    engine.relay(store).close()


def test_with_a_spool_the_server_starts_a_relay_instead_of_a_trainer(
    tmp_path, monkeypatch
):
    started = []

    class Child:
        pid = 1

        def __init__(self, command, **_options):
            started.append(command)

        def poll(self):
            return 0

    monkeypatch.setattr("vllm_tide.engine.trainer_process.subprocess.Popen", Child)
    group = "0123456789abcdef"
    spooled = parse_tide({"spool": {"url": "s3://secret@bucket"}})
    alone = parse_tide({})
    for config, kind, whom in ((spooled, "relay", "e1"), (alone, "train", group)):
        assert TrainerProcess.wanted(config)
        process = TrainerProcess("e1", tmp_path, group, config.spool)
        process.start()
        process.close()
        command = started.pop()
        assert command[1:] == [
            "-m", "vllm_tide", kind, "--engine", whom, "--run-dir", str(tmp_path)
        ]  # fmt: skip
    made = ["relay-e1.log", "trainer-e1.log", "trainers.lock"]
    assert sorted(os.listdir(tmp_path)) == made
    for nobody in (
        {"preset": "control"},
        {"preset": "observe"},
        {"capture": {"enabled": False}},  # a trainer gets no rows
        {"train": {"autostart": False}},
    ):
        assert not TrainerProcess.wanted(parse_tide(nobody))
        assert TrainerProcess.wanted(parse_tide({**nobody, "spool": {"url": "/s"}}))


def relay_command(*argv):
    parser = argparse.ArgumentParser()
    cli_relay.add_arguments(parser)
    return cli_relay.run(parser.parse_args(argv))


def test_the_command_says_what_is_missing(engines, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli_relay, "_prepare", lambda _config: None)
    assert relay_command("--run-dir", str(tmp_path / "none")) == 2
    assert "no live engine" in capsys.readouterr().err
    engine = engines()
    assert relay_command("--run-dir", str(engine.run_dir)) == 2
    assert "tide.spool.url" in capsys.readouterr().err
    argv = ["--run-dir", str(engine.run_dir), "--spool", "nosuch://x"]
    assert relay_command(*argv) == 2
    assert "Protocol not known" in capsys.readouterr().err
