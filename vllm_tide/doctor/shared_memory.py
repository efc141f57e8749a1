"""Is there room, and the right, for the ring and the weights segment?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_tide.config import MIB, TideConfig
from vllm_tide.doctor.draft_size import draft_bytes
from vllm_tide.doctor.finding import Finding, failed, ok, warning
from vllm_tide.doctor.subject import Subject

NAME = "shared memory"
_SEGMENT_BYTES = 3 * 4096  # header pages and rounding of a segment
_TIGHT = 0.1  # share of the file system that should stay free


@dataclass(frozen=True, slots=True)
class Space:
    """A shared-memory file system (bytes).

    Attributes:
        available: Memory that the system can still give; None where it does not say.
    """

    size: int
    free: int
    available: int | None


def check(subject: Subject) -> Iterator[Finding]:
    """Look at /dev/shm, then count."""
    from vllm_tide.transport.shm import SHM_DIR

    folder = Path(SHM_DIR)
    if problem := rights(folder):
        yield problem
        return
    tide = subject.tide or TideConfig.model_validate({})
    ring, slots, known = needed(tide, draft_bytes(subject))
    yield judge(folder, space(folder), ring, slots, slots_known=known)


def rights(folder: Path) -> Finding | None:
    """Why no segment can be made in a folder; None if one can.

    Args:
        folder: Tried with a file without a name, which cannot be left behind.
    """
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        return failed(
            NAME,
            f"{folder} cannot be written ({error.strerror}).",
            "Mount a tmpfs there (mode 1777); in a container give it --shm-size.",
        )
    try:
        os.write(fd, b"\0")
    except OSError as error:
        return failed(
            NAME,
            f"{folder} takes no byte ({error.strerror}).",
            f"Remove what fills {folder}; in a container raise --shm-size.",
        )
    finally:
        os.close(fd)
    return None


def space(folder: Path) -> Space:
    """Size and room of the file system that holds a folder."""
    status = os.statvfs(folder)
    return Space(
        status.f_blocks * status.f_frsize,
        status.f_bavail * status.f_frsize,
        _available_memory(),
    )


def needed(tide: TideConfig, draft: int | None) -> tuple[int, int, bool]:
    """Bytes of ring and of the weights segment, and whether the latter is known.

    Args:
        tide: What a server would be started with.
        draft: Bytes of the draft; None if not known.
    """
    ring = tide.capture.ring_mib * MIB + _SEGMENT_BYTES if tide.capture.enabled else 0
    if not tide.swap.enabled:
        return ring, 0, True
    if draft is None:
        return ring, 0, False
    # As the server: two slots of twice the draft, for one published in fp32.
    return ring, 2 * (2 * draft + MIB) + _SEGMENT_BYTES, True


def judge(
    folder: Path, found: Space, ring: int, slots: int, *, slots_known: bool
) -> Finding:
    """Compare what a server needs with what there is.

    Args:
        folder: Shown.
        found: What there is.
        ring: Bytes of the ring.
        slots: Bytes of the weights segment.
        slots_known: Whether the draft's size was known.
    """
    need = ring + slots
    parts = f"ring {_mib(ring)}, weights " + (
        _mib(slots) if slots_known else "not known without the draft"
    )
    text = (
        f"{folder} has {_mib(found.free)} free of {_mib(found.size)}; a server needs "
        f"{_mib(need)} ({parts})"
    )
    if need > found.free:
        return failed(
            NAME,
            f"{text}.",
            "Make tide.capture.ring_mib smaller or the file system larger (docker run "
            f"--shm-size, mount -o remount,size=... {folder}).",
        )
    if found.available is not None and need > found.available:
        return warning(
            NAME,
            f"{text}, and the system has {_mib(found.available)} of memory left.",
            "Make tide.capture.ring_mib smaller: a ring is memory, taken at the start.",
        )
    if found.free - need < _TIGHT * found.size:
        return warning(
            NAME,
            f"{text}, which nearly fills it.",
            "Make tide.capture.ring_mib smaller or the file system larger; vLLM's own "
            "workers use it too.",
        )
    return ok(NAME, f"{text}.")


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"
