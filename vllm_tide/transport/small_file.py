"""Small files that another process wrote: read whole, but never more than they may be.

A name in a shared directory may turn out to be a pipe, which would be waited for, or a
file of any size. The JSON of a run directory is a few KiB.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

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


def write_once(path: Path, data: bytes) -> None:
    """Makes a file, mode 0600; of two that start at once, the first one's stays."""
    with written_beside(path, data) as temporary, contextlib.suppress(FileExistsError):
        os.link(temporary, path)  # not renamed: that would replace it


@contextlib.contextmanager
def written_beside(path: Path, data: bytes) -> Iterator[str]:
    """A new file beside a path that lasts as long as this, unless it is renamed."""
    # mkstemp makes it 0600, whatever the umask.
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        yield temporary
    finally:
        Path(temporary).unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make a directory and what is missing above it, each of mode 0700."""
    for level in reversed((folder, *folder.parents)):
        level.mkdir(mode=0o700, exist_ok=True)


def plain(value: Any) -> Any:
    """`value` in Python's own types and vLLM's range: others would hang its encoder."""
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(entry) for entry in value]
    if value is None or isinstance(value, bool):
        return value
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays, tensors
        return plain(value.tolist())
    if isinstance(value, int):
        return min(max(int(value), -(2**63)), 2**64 - 1)
    return float(value) if isinstance(value, float) else str(value)
