"""Where a spool lies: a directory, or any store that fsspec can reach.

Both kinds promise the same: a file is written whole or not at all, and one that is
listed can be read. In a directory that is write, sync, rename. An object store puts an
object at once; where a store does neither (SFTP), a file cut short is told by its
manifest, which is written after it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_tide.config import without_credentials
from vllm_tide.transport.rendezvous import (
    ABANDONED_S,
    is_temporary,
    make_private,
    open_plain,
    write_private,
)
from vllm_tide.transport.shm import TransportError

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)
_FILLED = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
# Some back ends make room for all that is asked for, whatever there is.
_MOST_RANGE = 1 << 28


class StoreError(TransportError):
    """The storage cannot be used just now; it may be later."""


class NotOurs(StoreError):  # noqa: N818 - says what it is
    """The file to remove is another user's, or no plain file: it is left."""


def open_store(url: str) -> Store:
    """Open the store of a spool (directory, ``file://``, any URL of fsspec); make it.

    Raises:
        StoreError: It cannot be used just now.
        TransportError: Nor will it ever be with this address in this process.
    """
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    return FsspecStore(url) if "://" in url else LocalStore(Path(url).expanduser())


class LocalStore:
    """A directory, on a disk or a shared file system; made where it is not.

    A store is a flat set of files under slash-separated names; anything may raise
    StoreError. `url` is for a user's eyes: it has no password.

    Raises:
        StoreError: If it cannot be used, or is open to every user.
    """

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        self._root = root
        with self._using("opened"):
            make_private(root)
            status = root.stat()
        # A shared file system may give all that anyone writes to one user.
        self._ours = {os.geteuid(), status.st_uid}
        if status.st_mode & 0o007:
            raise StoreError(
                f"tide.spool.url: {root} is open to every user and would hold text of "
                f"requests: chmod o-rwx {root}"
            )

    def write(self, name: str, *parts: bytes, durable: bool = True) -> None:
        """Make or replace a file, whole or not at all; `durable`: synced, too."""
        path = self._root / name
        with self._using("written"):
            make_private(path.parent)
            write_private(path, *parts, durable=durable)

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """A file's bytes, `most` of them; None if there is none."""
        with self._using("read", *_NO_FILE), open_plain(self._root / name) as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(size if most is None else min(most, size))
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Files of a folder and their bytes; removes what dead writers left."""
        return {
            name: status.st_size
            for name, status in self._list(folder)
            if stat.S_ISREG(status.st_mode)
        }

    def unfinished(self, folder: str) -> list[str]:
        """Files that are being written, or were when their writer was killed."""
        with self._using("read", *_NO_FILE):
            return list(filter(is_temporary, os.listdir(self._root / folder)))
        return []

    def folders(self, folder: str) -> list[str]:
        """The folders of a folder, sorted."""
        found = self._list(folder)
        return sorted(n for n, status in found if stat.S_ISDIR(status.st_mode))

    def remove(self, name: str) -> None:
        """Remove a file; fine if it is gone. Raises NotOurs where it is left."""
        path = self._root / name
        with self._using("cleaned up", *_NO_FILE):
            status = path.lstat()
            linked = any(
                p.is_symlink() for p in path.parents if self._root in p.parents
            )
            plain = stat.S_ISREG(status.st_mode) and not linked
            if not plain or status.st_uid not in self._ours:
                raise NotOurs(
                    f"tide.spool.url: {path.name} in {self.url} is another user's or "
                    "no plain file, so it is left: remove it yourself"
                )
            path.unlink()

    def remove_folder(self, folder: str) -> None:
        """Remove a folder; fine if it is gone, or if something is in it."""
        with self._using("cleaned up", *_FILLED):
            (self._root / folder).rmdir()

    def _list(self, folder: str) -> list[tuple[str, os.stat_result]]:
        found: list[tuple[str, os.stat_result]] = []
        path = self._root / folder
        with self._using("read", *_NO_FILE), os.scandir(path) as entries:
            changed = path.stat().st_mtime  # by the storage's clock, as theirs
            for entry in entries:
                # One removed since the scan began is simply not listed.
                with contextlib.suppress(FileNotFoundError, NotOurs):
                    status = entry.stat(follow_symlinks=False)
                    if not entry.name.startswith("."):
                        found.append((entry.name, status))
                    elif is_temporary(entry.name) and (
                        changed - status.st_mtime > ABANDONED_S
                    ):
                        self.remove(f"{folder}/{entry.name}")
        return found

    @contextlib.contextmanager
    def _using(self, verb: str, *fine: int) -> Iterator[None]:
        """Raises StoreError for an OSError, but for errors that end a use as well."""
        try:
            yield
        except OSError as error:
            if error.errno not in fine:
                raise StoreError(
                    f"tide.spool.url: {self.url} cannot be {verb} "
                    f"({error.strerror or error}): check that it exists, is yours and "
                    "has room"
                ) from error


class FsspecStore:
    """A store behind fsspec: S3, GCS, Azure, SFTP, memory, with credentials as there.

    Raises:
        StoreError: If it cannot be reached just now.
        TransportError: If the address is none, or a package is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = without_credentials(url)
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            raise TransportError(
                f"tide.spool.url: {self.url} needs fsspec: pip install fsspec, or give "
                "a directory"
            ) from error
        try:
            with self._using("opened"):
                self._fs, self._root = url_to_fs(url)
        except StoreError as error:
            # A package that is missing, an unknown protocol: time mends neither.
            if isinstance(error.__cause__, ImportError | ValueError):
                raise TransportError(str(error)) from error.__cause__
            raise

    def write(self, name: str, *parts: bytes, durable: bool = True) -> None:
        del durable
        path = self._at(name)
        with self._using("written"):
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            self._fs.pipe_file(path, b"".join(parts))

    def read(self, name: str, most: int | None = None) -> bytes | None:
        path = self._at(name)
        with self._using("read"), contextlib.suppress(FileNotFoundError):
            if most is None or most > _MOST_RANGE:
                return bytes(self._fs.cat_file(path)[:most])
            return bytes(self._fs.cat_file(path, start=0, end=most))
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        return {
            posixpath.basename(entry["name"]): int(entry.get("size") or 0)
            for entry in self._list(folder)
            if entry["type"] == "file"
        }

    def unfinished(self, folder: str) -> list[str]:
        del folder
        return []

    def folders(self, folder: str) -> list[str]:
        return sorted(
            posixpath.basename(entry["name"].rstrip("/"))
            for entry in self._list(folder)
            if entry["type"] == "directory"
        )

    def remove(self, name: str) -> None:
        with self._using("cleaned up"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def remove_folder(self, folder: str) -> None:
        # OSError: something is in it.
        with self._using("cleaned up"), contextlib.suppress(OSError):
            self._fs.rmdir(self._at(folder))

    def _list(self, folder: str) -> list[dict[str, Any]]:
        path = self._at(folder)
        with self._using("read"), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()  # others write to it too
            found = self._fs.ls(path, detail=True)
            # Object stores list a folder's own marker among its files.
            return [entry for entry in found if entry["name"].rstrip("/") != path]
        return []

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    @contextlib.contextmanager
    def _using(self, verb: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - back ends raise what they like
            raise StoreError(
                f"tide.spool.url: {self.url} cannot be {verb} "
                f"({type(error).__name__}: {without_credentials(str(error))}): check "
                "the address, the access rights and that the protocol's package is "
                "installed"
            ) from error


Store = LocalStore | FsspecStore
