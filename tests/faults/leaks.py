"""Resources that a process must not accumulate: memory, descriptors, segments."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # no stubs needed for this

from vllm_tide.transport.shm import SHM_DIR

MORE_FDS = 48
MORE_MIB = 128.0
MORE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one process.

    Attributes:
        rss_mib: Resident memory that is no shared segment (MiB).
        fds: Open file descriptors.
    """

    rss_mib: float
    fds: int


def usage_of(process: psutil.Process) -> Usage | None:
    """Return the resources of a process; None if it is gone."""
    try:
        memory = process.memory_info()
        return Usage(round((memory.rss - memory.shared) / 2**20, 1), process.num_fds())
    except psutil.Error:
        return None


class LeakWatch:
    """Compares every process with its resources after its first minutes.

    Before that it fills buffers of a fixed size, and kernels get their workspaces.

    Args:
        warm_s: Age up to which a process may grow (s).
    """

    def __init__(self, warm_s: float = 180.0) -> None:
        self._warm_s = warm_s
        self._first: dict[tuple[int, float], Usage] = {}

    def check(self, role: str, process: psutil.Process) -> str:
        """Check a process.

        Returns:
            The figures that have grown too much; empty if none.
        """
        now = usage_of(process)
        if now is None:
            return ""
        key = (process.pid, process.create_time())
        if time.time() - key[1] < self._warm_s:
            self._first[key] = now
        first = self._first.setdefault(key, now)
        if now.fds > first.fds + MORE_FDS:
            return f"{role} has {now.fds} file descriptors, {first.fds} at first"
        if now.rss_mib > first.rss_mib * (1 + MORE_SHARE) + MORE_MIB:
            return f"{role} has {now.rss_mib} MiB, {first.rss_mib} at first"
        return ""


def left_behind(made: Set[str], in_use: Set[str]) -> list[str]:
    """Return segments that still exist without a user."""
    return sorted(n for n in made - in_use if n and (Path(SHM_DIR) / n).exists())
