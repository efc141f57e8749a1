"""Where a spool lies: a directory, or any store that fsspec can reach.

Both kinds promise the same: a file is written whole or not at all, and one that is
listed can be read. In a directory that is write, sync, rename. An object store puts an
object at once; where a store does neither (SFTP), a file cut short is told by its
manifest, which is written after it.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from vllm_tide.transport.header import TransportError

Buffer = bytes | bytearray | memoryview | np.ndarray

_TEMPORARY = ".tmp"
_TEMPORARY_SECONDS = 3600.0
# Some back ends make room for all that is asked for, whatever there is.
_MOST_RANGE = 1 << 28
_USER_INFO = re.compile(r"://[^/@]*@")
_Result = TypeVar("_Result")


class StoreError(TransportError):
    """The storage cannot be used just now; it may be later."""


class Store(Protocol):
    """A flat set of files under slash-separated names.

    Every method raises StoreError when the store cannot be used just now.
    """

    url: str
    """As shown to a user: without a password."""

    def write(self, name: str, *parts: Buffer, durable: bool = True) -> None:
        """Make or replace a file of these parts, whole or not at all.

        Args:
            name: Its name.
            parts: Its bytes, one buffer after another.
            durable: Whether it must survive a power cut.
        """

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """A file's bytes; None if there is none.

        Args:
            name: Its name.
            most: Give no more than its first so many bytes.
        """

    def sizes(self, folder: str) -> dict[str, int]:
        """The files of a folder and their sizes (bytes); empty if there is none."""

    def folders(self, folder: str) -> list[str]:
        """The folders of a folder, sorted."""

    def remove(self, name: str) -> None:
        """Remove a file; fine if it is gone."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and what is in it; fine if it is gone."""


def open_store(url: str) -> Store:
    """Open the store of a spool, and make its folder.

    Args:
        url: Directory, ``file://`` or any URL of fsspec (``s3://bucket/prefix``).

    Raises:
        StoreError: It cannot be used just now; one sentence that names
            ``tide.spool.url``.
        TransportError: The same, and it never will be with this address in this
            process.
    """
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    return FsspecStore(url) if "://" in url else LocalStore(Path(url).expanduser())


