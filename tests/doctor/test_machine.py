"""Shared memory, directories, device, spool: real ones, planted faults."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.doctor.samples import examined, make_subject, write_draft
from vllm_tide.capture.switch import OFF, PAUSED, Switch
from vllm_tide.config import MIB, parse_tide
from vllm_tide.doctor import machine
from vllm_tide.doctor.install import TorchBuild
from vllm_tide.doctor.run import Status, Subject
from vllm_tide.transport import spool as transport_spool
from vllm_tide.transport.shm import TransportError

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")


@pytest.fixture
def space(monkeypatch):
    """Set size and free bytes of every file system, and the free memory."""

    def plant(size, free, available=1 << 40):
        status = SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda folder: status)
        memory = SimpleNamespace(available=available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    return plant


def test_the_ring_and_two_slots_of_twice_the_draft_are_needed(
    tmp_path, monkeypatch, space
):
    space(10_000 * MIB, 9_000 * MIB)
    sentence = examined(make_subject(tmp_path), "shared_memory").sentence
    assert "(ring 256 MiB, weights unknown without the draft)" in sentence
    subject = make_subject(tmp_path, draft=write_draft(tmp_path / "d"))
    monkeypatch.setattr("vllm_tide.doctor.models.draft_bytes", lambda _: 100 * MIB)
    sentence = examined(subject, "shared_memory").sentence
    assert "needs 658 MiB (ring 256 MiB, weights 402 MiB)" in sentence
    for free, available, status in (
        (900, 1000, Status.OK),
        (64, 1000, Status.FAILED),
        (900, 100, Status.WARNING),
    ):
        space(1000 * MIB, free * MIB, available * MIB)
        subject = make_subject(tmp_path, {"capture": {"ring_mib": 290}})
        finding = examined(subject, "shared_memory")
        assert finding.status is status
        assert f"has {free} MiB free of 1000 MiB" in finding.sentence
        assert status is Status.OK or "tide.capture.ring_mib" in finding.advice
    off = {"capture": {"enabled": False}, "swap": {"enabled": False}}
    sentence = examined(make_subject(tmp_path, off), "shared_memory").sentence
    assert "needs 0 MiB (ring 0 MiB, weights 0 MiB)" in sentence


def test_missing_or_full_shared_memory_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "SHM_DIR", tmp_path / "gone")
    finding = examined(make_subject(tmp_path), "shared_memory")
    assert finding.status is Status.FAILED
    assert "cannot be written" in finding.sentence
    monkeypatch.setattr(machine, "SHM_DIR", tmp_path)
    examined(make_subject(tmp_path), "shared_memory")
    assert list(tmp_path.iterdir()) == []

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    finding = examined(make_subject(tmp_path), "shared_memory")
    assert finding.status is Status.FAILED
    assert "No space left" in finding.sentence


def run_directory(run_dir):
    finding = examined(Subject(run_dir=run_dir), "run_directory")
    return finding.status, finding.sentence


def test_run_directories(tmp_path):
    assert run_directory(tmp_path / "a" / "b")[0] is Status.OK
    assert list(tmp_path.iterdir()) == []
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    assert run_directory(run)[0] is Status.OK
    run.chmod(0o755)
    status, sentence = run_directory(run)
    assert status is Status.FAILED
    assert "0755" in sentence
    assert run.stat().st_mode & 0o777 == 0o755  # it is not changed
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("")
    link.symlink_to(tmp_path)
    for path in (file, link, file / "below"):
        assert run_directory(path)[0] is Status.FAILED, path


@ROOT_ONLY
def test_a_gpu_of_a_trainer_elsewhere_is_not_checked(monkeypatch):
    monkeypatch.setattr(machine, "torch_build", lambda: TorchBuild("2", None, None))
    for tide in ({"spool": {"url": "/s"}}, {"train": {"autostart": False}}, {}):
        train = tide.get("train", {}) | {"device": "cuda:0"}
        subject = Subject(run_dir=Path("/r"), tide=parse_tide(tide | {"train": train}))
        status = examined(subject, "trainer_device").status
        assert status is (Status.SKIPPED if tide else Status.FAILED)


def test_switches_that_outlive_a_restart_are_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    subject = Subject(run_dir=tmp_path / "run")
    assert examined(subject, "switches").status is Status.OK
    switch = Switch(subject.run_dir, PAUSED)
    switch.set(True)
    (subject.run_dir / PAUSED).unlink()  # as after a reboot
    finding = examined(subject, "switches")
    assert finding.status is Status.WARNING
    assert finding.sentence == (
        "Nothing is captured or trained until `vllm-tide resume`, also after restarts."
    )
    tide = parse_tide({"run_dir": "/r", "train": {"state_dir": "/s"}})
    monkeypatch.setattr("vllm_tide.capture.switch.switches_on", lambda _: [PAUSED, OFF])
    finding = examined(Subject(run_dir=Path("/r"), tide=tide), "switches")
    assert (
        "`vllm-tide resume --run-dir /r --state-dir /s` and `vllm-tide capture on "
        "--run-dir /r --state-dir /s`"
    ) in finding.sentence


def test_another_users_run_directory_fails(tmp_path):
    os.chown(tmp_path, 12345, -1)
    status, sentence = run_directory(tmp_path)
    assert status is Status.FAILED
    assert "12345" in sentence


@pytest.mark.parametrize(
    ("cuda", "device", "status"),
    [
        (None, "cpu", Status.OK),
        ("13.0", "cuda:1", Status.OK),
        (None, "cuda:1", Status.FAILED),
    ],
)
def test_a_trainer_s_device_needs_its_build_of_torch(
    tmp_path, monkeypatch, cuda, device, status
):
    monkeypatch.setattr(machine, "torch_build", lambda: TorchBuild("2.13", cuda, None))
    subject = make_subject(tmp_path, {"train": {"device": device}})
    assert examined(subject, "trainer_device").status is status


def spool(url):
    finding = examined(make_subject(Path("run"), {"spool": {"url": url}}), "spool")
    return finding.status, finding.sentence


def test_a_spool_is_listed_and_a_missing_one_is_not_made(tmp_path):
    folder = tmp_path / "spool"
    url = f"file://{folder}"
    assert "will be created by the relay" in spool(url)[1]
    assert not folder.exists()
    folder.mkdir(mode=0o700)
    (folder / "engine").mkdir()
    status, sentence = spool(url)
    assert status is Status.OK
    assert "1 folders" in sentence
    folder.chmod(0o777)
    status, sentence = spool(url)
    assert status is Status.FAILED
    assert "accessible to all users" in sentence


def test_an_unresponsive_back_end_is_given_up(monkeypatch, tmp_path):
    def hang(url):
        time.sleep(0.05)
        raise TransportError("too late")

    monkeypatch.setattr(transport_spool, "Store", hang)
    monkeypatch.setattr(machine, "SPOOL_SECONDS", 0.001)
    status, sentence = spool(f"{tmp_path}")
    assert status is Status.FAILED
    assert "No answer" in sentence


def test_state_directories(tmp_path):
    def judged(folder):
        section = {"train": {"state_dir": str(folder)}}
        return examined(make_subject(tmp_path, section), "state_directory").status

    assert judged(tmp_path / "heads") is Status.OK
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert judged(tmp_path / "file") is judged(tmp_path / "file" / "x") is Status.FAILED
    default = examined(make_subject(tmp_path), "state_directory")
    assert str(tmp_path / "run" / "heads") in default.sentence


def test_absent_cpus_fail(tmp_path):
    subject = make_subject(tmp_path, {"train": {"cpus": [0, 1 << 20]}})
    finding = examined(subject, "trainer_device")
    assert finding.status is Status.FAILED
    assert "tide.train.cpus has [1048576], but" in finding.sentence
