"""Storage, states, drafts and models of a spool: on a disk and an object store."""

import os
import stat
from dataclasses import replace

import numpy as np
import pytest

from tests.transport.spool_toys import ROWS, head_tensors
from vllm_tide.draft.target import TargetRows
from vllm_tide.transport import TransportError, WeightsRefused, publication
from vllm_tide.transport.identity import difference, identity_of
from vllm_tide.transport.shm import sanitize_for_log
from vllm_tide.transport.spool import (
    DraftConflict,
    EngineFolder,
    EngineState,
    HeartbeatMonitor,
    ReaderState,
    checked_name,
    instance_gone,
    this_instance,
)
from vllm_tide.transport.spool_models import local_models, upload_models
from vllm_tide.transport.spool_store import ForeignFileError, open_store

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
    store.remove_folder("a/b")  # it is not empty
    assert store.read("a/b/d") == b""
    store.remove("a/b/d")
    store.remove_folder("a/b")
    store.remove_folder("a")
    store.remove_folder("a")
    assert store.folders("a") == []


def test_a_directory_is_private_and_keeps_no_temporary_file(tmp_path):
    before = os.umask(0o022)
    try:
        store = open_store(f"file://{tmp_path}/x/s")
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
    assert left.exists()
    os.utime(left, (0, 0))
    assert store.sizes("engines/f") == {"x": 1}
    assert not left.exists()


def test_nothing_but_plain_files_is_read_listed_or_removed(tmp_path):
    store = open_store(str(tmp_path / "s"))
    store.write("d/f", b"1")
    root = tmp_path / "s"
    (root / "d/link").symlink_to(root / "d/f")
    os.mkfifo(root / "d/pipe")
    for name in ("d/pipe", "d", "d/f/x"):
        assert store.read(name) is None, name
    assert store.sizes("d") == {"f": 1}
    assert store.folders("d") == [] and store.sizes("d/f") == {}
    for name in ("d/link", "d/pipe"):
        with pytest.raises(ForeignFileError, match="not removed"):
            store.remove(name)
    store.write("d/link", b"3")  # replaces the link
    store._owner_uids = {os.geteuid() + 1}
    with pytest.raises(ForeignFileError, match="another user's"):
        store.remove("d/f")
    assert store.read("d/link") == b"3" and store.read("d/f") == b"1"


def test_an_unusable_store_is_refused_in_one_line(tmp_path):
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
    assert "secret" not in open_store("memory://user:secret@place/x").url


# States


def test_states_are_read_back_and_half_written_ones_are_none(store):
    folder = EngineFolder(store, "e1")
    assert folder.read_state() is None
    assert folder.read_engine() is None
    assert folder.read_readers() == {}
    state = EngineState(1.5, False, 2, 3, 4, 5, 6, "norm", 7.5, 8, 9)
    folder.write_state(state)
    assert folder.read_state() == state
    reader = ReaderState("i", 1.0, False, False, True, False, 4, 5)
    folder.write_reader("t", reader)
    assert folder.read_readers() == {"t": reader}
    for text in (b"", b'{"unix":1', b"[]", b'{"unix":"x"}', b"[" * 100_000):
        store.write(folder.path("state.json"), text)
        assert folder.read_state() is None
    folder.write_json("engine.json", {"format": 99}, durable=True)
    with pytest.raises(TransportError, match="spool format 99"):
        folder.read_engine()
    for name in ("", ".", "..", "a/b", ".hidden", "x" * 129):
        with pytest.raises(TransportError, match="engine"):
            EngineFolder(store, name)


def test_text_of_another_process_is_escaped_and_clipped(store):
    folder = EngineFolder(store, "e1")
    evil = "\x1b[31mroot\n2026 ERROR forged " + "x" * 100_000
    folder.write_json("state.json", {"refused_reason": evil}, durable=True)
    folder.write_json("readers/t.json", {"instance": evil}, durable=True)
    texts = [folder.read_state().refused_reason, folder.read_reader("t").instance]
    folder.write_json("engine.json", {"format": evil}, durable=True)
    with pytest.raises(TransportError) as caught:
        folder.read_engine()
    texts.append(str(caught.value))
    with pytest.raises(TransportError) as caught:
        checked_name(evil, "target")
    texts.append(str(caught.value))
    for text in texts:
        assert "forged" in text
        assert text.isprintable()
        assert len(text) < 500
    assert sanitize_for_log("plain reason: é") == "plain reason: \\xe9"


def test_freshness_follows_change_and_not_clocks():
    monitor = HeartbeatMonitor(timeout_s=60.0)
    monitor.observe(5.0)
    assert monitor.fresh
    assert not monitor.changed
    monitor._timeout_s = 0.0
    monitor.observe(5.0)
    assert not monitor.fresh
    monitor._timeout_s = 60.0
    monitor.observe(4.0)  # a clock may even go back
    assert monitor.fresh
    assert monitor.changed


