"""Which GPUs are there? Asked of the driver: a CUDA context would take memory."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_tide.doctor.builds import TorchBuild, torch_build
from vllm_tide.doctor.finding import Finding, failed, ok, skipped, warning
from vllm_tide.doctor.subject import Subject

NAME = "GPUs"
DRM = Path("/sys/class/drm")
_QUERY = "--query-gpu=name,memory.total,memory.used"
_SECONDS = 10
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver names it; memory in bytes, None where it is not told."""

    name: str
    memory: int | None
    used: int | None


def check(subject: Subject) -> Iterator[Finding]:
    """Ask where torch is built for GPUs."""
    del subject
    build = torch_build()
    if build is None or not (build.cuda or build.hip):
        yield skipped(NAME, "torch is built for the CPU.")
    elif build.hip:
        yield judge(amd_gpus(DRM), build)
    else:
        try:
            found = nvidia_gpus()
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            yield warning(
                NAME,
                f"nvidia-smi cannot be asked ({type(error).__name__}: {error}).",
                "Run nvidia-smi by hand; in a container expose the driver's tools.",
            )
        else:
            yield judge(found, build)


def judge(found: Sequence[Gpu], build: TorchBuild) -> Finding:
    """What the driver shows against what torch is built for."""
    if not found:
        return failed(
            NAME,
            f"torch is built for {build.words} and no GPU is to be seen.",
            "Check the driver; in a container pass the devices in.",
        )
    return ok(NAME, f"{len(found)}: {'; '.join(map(_words, found))}.")


def nvidia_gpus() -> list[Gpu]:
    """GPUs by `nvidia-smi`.

    Raises:
        OSError, SubprocessError, ValueError: It is not there, fails, or says something
            else.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("it is not installed")
    text = subprocess.run(  # noqa: S603 - a fixed query
        [program, _QUERY, "--format=csv,noheader,nounits"],
        capture_output=True,
        check=True,
        text=True,
        timeout=_SECONDS,
    ).stdout
    return parse_nvidia(text)


def parse_nvidia(text: str) -> list[Gpu]:
    """Lines of name, total and used memory (MiB, "[N/A]" where it is not told).

    Raises:
        ValueError: A line is another.
    """
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, total, used = (field.strip() for field in line.rsplit(",", 2))
        gpus.append(Gpu(name, _mib(total), _mib(used)))
    return gpus


def amd_gpus(drm: Path) -> list[Gpu]:
    """GPUs of the amdgpu driver.

    Args:
        drm: Its folder, /sys/class/drm.
    """
    gpus = []
    for total in sorted(drm.glob("card*/device/mem_info_vram_total")):
        name = _text(total.parent / "product_name") or "AMD GPU"
        used = _text(total.parent / "mem_info_vram_used")
        gpus.append(Gpu(name, _number(_text(total)), _number(used)))
    return gpus


def _words(gpu: Gpu) -> str:
    if gpu.memory is None:
        return gpu.name
    used = "" if gpu.used is None else f", {gpu.used / _GIB:.1f} used"
    return f"{gpu.name} ({gpu.memory / _GIB:.0f} GiB{used})"


def _mib(text: str) -> int | None:
    return None if text.startswith("[") else int(text) << 20


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
