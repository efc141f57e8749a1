"""The operations of a process on files and shared memory, with one fault among them.

`Watch.install` replaces Python's functions on files, the writing end of the ring and
the memory of segments for the rest of a process, which is a fork made for that. An
operation is counted before it is done; the one that is to be hit is killed, torn or
failed there. A killed process ends at once: nothing is cleaned up.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import mmap
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tide import _shm
from vllm_tide.transport import shm

KILLED = 9
READ, CHANGE, WRITE, STORE, COPY = "read", "change", "write", "store", "copy"
FAULTS = {
    READ: ("EIO",),
    CHANGE: ("kill", "EIO", "ENOSPC"),
    WRITE: ("kill", "torn", "EIO", "ENOSPC", "short"),
    STORE: ("kill",),
    COPY: ("kill", "torn"),
}
"""What may happen to an operation: a store to memory cannot fail."""

# Functions of `os`, by the argument with the place: a path or a descriptor.
_FUNCTIONS = {
    **dict.fromkeys(("unlink", "remove", "rmdir", "mkdir", "chmod"), (CHANGE, 0)),
    **dict.fromkeys(("utime", "truncate", "fsync", "ftruncate"), (CHANGE, 0)),
    **dict.fromkeys(("rename", "replace", "link"), (CHANGE, 1)),
    **dict.fromkeys(("pread", "read"), (READ, 0)),
}
_LINE_BYTES = 64
_DATA_LINE = 8192 // _LINE_BYTES


class Watch:
    """Counts the operations below a folder, with one fault.

    Args:
        fault: One of `FAULTS`.
        at: Number of the operation that it happens to; -1: none.

    Attributes:
        operations: Kinds of the operations so far.
    """

    def __init__(self, root: Path, fault: str = "", at: int = -1) -> None:
        self.operations: list[str] = []
        self._root, self._fault, self._at = f"{root}/", fault, at

    def disarm(self) -> None:
        self._at = -1

    def meet(self, kind: str, where: Any = None, folder: int | None = None) -> str:
        """Count an operation; return "torn" or "short" if half of it is to be done.

        Args:
            where: Path or descriptor; None is one that is watched in any case.
            folder: Descriptor that a path is relative to.
        """
        if where is not None and not self.watches(where, folder):
            return ""
        self.operations.append(kind)
        if len(self.operations) - 1 != self._at:
            return ""
        if self._fault == "kill":
            os._exit(KILLED)
        if self._fault in ("torn", "short"):
            return self._fault
        number = getattr(errno, self._fault)
        raise OSError(number, os.strerror(number), str(where))

    def watches(self, where: Any, folder: int | None = None) -> bool:
        try:
            if isinstance(where, int):
                path = os.readlink(f"/proc/self/fd/{where}")
            else:
                path = os.fsdecode(where)
            if folder is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        except (OSError, TypeError):
            return False
        return f"{path}/".startswith(self._root)

    def install(self) -> None:
        """Watch this process until it ends."""
        for name, (kind, place) in _FUNCTIONS.items():
            self._wrap(os, name, kind, place)
        for name in ("shm_create", "shm_open", "shm_unlink"):
            self._wrap(_shm, name, CHANGE)
        for name in ("store", "fetch_add"):
            self._wrap(_shm, name, STORE)
        for name in ("bind", "listen", "connect"):
            self._wrap(socket.socket, name, CHANGE)
        self._wrap(mmap, "mmap", CHANGE)
        self._wrap(fcntl, "fcntl", CHANGE)  # locks
        self._watch_descriptors()
        self._watch_folders()
        self._watch_files()
        self._watch_memory()

    def _wrap(
        self, module: Any, name: str, kind: str, place: int | None = None
    ) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def watched(*args: Any, **more: Any) -> Any:
            folder = more.get("dst_dir_fd", more.get("dir_fd"))
            self.meet(kind, None if place is None else args[place], folder)
            return real(*args, **more)

        setattr(module, name, watched)

    def _watch_descriptors(self) -> None:
        real_open, real_write = os.open, os.write

        def watched_open(
            path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
        ) -> int:
            self.meet(CHANGE if flags & os.O_CREAT else READ, path, dir_fd)
            return real_open(path, flags, mode, dir_fd=dir_fd)

        def watched_write(fd: int, data: Any) -> int:
            how = self.meet(WRITE, fd)
            written = real_write(fd, data[: len(data) // 2] if how else data)
            if how == "torn":
                os._exit(KILLED)
            return written

        os.open, os.write = watched_open, watched_write  # type: ignore[assignment]

    def _watch_folders(self) -> None:
        real_scandir, real_listdir = os.scandir, os.listdir

        def watched_scandir(path: Any = ".") -> Any:
            self.meet(READ, path)
            if not self.watches(path):
                return real_scandir(path)
            with real_scandir(path) as entries:
                return _Entries(sorted(entries, key=lambda entry: entry.name))

        def watched_listdir(path: Any = ".") -> Any:
            self.meet(READ, path)
            return sorted(real_listdir(path))

        os.scandir, os.listdir = watched_scandir, watched_listdir  # type: ignore

    def _watch_files(self) -> None:
        real = io.open

        def watched_open(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if not self.watches(file):
                return real(
                    file, mode, buffering, encoding, errors, newline, closefd, opener
                )
            writes = not set("wax+").isdisjoint(mode)
            if not isinstance(file, int):
                self.meet(CHANGE if writes else READ, file)
            raw = _File(self, file, mode.replace("t", "").replace("b", ""), closefd)
            if buffering == 0:
                return raw
            buffered = io.BufferedWriter(raw) if writes else io.BufferedReader(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, encoding, errors, newline)

        io.open = builtins.open = watched_open

    def _watch_memory(self) -> None:
        real_init, real_write = shm.Segment.__init__, _shm.write_frames

        def watched_init(segment: shm.Segment, *args: Any, **more: Any) -> None:
            real_init(segment, *args, **more)
            segment.buf = _Memory.of(self, segment.buf)  # type: ignore[assignment]

        def watched_write(buf: Any, fd: int, *arguments: Any) -> None:
            """Write line by line; the frame's first and the atomics of page 1 last."""
            after = np.array(buf)
            real_write(after, fd, *arguments)
            shown, after = (
                np.asarray(b).reshape(-1, _LINE_BYTES) for b in (buf, after)
            )
            changed = np.flatnonzero((shown != after).any(1)).tolist()
            order = sorted(changed, key=lambda line: (line < _DATA_LINE, -line))
            for line in order:
                self.meet(STORE)
                shown[line] = after[line]

        shm.Segment.__init__ = watched_init  # type: ignore[method-assign]
        _shm.write_frames = watched_write
        for segment in list(shm._owned):  # made before the fork
            if segment.closed:
                continue
            segment.buf = _Memory.of(self, segment.buf)  # type: ignore[assignment]


