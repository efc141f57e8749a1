import json
import os
import stat
import subprocess
import sys
import uuid

import pytest

from tests.transport.samples import make_spec
from vllm_tide.transport import RingWriter, TransportError
from vllm_tide.transport.process import Holder
from vllm_tide.transport.rendezvous import (
    RUN_DIR_VARIABLE,
    EngineManifest,
    default_run_dir,
    group_of,
    read_manifests,
    reclaim_orphans,
    remove_manifest,
    take_lock,
    write_manifest,
)
from vllm_tide.transport.shm import NAME_PREFIX, SHM_DIR


def make_manifest(engine_id="e1", **changes):
    me = Holder.me()
    fields = {
        "engine_id": engine_id,
        "pid": me.pid,
        "pid_start": me.start,
        "ring": "vllm_tide_ring_0",
        "weights": "vllm_tide_weights_0",
        "target_path": "/models/t",
        "draft_path": "/models/d",
        "target_dtype": "bfloat16",
        "hidden_size": 8,
        "vocab_size": 100,
        "draft_vocab_size": 50,
        "aux_layer_ids": (1, 2, 5),
        "teacher": "hidden",
        "teacher_topk": 3,
        "feature_dtype": "bfloat16",
        "num_speculative_tokens": 5,
        "tide": {"capture": {"enabled": True}},
        "created_unix": 1.5,
    }
    return EngineManifest(**{**fields, **changes})


def test_a_manifest_is_found_and_taken_back(tmp_path):
    run = tmp_path / "run"
    assert read_manifests(run) == []
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


def test_a_manifest_is_replaced_whole(tmp_path):
    write_manifest(tmp_path, make_manifest())
    write_manifest(tmp_path, make_manifest(ring="other"))
    assert [m.ring for m in read_manifests(tmp_path)] == ["other"]


def test_dead_engines_and_unreadable_files_are_passed_over(tmp_path):
    write_manifest(tmp_path, make_manifest("live"))
    write_manifest(tmp_path, make_manifest("dead", pid_start=1))
    write_manifest(tmp_path, make_manifest("odd", pid="x"))
    write_manifest(tmp_path, make_manifest("inf", pid=float("inf")))
    for name, text in (
        ("a", "{"),
        ("b", "[]"),
        ("c", "{}"),
        ("d", "[" * 100_000),
        ("e", '{"pid":Infinity}'),
    ):
        (tmp_path / f"engine-{name}.json").write_text(text)
    assert [m.engine_id for m in read_manifests(tmp_path)] == ["live"]


def test_a_manifest_of_a_later_version_is_still_read(tmp_path):
    path = write_manifest(tmp_path, make_manifest())
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert len(read_manifests(tmp_path)) == 1


@pytest.mark.parametrize("engine_id", ["", "../x", "a/b", "a b", "x" * 129])
def test_an_engine_id_that_is_no_file_name_is_refused(tmp_path, engine_id):
    with pytest.raises(TransportError, match="engine_id"):
        write_manifest(tmp_path, make_manifest(engine_id))


def test_a_run_directory_that_is_a_link_or_a_file_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(TransportError, match="TIDE_RUN_DIR"):
            write_manifest(tmp_path / name, make_manifest())


def test_a_run_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(TransportError, match="not a directory of user"):
        read_manifests(tmp_path)


def test_an_open_run_directory_is_made_private(tmp_path):
    tmp_path.chmod(0o755)
    write_manifest(tmp_path, make_manifest())
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_the_default_run_directory(monkeypatch):
    monkeypatch.delenv("TIDE_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/t")
    assert str(default_run_dir()) == f"/t/vllm_tide-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert str(default_run_dir()) == "/run/user/1/vllm_tide"
    monkeypatch.setenv("TIDE_RUN_DIR", "/x/y")
    assert str(default_run_dir()) == "/x/y"


@pytest.mark.vllm
def test_vllm_starts_where_it_checks_its_environment_and_ours_is_set(monkeypatch):
    """`vllm serve --fail-on-environ-validation` refuses names below VLLM_."""
    from vllm.platforms import Platform

    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(RUN_DIR_VARIABLE, "/x/y")
    Platform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_NO_SUCH_NAME", "")
    with pytest.raises(ValueError, match="VLLM_NO_SUCH_NAME"):
        Platform.validate_environ(hard_fail=True)


def in_shm(names):
    """Those that are there. Any process of this user may reclaim orphans meanwhile."""
    return [name for name in names if os.path.exists(f"{SHM_DIR}/{name}")]