def test_a_dead_process_of_this_host_is_recognized():
    assert not instance_gone(this_instance())
    boot, namespace, pid, _ = this_instance().split(":")
    assert instance_gone(f"{boot}:{namespace}:{pid}:1")
    assert not instance_gone(f"other:{namespace}:{pid}:1")
    assert not instance_gone("nonsense")


# Drafts


def test_a_draft_is_read_back_to_the_bit_and_the_last_few_are_stored(store):
    folder = EngineFolder(store, "e1")
    assert folder.latest_draft() == 0
    foreign = ["x.safetensors", "y.safetensors", "z.safetensors"]
    for name in foreign:
        store.write(folder.path("heads", name), b"")
    for version in range(1, 6):
        blob = publication.encode(head_tensors(version), version, 1, {"a": 1})
        folder.write_draft(blob)
        assert folder.latest_draft() == version
        assert folder.read_draft() == blob
        got = publication.decode(folder.read_draft())
        assert (got.version, got.parent_version, got.meta) == (version, 1, {"a": 1})
        want = head_tensors(version)["fc.weight"][2]
        assert got.tensors["fc.weight"].data.tobytes() == want.tobytes()
    assert sorted(store.sizes(folder.path("heads"))) == sorted(
        ["latest.json", *foreign] + [f"{v:012d}.safetensors" for v in (3, 4, 5)]
    )
    folder.write_draft(blob)  # again, after a write that the storage reported as failed
    other = publication.encode(head_tensors(9), 5, 1, {})
    with pytest.raises(DraftConflict, match="not newer"):
        folder.write_draft(other)


@pytest.mark.parametrize("harm", ["cut", "flip", "manifest", "gone"])
def test_a_damaged_draft_is_refused(store, harm):
    folder = EngineFolder(store, "e1")
    folder.write_draft(publication.encode(head_tensors(1), 1, 0, {}))
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
        entry = folder.read_json("heads/latest.json")
        folder.write_json("heads/latest.json", {**entry, "sha256": "00"}, durable=True)
    else:
        store.remove(folder.path("heads", "latest.json"))
        reason = "empty"
    with pytest.raises(WeightsRefused) as caught:
        publication.decode(folder.read_draft())
    assert caught.value.reason == reason


def test_a_draft_stored_by_another_version_is_refused_in_one_line(store):
    """An earlier format had one manifest per draft; its version still counts."""
    folder = EngineFolder(store, "e1")
    folder.write_json("heads/latest.json", {"version": 7}, durable=True)
    with pytest.raises(WeightsRefused, match="run the same vllm_tide on both sides"):
        folder.read_draft()
    assert folder.latest_draft() == 7
    folder.write_draft(publication.encode(head_tensors(8), 8, 0, {}))
    assert folder.read_draft().version == 8


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


def test_a_remote_trainer_gets_the_rows_and_the_draft(store, engines, tmp_path):
    engine = engines("a")
    relay = engine.relay(store)
    relay.close()
    folder = engine.folder(store)
    entry = folder.read_engine()
    assert entry.identity.items() > engine.identity.items()
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


def test_what_a_killed_relay_left_of_a_model_is_removed(tmp_path, engines):
    root, engine = tmp_path / "spool", engines()
    store = open_store(str(root))
    rows = upload_models(engine.folder(store), engine.manifest)
    for folder in (f"targets/{rows}", "engines/e1/draft"):
        left = root / folder / ".tide-left.tmp"
        left.write_bytes(b"rows")
        os.utime(left, (0, 0))
        upload_models(engine.folder(store), engine.manifest)
        assert not left.exists()


def test_a_damaged_model_file_is_refused(store, engines, tmp_path):
    engine = engines("a")
    engine.relay(store).close()
    folder = engine.folder(store)
    at = folder.path("draft", "model.safetensors")
    store.write(at, store.read(at)[:-1])
    with pytest.raises(TransportError, match="damaged"):
        local_models(folder, folder.read_engine(), tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").glob("*") if p.is_dir()] == []


@pytest.mark.parametrize("left", [b"", b"\x00" * 200, None])
def test_a_model_left_by_a_crash_is_fetched_again(store, engines, tmp_path, left):
    engine = engines("a")
    engine.relay(store).close()
    folder, entry = engine.folder(store), engine.folder(store).read_engine()
    away = replace(entry, manifest=replace(entry.manifest, target_path="/nowhere"))
    first = local_models(folder, away, tmp_path / "cache")
    files = [path / "model.safetensors" for path in first]
    want = [(path.read_bytes(), path.stat().st_ino) for path in files]
    assert local_models(folder, away, tmp_path / "cache") == first
    assert [(path.read_bytes(), path.stat().st_ino) for path in files] == want
    for path in files:
        path.unlink() if left is None else path.write_bytes(left)
    assert local_models(folder, away, tmp_path / "cache") == first
    assert [path.read_bytes() for path in files] == [data for data, _ in want]
