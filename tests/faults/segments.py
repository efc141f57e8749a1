"""The shared memory of one run.

A segment does not name its run, but it names its owner: the segments of a run's
processes are the run's, announced or not, also after those processes ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from vllm_tide.transport.shm import NAME_PREFIX, SHM_DIR, open_readonly


class RunSegments:
    """Every segment that the run's processes have made so far."""

    def __init__(self) -> None:
        self._made: set[str] = set()
        self._makers: set[int] = set()

    def note(self, pids: Iterable[int]) -> None:
        """Add segments.

        Args:
            pids: Of the run's living processes; those of earlier looks count on.
        """
        self._makers.update(pids)
        for name in os.listdir(SHM_DIR):
            if not name.startswith(NAME_PREFIX) or name in self._made:
                continue
            with contextlib.suppress(OSError), open_readonly(name) as (_, header):
                if header is not None and header.pid in self._makers:
                    self._made.add(name)

    @property
    def made(self) -> frozenset[str]:
        """Return the names of all of them, those that are gone included."""
        return frozenset(self._made)

    def num_bytes(self) -> int:
        """Return the size of the existing ones (bytes)."""
        total = 0
        for name in self._made:
            try:
                total += (Path(SHM_DIR) / name).stat().st_size
            except FileNotFoundError:
                continue
        return total