ENGINE = """
import os, signal, sys
from pathlib import Path
from tests.transport.samples import make_spec
from tests.transport.test_rendezvous import make_manifest
from vllm_tide.transport import RingWriter, WeightsSegment
from vllm_tide.transport.rendezvous import write_manifest
ring = RingWriter.create(make_spec(), 4096)
weights = WeightsSegment.create(4096)
names = {"ring": ring.name, "weights": weights.name}
write_manifest(Path(sys.argv[1]), make_manifest("dead", **names))
print(ring.name, weights.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_a_killed_engine_left_is_reclaimed_and_nothing_else(tmp_path):
    run = tmp_path / "run"
    live = RingWriter.create(make_spec(), 4096)
    write_manifest(run, make_manifest("live", ring=live.name))
    argv = [sys.executable, "-c", ENGINE, str(run)]
    left = subprocess.run(argv, capture_output=True, text=True).stdout.split()
    assert len(left) == 2
    assert all(os.path.exists(f"{SHM_DIR}/{name}") for name in left)
    assert "engine-dead.json" in reclaim_orphans(run)
    assert not any(os.path.exists(f"{SHM_DIR}/{name}") for name in left)
    assert os.path.exists(f"{SHM_DIR}/{live.name}")
    assert [m.engine_id for m in read_manifests(run)] == ["live"]
    live.close()


def test_a_segment_without_a_header_is_reclaimed_only_once_it_is_old(tmp_path):
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


@pytest.mark.slow
def test_a_damaged_segment_is_reclaimed_only_when_its_engine_is_dead(tmp_path):
    waits = ENGINE.replace("os.kill(", "sys.stdin.read(); os.kill(")
    argv = [sys.executable, "-c", waits, str(tmp_path / "run")]
    with subprocess.Popen(argv, stdin=-1, stdout=-1) as engine:
        names = engine.stdout.readline().decode().split()
        for name in names:
            with open(f"{SHM_DIR}/{name}", "r+b") as file:
                file.write(os.urandom(300))
            os.utime(f"{SHM_DIR}/{name}", (0, 0))  # idle: nothing was written since
        reclaim_orphans(tmp_path)
        assert len(names) == 2 and in_shm(names) == names
        engine.stdin.close()
    reclaim_orphans(tmp_path)
    assert in_shm(names) == []


OTHER_NAMESPACE = ENGINE.replace(
    "ring = Ring", "process.pid_namespace = lambda: 7\nring = Ring"
).replace(
    "import os, signal, sys",
    "import os, signal, sys\nfrom vllm_tide.transport import process",
).replace("**names", "pid_namespace=7, **names")  # fmt: skip


@pytest.mark.slow
def test_a_server_killed_in_another_pid_namespace_is_seen_as_dead(tmp_path):
    run = tmp_path / "run"
    waits = OTHER_NAMESPACE.replace("os.kill(", "sys.stdin.read(); os.kill(")
    argv = [sys.executable, "-c", waits, str(run)]
    with subprocess.Popen(argv, stdin=-1, stdout=-1) as engine:
        names = engine.stdout.readline().decode().split()
        assert [m.engine_id for m in read_manifests(run)] == ["dead"]
        assert "engine-dead.json" not in reclaim_orphans(run)
        assert len(names) == 2 and in_shm(names) == names
        engine.stdin.close()
    assert read_manifests(run) == []
    assert "engine-dead.json" in reclaim_orphans(run)
    assert in_shm(names) == []


def leave(run, engine_id, when):
    kinds = ("trainer-{}.json", "trainer-{}.log", "trainer-{}.log.1", "events-{}.jsonl")
    for kind in (*kinds, "relay-{}.log", "relay-{}-123.json"):
        path = run / kind.format(engine_id)
        path.write_text("x")
        os.utime(path, (when, when))
    return 6


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


def test_files_that_another_start_removes_meanwhile_stop_nothing(tmp_path, monkeypatch):
    leave(tmp_path, "a" * 16, 9)
    kind, lstat = type(tmp_path), type(tmp_path).lstat

    def vanished(path):
        if path.parent == tmp_path:
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(kind, "lstat", vanished)
    reclaim_orphans(tmp_path)
    assert not os.listdir(tmp_path)


def test_one_engine_of_a_group_starts_the_trainer_until_it_and_its_child_end(tmp_path):
    mine, other = (make_manifest(e, pid=p) for e, p in (("a", 1), ("b", 2)))
    group = group_of(mine)
    assert group == group_of(other) != group_of(make_manifest(target_path="/x"))
    lock = take_lock(tmp_path, group)
    assert take_lock(tmp_path, group) is None
    second = take_lock(tmp_path, group_of(make_manifest(target_path="/x")))
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(argv, stdin=-1, pass_fds=(lock,)) as child:
        os.close(lock)
        assert take_lock(tmp_path, group) is None
        child.stdin.close()
    third = take_lock(tmp_path, group)
    assert None not in (lock, second, third)
    os.close(second)
    os.close(third)
