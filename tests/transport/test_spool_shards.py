"""Shards of a spool: written whole or not at all, read to the bit."""

import os
import time

import numpy as np
import pytest
from safetensors.numpy import load

from tests.transport.samples import (
    body_of,
    identity,
    make_metadata_only,
    make_record,
    make_spec,
)
from tests.transport.spool_toys import (
    CONFIG,
    failing,
    files_of,
    read_all,
    record_bytes,
    seeds_in,
    write_shards,
    writer_of,
)
from vllm_tide.transport import Phase, spool_writer
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.spool import EngineFolder, EngineState, engine_ids
from vllm_tide.transport.spool_shard import (
    ShardBuilder,
    ShardDamaged,
    SpoolReader,
    read_shard,
)
from vllm_tide.transport.spool_store import StoreError, open_store
from vllm_tide.transport.spool_writer import SpoolWriter

SPEC = make_spec()


# Shards


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_records_are_read_back_to_the_bit(store, teacher):
    spec = make_spec(teacher)
    records = [
        make_record(spec, 1),
        make_record(spec, 2, 7, Phase.PREFILL, teacher_start=3),
        make_record(spec, 3, 0),
        make_metadata_only(spec, 5),
    ]
    assert writer_of(store, records).flush() == 1
    reader = SpoolReader(EngineFolder(store, "e1"), spec)
    got = reader.fetch(EngineState(last_shard=1))
    assert [identity(r) for r in got.records] == [identity(r) for r in records]
    assert all(r.features.flags.writeable for r in got.records)
    assert reader.fetch(EngineState(last_shard=1)) is None


def test_records_of_a_shard_do_not_keep_its_file_in_memory():
    builder = ShardBuilder()
    for seed in range(50):
        builder.add(body_of(make_record(SPEC, seed)))
    manifest, body = builder.build(7, 1234.5)
    tensors = load(body)
    assert set(tensors) == {"offsets", "records"}
    assert tensors["offsets"][-1] == len(tensors["records"]) == builder.num_bytes
    assert manifest["file"] == "000000000007-1234.safetensors"
    assert manifest["bytes"] == len(body)
    assert (manifest["records"], manifest["rows"]) == (50, 200)
    records, unfit = read_shard(manifest, body, SPEC)
    assert unfit == 0
    base = records[0].features
    while getattr(base, "base", None) is not None:
        base = base.base
    num_bytes = base.nbytes if isinstance(base, (np.ndarray, memoryview)) else len(base)
    assert num_bytes < builder.num_bytes / 10


