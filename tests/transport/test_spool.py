"""The spool: on a disk and on an object store, whole or not at all."""

import argparse
import os
import stat
import subprocess
import sys
import time
import uuid
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load

from tests.transport.samples import identity, make_record, make_spec
from tests.transport.spool_toys import CONFIG, ROWS, ToyEngine, head_tensors
from vllm_tide.cli import relay as cli_relay
from vllm_tide.config import SpoolConfig, parse_tide
from vllm_tide.draft.target import TargetRows
from vllm_tide.engine.trainer_process import TrainerProcess
from vllm_tide.transport import Phase, TransportError, WeightsRefused
from vllm_tide.transport.spool import (
    EngineFolder,
    EngineState,
    Freshness,
    ReaderState,
    engine_ids,
    instance_gone,
    this_instance,
)
from vllm_tide.transport.spool_heads import (
    HeadConflict,
    encode_head,
    latest_head,
    read_head,
    write_head,
)
from vllm_tide.transport.spool_identity import difference, identity_of
from vllm_tide.transport.spool_models import local_models
from vllm_tide.transport.spool_reader import SpoolReader
from vllm_tide.transport.spool_shard import ShardBuilder, ShardDamaged, read_shard
from vllm_tide.transport.spool_store import open_store
from vllm_tide.transport.spool_writer import SpoolWriter, purge_records

SPEC = make_spec()


@pytest.fixture(params=["directory", "memory"])
def store(request, tmp_path):
    if request.param == "directory":
        return open_store(str(tmp_path / "spool"))
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def engines(tmp_path):
    made = []

    def make(name="e1", **changes):
        made.append(ToyEngine(tmp_path / name, name, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def write_shards(store, shards, engine="e1", config=CONFIG):
    """One shard per list of seeds."""
    writer = SpoolWriter(EngineFolder(store, engine), SPEC, config)
    for seeds in shards:
        for seed in seeds:
            writer.add(make_record(SPEC, seed))
        assert writer.flush() == writer.last
    return writer


def read_all(store, engine="e1", first=1, last=99, attempts=200):
    """Seeds of the records of each shard that can be read, and the reader."""
    reader = SpoolReader(EngineFolder(store, engine), SPEC)
    state = EngineState(first_shard=first, last_shard=last)
    found = {}
    for _ in range(attempts):
        shard = reader.fetch(state)
        if shard is not None:
            found[shard.number] = [r.draft_version for r in shard.records]
    return found, reader


def files_of(store, engine="e1"):
    return sorted(store.sizes(f"engines/{engine}/records"))


def record_bytes(store, engine):
    """Bytes of its shards; their manifests are not counted against the bound."""
    sizes = store.sizes(f"engines/{engine}/records")
    return sum(size for name, size in sizes.items() if not name.endswith(".json"))


# The store


def test_a_file_is_written_replaced_listed_and_removed(store):
    assert store.read("a/b/c") is None
    assert store.sizes("a") == {}
    assert store.folders("a") == []
    store.write("a/b/c", b"12", np.arange(3, dtype=np.uint8), memoryview(b"9"))
    store.write("a/b/d", b"")
    assert store.read("a/b/c") == b"12\x00\x01\x029"
    assert store.sizes("a/b") == {"c": 6, "d": 0}
    assert store.folders("a") == ["b"]
    assert store.sizes("a") == {}
    store.write("a/b/c", b"x", durable=False)
    assert store.read("a/b/c") == b"x"
    store.remove("a/b/c")
    store.remove("a/b/c")
    assert store.sizes("a/b") == {"d": 0}
    store.remove_folder("a")
    store.remove_folder("a")
    assert store.read("a/b/d") is None


def test_a_directory_is_private_and_keeps_no_temporary_file(tmp_path):
    store = open_store(f"file://{tmp_path}/s")
    store.write("f/x", b"1")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "s/f/x").stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "s/f") == ["x"]
    left = tmp_path / "s/f/.abc.tmp"
    left.write_bytes(b"half")
    assert store.sizes("f") == {"x": 1}
    assert left.exists()
    os.utime(left, (0, 0))
    assert store.sizes("f") == {"x": 1}
    assert not left.exists()


