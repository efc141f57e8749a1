"""Storage, states, drafts and models of a spool: on a disk and an object store."""

import json
import os
import stat
import time
from dataclasses import asdict, replace
from pathlib import Path

import huggingface_hub
import pytest
from safetensors.numpy import load_file, save_file

from tests.transport.spool_toys import ROWS, failing, feed_of, head_tensors, settle
from vllm_tide.draft.target import TargetRows
from vllm_tide.transport import TransportError, WeightsRefused
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.identity import difference, identity_of
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import sanitize_for_log
from vllm_tide.transport.spool import (
    EngineFolder,
    EngineState,
    HeartbeatMonitor,
    Store,
    StoreError,
    TrainerState,
    draft_version,
)
from vllm_tide.transport.spool_models import find_models
from vllm_tide.transport.versions import first_version

FAR = 2**63 - 1

# The store


def test_a_file_is_written_replaced_listed_and_removed(store):
    assert store.read("a/b/c", 9) is None
    assert store.sizes("a") == {} and store.folders("a") == []
    store.write("a/b/c", b"12345")
    store.write("a/b/d", b"")
    assert store.read("a/b/c", 5) == b"12345"
    assert store.read("a/b/c", 4) is None  # too large
    assert store.read_start("a/b/c", 3) == b"123"
    assert store.sizes("a/b") == {"c": 5, "d": 0}
    assert store.folders("a") == ["b"] and store.sizes("a") == {}
    store.write("a/b/c", b"x")
    assert store.read("a/b/c", 5) == b"x"
    assert store.remove("a/b/c", "a/b/c") == []
    assert store.sizes("a/b") == {"d": 0}
    store.remove_folder("a/b")  # it is not empty
    assert store.read("a/b/d", 1) == b""
    store.remove("a/b/d")
    for folder in ("a/b", "a", "a"):
        store.remove_folder(folder)
    assert store.folders("a") == []


def test_a_directory_is_private_and_keeps_no_temporary_file(tmp_path):
    before = os.umask(0o022)
    try:
        store = Store(f"file://{tmp_path}/x/s")
        store.write("engines/f/x", b"1")
    finally:
        os.umask(before)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    at = tmp_path / "x/s/engines/f"
    assert stat.S_IMODE((at / "x").stat().st_mode) == 0o600
    assert os.listdir(at) == ["x"]
    left = at / ".tide-abc.tmp"
    left.write_bytes(b"half")
    assert store.sizes("engines/f") == {"x": 1}
    store.remove_unfinished("engines/f", 60)
    assert left.exists()
    os.utime(left, (0, 0))
    store.remove_unfinished("engines/f", 60)
    assert not left.exists()


@pytest.mark.timeout(20)
def test_nothing_but_plain_files_is_read_or_listed(tmp_path):
    store, root = Store(str(tmp_path / "s")), tmp_path / "s"
    store.write("d/f", b"1")
    (root / "d/link").symlink_to(root / "d/f")
    (root / "linked").symlink_to(root / "d")
    os.mkfifo(root / "d/pipe")
    with open(root / "d/sparse", "wb") as file:
        file.truncate(1 << 40)
    for name in ("d/pipe", "d", "d/f/x", "d/sparse"):
        assert store.read(name, 1 << 20) is None, name
    assert store.sizes("d") == {"f": 1, "sparse": 1 << 40}
    assert store.folders("") == ["d"] and store.sizes("d/f") == {}
    store.write("d/link", b"3")  # replaces the link
    assert store.read("d/f", 9) == b"1" and store.read("d/link", 9) == b"3"


def test_an_unusable_store_is_refused_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").write_text("")
    for url, message in (("open", "chmod o-rwx"), ("file", "cannot be opened")):
        store = Store(str(tmp_path / url))  # a mount may come later
        with pytest.raises(StoreError, match=message) as caught:
            store.sizes("")
        assert "tide.spool.url" in str(caught.value)
    with pytest.raises(TransportError, match=r"tide\.spool\.url.*Protocol not known"):
        Store("nosuch://x/y")


def test_credentials_stay_out_of_messages(monkeypatch):
    url = "memory://me:pa%2Fss@word@host/spool?sig=abc"
    store = Store(url)
    assert store.url == "memory://host/spool"

    def fails(*_, **__):
        raise ValueError(f"no answer from {url} today")

    monkeypatch.setattr(store._fs, "info", fails)
    with pytest.raises(StoreError, match="today") as caught:
        store.read("x", 1)
    assert "word" not in str(caught.value) and "abc" not in str(caught.value)


# States


