"""What lies under a path: a file system that forgets, one that cannot be written."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MEMORY = ("tmpfs", "ramfs")
_OCTAL = re.compile(r"\\([0-7]{3})")


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest of its parents that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def can_be_made(path: Path) -> bool:
    """Whether this user could make a directory that does not exist yet."""
    parent = nearest_existing(path)
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)


def is_memory(path: Path, mounts: str | None = None) -> bool:
    """Whether what is written there is gone after a restart of the machine.

    Args:
        path: Need not exist yet.
        mounts: In the form of /proc/self/mountinfo, which is read if None.
    """
    where = nearest_existing(path).resolve()
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
        except OSError:
            return False
    kind, longest = "", -1
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda m: chr(int(m[1], 8)), fields.split()[4]))
        # The later of two mounts at one place hides the earlier.
        if where.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = rest.split()[0], len(point.parts)
    return kind in _MEMORY
