import json
import os
import signal
import stat
import time
import uuid

import pytest

from tests.transport.samples import make_manifest, make_spec, write_dead_manifest
from tests.transport.test_kill import Child, child_that_tells
from vllm_tide.transport import RingWriter, TransportError, WeightsSegment
from vllm_tide.transport.rendezvous import (
    RUN_DIR_VARIABLE,
    default_run_dir,
    group_of,
    is_live,
    read_manifests,
    reclaim_orphans,
    remove_manifest,
    take_lock,
    write_manifest,
)
from vllm_tide.transport.shm import NAME_PREFIX, SHM_DIR


def test_a_manifest_is_read_replaced_and_removed(tmp_path):
    run = tmp_path / "run"
    assert read_manifests(run) == []
    write_manifest(run, make_manifest("c", ring="other"))
    second = make_manifest("b", created_unix=2.0)
    first = make_manifest("c", created_unix=1.0)
    write_manifest(run, second)
    path = write_manifest(run, first)
    assert read_manifests(run) == [first, second]
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    remove_manifest(run, "c")
    remove_manifest(run, "c")
    assert read_manifests(run) == [second]
    assert sorted(os.listdir(run)) == ["engine-b.json"]
    for name in ("", "../x", "a/b", "a b", "x" * 129):
        with pytest.raises(TransportError, match="engine_id"):
            write_manifest(run, make_manifest(name))


def test_dead_engines_and_unreadable_files_are_skipped(tmp_path):
    path = write_manifest(tmp_path, make_manifest("live"))
    # Of a later version.
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    write_dead_manifest(tmp_path, "dead")
    write_manifest(tmp_path, make_manifest("odd", pid="x"))
    write_manifest(tmp_path, make_manifest("inf", pid=float("inf")))
    odd = ("{", "[]", "{}", "[" * 100_000, '{"pid":Infinity}')
    for number, text in enumerate(odd):
        (tmp_path / f"engine-{number}.json").write_text(text)
    assert [m.engine_id for m in read_manifests(tmp_path)] == ["live"]


def test_a_run_directory_that_is_a_link_a_file_or_anothers_is_refused(
    tmp_path, monkeypatch
):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(TransportError, match="TIDE_RUN_DIR"):
            write_manifest(tmp_path / name, make_manifest())
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(TransportError, match="not a directory of user"):
        read_manifests(tmp_path)


def test_a_directory_open_to_others_is_refused_and_keeps_its_mode(tmp_path):
    shared, made = tmp_path / "shared", tmp_path / "made"
    shared.mkdir()
    shared.chmod(0o1777)
    for use in (read_manifests, reclaim_orphans):
        with pytest.raises(TransportError, match=rf"chmod 700 {shared}"):
            use(shared)
    with pytest.raises(TransportError, match="1777"):
        write_manifest(shared, make_manifest())
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    write_manifest(made, make_manifest())
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.chmod(0o2700)  # a folder of a volume passes its group on
    assert read_manifests(made)
    assert stat.S_IMODE(made.stat().st_mode) == 0o2700


def test_the_default_run_directory(monkeypatch):
    monkeypatch.delenv("TIDE_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/t")
    assert str(default_run_dir()) == f"/t/vllm_tide-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert str(default_run_dir()) == "/run/user/1/vllm_tide"
    monkeypatch.setenv("TIDE_RUN_DIR", "/x/y")
    assert str(default_run_dir()) == "/x/y"
    # `vllm serve --fail-on-environ-validation` refuses unknown names.
    assert RUN_DIR_VARIABLE == "TIDE_RUN_DIR"


def in_shm(names):
    """Return the existing ones. Other processes of the user may reclaim orphans."""
    return [name for name in names if os.path.exists(f"{SHM_DIR}/{name}")]


