"""Are Python and the packages those that vLLM and vllm-tide ask for?"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from vllm_tide.doctor.builds import torch_build, vllm_device, vllm_distribution
from vllm_tide.doctor.finding import Finding, failed, ok, skipped
from vllm_tide.doctor.subject import Subject
from vllm_tide.patch_series import SUPPORTED, PatchError
from vllm_tide.patching import find_target

PACKAGES = ("torch", "triton", "safetensors", "numpy", "prometheus-client")
_WORDS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm"}
_INSTALL = "Install again with scripts/install.sh, or the named version with pip."


def check(subject: Subject) -> Iterator[Finding]:
    """Python, vLLM, and the packages whose versions matter."""
    del subject
    yield _python(platform.python_version(), _required_python())
    yield _vllm()
    wanted = requirements()
    for name in PACKAGES:
        yield package(name, wanted.get(name, SpecifierSet()))


def requirements() -> dict[str, SpecifierSet]:
    """What the installed vLLM and vllm-tide require here, by canonical name."""
    found: dict[str, SpecifierSet] = {}
    for text in [*_requires(vllm_distribution()), *_requires(_own())]:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(wanted.name)
        found[name] = found.get(name, SpecifierSet()) & wanted.specifier
    return found


def package(name: str, wanted: SpecifierSet) -> Finding:
    """Compare one installed package with what is asked for.

    Args:
        name: As on the index.
        wanted: Versions that fit.
    """
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if name == "triton" and vllm_device(torch_build()) in ("cpu", ""):
            return skipped(name, "Not installed; the CPU backend does without.")
        return failed(name, "Not installed.", _INSTALL)
    build = torch_build() if name == "torch" else None
    text = f"{version}, {build.words} build" if build else version
    if not wanted.contains(version, prereleases=True):
        return failed(name, f"{text}, but vLLM asks for {wanted}.", _INSTALL)
    return ok(name, f"{text}.")


def _python(version: str, wanted: SpecifierSet) -> Finding:
    if not wanted.contains(version, prereleases=True):
        return failed(
            "Python",
            f"{version}, but vLLM asks for {wanted}.",
            "Make the environment with such a Python (scripts/install.sh --venv DIR).",
        )
    return ok("Python", f"{version}.")


def _required_python() -> SpecifierSet:
    found = SpecifierSet(">=3.11")
    for distribution in (vllm_distribution(), _own()):
        if distribution is not None and "Requires-Python" in distribution.metadata:
            found &= SpecifierSet(distribution.metadata["Requires-Python"])
    return found


def _vllm() -> Finding:
    try:
        find_target()
    except PatchError as error:
        return failed("vLLM", str(error), "scripts/install.sh installs and patches it.")
    found = vllm_distribution()
    version = found.version if found is not None else SUPPORTED
    device = vllm_device(torch_build())
    build = f"{_WORDS[device]} build" if device else "build not known"
    return ok("vLLM", f"{version}, {build}.")


def _own() -> metadata.Distribution | None:
    try:
        return metadata.distribution("vllm-tide")
    except metadata.PackageNotFoundError:  # a checkout on the path
        return None


def _requires(distribution: metadata.Distribution | None) -> list[str]:
    return [] if distribution is None else list(distribution.requires or ())