def test_states_are_read_back_and_invalid_ones_are_none(store):
    folder = EngineFolder(store, "e1")
    assert folder.read_state() is folder.read_engine() is folder.read_trainer() is None
    state = EngineState(1.5, False, 3, 4, 5, 6, "norm", 7.5, 8)
    folder.write_state(state)
    assert folder.read_state() == state
    trainer = TrainerState("i", 1.0, True, Collect.NOTHING, 4, 5, "x")
    folder.write_trainer(trainer)
    assert folder.read_trainer() == trainer
    for text in ("", '{"unix":1', "[]", '{"unix":"x"}', "[" * 100_000, "3",
                 '{"unix": NaN}', '{"unix": 1e999}', '{"running": 3}'):  # fmt: skip
        for name in ("state.json", "trainer.json"):
            store.write(folder.path(name), text.encode())
        assert folder.read_state() is folder.read_trainer() is None
    folder.write_json("state.json", {"last_shard": 1.5})
    folder.write_json("trainer.json", {"collect": 7})
    assert folder.read_state() is folder.read_trainer() is None
    folder.write_json("engine.json", {"format": 99})
    with pytest.raises(TransportError, match="spool format 99"):
        folder.read_engine()
    for name in ("", ".", "..", "a/b", ".hidden", "x" * 129):
        with pytest.raises(TransportError, match="engine"):
            EngineFolder(store, name)


def test_text_of_another_process_is_escaped_and_clipped(store):
    folder = EngineFolder(store, "e1")
    evil = "\x1b[31mroot\n2026 ERROR forged " + "x" * 100_000
    folder.write_json("state.json", {"refused_reason": evil})
    folder.write_json("trainer.json", {"instance": evil})
    texts = [folder.read_state().refused_reason, folder.read_trainer().instance]
    folder.write_json("engine.json", {"format": evil})
    for call in (folder.read_engine, lambda: EngineFolder(store, evil)):
        with pytest.raises(TransportError) as caught:
            call()
        texts.append(str(caught.value))
    for text in texts:
        assert "forged" in text and text.isprintable() and len(text) < 500
    assert sanitize_for_log("plain reason: é") == "plain reason: \\xe9"


def test_freshness_follows_change_and_not_clocks():
    monitor = HeartbeatMonitor(timeout_s=60.0)
    monitor.observe(5.0)
    assert monitor.fresh and not monitor.changed
    monitor._timeout_s = 0.0
    monitor.observe(5.0)
    assert not monitor.fresh
    monitor._timeout_s = 60.0
    monitor.observe(4.0)  # a clock may even go back
    assert monitor.fresh and monitor.changed


# Drafts


def test_a_draft_is_read_back_to_the_bit_and_the_last_two_are_stored(store):
    folder, names = EngineFolder(store, "e1"), []
    foreign = ["x.safetensors", "y.safetensors", f"{FAR}-{'0' * 64}.safetensors"]
    for name in foreign:
        store.write(folder.path("drafts", name), b"")
    for version in range(1, 5):
        blob = DraftWeights.encode(head_tensors(version), version, {"a": 1})
        names.append(folder.write_draft(blob))
        assert draft_version(names[-1]) == version
        assert bytes(folder.read_draft(names[-1]).data) == blob.data
    got = folder.read_draft(names[-1]).verify()
    assert (got.version, got.sha256, got.meta) == (4, blob.sha256, {"a": 1})
    want = head_tensors(4)["fc.weight"][2]
    assert got.tensors["fc.weight"].data.tobytes() == want.tobytes()
    stored = store.sizes(folder.path("drafts"))
    assert sorted(stored) == sorted([*foreign, *names[-2:]])


def test_versions_that_are_invalid_or_skip_too_far_are_none():
    name = "{:019d}-" + "0" * 64 + ".safetensors"
    assert draft_version(name.format(7)) == draft_version(name.format(7), 6) == 7
    assert draft_version(name.format(FAR)) == FAR
    for invalid in ("", "../x", name.format(FAR + 1), "latest.json"):
        assert draft_version(invalid) == 0
    assert draft_version(name.format(FAR), 6) == 0


def test_a_damaged_large_or_missing_draft_is_refused(store):
    folder = EngineFolder(store, "e1")
    version = first_version(1)
    name = folder.write_draft(DraftWeights.encode(head_tensors(1), version))
    path = folder.path("drafts", name)
    body = store.read(path, 1 << 20)
    with pytest.raises(WeightsRefused) as caught:
        folder.read_draft(name, len(body) - 1)
    assert caught.value.reason == "segment"
    for damaged in (body[:-1], body[:-1] + b"\0"):
        store.write(path, damaged)
        with pytest.raises(WeightsRefused) as caught:
            folder.read_draft(name).verify()
        assert caught.value.reason == "sha256"
    store.remove(path)
    with pytest.raises(StoreError, match="draft 1 is not in"):
        folder.read_draft(name)


def test_a_sparse_draft_is_refused_by_relay_and_trainer(disk, engine, tmp_path):
    relay, folder = engine.relay(disk), engine.folder(disk)
    name = folder.write_draft(DraftWeights.encode(head_tensors(1), 2))
    with (tmp_path / "spool" / folder.path("drafts", name)).open("r+b") as file:
        file.truncate(1 << 40)
    folder.write_trainer(TrainerState("i", draft=name))
    settle(relay)
    state = folder.read_state()
    assert (state.refused_version, state.refused_reason) == (2, "segment")
    feed = feed_of(disk)
    assert feed.latest_version == 2 and feed.latest() is None
    feed.close()


# Identity and models


