"""Storage of a spool: a directory, or any store supported by fsspec.

Files are written atomically, and a listed file can be read: in a directory by write,
sync and rename, in an object store by put. In a store with neither (SFTP), truncated
files are recognised by their missing manifest, which is written last.
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
# Some backends allocate the whole requested range.
_MAX_RANGE = 1 << 28


class StoreError(TransportError):
    """The storage is not usable at present; a retry may succeed."""


class ForeignFileError(StoreError):
    """A file was not removed: it is another user's or not a regular file."""


def open_store(url: str) -> Store:
    """Open or create the store of a spool (directory, ``file://``, URL of fsspec).

    Raises:
        StoreError: It is not usable at present.
        TransportError: It cannot be used with this URL in this process.
    """
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    return FsspecStore(url) if "://" in url else LocalStore(Path(url).expanduser())


class LocalStore:
    """A directory on a disk or a shared file system, created if missing.

    A store is a flat set of files with slash-separated names. All methods may raise
    StoreError. `url` is for messages and contains no password.

    Raises:
        StoreError: It cannot be used, or is accessible to all users.
    """

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        self._root = root
        with self._using("opened"):
            make_private(root)
            status = root.stat()
        # A shared file system may map all writers to one user.
        self._owner_uids = {os.geteuid(), status.st_uid}
        if status.st_mode & 0o007:
            raise StoreError(
                f"tide.spool.url: {root} is accessible to all users and would expose "
                f"request text: chmod o-rwx {root}"
            )

    def write(self, name: str, *parts: bytes, durable: bool = True) -> None:
        """Create or replace a file atomically; sync it if `durable`."""
        path = self._root / name
        with self._using("written"):
            make_private(path.parent)
            write_private(path, *parts, durable=durable)

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """Read a file, at most `most` bytes; None if it does not exist."""
        with self._using("read", *_NO_FILE), open_plain(self._root / name) as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(size if most is None else min(most, size))
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the files of a folder and their sizes; remove abandoned ones."""
        return {
            name: status.st_size
            for name, status in self._list(folder)
            if stat.S_ISREG(status.st_mode)
        }

    def unfinished(self, folder: str) -> list[str]:
        """Return temporary files, of current and of killed writers."""
        with self._using("read", *_NO_FILE):
            return list(filter(is_temporary, os.listdir(self._root / folder)))
        return []

    def folders(self, folder: str) -> list[str]:
        """Return the subfolders of a folder, sorted."""
        entries = self._list(folder)
        return sorted(n for n, status in entries if stat.S_ISDIR(status.st_mode))

    def remove(self, name: str) -> None:
        """Remove a file if it exists; raise ForeignFileError if not permitted."""
        path = self._root / name
        with self._using("cleaned up", *_NO_FILE):
            status = path.lstat()
            parents = (p for p in path.parents if self._root in p.parents)
            linked = any(p.is_symlink() for p in parents)
            regular = stat.S_ISREG(status.st_mode) and not linked
            if not regular or status.st_uid not in self._owner_uids:
                raise ForeignFileError(
                    f"tide.spool.url: {path.name} in {self.url} is another user's or "
                    "not a regular file and was not removed: remove it manually"
                )
            path.unlink()

    def remove_folder(self, folder: str) -> None:
        """Remove a folder if it exists and is empty."""
        with self._using("cleaned up", *_FILLED):
            (self._root / folder).rmdir()

    def _list(self, folder: str) -> list[tuple[str, os.stat_result]]:
        result: list[tuple[str, os.stat_result]] = []
        path = self._root / folder
        with self._using("read", *_NO_FILE), os.scandir(path) as entries:
            changed = path.stat().st_mtime  # the storage's clock, as that of the files
            for entry in entries:
                # Ignore files that are removed during the scan.
                with contextlib.suppress(FileNotFoundError, ForeignFileError):
                    status = entry.stat(follow_symlinks=False)
                    if not entry.name.startswith("."):
                        result.append((entry.name, status))
                    elif is_temporary(entry.name) and (
                        changed - status.st_mtime > ABANDONED_S
                    ):
                        self.remove(f"{folder}/{entry.name}")
        return result

    @contextlib.contextmanager
    def _using(self, verb: str, *ignored: int) -> Iterator[None]:
        """Convert OSError to StoreError, except for `ignored` error numbers."""
        try:
            yield
        except OSError as error:
            if error.errno not in ignored:
                raise StoreError(
                    f"tide.spool.url: {self.url} cannot be {verb} "
                    f"({error.strerror or error}): check that it exists, is yours and "
                    "has free space"
                ) from error


class FsspecStore:
    """A store of fsspec: S3, GCS, Azure, SFTP, memory; credentials as for fsspec.

    Raises:
        StoreError: It cannot be reached at present.
        TransportError: The URL is invalid or a package is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = without_credentials(url)
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            raise TransportError(
                f"tide.spool.url: {self.url} needs fsspec: pip install fsspec, or use "
                "a directory"
            ) from error
        try:
            with self._using("opened"):
                self._fs, self._root = url_to_fs(url)
        except StoreError as error:
            # Permanent: a missing package or an unknown protocol.
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
            if most is None or most > _MAX_RANGE:
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
        # OSError: it is not empty.
        with self._using("cleaned up"), contextlib.suppress(OSError):
            self._fs.rmdir(self._at(folder))

    def _list(self, folder: str) -> list[dict[str, Any]]:
        path = self._at(folder)
        with self._using("read"), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()  # other processes write to it, too
            entries = self._fs.ls(path, detail=True)
            # Object stores list the marker of the folder itself.
            return [entry for entry in entries if entry["name"].rstrip("/") != path]
        return []

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    @contextlib.contextmanager
    def _using(self, verb: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - backends raise any exception
            raise StoreError(
                f"tide.spool.url: {self.url} cannot be {verb} "
                f"({type(error).__name__}: {without_credentials(str(error))}): check "
                "the URL, the access rights and that the protocol's package is "
                "installed"
            ) from error


Store = LocalStore | FsspecStore
