"""Untrusted content of a spool: sizes, names, numbers and times."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from safetensors import serialize

from tests.transport.feed_toys import scan
from tests.transport.samples import body_of, make_record, make_spec
from tests.transport.spool_toys import (
    CONFIG,
    failing,
    head_tensors,
    read_all,
    settle,
    write_shards,
    writer_of,
)
from vllm_tide import _shm
from vllm_tide.transport import RingWriter, TransportError, publication
from vllm_tide.transport.feed_spool import SpoolFeed, SpoolSource
from vllm_tide.transport.feeds import Feeds
from vllm_tide.transport.publication import tensor_spec
from vllm_tide.transport.spool import EngineFolder, EngineState
from vllm_tide.transport.spool_models import local_models
from vllm_tide.transport.spool_shard import ShardBuilder, ShardDamaged, read_shard
from vllm_tide.transport.spool_store import ForeignFileError, open_store
from vllm_tide.transport.spool_writer import SpoolWriter, purge_records

SPEC = make_spec()
AT = "engines/e1/records/"


# Sizes


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
    body = bytes(serialize(tensors, {}))
    manifest, _ = _builder(record).build(1, 0.0)
    manifest |= {"bytes": len(body), "crc32c": _shm.crc32c(body)}
    with pytest.raises(ShardDamaged, match="offsets"):
        read_shard(manifest, body, SPEC)


def _builder(body):
    builder = ShardBuilder()
    builder.add(body)
    return builder


def test_a_sparse_shard_is_skipped_and_removed_before_any_other(disk, tmp_path):
    write_shards(disk, [[1], [2]])
    manifest = json.loads(disk.read(AT + "000000000001.json"))
    with (tmp_path / "spool" / AT / manifest["file"]).open("r+b") as file:
        file.truncate(1 << 40)
    text = json.dumps({**manifest, "bytes": 1 << 40})
    disk.write(AT + "000000000001.json", text.encode())
    records, reader = read_all(disk, last=2)
    assert records == {2: [2]}
    assert reader.skipped["damaged"] == 1
    writer = SpoolWriter(EngineFolder(disk, "e1"), CONFIG)
    writer.enforce_bounds(now=True)
    assert list(disk.sizes(AT)) and read_all(disk, last=2)[0] == {2: [2]}
    assert manifest["file"] not in disk.sizes(AT)


def test_a_relays_last_records_go_into_shards_of_the_usual_size(
    disk, engine, monkeypatch
):
    monkeypatch.setattr("vllm_tide.transport.spool_writer.SHARD_SECONDS", 1e9)
    monkeypatch.setattr("vllm_tide.transport.spool_writer.MIB", 1 << 10)
    relay = engine.relay(disk)
    engine.serve(range(50))
    relay.stop()
    relay.run()
    records, _ = read_all(disk, "e1")
    assert [seed for seeds in records.values() for seed in seeds] == list(range(50))
    assert len(records) > 3


def sparse_draft(disk, root, version=2):
    """Return a draft of 1 TiB that takes no space."""
    folder = EngineFolder(disk, "e1")
    folder.write_draft(publication.encode(head_tensors(1), version, 0, {}))
    path = root / "spool" / folder.path("heads", f"{version:012d}.safetensors")
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    manifest = folder.read_json("heads/latest.json") | {"bytes": 1 << 40}
    folder.write_json("heads/latest.json", manifest, durable=True)


def test_a_sparse_draft_is_refused_by_relay_and_trainer(disk, engine, tmp_path):
    relay = engine.relay(disk)
    sparse_draft(disk, tmp_path)
    settle(relay)
    state = engine.folder(disk).read_state()
    assert (state.refused_version, state.refused_reason) == (2, "segment")
    feed = SpoolFeed(disk, "e1", threaded=False)
    assert feed.latest() is None
    feed.close()


def test_a_model_larger_than_memory_is_refused_in_one_line(disk, engine, tmp_path):
    engine.relay(disk).close()
    folder, cache = engine.folder(disk), tmp_path / "cache"
    disk.read = failing(disk, "read", "model.safetensors", MemoryError())
    with pytest.raises(TransportError, match="does not fit in memory"):
        local_models(folder, folder.read_engine(), cache)
    assert [p for p in cache.glob("*") if p.is_dir()] == []


def test_no_record_is_larger_than_a_shard():
    spec = make_spec(hidden_size=8192)

    def most(ring_bytes):
        segment = MagicMock(header=SimpleNamespace(size_bytes=ring_bytes))
        return RingWriter(segment, spec).max_rows * spec.row_bytes

    assert 16 << 20 < most(64 << 30) < 200 << 20
    assert most(16 << 20) <= 1 << 20


# Numbers


def test_a_draft_with_a_skipped_version_is_refused(disk, engine):
    relay, folder = engine.relay(disk), engine.folder(disk)
    feed = SpoolFeed(disk, "e1", threaded=False)
    feed.publish(head_tensors(1), version=1, parent_version=0, meta={})
    feed.heartbeat()
    settle(relay)
    far = 2**63 - 1
    blob = publication.encode(head_tensors(9), far, 0, {})
    disk.write(folder.path("heads", f"{far:012d}.safetensors"), blob.data)
    entry = {"version": far, "bytes": len(blob.data), "sha256": blob.sha256.hex()}
    folder.write_json("heads/latest.json", entry, durable=True)
    settle(relay)
    assert engine.weights.latest_version() == 1
    for number in range(3):  # newer by name than any of ours
        disk.write(folder.path("heads", f"99999999999{number}.safetensors"), b"x")
    feed.publish(head_tensors(2), version=2, parent_version=1, meta={})
    feed.heartbeat()
    settle(relay)
    assert engine.weights.latest_version() == 2
    feed.close()
    again = SpoolFeed(disk, "e1", threaded=False)
    assert again.latest_version == 2
    with pytest.raises(TransportError, match="exceeds the maximum"):
        again.publish(head_tensors(3), version=2**63, parent_version=2, meta={})
    again.close()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_an_invalid_time_makes_a_state_invalid(disk, number):
    folder = EngineFolder(disk, "e1")
    text = json.dumps(asdict(EngineState(unix=1.5))).replace("1.5", number)
    disk.write(folder.path("state.json"), text.encode())
    assert folder.read_state() is None
    reader = f'{{"instance":"x","unix":{number}}}'
    disk.write(folder.path("readers/x.json"), reader.encode())
    assert folder.read_readers() == {}


def test_an_engine_without_models_is_not_the_reference(disk, engine, tmp_path):
    engine.relay(disk)
    settle(engine.relays[0])
    entry = engine.folder(disk).read_engine()
    ghost = EngineFolder(disk, "zz")  # the last name is scanned first
    away = replace(entry.manifest, engine_id="zz", target_path="/nowhere")
    identity = {"target": "other", "draft": "other", "rows": "0" * 64}
    ghost.write_engine(replace(entry, manifest=away, identity=identity))
    ghost.write_state(EngineState(unix=time.time()))
    source = SpoolSource(disk.url, cache=tmp_path / "cache", threaded=False)
    feeds = Feeds([source])
    feeds.poll()
    scan(feeds)
    assert feeds.ids == ["e1"]
    assert "zz" in feeds.refused
    assert feeds.reference.id == "e1"
    feeds.close()


def test_rows_of_a_target_are_those_of_the_list_that_the_engine_named(
    disk, engine, tmp_path
):
    engine.relay(disk).close()
    folder = engine.folder(disk)
    entry = folder.read_engine()
    entry = replace(entry, manifest=replace(entry.manifest, target_path="/nowhere"))
    at = f"targets/{entry.identity['rows']}/files.json"
    listed = json.loads(disk.read(at))
    disk.write(at, json.dumps(dict(reversed(listed.items()))).encode())
    with pytest.raises(TransportError, match="damaged"):
        local_models(folder, entry, tmp_path / "cache")


# Threads


@pytest.mark.parametrize("threaded", [True, False])
def test_an_unexpected_exception_is_logged_and_ends_the_feed(disk, engine, threaded):
    engine.relay(disk)
    settle(engine.relays[0])
    feed = SpoolFeed(disk, "e1", threaded=threaded)

    def fails(*_):
        raise MemoryError

    feed._folder.read_state = fails
    end = time.monotonic() + 10
    with pytest.raises(TransportError, match="MemoryError"):
        while time.monotonic() < end:
            feed.heartbeat()
            time.sleep(0.01)
    feed.close()


def test_a_failing_scan_is_logged_and_repeated(disk, engine, monkeypatch, caplog):
    engine.relay(disk)
    settle(engine.relays[0])
    monkeypatch.setattr("vllm_tide.transport.feed_spool.SCAN_S", 0.01)
    source = SpoolSource(disk.url)
    assert source.find() == ["e1"]
    failed = []

    def fails(*_):
        failed.append(1)
        raise RecursionError("too deep")

    with monkeypatch.context() as odd:
        odd.setattr(source, "_alive", fails)
        _until(lambda: len(failed) > 1)
    assert "too deep" in caplog.text
    source._identities = {}
    _until(lambda: source.find() == ["e1"])
    with monkeypatch.context() as odd:
        odd.setattr(source, "_attach", fails)
        with pytest.raises(TransportError, match="too deep"):
            _until(lambda: source.open("e1"))
    source.close()


def test_a_relay_outlives_an_unexpected_exception(disk, engine, caplog):
    relay = engine.relay(disk)

    def fails(*_):
        raise MemoryError("so much")

    relay._folder.latest_draft = fails
    settle(relay)
    assert "so much" in caplog.text
    del relay._folder.latest_draft
    engine.serve([1])
    settle(relay)
    assert read_all(disk)[0] == {1: [1]}


def _until(check):
    end = time.monotonic() + 10
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


# Purges


def test_a_foreign_file_stops_no_purge_and_is_named_at_the_end(disk, tmp_path):
    write_shards(disk, [[1], [2], [3]])
    (tmp_path / "mine").write_bytes(disk.read(AT + "000000000001.json"))
    first = tmp_path / "spool" / AT / "000000000001.json"
    first.unlink()
    first.symlink_to(tmp_path / "mine")
    with pytest.raises(ForeignFileError, match=r"3 shards.*000000000001\.json"):
        purge_records(disk, before_unix=time.time() + 10)
    assert list(disk.sizes(AT)) == []
    assert (tmp_path / "mine").exists()
    first.unlink()
    assert purge_records(disk, before_unix=time.time() + 10) == 0


@pytest.mark.parametrize("tenants", [5, None, "7", {"7": 1}])
def test_a_shard_with_malformed_tenant_names_is_purged(disk, tenants):
    writer_of(disk, [1]).flush()
    manifest = json.loads(disk.read(AT + "000000000001.json"))
    text = json.dumps({**manifest, "tenants": tenants})
    disk.write(AT + "000000000001.json", text.encode())
    assert purge_records(disk, tenant=7, grace_s=0.0) == 1


# Credentials


SECRET = "memory://me:pa%2Fss@word@host/spool?sig=abc"


def test_credentials_stay_out_of_the_spool_and_of_messages(disk, engines):
    engine = engines(tide={"spool": {"url": SECRET}, "preset": "full"})
    engine.relay(disk).close()
    entry = engine.folder(disk).read_engine()
    assert entry.manifest.tide == {"preset": "full"}
    store = open_store(SECRET)
    assert store.url == "memory://host/spool"

    def fails(*_, **__):
        raise ValueError(f"no answer from {SECRET} today")

    store._fs.cat_file = fails
    try:
        with pytest.raises(TransportError, match="today") as caught:
            store.read("x")
    finally:
        del store._fs.cat_file
    assert "word" not in str(caught.value) and "abc" not in str(caught.value)
