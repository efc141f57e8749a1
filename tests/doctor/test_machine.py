"""Shared memory, run directory, cores, GPUs, ports: real ones, planted faults."""

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from tests.doctor.samples import examined, free_port, make_subject, write_draft
from tests.top.page_server import serve_page
from vllm_tide.config import MIB
from vllm_tide.doctor import machine
from vllm_tide.doctor.install import TorchBuild, vllm_device
from vllm_tide.doctor.machine import CORES_VARIABLE, can_be_made, is_memory
from vllm_tide.doctor.run import Status, Subject, examine

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")


@pytest.fixture
def space(monkeypatch):
    """Let every file system have a size and free bytes, the system free memory."""

    def plant(size, free, available=1 << 40):
        found = SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda folder: found)
        memory = SimpleNamespace(available=available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    return plant


def test_the_ring_and_two_slots_of_twice_the_draft_are_needed(
    tmp_path, monkeypatch, space
):
    space(10_000 * MIB, 9_000 * MIB)
    sentence = examined(make_subject(tmp_path), "shared_memory").sentence
    assert "(ring 256 MiB, weights not known without the draft)" in sentence
    subject = make_subject(tmp_path, draft=write_draft(tmp_path / "d"))
    monkeypatch.setattr("vllm_tide.doctor.models.draft_bytes", lambda _: 100 * MIB)
    sentence = examined(subject, "shared_memory").sentence
    assert "needs 658 MiB (ring 256 MiB, weights 402 MiB)" in sentence
    off = {"capture": {"enabled": False}, "swap": {"enabled": False}}
    sentence = examined(make_subject(tmp_path, off), "shared_memory").sentence
    assert "needs 0 MiB (ring 0 MiB, weights 0 MiB)" in sentence


@pytest.mark.parametrize(
    ("size", "free", "available", "status"),
    [
        (1000, 900, 1000, Status.OK),
        (64, 64, 1000, Status.FAILED),
        (320, 310, 1000, Status.WARNING),
        (1000, 900, 100, Status.WARNING),
    ],
)
def test_room_is_compared_with_the_need(
    tmp_path, monkeypatch, space, size, free, available, status
):
    space(size * MIB, free * MIB, available * MIB)
    monkeypatch.setattr("vllm_tide.doctor.models.draft_bytes", lambda _: MIB * 3 // 2)
    subject = make_subject(tmp_path, {"capture": {"ring_mib": 290}})
    finding = examined(subject, "shared_memory")
    assert finding.status is status
    assert f"has {free} MiB free of {size} MiB" in finding.sentence
    assert "needs 298 MiB (ring 290 MiB, weights 8 MiB)" in finding.sentence


def test_a_ring_larger_than_the_file_system_fails(tmp_path):
    status = os.statvfs(machine.SHM_DIR)
    if status.f_bavail * status.f_frsize > 65536 * MIB:
        pytest.skip("this machine has room for the largest ring there is")
    subject = make_subject(
        tmp_path,
        {"capture": {"ring_mib": 65536}},
        draft=write_draft(tmp_path / "draft"),
    )
    found = examined(subject, "shared_memory")
    assert found.status is Status.FAILED
    assert "tide.capture.ring_mib" in found.advice


def test_a_folder_that_is_not_there_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "SHM_DIR", tmp_path / "gone")
    found = examined(make_subject(tmp_path), "shared_memory")
    assert found.status is Status.FAILED
    assert "cannot be written" in found.sentence


def test_trying_to_write_leaves_nothing(tmp_path):
    before = set(os.listdir(machine.SHM_DIR))
    sentence = examined(make_subject(tmp_path), "shared_memory").sentence
    assert "a server needs" in sentence
    assert set(os.listdir(machine.SHM_DIR)) <= before


def run_directory(run_dir):
    return examined(Subject(run_dir=run_dir), "run_directory")


def test_a_run_directory_that_does_not_exist_yet_is_fine(tmp_path):
    assert run_directory(tmp_path / "a" / "b").status is Status.OK
    assert list(tmp_path.iterdir()) == []


def test_a_private_run_directory_is_ok_and_an_open_one_a_warning(tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    assert run_directory(run).status is Status.OK
    run.chmod(0o755)
    found = run_directory(run)
    assert found.status is Status.WARNING
    assert "0755" in found.sentence
    assert run.stat().st_mode & 0o777 == 0o755  # looked at, not changed


@ROOT_ONLY
def test_another_user_s_run_directory_fails(tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    os.chown(run, 12345, -1)
    found = run_directory(run)
    assert found.status is Status.FAILED
    assert "12345" in found.sentence


def test_a_file_a_link_and_an_impossible_place_fail(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for path in (file, link, file / "below"):
        assert run_directory(path).status is Status.FAILED, path


@pytest.mark.parametrize("mode", [None, 0o700, 0o755])
def test_a_full_file_system_of_the_run_directory_fails(tmp_path, space, mode):
    run = tmp_path / "run"
    if mode is not None:
        run.mkdir(mode=mode)
    space(1000 * MIB, (64 << 10) - 1)
    found = run_directory(run)
    assert found.status is Status.FAILED
    assert f"{run} has no room (63 KiB free)" in found.sentence
    assert "tide.run_dir" in found.advice


def test_less_room_than_the_ring_is_a_warning(tmp_path, space):
    space(1000 * MIB, 10 * MIB)
    for section, status in (
        (None, Status.WARNING),
        ({"capture": {"ring_mib": 8}}, Status.OK),
        ({"capture": {"enabled": False}}, Status.OK),
    ):
        found = examined(make_subject(tmp_path, section), "run_directory")
        assert found.status is status, section
        if status is Status.WARNING:
            assert "has 10 MiB free" in found.sentence
            assert "256 MiB" in found.sentence
            assert "tide.run_dir" in found.advice


@pytest.mark.parametrize(
    ("path", "memory"),
    [
        ("/run/x", True),
        ("/runner", False),
        ("/run/my disk/y", False),
        ("/run/hidden/y", True),
        ("/", False),
    ],
)
def test_the_nearest_mount_decides(path, memory, monkeypatch):
    mounts = [
        SimpleNamespace(mountpoint=point, fstype=kind)
        for point, kind in (
            ("/run/my disk", "xfs"),
            ("/", "ext4"),
            ("/run", "tmpfs"),
            ("/run/hidden", "xfs"),
            ("/run/hidden", "ramfs"),
        )
    ]

    def partitions(all):
        assert all  # else psutil leaves file systems in memory out
        return mounts

    monkeypatch.setattr(psutil, "disk_partitions", partitions)
    monkeypatch.setattr(machine, "nearest_existing", lambda path: path)
    assert is_memory(machine.Path(path)) is memory


def test_real_mounts_are_read():
    assert is_memory(machine.SHM_DIR / "not" / "there")


def test_can_be_made(tmp_path):
    assert can_be_made(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not can_be_made(tmp_path / "file" / "b")


ALL = {0, 1, 2, 3}


@pytest.fixture
def cores(monkeypatch, tmp_path):
    """The finding on a division of the cores of a machine that has four."""

    def judge(trainer, bind, allowed):
        device = "cuda" if bind is None else "cpu"
        monkeypatch.setattr(machine, "vllm_device", lambda: device)
        monkeypatch.setenv(CORES_VARIABLE, bind or "0-99")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        return examined(make_subject(tmp_path, {"train": {"cpus": trainer}}), "cores")

    return judge


@pytest.mark.parametrize(
    ("trainer", "bind", "allowed", "status", "part"),
    [
        (None, "auto", ALL, Status.OK, "takes cores that the engine leaves"),
        ([3], "0-2", ALL, Status.OK, "engine on 0-2, trainer on 3"),
        ([1], "0,2-3", ALL, Status.OK, "engine on 0,2-3, trainer on 1"),
        ([3], "0-3", ALL, Status.WARNING, "may share 3"),
        ([2, 3], "0,1|2,3", ALL, Status.WARNING, "may share 2-3"),
        ([3], "auto", ALL, Status.WARNING, f"{CORES_VARIABLE} is auto"),
        ([3], "nobind", ALL, Status.WARNING, "may share 3"),
        ([3], None, ALL, Status.OK, "trainer on 3"),
        ([9], "0-2", ALL, Status.FAILED, "names [9]"),
        ([3, 9], "0-2", ALL, Status.WARNING, "names [9]"),
        (None, "0-7", ALL, Status.FAILED, "names [4, 5, 6, 7], which this process may"),
        (None, "x-y", ALL, Status.FAILED, "is no list of cores"),
        (None, "auto", {2}, Status.WARNING, "slows it down"),
    ],
)
def test_division_of_cores(cores, trainer, bind, allowed, status, part):
    found = cores(trainer, bind, allowed)
    assert found.status is status, found
    assert part in found.sentence


def test_the_advice_leaves_the_trainer_s_cores_out(cores):
    assert f'{CORES_VARIABLE}="0-2"' in cores([3], "auto", ALL).advice
    assert "fewer cores" in cores([0, 1, 2, 3], "auto", ALL).advice


def test_this_machine_s_cores_are_judged(tmp_path, monkeypatch):
    monkeypatch.setenv(CORES_VARIABLE, "no-list")
    found = examined(make_subject(tmp_path), "cores")
    assert vllm_device() != "cpu" or found.status is Status.FAILED


CUDA = TorchBuild("2.13.0", "13.0", None)
ROCM = TorchBuild("2.13.0", None, "7.0")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A program of ours stands for nvidia-smi."""

    def plant(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return plant


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    def judge(build, **train):
        monkeypatch.setattr(machine, "torch_build", lambda: build)
        return examined(make_subject(tmp_path, {"train": train}), "gpus")

    return judge


def test_count_names_and_memory(nvidia_smi, gpus):
    nvidia_smi("printf 'NVIDIA H200, 143771, 512\\nNVIDIA H200, 143771, 0\\n'")
    found = gpus(CUDA)
    assert found.status is Status.OK
    assert found.sentence.startswith("2: NVIDIA H200 (140 GiB, 0.5 used); ")


def test_memory_that_is_not_told_is_left_out(nvidia_smi, gpus):
    nvidia_smi("echo 'NVIDIA GB10, [N/A], [N/A]'")
    assert gpus(CUDA).sentence == "1: NVIDIA GB10."


def test_no_gpu_for_a_cuda_build_fails(nvidia_smi, gpus):
    nvidia_smi("true")
    found = gpus(CUDA)
    assert found.status is Status.FAILED
    assert "CUDA 13.0" in found.sentence


@pytest.mark.parametrize("script", ["exit 9", "echo nonsense"])
def test_a_tool_that_fails_is_a_warning(nvidia_smi, gpus, script):
    nvidia_smi(script)
    assert gpus(CUDA).status is Status.WARNING


def test_no_tool_is_a_warning(tmp_path, monkeypatch, gpus):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus(CUDA).status is Status.WARNING


def test_amd_gpus_are_read_from_the_driver_s_files(tmp_path, monkeypatch, gpus):
    device = tmp_path / "card0" / "device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text(f"{192 << 30}\n")
    monkeypatch.setattr(machine, "DRM_DIR", tmp_path)
    assert gpus(ROCM).sentence == "1: AMD GPU (192 GiB)."
    (device / "mem_info_vram_used").write_text(f"{1 << 30}\n")
    (device / "product_name").write_text("AMD Instinct MI300X\n")
    assert gpus(ROCM).sentence == "1: AMD Instinct MI300X (192 GiB, 1.0 used)."


def test_a_cpu_build_is_skipped(gpus):
    build = TorchBuild("2.13.0+cpu", None, None)
    assert gpus(build).status is Status.SKIPPED
    found = gpus(build, device="cuda:1")
    assert found.status is Status.FAILED
    assert found.sentence.startswith("tide.train.device is cuda:1 and torch is built")


def ports(subject):
    return list(examine(subject, ("ports",)))


def test_a_free_port_is_ok(tmp_path):
    first, second = ports(make_subject(tmp_path, port=free_port()))
    assert first.status is Status.OK
    assert second.status is Status.SKIPPED


def test_a_port_taken_by_somebody_else_fails(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        first, _ = ports(make_subject(tmp_path, port=port))
    assert first.status is Status.FAILED
    assert "--port" in first.advice


def test_a_running_server_is_told_from_somebody_else(tmp_path):
    with serve_page("# TYPE vllm:num_requests_running gauge\n") as page:
        first, _ = ports(make_subject(tmp_path, port=page.port))
    assert first.status is Status.WARNING
    assert "running server" in first.sentence


def test_the_trainer_s_port_is_looked_at_too(tmp_path):
    with serve_page("vllm_tide:trainer_steps_total 1\n") as page:
        section = {"train": {"metrics_port": page.port}}
        subject = make_subject(tmp_path, section, port=free_port())
        _, second = ports(subject)
        assert second.status is Status.WARNING
        page.text = "something else"
        _, second = ports(subject)
    assert second.status is Status.FAILED
    assert "tide.train.metrics_port" in second.advice
