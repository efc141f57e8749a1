"""The spool's storage and its words: on a disk and on an object store."""

import os
import stat
import time

import numpy as np
import pytest

from tests.transport.samples import make_spec
from vllm_tide.transport import TransportError
from vllm_tide.transport.spool import (
    EngineFolder,
    EngineState,
    Freshness,
    ReaderState,
    instance_gone,
    this_instance,
)
from vllm_tide.transport.spool_store import open_store

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