class LocalStore:
    """A directory, on a disk or a shared file system.

    Args:
        root: The directory; made with mode 0700 where it does not exist.

    Raises:
        StoreError: If it cannot be used, or is open to every user.
    """

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        self._root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = root.stat().st_mode
        except OSError as error:
            raise self._failed("opened", error) from error
        if mode & 0o007:
            raise StoreError(
                f"tide.spool.url: {root} is open to every user and would hold text of "
                f"requests: chmod o-rwx {root}"
            )

    def write(self, name: str, *parts: Buffer, durable: bool = True) -> None:
        """See :class:`Store`."""
        path = self._root / name
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, temporary = tempfile.mkstemp(
                dir=path.parent, prefix=".", suffix=_TEMPORARY
            )
            try:
                with os.fdopen(fd, "wb") as file:
                    for part in parts:
                        file.write(part.data if isinstance(part, np.ndarray) else part)
                    if durable:
                        file.flush()
                        os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            if durable:
                _sync_folder(path.parent)
        except OSError as error:
            raise self._failed("written", error) from error

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """See :class:`Store`."""
        try:
            with open(self._root / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                return file.read(size if most is None else min(most, size))
        except (FileNotFoundError, ValueError):  # or no name of a file at all
            return None
        except OSError as error:
            raise self._failed("read", error) from error

    def sizes(self, folder: str) -> dict[str, int]:
        """See :class:`Store`. Removes what writers that died left half done."""
        sizes: dict[str, int] = {}
        try:
            with os.scandir(self._root / folder) as entries:
                for entry in entries:
                    # One removed since the scan began is simply not listed.
                    with contextlib.suppress(FileNotFoundError):
                        if entry.name.startswith("."):
                            _drop_if_old(entry)
                        elif entry.is_file():
                            sizes[entry.name] = entry.stat().st_size
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._failed("read", error) from error
        return sizes

    def folders(self, folder: str) -> list[str]:
        """See :class:`Store`."""
        try:
            with os.scandir(self._root / folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("read", error) from error

    def remove(self, name: str) -> None:
        """See :class:`Store`."""
        try:
            (self._root / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._failed("cleaned up", error) from error

    def remove_folder(self, folder: str) -> None:
        """See :class:`Store`. Refuses nothing: names are made by this package."""
        path = self._root / folder
        for inner in self.folders(folder):
            self.remove_folder(f"{folder}/{inner}")
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    os.unlink(entry.path)
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._failed("cleaned up", error) from error

    def _failed(self, verb: str, error: OSError) -> StoreError:
        return StoreError(
            f"tide.spool.url: {self.url} cannot be {verb} ({error.strerror or error}): "
            "check that it exists, is yours and has room"
        )


class FsspecStore:
    """A store behind fsspec: S3, GCS, Azure, SFTP, memory.

    Credentials come from where fsspec's own back ends look for them.

    Args:
        url: Any URL of fsspec.

    Raises:
        StoreError: If it cannot be reached just now.
        TransportError: If the address is none, or fsspec or the protocol's package is
            missing.
    """

    def __init__(self, url: str) -> None:
        self.url = _USER_INFO.sub("://", url)
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            raise TransportError(
                f"tide.spool.url: {self.url} needs fsspec: pip install fsspec, or give "
                "a directory"
            ) from error
        try:
            self._fs, self._root = self._call("opened", lambda: url_to_fs(url))
        except StoreError as error:
            # A package that is missing, an unknown protocol: time mends neither.
            if isinstance(error.__cause__, ImportError | ValueError):
                raise TransportError(str(error)) from error.__cause__
            raise

    def write(self, name: str, *parts: Buffer, durable: bool = True) -> None:
        """See :class:`Store`; always durable."""
        del durable
        path = self._at(name)
        data = b"".join(bytes(part) for part in parts)

        def put() -> None:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            self._fs.pipe_file(path, data)

        self._call("written", put)

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """See :class:`Store`."""
        path = self._at(name)

        def get() -> bytes | None:
            try:
                if most is None or most > _MOST_RANGE:
                    return bytes(self._fs.cat_file(path)[:most])
                return bytes(self._fs.cat_file(path, start=0, end=most))
            except FileNotFoundError:
                return None

        return self._call("read", get)

    def sizes(self, folder: str) -> dict[str, int]:
        """See :class:`Store`."""
        found = self._list(folder)
        return {
            posixpath.basename(entry["name"]): int(entry.get("size") or 0)
            for entry in found
            if entry["type"] == "file"
        }

    def folders(self, folder: str) -> list[str]:
        """See :class:`Store`."""
        found = self._list(folder)
        return sorted(
            posixpath.basename(entry["name"].rstrip("/"))
            for entry in found
            if entry["type"] == "directory"
        )

    def remove(self, name: str) -> None:
        """See :class:`Store`."""
        path = self._at(name)

        def drop() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

        self._call("cleaned up", drop)

    def remove_folder(self, folder: str) -> None:
        """See :class:`Store`."""
        path = self._at(folder)

        def drop() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(path, recursive=True)

        self._call("cleaned up", drop)

    def _list(self, folder: str) -> list[dict[str, Any]]:
        path = self._at(folder)

        def look() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()  # others write to it too
            try:
                return list(self._fs.ls(path, detail=True))
            except FileNotFoundError:
                return []

        # Object stores list a folder's own marker among its files.
        return [e for e in self._call("read", look) if e["name"].rstrip("/") != path]

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _call(self, verb: str, function: Callable[[], _Result]) -> _Result:
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - back ends raise what they like
            raise StoreError(
                f"tide.spool.url: {self.url} cannot be {verb} "
                f"({type(error).__name__}: {error}): check the address, the access "
                "rights and that the protocol's package is installed"
            ) from error


def _sync_folder(path: Path) -> None:
    """Make a rename in a folder survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _drop_if_old(entry: os.DirEntry[str]) -> None:
    if not entry.name.endswith(_TEMPORARY):
        return
    if time.time() - entry.stat().st_mtime > _TEMPORARY_SECONDS:
        with contextlib.suppress(OSError):
            os.unlink(entry.path)