def serve_until_killed(run, tell):
    ring, weights = RingWriter.create(make_spec(), 4096), WeightsSegment.create(4096)
    manifest = make_manifest("dead", ring=ring.name, weights=weights.name)
    write_manifest(run, manifest)
    if os.fork() == 0:  # a child that outlives it
        signal.alarm(20)
        os.write(tell, f"{ring.name} {weights.name}".encode())
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "damaged"])
def test_only_files_of_a_killed_engine_are_reclaimed(tmp_path, kind):
    run = tmp_path / "run"
    live = RingWriter.create(make_spec(), 4096)
    write_manifest(run, make_manifest("live", ring=live.name, created_unix=2.0))
    child, created = child_that_tells(serve_until_killed, run)
    names = created.split()
    for name in names if kind == "damaged" else ():
        with open(f"{SHM_DIR}/{name}", "r+b") as file:
            file.write(os.urandom(300))
        os.utime(f"{SHM_DIR}/{name}", (0, 0))  # idle: nothing was written since
    assert "engine-dead.json" not in reclaim_orphans(run)
    assert len(names) == 2 and in_shm(names) == names
    assert [m.engine_id for m in read_manifests(run)] == ["dead", "live"]
    child.kill()
    assert [m.engine_id for m in read_manifests(run)] == ["live"]
    assert "engine-dead.json" in reclaim_orphans(run)
    assert in_shm([*names, live.name]) == [live.name]
    live.close()


def test_a_segment_without_a_header_is_reclaimed_only_once_old(tmp_path):
    path = f"{SHM_DIR}/{NAME_PREFIX}{uuid.uuid4().hex}"
    with open(path, "wb") as file:
        file.write(b"\0" * 100)
    try:
        reclaim_orphans(tmp_path)
        assert os.path.exists(path)
        os.utime(path, (0, 0))
        reclaim_orphans(tmp_path)
        assert not os.path.exists(path)
    finally:
        if os.path.exists(path):
            os.unlink(path)


def test_a_manifest_that_was_removed_or_replaced_is_locked_again(tmp_path):
    path = write_manifest(tmp_path, make_manifest("e1"))
    for remove in (path.unlink, lambda: None, lambda: remove_manifest(tmp_path, "e1")):
        remove()
        write_manifest(tmp_path, make_manifest("e1"))
        assert is_live(path)
    remove_manifest(tmp_path, "e1")
    assert not is_live(path)


def leave(run, engine_id, when):
    kinds = ("trainer-{}.json", "trainer-{}.log", "trainer-{}.log.1", "events-{}.jsonl")
    for kind in (*kinds, "relay-{}.log"):
        path = run / kind.format(engine_id)
        path.write_text("x")
        os.utime(path, (when, when))
    return 5


def test_files_of_dead_engines_are_removed_but_of_the_newest_four(tmp_path):
    live = "f" * 16
    write_manifest(tmp_path, make_manifest(live))
    ids = [f"{i:016x}" for i in range(9)]
    for age, engine_id in enumerate(ids):
        leave(tmp_path, engine_id, 1000 - age)
    leave(tmp_path, live, 1)
    for name in ("tenants.key", "trainer-mine.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    before = set(os.listdir(tmp_path))
    removed = {name for name in reclaim_orphans(tmp_path) if "vllm_tide" not in name}
    assert removed == {n for n in before if any(e in n for e in ids[4:])}
    assert set(os.listdir(tmp_path)) == before - removed


def test_files_that_another_start_removes_are_no_error(tmp_path, monkeypatch):
    leave(tmp_path, "a" * 16, 9)
    kind, lstat = type(tmp_path), type(tmp_path).lstat

    def vanished(path):
        if path.parent == tmp_path:
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(kind, "lstat", vanished)
    reclaim_orphans(tmp_path)
    assert not os.listdir(tmp_path)


def test_one_engine_of_a_group_starts_the_trainer_until_both_end(tmp_path):
    mine, other = (make_manifest(e, pid=p) for e, p in (("a", 1), ("b", 2)))
    group = group_of(mine)
    assert group == group_of(other) != group_of(make_manifest(target_path="/x"))
    lock = take_lock(tmp_path, group)
    assert take_lock(tmp_path, group) is None
    second = take_lock(tmp_path, group_of(make_manifest(target_path="/x")))
    child = Child(time.sleep, 60)
    os.close(lock)
    assert take_lock(tmp_path, group) is None
    child.kill()
    third = take_lock(tmp_path, group)
    assert None not in (lock, second, third)
    os.close(second)
    os.close(third)
