"""Small files that another process wrote: read whole, but never more than they may be.

A name in a shared directory may turn out to be a pipe, which would be waited for, or a
file of any size. The JSON of a run directory is a few KiB.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 1 << 20
"""The most that a file of a run directory may hold (bytes)."""


def read_small(path: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a plain file.

    Args:
        path: The file.
        most: The most it may hold (bytes).

    Raises:
        OSError: It is absent, unreadable, no plain file or larger.
        ValueError: It is no path.
    """
    # Opening a pipe would otherwise wait for its other end.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        # One byte more than it says, or may hold: it may have grown meanwhile.
        data = file.read(min(status.st_size, most) + 1)
    if max(len(data), status.st_size) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return data
