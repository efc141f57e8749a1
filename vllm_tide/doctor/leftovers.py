"""Did engines die and leave manifests or segments behind?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vllm_tide.config import MIB
from vllm_tide.doctor.finding import Finding, ok, warning
from vllm_tide.doctor.subject import Subject
from vllm_tide.transport.rendezvous import inspect_manifests
from vllm_tide.transport.shm import NAME_PREFIX, SHM_DIR, orphaned

NAME = "leftovers"


def check(subject: Subject) -> Iterator[Finding]:
    """Look through the run directory and /dev/shm."""
    yield judge(subject.run_dir)


def judge(run_dir: Path) -> Finding:
    """Manifests of live and dead engines, and segments without an owner.

    Args:
        run_dir: Run directory; need not exist.
    """
    live, stale = 0, []
    for path, manifest in inspect_manifests(run_dir):
        if manifest is None:
            stale.append(f"{path.name} (unreadable)")
        elif manifest.owner_alive() is False:
            stale.append(path.name)
        else:
            live += 1
    orphans, size = _orphans()
    engines = f"{live} live engine{'' if live == 1 else 's'}"
    if not stale and not orphans:
        return ok(NAME, f"None; {engines} announced.")
    parts = []
    if stale:
        parts.append(f"manifests {', '.join(stale)} without a live engine")
    if orphans:
        parts.append(f"{orphans} segment(s) of dead engines ({size / MIB:.0f} MiB)")
    return warning(
        NAME,
        f"{'; '.join(parts)}; {engines} announced.",
        "The next server or trainer removes what dead engines of this user left; "
        "remove unreadable files by hand.",
    )


def _orphans() -> tuple[int, int]:
    """Number and bytes of segments that dead owners left."""
    count = size = 0
    try:
        names = [n for n in os.listdir(SHM_DIR) if n.startswith(NAME_PREFIX)]
    except OSError:
        return 0, 0
    for name in names:
        if orphaned(name):
            count += 1
            try:
                size += os.stat(f"{SHM_DIR}/{name}").st_size
            except OSError:
                continue
    return count, size
