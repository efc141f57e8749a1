"""Shards of a spool: stored whole or not at all, read to the bit, bounded, purged."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from safetensors import serialize
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
    enforce,
    failing,
    files_of,
    read_all,
    seeds_in,
    write_shards,
    writer_of,
)
from vllm_tide import _shm
from vllm_tide.transport import Phase, RingWriter, spool_shard
from vllm_tide.transport.draft_weights import tensor_spec
from vllm_tide.transport.process import steady_unix
from vllm_tide.transport.spool import (
    EngineFolder,
    EngineState,
    HeartbeatMonitor,
    Store,
    StoreError,
    engine_folders,
)
from vllm_tide.transport.spool_shard import (
    ShardDamaged,
    ShardReader,
    build_shard,
    purge_shards,
    read_shard,
)

SPEC = make_spec()
AT = "engines/e1/records/"


# Reading


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_records_are_read_back_to_the_bit(store, teacher):
    spec = make_spec(teacher)
    records = [
        make_record(spec, 1),
        make_record(spec, 2, 7, Phase.PREFILL, teacher_start=3),
        make_record(spec, 3, 0),
        make_metadata_only(spec, 5),
    ]
    assert writer_of(store, records).flush()
    reader = ShardReader(EngineFolder(store, "e1"), spec)
    number, got = reader.fetch(1)
    assert number == 1
    assert [identity(r) for r in got] == [identity(r) for r in records]
    assert all(r.features.flags.writeable for r in got)
    assert reader.fetch(1) is None


def test_records_of_a_shard_do_not_keep_its_file_in_memory():
    bodies = [body_of(make_record(SPEC, seed)) for seed in range(50)]
    name, file = build_shard(bodies, 7, 1234.5)
    assert name == f"000000000007-1234-{_shm.crc32c(file):08x}.safetensors"
    tensors = load(file)
    assert set(tensors) == {"offsets", "records"}
    num_bytes = sum(map(len, bodies))
    assert tensors["offsets"][-1] == len(tensors["records"]) == num_bytes
    records, unfit = read_shard(name, file, SPEC)
    assert (len(records), unfit) == (50, 0)
    base = records[0].features
    while getattr(base, "base", None) is not None:
        base = base.base
    size = base.nbytes if isinstance(base, (np.ndarray, memoryview)) else len(base)
    assert size < num_bytes / 10


def test_a_damaged_shard_is_never_read():
    name, file = build_shard([body_of(make_record(SPEC, 1))], 1, 0.0)
    flipped = bytearray(file)
    flipped[len(file) // 2] ^= 1
    for damaged in (b"", file[:-1], bytes(flipped), file + b"\0"):
        with pytest.raises(ShardDamaged, match="checksum"):
            read_shard(name, damaged, SPEC)
    for content in (b"", b"{}", b"\xff" * 20):
        name = f"000000000001-1-{_shm.crc32c(content):08x}.safetensors"
        with pytest.raises(ShardDamaged, match="unreadable"):
            read_shard(name, content, SPEC)


@pytest.mark.parametrize(
    "offsets",
    [
        lambda size: [0, size] * 50,  # each record is the whole file
        lambda size: [0, size + 8],
        lambda size: [0],
        lambda size: [8, size],
        lambda size: [-size, size],
        lambda size: [0, size, size],
        lambda size: [],
    ],
)
def test_offsets_that_do_not_rise_to_the_end_are_no_shard(offsets):
    record = body_of(make_record(SPEC, 1))
    at = np.array(offsets(len(record)), np.int64)
    tensors = {
        "offsets": tensor_spec("int64", [len(at)], at),
        "records": tensor_spec("uint8", [len(record)], record),
    }
    file = bytes(serialize(tensors, {}))
    name = f"000000000001-1-{_shm.crc32c(file):08x}.safetensors"
    with pytest.raises(ShardDamaged, match="offsets"):
        read_shard(name, file, SPEC)


def test_damaged_and_removed_shards_are_skipped_and_counted(store):
    write_shards(store, [[n] for n in range(1, 8)])
    names = files_of(store)
    store.write(AT + names[1], store.read(AT + names[1], 1 << 20)[:-8])
    store.remove(AT + names[3], AT + names[4])
    store.write(AT + "000000000003.safetensors", b"no shard")
    records, reader = read_all(store, last=7)
    assert records == {n: [n] for n in (1, 3, 6, 7)}
    assert reader.skipped["damaged"] == 1
    assert reader.skipped["removed"] == 2
    # The folder may be listed as it was: a shard is not removed until a later one is
    # listed, or it is missing after the listing.
    assert reader.fetch(9) is None and reader.next_shard == 8
    write_shards(store, [[8], [9]])
    assert reader.fetch(8)[0] == 8
    store.remove(AT + files_of(store)[-1])
    assert reader.fetch(9) is None
    assert reader.skipped["removed"] == 2


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


def test_a_sparse_shard_is_skipped_and_removed_before_any_other(disk, tmp_path):
    write_shards(disk, [[1], [2]])
    first = files_of(disk)[0]
    with (tmp_path / "spool" / AT / first).open("r+b") as file:
        file.truncate(1 << 40)
    records, reader = read_all(disk, last=2)
    assert records == {2: [2]}
    assert reader.skipped["damaged"] == 1
    enforce(disk)
    assert first not in files_of(disk) and seeds_in(disk) == {2: [2]}


def test_no_record_is_larger_than_a_shard():
    spec = make_spec(hidden_size=8192)

    def most(ring_bytes):
        segment = MagicMock(header=SimpleNamespace(size_bytes=ring_bytes))
        return RingWriter(segment, spec).max_rows * spec.row_bytes

    assert 16 << 20 < most(64 << 30) < 200 << 20
    assert most(16 << 20) <= 1 << 20


# Writing


def test_a_shard_is_closed_by_size_and_by_age(store, monkeypatch):
    monkeypatch.setattr(spool_shard, "SHARD_SECONDS", 1e9)
    writer = writer_of(store)
    assert not writer.due()
    assert writer.flush() == 0
    writer.add(body_of(make_record(SPEC, 1)))
    assert not writer.due()
    monkeypatch.setattr(spool_shard, "SHARD_SECONDS", 0.0)
    assert writer.due()
    assert writer.flush() and writer.last == 1
    assert not writer.due()
    monkeypatch.setattr(spool_shard, "SHARD_SECONDS", 1e9)
    writer.add(body_of(make_record(SPEC, 2, num_rows=1 << 15)))
    assert writer.due()


def test_a_restarted_writer_never_reuses_a_number(store):
    write_shards(store, [[1], [2]])
    store.write(AT + "000000000003-5-00000000.safetensors", b"half")
    assert write_shards(store, [[4]]).last == 4
    records, reader = read_all(store)
    assert records == {1: [1], 2: [2], 4: [4]}
    assert reader.skipped["damaged"] == 1
    EngineFolder(store, "e1").write_state(EngineState(last_shard=4))
    purge_shards(engine_folders(store), None)
    assert write_shards(store, [[5]]).last == 5


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_shard_is_retained_and_retried(store, monkeypatch, after):
    """Also one that the storage reports as failed although it was written."""
    writer = writer_of(store, [1])
    monkeypatch.setattr(store, "write", failing(store, "write", "rec", after=after))
    for _ in range(3):
        with pytest.raises(StoreError):
            writer.flush()
        assert writer.blocked and writer.due()
    assert seeds_in(store) == ({1: [1]} if after else {})
    monkeypatch.undo()
    assert writer.flush()
    assert not writer.blocked
    assert seeds_in(store) == {1: [1]} and len(files_of(store)) == 1


# Bounds


def silence(monkeypatch):
    """Make every heartbeat look old."""
    monkeypatch.setattr(HeartbeatMonitor, "fresh", False)


def at_time(monkeypatch, unix):
    monkeypatch.setattr("vllm_tide.transport.spool_shard.steady_unix", lambda: unix)


def test_size_is_bounded_over_all_engines_oldest_first(store, monkeypatch):
    with monkeypatch.context() as before:
        at_time(before, 1.0)
        write_shards(store, [[1], [2]], "a")
    EngineFolder(store, "a").write_state(EngineState(unix=steady_unix()))
    size = sum(store.sizes("engines/a/records").values()) / 2
    bounds = {"max_gib": 4.5 * size / (1 << 30), "max_age_s": 1e10}
    write_shards(store, [[3], [4], [5]], "b")
    enforce(store, "b", **bounds)
    assert [name[:12] for name in files_of(store, "a")] == ["000000000002"]
    assert len(files_of(store, "b")) == 3
    write_shards(store, [[6], [7]], "b")
    enforce(store, "b", **bounds)
    assert files_of(store, "a") == []
    assert 0 < sum(store.sizes("engines/b/records").values()) <= 4.5 * size


def test_old_shards_and_dead_engines_are_removed(store, monkeypatch):
    store.write("engines/gone/records/000000000001-5-00000000.safetensors", b"x")
    EngineFolder(store, "gone").write_state(EngineState(unix=5.0))
    EngineFolder(store, "quiet").write_state(EngineState(unix=time.time()))
    write_shards(store, [[1]])

    def engines():
        return [folder.engine_id for folder in engine_folders(store)]

    enforce(store)
    assert engines() == ["e1", "gone", "quiet"]  # it may be live
    monkeypatch.setattr(time, "time", lambda: 9e9)  # a step of the clock
    silence(monkeypatch)
    enforce(store)
    assert engines() == ["e1", "quiet"]
    assert seeds_in(store) == {1: [1]}
    at_time(monkeypatch, steady_unix() + CONFIG.max_age_s + 2)
    enforce(store)
    assert files_of(store) == [] and engines()[0] == "e1"


def test_a_host_with_a_fast_clock_removes_nothing_of_a_live_engine(store, monkeypatch):
    write_shards(store, [[1], [2]], "near")
    near, now = EngineFolder(store, "near"), steady_unix()
    near.write_json("engine.json", {})
    near.write_state(EngineState(unix=now))
    files = files_of(store, "near")
    at_time(monkeypatch, now + 2 * CONFIG.max_age_s)
    write_shards(store, [[3]], "ahead")
    enforce(store, "ahead", times=3)
    assert files_of(store, "near") == files
    assert near.read_json("engine.json") == {}
    enforce(store, "near")  # its own clock
    assert files_of(store, "near") == []
    assert len(files_of(store, "ahead")) == 1


def test_only_files_that_the_package_names_are_removed_of_a_dead_engine(
    tmp_path, monkeypatch
):
    store = Store(str(tmp_path / "spool"))
    keep = tmp_path / "important"
    (keep / "deep").mkdir(parents=True)
    for name in ("thesis.tex", "model.safetensors", "deep/key.pem"):
        (keep / name).write_text("mine")
    for name in ("links", "mixed"):
        store.write(f"engines/{name}/state.json", b"{}")
    evil = tmp_path / "spool/engines/links"
    for name in ("records", "drafts", "initial"):
        (evil / name).symlink_to(keep)
    (tmp_path / "spool/engines/linked").symlink_to(keep)
    for name in ("engine.json", "trainer.json", f"initial/{'0' * 64}",
                 f"drafts/{'0' * 19}-{'0' * 64}.safetensors",
                 "records/000000000001-5-00000000.safetensors", "records/.tide-1.tmp",
                 "records/notes.txt"):  # fmt: skip
        store.write(f"engines/mixed/{name}", b"x")
    os.mkfifo(tmp_path / "spool/engines/pipe")
    store.write("engines/piped/x", b"")
    os.mkfifo(tmp_path / "spool/engines/piped/state.json")
    write_shards(store, [[1]])
    silence(monkeypatch)
    enforce(store)
    assert sorted(p.name for p in keep.rglob("*")) == [
        "deep", "key.pem", "model.safetensors", "thesis.tex",
    ]  # fmt: skip
    mixed = tmp_path / "spool/engines/mixed"
    assert sorted(p.name for p in mixed.rglob("*")) == ["notes.txt", "records"]
    assert sorted(os.listdir(evil)) == ["drafts", "initial", "records"]
    assert seeds_in(store) == {1: [1]}


# Purges


def of_tenants(*tenants):
    return [
        replace(make_record(SPEC, seed), tenant=tenant)
        for seed, tenant in enumerate(tenants)
    ]


def tenants_in(store):
    """Return the tenants of all records of the spool."""
    reader = ShardReader(EngineFolder(store, "e1"), SPEC)
    tenants = []
    while (shard := reader.fetch(99)) is not None:
        tenants += [record.tenant for record in shard[1]]
    return tenants


def purge(store, tenant):
    return purge_shards(engine_folders(store), tenant)


def test_shards_of_a_tenant_or_all_are_removed(store):
    writer = writer_of(store)
    for record in of_tenants(0, 77, 5, 77):
        writer.add(body_of(record))
        writer.flush()
    store.write(AT + "000000000009-5-00000000.safetensors", b"no header")
    assert purge(store, 77) == 3
    assert tenants_in(store) == [0, 5]
    assert purge(store, None) == 2
    assert store.sizes("engines/e1/records") == {}


def test_a_header_of_any_size_is_read(store, monkeypatch):
    monkeypatch.setattr(spool_shard, "_HEADER_BYTES", 256)
    writer_of(store, of_tenants(*range(1 << 40, (1 << 40) + 50))).flush()
    assert purge(store, 7) == 0
    assert purge(store, (1 << 40) + 49) == 1


def test_a_file_that_cannot_be_removed_stops_no_purge_and_is_named(disk, monkeypatch):
    write_shards(disk, [[1], [2], [3]])
    rm_file = disk._fs.rm_file

    def refuse(path):
        if "000000000002" in path:
            raise PermissionError(path)
        rm_file(path)

    monkeypatch.setattr(disk._fs, "rm_file", refuse)
    with pytest.raises(StoreError, match=r"1 of 3 shards.*000000000002-.*manually"):
        purge(disk, None)
    assert [name[:12] for name in files_of(disk)] == ["000000000002"]
    monkeypatch.undo()
    assert purge(disk, None) == 1


@pytest.mark.parametrize("written", ["open", "no", "yes"])
@pytest.mark.parametrize(("tenant", "left"), [(7, [0, 8]), (None, []), (9, [7, 0, 8])])
def test_records_that_are_not_stored_yet_are_purged(
    store, monkeypatch, written, tenant, left
):
    """In the open shard, and in one that was written or not when it failed."""
    writer = writer_of(store, of_tenants(7, 0, 8))
    if written != "open":
        fails = failing(store, "write", "records", after=written == "yes")
        monkeypatch.setattr(store, "write", fails)
        with pytest.raises(StoreError):
            writer.flush()
        monkeypatch.undo()
    assert writer.purge(tenant) == 3 - len(left)
    assert purge(store, tenant) == (written == "yes" and tenant != 9)
    assert writer.blocked == (written != "open" and bool(left))
    writer.flush()
    assert tenants_in(store) == left
