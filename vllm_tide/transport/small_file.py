"""Small files that another process wrote: read whole, but never more than they may be.

A name in a shared directory may turn out to be a pipe, which would be waited for, or a
file of any size. The JSON of a run directory is a few KiB.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 1 << 20
"""The most that a file of a run directory may hold (bytes)."""


def read_small(path: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a plain file of at most so many.

    Raises:
        OSError: It is absent, unreadable, no plain file or larger.
        ValueError: It is no path.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        # One byte more than it says, or may hold: it may have grown meanwhile.
        data = file.read(min(size, most) + 1)
    if max(len(data), size) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return data


def open_plain(path: Path | str, folder: int | None = None) -> BinaryIO:
    """Open a plain file to read, never to wait for.

    With the descriptor of a `folder` it is a name in that, and no link. Raises as
    `read_small` does.
    """
    inside = folder is not None
    _refuse_special(os.stat(path, dir_fd=folder, follow_symlinks=not inside), path)
    # It may be another by now: opening a pipe would wait for its other end.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW * inside
    file = os.fdopen(os.open(path, flags, dir_fd=folder), "rb")
    try:
        _refuse_special(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def _refuse_special(status: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))


def make_private(folder: Path) -> None:
    """Make a directory and what is missing above it, each of mode 0700."""
    for level in reversed((folder, *folder.parents)):
        level.mkdir(mode=0o700, exist_ok=True)