def test_a_store_that_cannot_be_used_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "file").write_text("")
    for url, says in (
        (str(tmp_path / "open"), "chmod o-rwx"),
        (str(tmp_path / "file"), "cannot be opened"),
        ("nosuch://x/y", "Protocol not known"),
    ):
        with pytest.raises(TransportError, match=says) as caught:
            open_store(url)
        assert "tide.spool.url" in str(caught.value)


def test_a_password_in_the_address_is_not_shown():
    store = open_store("memory://user:secret@place/x")
    assert "secret" not in store.url


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "x" * 129])
def test_an_engine_id_that_is_no_name_is_refused(store, name):
    with pytest.raises(TransportError, match="engine"):
        EngineFolder(store, name)


# Shards


@pytest.mark.parametrize("teacher", ["hidden", "topk", "both"])
def test_records_come_back_to_the_bit(store, teacher):
    spec = make_spec(teacher)
    light = replace(
        make_record(spec, 5, teacher_start=4),
        features=np.empty((4, 0), np.uint16),
        teacher_hidden=None,
        teacher_topk_ids=None,
        teacher_topk_logprobs=None,
        teacher_tail_logprob=None,
    )
    records = [
        make_record(spec, 1),
        make_record(spec, 2, 7, Phase.PREFILL, teacher_start=3),
        make_record(spec, 3, 0),
        light,
    ]
    folder = EngineFolder(store, "e1")
    writer = SpoolWriter(folder, spec, CONFIG)
    for record in records:
        writer.add(record)
    assert writer.flush() == 1
    reader = SpoolReader(folder, spec)
    got = reader.fetch(EngineState(last_shard=1))
    assert [identity(r) for r in got.records] == [identity(r) for r in records]
    assert all(r.features.flags.writeable for r in got.records)
    assert reader.fetch(EngineState(last_shard=1)) is None


def test_a_shard_is_a_safetensors_file():
    builder = ShardBuilder(SPEC)
    for seed in range(3):
        builder.add(make_record(SPEC, seed))
    manifest, parts = builder.build(7, 1234.5)
    body = b"".join(bytes(part) for part in parts)
    tensors = load(body)
    assert set(tensors) == {"offsets", "records"}
    assert tensors["offsets"][-1] == len(tensors["records"]) == builder.num_bytes
    assert manifest["file"] == "000000000007-1234.safetensors"
    assert manifest["bytes"] == len(body)
    assert (manifest["records"], manifest["rows"]) == (3, 12)


def test_a_record_does_not_keep_its_shard_in_memory():
    builder = ShardBuilder(SPEC)
    for seed in range(50):
        builder.add(make_record(SPEC, seed))
    manifest, parts = builder.build(1, 0.0)
    records, unfit = read_shard(manifest, b"".join(map(bytes, parts)), SPEC)
    assert unfit == 0
    base = records[0].features
    while getattr(base, "base", None) is not None:
        base = base.base
    held = base.nbytes if isinstance(base, (np.ndarray, memoryview)) else len(base)
    assert held < builder.num_bytes / 10


