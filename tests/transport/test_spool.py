"""The spool's storage and its words: on a disk and on an object store."""

import os
import stat

import numpy as np
import pytest

from tests.transport.samples import make_spec
from vllm_tide.transport import TransportError
from vllm_tide.transport.shm import said
from vllm_tide.transport.spool import (
    EngineFolder,
    EngineState,
    Freshness,
    ReaderState,
    checked_name,
    instance_gone,
    this_instance,
)
from vllm_tide.transport.spool_store import NotOurs, open_store

SPEC = make_spec()


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
    store.remove_folder("a/b")  # something is in it
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
    left = at / ".abc.tmp"
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
        with pytest.raises(NotOurs, match="left"):
            store.remove(name)
    store.write("d/link", b"3")  # takes the link's place
    store._ours = {os.geteuid() + 1}
    with pytest.raises(NotOurs, match="another user's"):
        store.remove("d/f")
    assert store.read("d/link") == b"3" and store.read("d/f") == b"1"


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
    assert "secret" not in open_store("memory://user:secret@place/x").url


# Words


def test_words_come_back_and_half_written_ones_are_nothing(store):
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


def test_what_another_process_wrote_is_escaped_and_clipped(store):
    folder = EngineFolder(store, "e1")
    evil = "\x1b[31mroot\n2026 ERROR forged " + "x" * 100_000
    folder.write_json("state.json", {"refused_reason": evil}, durable=True)
    folder.write_json("readers/t.json", {"instance": evil}, durable=True)
    told = [folder.read_state().refused_reason, folder.read_reader("t").instance]
    folder.write_json("engine.json", {"format": evil}, durable=True)
    with pytest.raises(TransportError) as caught:
        folder.read_engine()
    told.append(str(caught.value))
    with pytest.raises(TransportError) as caught:
        checked_name(evil, "target")
    told.append(str(caught.value))
    for text in told:
        assert "forged" in text
        assert text.isprintable()
        assert len(text) < 500
    assert said("plain reason: é") == "plain reason: \\xe9"


def test_freshness_is_told_by_change_not_by_clocks():
    word = Freshness(timeout_s=60.0)
    word.look(5.0)
    assert word.fresh
    assert not word.moved
    word._timeout_s = 0.0
    word.look(5.0)
    assert not word.fresh
    word._timeout_s = 60.0
    word.look(4.0)  # a clock may even go back
    assert word.fresh
    assert word.moved


def test_a_process_of_this_host_that_is_dead_is_known_to_be():
    assert not instance_gone(this_instance())
    boot, namespace, pid, _ = this_instance().split(":")
    assert instance_gone(f"{boot}:{namespace}:{pid}:1")
    assert not instance_gone(f"other:{namespace}:{pid}:1")
    assert not instance_gone("nonsense")