def test_engines_with_the_same_models_match_and_others_do_not(engines):
    first = engines("a", seed=0)
    assert difference("b", engines("b", seed=0).identity, "a", first.identity) == ""
    other = engines("c", seed=1)
    sentence = difference("c", other.identity, "a", first.identity)
    assert "another target" in sentence
    assert "--engine c" in sentence
    for changes, says in (
        ({"aux_layer_ids": (1, 2, 6)}, "other layers"),
        ({"feature_dtype": "float32"}, "features of another type"),
        ({"shared": ["lm_head.weight"]}, "shares other"),
        ({"teacher": "topk"}, "tide.capture.teacher"),
    ):
        changed = replace(first.manifest, **changes)
        assert says in difference("d", identity_of(changed), "a", first.identity)


@pytest.fixture
def announced(store, engines):
    """Return an announced engine's folder and entry, with a target of another host."""
    engine = engines("a", tide={"spool": {"url": "s3://a:b@c"}, "preset": "full"})
    relay = engine.relay(store)
    settle(relay)
    relay.close()
    folder = engine.folder(store)
    entry = folder.read_engine()
    assert entry.manifest == replace(engine.manifest, tide={"preset": "full"})
    assert entry.spec == engine.spec
    assert entry.identity.items() > engine.identity.items()
    return folder, replace(
        entry, manifest=replace(entry.manifest, target_path="/nowhere")
    )


def test_a_remote_trainer_gets_the_initial_draft(announced, tmp_path):
    folder, entry = announced
    target, here = tmp_path / "a/models/target", tmp_path / "a/models/draft"
    models = find_models(folder, entry, str(target), tmp_path / "cache")
    assert models[0] == target
    for name in ("config.json", "model.safetensors"):
        assert (models[1] / name).read_bytes() == (here / name).read_bytes()
        (models[1] / name).write_bytes(b"")  # a crash of the host
    assert find_models(folder, entry, str(target), tmp_path / "cache") == models
    assert (models[1] / "config.json").read_bytes() == b'{"layers": 1}'


def test_a_target_that_is_missing_or_differs_is_refused_in_one_line(
    announced, tmp_path
):
    folder, entry = announced
    target = tmp_path / "a/models/target"
    weights = load_file(target / "model.safetensors")
    for model, message in (
        (None, "the target /nowhere of engine a is not on this host.*--model"),
        ("no/such", "--model 'no/such' is no directory and could not be fetched"),
        (str(tmp_path / "a/models/draft"), "is not the target /nowhere of engine a"),
        (str(target), "is not the target"),
    ):
        if model == str(target):
            weights["lm_head.weight"][0] += 1
            save_file(weights, target / "model.safetensors")
        with pytest.raises(TransportError, match=message):
            find_models(folder, entry, model, tmp_path / "cache")


def test_only_files_with_rows_are_fetched_from_the_hub(
    announced, tmp_path, monkeypatch
):
    folder, entry = announced
    at, fetched = tmp_path / "a/models/target", []
    weights = load_file(at / "model.safetensors")
    (at / "model.safetensors").unlink()
    files = {name: f"{number}.safetensors" for number, name in enumerate(weights)}
    text = json.dumps({"weight_map": files})
    (at / "model.safetensors.index.json").write_text(text)
    for name, file in files.items():
        if "layers" not in name:
            save_file({name: weights[name]}, at / file)

    def fetch(name, revision, allow_patterns):
        fetched.append((name, revision, allow_patterns))
        return str(at)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    target, _ = find_models(folder, entry, "org/name@v1", tmp_path / "cache")
    rows = sorted(file for name, file in files.items() if "layers" not in name)
    index = ["config.json", "model.safetensors.index.json"]
    assert fetched == [("org/name", "v1", index), ("org/name", "v1", rows)]
    assert TargetRows.load(target).lm_head.shape == (ROWS, 8)


@pytest.mark.parametrize("name", ["../state.json", "a\0b", "/etc/x", "", ".hidden"])
def test_a_damaged_initial_draft_is_refused(announced, tmp_path, name, monkeypatch):
    folder, entry = announced
    target, cache = str(tmp_path / "a/models/target"), tmp_path / "cache"
    digest = entry.draft_files["config.json"]
    for files in ({name: digest}, {"x": "../state.json"}, {"x": "0" * 64}):
        with pytest.raises(TransportError, match="is damaged"):
            find_models(folder, replace(entry, draft_files=files), target, cache)
    folder.store.write(folder.path("initial", digest), b"{}")
    with pytest.raises(TransportError, match="is damaged"):
        find_models(folder, entry, target, cache)
    read = failing(folder.store, "read", "initial", StoreError("no memory"))
    monkeypatch.setattr(folder.store, "read", read)
    with pytest.raises(TransportError, match="no memory"):
        find_models(folder, entry, target, cache)
    assert not [path for path in Path(cache).rglob("*") if path.is_file()]


def test_a_state_of_an_absurd_size_is_invalid(disk, tmp_path):
    folder = EngineFolder(disk, "e1")
    folder.write_state(EngineState(unix=time.time()))
    with open(tmp_path / "spool/engines/e1/state.json", "wb") as file:
        file.truncate(1 << 36)
    assert folder.read_state() is None
    assert asdict(EngineState())["unix"] == 0
