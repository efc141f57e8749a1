"""Locks on bytes of a file, which the kernel releases when their process ends.

They are open-file-description locks: they work between containers, and a lock conflicts
with a probe through any other descriptor, also of the same process. Forked children
close the descriptors, and a mapping of the file must have another one: each would keep
the lock after the death of the process.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi")  # type, whence, offset, length, pid
_locks: set[int] = set()


def hold(path: str | os.PathLike[str], byte: int = 0) -> int | None:
    """Lock a byte of a file until `release`; return None if it is locked.

    Returns:
        A descriptor for `release`.

    Raises:
        OSError: The file cannot be opened, or its file system has no locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if try_lock(fd, byte):
            _locks.add(fd)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def release(fd: int | None) -> None:
    """Release a lock of `hold`, if there is one."""
    if fd in _locks:
        _locks.remove(fd)
        os.close(fd)


def try_lock(fd: int, byte: int = 0) -> bool:
    """Lock a byte while copies of a descriptor are open; return False if it is locked.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(byte))
    except BlockingIOError:
        return False
    return True


def is_locked(fd: int, byte: int = 0) -> bool:
    """Return whether a byte is locked through another descriptor."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(byte))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _request(byte: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def _release_in_child() -> None:
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_release_in_child)