class _Entries:
    """Return sorted results of `os.scandir`: the same operations each time."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...


class _File(io.FileIO):
    """A file; after a short write the disk is full."""

    def __init__(self, watch: Watch, file: Any, mode: str, closefd: bool) -> None:
        super().__init__(file, mode, closefd)
        self._watch, self._full = watch, False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        if self._full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        how = self._watch.meet(WRITE, self.fileno())
        written = super().write(data[: len(data) // 2] if how else data)
        if how == "torn":
            os._exit(KILLED)
        self._full = how == "short"
        return written

    def readinto(self, buffer: Any) -> int:  # type: ignore[override]
        self._watch.meet(READ, self.fileno())
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._watch.meet(READ, self.fileno())
        return super().readall()


class _Memory(np.ndarray):
    """The memory of a segment, as its memoryview."""

    watch: Watch

    @classmethod
    def of(cls, watch: Watch, buf: Any) -> _Memory:
        made = np.frombuffer(buf, np.uint8).view(cls)
        cls.watch = watch
        return made

    def __setitem__(self, place: Any, data: Any) -> None:
        how = self.watch.meet(COPY)
        raw = np.frombuffer(data, np.uint8)
        target = np.asarray(self)[place]
        size = len(raw) // 2 if how else len(raw)
        target[:size] = raw[:size]
        if how == "torn":
            os._exit(KILLED)

    def release(self) -> None: ...