@pytest.mark.parametrize("harm", ["cut", "flip", "longer", "format", "crc-of-other"])
def test_a_damaged_shard_is_never_read(harm):
    builder = ShardBuilder()
    builder.add(body_of(make_record(SPEC, 1)))
    manifest, body = builder.build(1, 0.0)
    body = bytearray(body)
    if harm == "cut":
        body = body[:-1]
    elif harm == "flip":
        body[len(body) // 2] ^= 1
    elif harm == "longer":
        body += b"\0"
    elif harm == "format":
        manifest["record_format"] = 1
    else:
        del manifest["crc32c"]
    with pytest.raises(ShardDamaged):
        read_shard(manifest, bytes(body), SPEC)


def test_damaged_and_removed_shards_are_skipped_and_counted(store):
    write_shards(store, [[n] for n in range(1, 11)])
    names = files_of(store)
    bodies = [n for n in names if n.endswith(".safetensors")]
    at = "engines/e1/records/"
    store.write(at + bodies[1], store.read(at + bodies[1])[:-8])  # shard 2: cut
    store.write(at + "000000000004.json", b'{"shard":4,"fi')  # 4: half a manifest
    store.remove(at + bodies[5])  # 6: no body
    for number in (8, 9):
        store.remove(at + f"{number:012d}.json")
    records, reader = read_all(store, last=10)
    assert records == {n: [n] for n in (1, 3, 5, 7, 10)}
    assert reader.skipped["damaged"] == 1
    assert reader.skipped["removed"] == 4


def test_a_manifest_cannot_name_a_file_outside_its_folder(store):
    write_shards(store, [[1]])
    at = "engines/e1/records/000000000001.json"
    text = store.read(at).decode()
    for name in ("../../x.safetensors", "000000000002-1.safetensors"):
        store.write(at, text.replace("000000000001-", name + "#").encode())
        records, _ = read_all(store, last=1)
        assert records == {}


# Writing


def test_a_shard_is_closed_by_size_and_by_age(store, monkeypatch):
    monkeypatch.setattr(spool_writer, "SHARD_SECONDS", 1e9)
    writer = writer_of(store)
    assert not writer.due()
    assert writer.flush() == 0
    writer.add(body_of(make_record(SPEC, 1)))
    assert not writer.due()
    monkeypatch.setattr(spool_writer, "SHARD_SECONDS", 0.0)
    assert writer.due()
    assert writer.flush() == 1
    assert not writer.due()
    monkeypatch.setattr(spool_writer, "SHARD_SECONDS", 1e9)
    writer.add(body_of(make_record(SPEC, 2, num_rows=1 << 15)))
    assert writer.due()


def test_a_restarted_writer_continues_and_never_reuses_a_number(store):
    write_shards(store, [[1], [2]])
    # It died between body and manifest of shard 3.
    store.write("engines/e1/records/000000000003-5.safetensors", b"half")
    writer = write_shards(store, [[4]])
    assert (writer.first, writer.last) == (1, 4)
    records, reader = read_all(store, last=4)
    assert records == {1: [1], 2: [2], 4: [4]}
    assert reader.skipped["removed"] == 1


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_shard_is_stored_and_retried(store, monkeypatch, after):
    """Also one that the storage reports as failed although it was written."""
    writer = writer_of(store, [1])
    monkeypatch.setattr(store, "write", failing(store, "write", ".json", after=after))
    for _ in range(3):
        with pytest.raises(StoreError):
            writer.flush()
        assert writer.blocked
        assert writer.due()
    assert seeds_in(store) == ({1: [1]} if after else {})  # no manifest: no shard
    monkeypatch.undo()
    assert writer.flush() == 1
    assert not writer.blocked
    assert seeds_in(store) == {1: [1]}


def test_an_unreadable_record_is_counted_and_the_others_are_read(store):
    writer = writer_of(store)
    malformed = body_of(make_record(SPEC, 1))
    malformed[71] += 1  # its format
    writer.add(malformed)
    writer.add(body_of(make_record(make_spec(hidden_size=16), 1)))
    writer.add(body_of(make_record(SPEC, 2)))
    writer.flush()
    records, reader = read_all(store, last=1)
    assert records == {1: [2]}
    assert reader.skipped["unfit"] == 2


def silence(writer):
    """Make every heartbeat look old to the writer."""
    for heartbeat in writer._bounds._heartbeats.values():
        heartbeat._timeout_s = 0.0


def at_time(monkeypatch, unix):
    monkeypatch.setattr("vllm_tide.transport.spool_writer.steady_unix", lambda: unix)


def test_size_is_bounded_over_all_engines_oldest_first(store, monkeypatch):
    with monkeypatch.context() as before:
        at_time(before, 1.0)
        write_shards(store, [[1], [2]], "a")
    size = record_bytes(store, "a") / 2
    bounds = {"max_gib": 4.5 * size / (1 << 30), "max_age_s": 1e10}
    config = CONFIG.model_copy(update=bounds)
    writer = write_shards(store, [[3], [4], [5]], "b", config)
    writer.enforce_bounds(now=True)
    assert [n for n in files_of(store, "a") if n.endswith(".json")] == [
        "000000000002.json"
    ]
    assert len(files_of(store, "b")) == 6
    assert writer.first == 1
    writer.add(body_of(make_record(SPEC, 6)))
    writer.flush()
    writer.enforce_bounds()
    writer.add(body_of(make_record(SPEC, 7)))
    writer.flush()
    writer.enforce_bounds()
    assert files_of(store, "a") == []
    assert 0 < record_bytes(store, "b") <= config.max_gib * (1 << 30)


def test_old_shards_are_removed(store, monkeypatch):
    store.write("engines/gone/records/000000000001-5.safetensors", b"x")
    EngineFolder(store, "gone").write_state(EngineState(unix=5.0))
    EngineFolder(store, "quiet").write_state(EngineState(unix=time.time()))
    writer = write_shards(store, [[1]])
    writer.enforce_bounds(now=True)
    assert engine_ids(store) == ["e1", "gone", "quiet"]  # it may be live
    silence(writer)
    writer.enforce_bounds(now=True)
    assert writer.first == 1
    assert read_all(store, last=1)[0] == {1: [1]}
    assert engine_ids(store) == ["e1", "quiet"]
    monkeypatch.setattr(time, "time", lambda: 9e9)  # a step of the clock
    writer.enforce_bounds(now=True)
    assert engine_ids(store) == ["e1", "quiet"]
    assert len(files_of(store)) == 2
    at_time(monkeypatch, steady_unix() + CONFIG.max_age_s + 2)
    writer = SpoolWriter(EngineFolder(store, "e1"), CONFIG)
    writer.enforce_bounds(now=True)
    assert files_of(store) == []
    assert (writer.first, writer.last) == (2, 1)


def test_a_host_with_a_fast_clock_removes_nothing_of_a_live_engine(store, monkeypatch):
    write_shards(store, [[1], [2]], "near")
    near = EngineFolder(store, "near")
    near.write_json("engine.json", {}, durable=False)
    now = steady_unix()
    near.write_state(EngineState(unix=now))
    files = files_of(store, "near")
    at_time(monkeypatch, now + 2 * CONFIG.max_age_s)
    ahead = write_shards(store, [[3]], "ahead")
    for beat in range(3):
        ahead.enforce_bounds(now=True)
        near.write_state(EngineState(unix=now + beat + 1))
    assert files_of(store, "near") == files
    assert near.read_json("engine.json") == {}
    near.write_state(EngineState(unix=now + 2 * CONFIG.max_age_s))  # its own clock
    ahead.enforce_bounds(now=True)
    assert files_of(store, "near") == []
    assert len(files_of(store, "ahead")) == 2


def test_only_files_that_the_package_names_are_removed_of_a_dead_engine(tmp_path):
    store = open_store(str(tmp_path / "spool"))
    keep = tmp_path / "important"
    (keep / "deep").mkdir(parents=True)
    (keep / "thesis.tex").write_text("mine")
    (keep / "000000000001-5.safetensors").write_text("mine")
    (keep / "deep/key.pem").write_text("mine")
    for name in ("links", "mixed"):
        store.write(f"engines/{name}/state.json", b"{}")
    evil = tmp_path / "spool/engines/links"
    (evil / "records").symlink_to(keep)
    (evil / "readers").symlink_to(keep)
    for name in ("engine.json", "heads/latest.json", "readers/trainer.json",
                 "draft/model.safetensors", "records/000000000001-5.safetensors",
                 "records/notes.txt"):  # fmt: skip
        store.write(f"engines/mixed/{name}", b"x")
    os.mkfifo(tmp_path / "spool/engines/pipe")
    store.write("engines/piped/x", b"")
    os.mkfifo(tmp_path / "spool/engines/piped/state.json")
    writer = write_shards(store, [[1]])
    writer.enforce_bounds(now=True)
    silence(writer)
    writer.enforce_bounds(now=True)
    assert sorted(p.name for p in keep.rglob("*")) == [
        "000000000001-5.safetensors", "deep", "key.pem", "thesis.tex",
    ]  # fmt: skip
    assert [p.name for p in (tmp_path / "spool/engines/mixed").rglob("*")] == [
        "records",
        "notes.txt",
    ]
    assert sorted(os.listdir(evil)) == ["readers", "records"]
    assert read_all(store, last=1)[0] == {1: [1]}
