"""The shared memory of one run.

No segment names its run, but each names its owner: what a process of the run made is
the run's, announced or not, also when that process is gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from vllm_tide.transport.process import start_time
from vllm_tide.transport.shm import NAME_PREFIX, SHM_DIR, open_readonly


class RunSegments:
    """Every segment that the run's processes have made so far."""

    def __init__(self) -> None:
        self._made: set[str] = set()
        self._makers: set[tuple[int, int]] = set()

    def note(self, pids: Iterable[int]) -> None:
        """Look for segments.

        Args:
            pids: Of the run's living processes; those of earlier looks count on.
        """
        for pid in pids:
            start = start_time(pid)
            if start is not None:  # a pid alone is given out again
                self._makers.add((pid, start))
        for name in os.listdir(SHM_DIR):
            if not name.startswith(NAME_PREFIX) or name in self._made:
                continue
            with contextlib.suppress(OSError), open_readonly(name) as (_, header):
                owner = header.owner if header is not None else None
                if owner is not None and (owner.pid, owner.start) in self._makers:
                    self._made.add(name)

    @property
    def made(self) -> frozenset[str]:
        """Names of all of them, those that are gone included."""
        return frozenset(self._made)

    def num_bytes(self) -> int:
        """Size of those that are there (bytes)."""
        total = 0
        for name in self._made:
            try:
                total += (Path(SHM_DIR) / name).stat().st_size
            except FileNotFoundError:
                continue
        return total