@pytest.mark.parametrize(
    "harm", ["cut", "flip", "longer", "format", "records", "crc-of-other"]
)
def test_a_damaged_shard_is_never_read(harm):
    builder = ShardBuilder(SPEC)
    builder.add(make_record(SPEC, 1))
    manifest, parts = builder.build(1, 0.0)
    body = bytearray(b"".join(map(bytes, parts)))
    if harm == "cut":
        body = body[:-1]
    elif harm == "flip":
        body[len(body) // 2] ^= 1
    elif harm == "longer":
        body += b"\0"
    elif harm == "format":
        manifest["record_format"] = 1
    elif harm == "records":
        manifest["records"] = 2
    else:
        del manifest["crc32c"]
    with pytest.raises(ShardDamaged):
        read_shard(manifest, bytes(body), SPEC)


def test_damaged_and_removed_shards_are_passed_over_and_counted(store):
    write_shards(store, [[n] for n in range(1, 11)])
    names = files_of(store)
    bodies = [n for n in names if n.endswith(".safetensors")]
    at = "engines/e1/records/"
    store.write(at + bodies[1], store.read(at + bodies[1])[:-8])  # shard 2: cut
    store.write(at + "000000000004.json", b'{"shard":4,"fi')  # 4: half a manifest
    store.remove(at + bodies[5])  # 6: no body
    for number in (8, 9):
        store.remove(at + f"{number:012d}.json")
    found, reader = read_all(store, last=10)
    assert found == {n: [n] for n in (1, 3, 5, 7, 10)}
    assert reader.skipped["damaged"] == 1
    assert reader.skipped["removed"] == 4


def test_a_manifest_cannot_name_a_file_elsewhere(store):
    write_shards(store, [[1]])
    at = "engines/e1/records/000000000001.json"
    text = store.read(at).decode()
    for name in ("../../x.safetensors", "000000000002-1.safetensors"):
        store.write(at, text.replace("000000000001-", name + "#").encode())
        found, _ = read_all(store, last=1)
        assert found == {}


# Writing


def test_a_shard_is_closed_by_size_and_by_age(store):
    config = SpoolConfig.model_validate({"shard_mib": 1, "shard_seconds": 0.05})
    writer = SpoolWriter(EngineFolder(store, "e1"), SPEC, config)
    assert not writer.due()
    assert writer.flush() == 0
    writer.add(make_record(SPEC, 1))
    assert not writer.due()
    time.sleep(0.06)
    assert writer.due()
    assert writer.flush() == 1
    assert not writer.due()
    writer.add(make_record(SPEC, 2, num_rows=1 << 15))
    assert writer.due()


def test_a_restarted_writer_goes_on_and_never_reuses_a_number(store):
    write_shards(store, [[1], [2]])
    # It died between body and manifest of shard 3.
    store.write("engines/e1/records/000000000003-5.safetensors", b"half")
    writer = write_shards(store, [[4]])
    assert (writer.first, writer.last) == (1, 4)
    found, reader = read_all(store, last=4)
    assert found == {1: [1], 2: [2], 4: [4]}
    assert reader.skipped["removed"] == 1


def test_a_shard_that_cannot_be_written_is_kept_and_tried_again(store, monkeypatch):
    writer = SpoolWriter(EngineFolder(store, "e1"), SPEC, CONFIG)
    writer.add(make_record(SPEC, 1))
    write = store.write

    def full(name, *parts, durable=True):
        if name.endswith(".json"):
            raise TransportError("no space left")
        write(name, *parts, durable=durable)

    monkeypatch.setattr(store, "write", full)
    for _ in range(3):
        with pytest.raises(TransportError):
            writer.flush()
        assert writer.blocked
        assert writer.due()
    assert read_all(store, last=1)[0] == {}  # the body alone is nothing
    monkeypatch.undo()
    assert writer.flush() == 1
    assert not writer.blocked
    assert read_all(store, last=1)[0] == {1: [1]}


def test_a_malformed_record_is_counted_and_the_rest_goes_on(store):
    writer = SpoolWriter(EngineFolder(store, "e1"), SPEC, CONFIG)
    writer.add(replace(make_record(SPEC, 1), num_accepted=99))
    writer.add(make_record(make_spec(hidden_size=16), 1))
    writer.add(make_record(SPEC, 2))
    writer.flush()
    assert writer.invalid == 2
    assert read_all(store, last=1)[0] == {1: [2]}


def test_size_is_bounded_over_all_engines_oldest_first(store):
    write_shards(store, [[1], [2]], "a")
    size = record_bytes(store, "a") / 2
    for name in files_of(store, "a"):  # a's shards are older than b's
        if name.endswith(".safetensors"):
            body = store.read(f"engines/a/records/{name}")
            store.remove(f"engines/a/records/{name}")
            store.write(f"engines/a/records/{name[:13]}1.safetensors", body)
    config = CONFIG.model_copy(update={"max_gib": 4.5 * size / (1 << 30)})
    config = config.model_copy(update={"max_age_s": 1e10})
    writer = write_shards(store, [[3], [4], [5]], "b", config)
    writer.keep_bounds(now=True)
    assert [n for n in files_of(store, "a") if n.endswith(".json")] == [
        "000000000002.json"
    ]
    assert len(files_of(store, "b")) == 6
    assert writer.first == 1
    writer.add(make_record(SPEC, 6))
    writer.flush()
    writer.keep_bounds()
    writer.add(make_record(SPEC, 7))
    writer.flush()
    writer.keep_bounds()
    assert files_of(store, "a") == []
    assert 0 < record_bytes(store, "b") <= config.max_gib * (1 << 30)


def test_what_is_too_old_is_removed(store, monkeypatch):
    store.write("engines/gone/records/000000000001-5.safetensors", b"x")
    EngineFolder(store, "gone").write_state(EngineState(unix=5.0))
    EngineFolder(store, "quiet").write_state(EngineState(unix=time.time()))
    writer = write_shards(store, [[1]])
    writer.keep_bounds(now=True)
    assert writer.first == 1
    assert read_all(store, last=1)[0] == {1: [1]}
    assert engine_ids(store) == ["e1", "quiet"]
    later = time.time() + CONFIG.max_age_s + 2
    monkeypatch.setattr(time, "time", lambda: later)
    writer = SpoolWriter(EngineFolder(store, "e1"), SPEC, CONFIG)
    writer.keep_bounds(now=True)
    assert files_of(store) == []
    assert (writer.first, writer.last) == (2, 1)


def test_a_tenants_shards_are_purged(store):
    folder = EngineFolder(store, "e1")
    writer = SpoolWriter(folder, SPEC, CONFIG)
    for seed, tenant in ((1, 0), (2, 77), (3, 5), (4, 77)):
        writer.add(replace(make_record(SPEC, seed), tenant=tenant))
        writer.flush()
    assert purge_records(store, tenant=77) == 2
    found, reader = read_all(store, last=4)
    assert found == {1: [1], 3: [3]}
    assert purge_records(store, before_unix=time.time() + 10) == 2
    assert files_of(store) == []


WRITER = """
import sys
from tests.transport.samples import make_record, make_spec
from tests.transport.spool_toys import CONFIG
from vllm_tide.transport.spool import EngineFolder, EngineState
from vllm_tide.transport.spool_store import open_store
from vllm_tide.transport.spool_writer import SpoolWriter
folder = EngineFolder(open_store(sys.argv[1]), "e1")
writer, spec, seed = SpoolWriter(folder, make_spec(), CONFIG), make_spec(), 0
print("up", flush=True)
while seed < 100_000:
    for _ in range(3):
        writer.add(make_record(spec, seed, num_rows=seed % 5))
        seed += 1
    writer.flush()
    folder.write_state(EngineState(last_shard=writer.last))
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.02, 0.11, 0.23])
def test_a_writer_killed_at_any_moment_leaves_only_whole_shards(tmp_path, delay):
    url = str(tmp_path / "spool")
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "up\n"
    store = open_store(url)
    folder = EngineFolder(store, "e1")
    reader = SpoolReader(folder, SPEC)
    seeds = []
    end = time.monotonic() + delay
    while time.monotonic() < end or not seeds:
        shard = reader.fetch(folder.read_state() or EngineState())
        if shard is not None:
            for record in shard.records:
                assert identity(record) == identity(
                    make_record(SPEC, record.draft_version, record.draft_version % 5)
                )
                seeds.append(record.draft_version)
    child.kill()
    child.wait()
    child.stdout.close()
    while (shard := reader.fetch(folder.read_state())) is not None:
        seeds += [record.draft_version for record in shard.records]
    assert seeds == list(range(len(seeds)))
    assert not reader.skipped["damaged"]
    assert not reader.skipped["removed"]
    again = SpoolWriter(folder, SPEC, CONFIG)
    again.add(make_record(SPEC, 1))
    assert again.flush() > folder.read_state().last_shard


# Words


def test_words_come_back_and_half_written_ones_are_nothing(store):
    folder = EngineFolder(store, "e1")
    assert folder.read_state() is None
    assert folder.read_engine() is None
    assert folder.read_readers() == {}
    state = EngineState(1.5, False, 2, 3, 4, 5, 6, "norm", 7.5, 8, 9)
    folder.write_state(state)
    assert folder.read_state() == state
    reader = ReaderState("i", 1.0, False, False, False, 4, 5)
    folder.write_reader("t", reader)
    assert folder.read_readers() == {"t": reader}
    for text in (b"", b'{"unix":1', b"[]", b'{"unix":"x"}', b"[" * 100_000):
        store.write(folder.path("state.json"), text)
        assert folder.read_state() is None


def test_an_engine_of_another_format_is_refused_in_a_sentence(store):
    folder = EngineFolder(store, "e1")
    folder.write_json("engine.json", {"format": 99}, durable=True)
    with pytest.raises(TransportError, match="spool format 99"):
        folder.read_engine()


def test_freshness_is_told_by_change_not_by_clocks():
    word = Freshness(timeout_s=0.05)
    word.look(5.0)
    assert word.fresh
    assert not word.moved
    time.sleep(0.06)
    word.look(5.0)
    assert not word.fresh
    word.look(4.0)  # a clock may even go back
    assert word.fresh
    assert word.moved


def test_a_process_of_this_host_that_is_dead_is_known_to_be():
    assert not instance_gone(this_instance())
    boot, namespace, pid, _ = this_instance().split(":")
    assert instance_gone(f"{boot}:{namespace}:{pid}:1")
    assert not instance_gone(f"other:{namespace}:{pid}:1")
    assert not instance_gone("nonsense")


# Heads


def test_a_head_comes_back_to_the_bit_and_the_last_few_are_kept(store):
    folder = EngineFolder(store, "e1")
    assert latest_head(folder) == 0
    for version in range(1, 6):
        head = encode_head(
            head_tensors(version), version=version, parent_version=1, meta={"a": 1}
        )
        write_head(folder, head)
        got = read_head(folder, latest_head(folder))
        assert (got.version, got.parent_version, got.meta) == (version, 1, {"a": 1})
        want = head_tensors(version)["fc.weight"][2]
        assert got.tensors["fc.weight"].data.tobytes() == want.tobytes()
    assert sorted(store.sizes(folder.path("heads"))) == sorted(
        ["latest.json"]
        + [f"{v:012d}.{ext}" for v in (3, 4, 5) for ext in ("json", "safetensors")]
    )
    with pytest.raises(HeadConflict, match="not newer"):
        write_head(folder, head)


@pytest.mark.parametrize("harm", ["cut", "flip", "manifest", "gone"])
def test_a_damaged_head_is_refused(store, harm):
    folder = EngineFolder(store, "e1")
    tensors = head_tensors(1)
    write_head(folder, encode_head(tensors, version=1, parent_version=0, meta={}))
    at = folder.path("heads", "000000000001.safetensors")
    body = bytearray(store.read(at))
    reason = "sha256"
    if harm == "cut":
        store.write(at, body[:-1])
        reason = "truncated"
    elif harm == "flip":
        body[-1] ^= 1
        store.write(at, body)
    elif harm == "manifest":
        entry = folder.read_json("heads/000000000001.json")
        entry["manifest"] = entry["manifest"].replace('"parent_version":0', '"x":0')
        folder.write_json("heads/000000000001.json", entry, durable=True)
    else:
        store.remove(folder.path("heads", "000000000001.json"))
        reason = "empty"
    with pytest.raises(WeightsRefused) as caught:
        read_head(folder, 1)
    assert caught.value.reason == reason


# Identity and models


def test_engines_with_the_same_models_fit_and_others_do_not(engines):
    first = engines("a", seed=0)
    assert difference("b", engines("b", seed=0).identity, "a", first.identity) == ""
    other = engines("c", seed=1)
    sentence = difference("c", other.identity, "a", first.identity)
    assert "another target" in sentence
    assert "--engine c" in sentence
    for changes, says in (
        ({"aux_layer_ids": (1, 2, 6)}, "other layers"),
        ({"feature_dtype": "float32"}, "feature_dtype"),
        ({"shared": ["lm_head.weight"]}, "shares other"),
        ({"teacher": "topk"}, "tide.capture.teacher"),
    ):
        changed = replace(first.manifest, **changes)
        assert says in difference("d", identity_of(changed), "a", first.identity)


def test_a_trainer_elsewhere_gets_the_rows_and_the_draft(store, engines, tmp_path):
    engine = engines("a")
    relay = engine.relay(store)
    relay.close()
    folder = engine.folder(store)
    entry = folder.read_engine()
    assert entry.identity == engine.identity
    assert entry.spec == engine.spec
    assert entry.manifest == engine.manifest
    here, draft = local_models(folder, entry, tmp_path / "cache")
    assert str(here) == engine.manifest.target_path  # the same target is here
    assert (draft / "model.safetensors").read_bytes() == (
        (tmp_path / "a/models/draft/model.safetensors").read_bytes()
    )
    away = replace(entry.manifest, target_path="/nowhere")
    target, _ = local_models(folder, replace(entry, manifest=away), tmp_path / "cache")
    assert target.parent == tmp_path / "cache"
    want, got = TargetRows.load(engine.manifest.target_path), TargetRows.load(target)
    assert got.embed_tokens.equal(want.embed_tokens)
    assert got.lm_head.equal(want.lm_head)
    assert got.lm_head.shape == (ROWS, 8)
    whole = (tmp_path / "a/models/target/model.safetensors").stat().st_size
    assert (target / "model.safetensors").stat().st_size < whole


def test_a_damaged_model_file_is_refused(store, engines, tmp_path):
    engine = engines("a")
    engine.relay(store).close()
    folder = engine.folder(store)
    at = folder.path("draft", "model.safetensors")
    store.write(at, store.read(at)[:-1])
    with pytest.raises(TransportError, match="damaged"):
        local_models(folder, folder.read_engine(), tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").glob("*") if p.is_dir()] == []


# The relay


def settle(relay, seconds=0.05):
    """Let the relay's storage work come due, and do it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        relay.tick()
        relay._next_poll = 0.0


def test_the_relay_carries_records_heads_and_feedback(store, engines):
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
    head = encode_head(head_tensors(3), version=3, parent_version=0, meta={"g": 1})
    write_head(folder, head)
    settle(relay)
    got = engine.weights.read()
    assert (got.version, got.meta) == (3, {"g": 1})
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


def test_the_relay_refuses_a_head_that_is_damaged_or_does_not_fit(store, engines):
    engine = engines()
    relay = engine.relay(store)
    folder = engine.folder(store)
    big = {"fc.weight": ("float32", (1 << 19,), np.zeros(1 << 19, np.float32))}
    for version, tensors, harm, reason in (
        (1, head_tensors(1), True, "truncated"),
        (2, big, False, "segment"),
    ):
        head = encode_head(tensors, version=version, parent_version=0, meta={})
        write_head(folder, head)
        if harm:
            at = folder.path("heads", f"{version:012d}.safetensors")
            store.write(at, store.read(at)[:-1])
        settle(relay)
        state = folder.read_state()
        assert (state.refused_version, state.refused_reason) == (version, reason)
        assert engine.weights.latest_version() == 0
    write_head(folder, encode_head(head_tensors(3), version=3, parent_version=0,
                                   meta={}))  # fmt: skip
    settle(relay)
    assert engine.weights.latest_version() == 3
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
    spooled = parse_tide({"spool": {"url": "s3://secret@bucket"}})
    alone = parse_tide({"train": {"autostart": True}})
    for config, kind in ((spooled, "relay"), (alone, "train")):
        assert TrainerProcess.wanted(config.train, config.spool)
        process = TrainerProcess("e1", tmp_path, config.train, config.spool)
        process.start()
        process.close()
        command = started.pop()
        assert command[1:] == [
            "-m", "vllm_tide", kind, "--engine", "e1", "--run-dir", str(tmp_path)
        ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["relay-e1.log", "trainer-e1.log"]
    neither = parse_tide({})
    assert not TrainerProcess.wanted(neither.train, neither.spool)


def relay_command(*argv):
    parser = argparse.ArgumentParser()
    cli_relay.add_parser(parser.add_subparsers())
    return cli_relay.run(parser.parse_args(["relay", *argv]))


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
