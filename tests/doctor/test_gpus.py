"""GPUs as the drivers' tools name them; a program of ours stands for nvidia-smi."""

import pytest

from vllm_tide.doctor import gpus
from vllm_tide.doctor.builds import TorchBuild
from vllm_tide.doctor.finding import Status

CUDA = TorchBuild("2.13.0", "13.0", None)
ROCM = TorchBuild("2.13.0", None, "7.0")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def plant(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return plant


def examined(monkeypatch, build):
    monkeypatch.setattr(gpus, "torch_build", lambda: build)
    (found,) = gpus.check(None)
    return found


def test_count_names_and_memory(nvidia_smi, monkeypatch):
    nvidia_smi("printf 'NVIDIA H200, 143771, 512\\nNVIDIA H200, 143771, 0\\n'")
    found = examined(monkeypatch, CUDA)
    assert found.status is Status.OK
    assert found.sentence.startswith("2: NVIDIA H200 (140 GiB, 0.5 used); ")


def test_memory_that_is_not_told_is_left_out(nvidia_smi, monkeypatch):
    nvidia_smi("echo 'NVIDIA GB10, [N/A], [N/A]'")
    assert examined(monkeypatch, CUDA).sentence == "1: NVIDIA GB10."


def test_no_gpu_for_a_cuda_build_fails(nvidia_smi, monkeypatch):
    nvidia_smi("true")
    found = examined(monkeypatch, CUDA)
    assert found.status is Status.FAILED
    assert "CUDA 13.0" in found.sentence


@pytest.mark.parametrize("script", ["exit 9", "echo nonsense"])
def test_a_tool_that_fails_is_a_warning(nvidia_smi, monkeypatch, script):
    nvidia_smi(script)
    assert examined(monkeypatch, CUDA).status is Status.WARNING


def test_no_tool_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert examined(monkeypatch, CUDA).status is Status.WARNING


def test_amd_gpus_are_read_from_the_driver_s_files(tmp_path, monkeypatch):
    device = tmp_path / "card0" / "device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text(f"{192 << 30}\n")
    (device / "mem_info_vram_used").write_text(f"{1 << 30}\n")
    (device / "product_name").write_text("AMD Instinct MI300X\n")
    monkeypatch.setattr(gpus, "DRM", tmp_path)
    found = examined(monkeypatch, ROCM)
    assert found.sentence == "1: AMD Instinct MI300X (192 GiB, 1.0 used)."


def test_a_cpu_build_is_skipped(monkeypatch):
    cpu = TorchBuild("2.13.0+cpu", None, None)
    assert examined(monkeypatch, cpu).status is Status.SKIPPED
