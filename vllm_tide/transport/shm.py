"""A shared-memory segment: created once, mapped by both sides, unlinked by its creator.

``multiprocessing.shared_memory`` is not used: its resource tracker unlinks a segment
when a process that only attached to it exits.

Page 0 is the header, written once before the name is published: magic, format version,
size, pid of the creator, length and CRC at 0, the spec as JSON at 256. Page 1 holds
atomics (u64), each on a separate cache line. The data follow. The creator has byte 0 of
the file locked while it is alive, and the process with the other role (reader of a
ring, writer of drafts) byte 1. ``Segment`` may raise; the classes built on it define
which exceptions leave them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import re
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_tide import _shm
from vllm_tide.transport import locks

# Not "vllm_tide_": earlier versions test another kind of lock and would remove segments
# of live processes.
NAME_PREFIX = "vllm_tide2_"
SHM_DIR = "/dev/shm"  # noqa: S108 - the mount of POSIX shared memory in Linux
_NAME = re.compile(re.escape(NAME_PREFIX) + r"[A-Za-z0-9_.-]{1,200}")
# A segment without a valid header is being created, or its creator died doing so.
_UNFINISHED_SECONDS = 60.0

PAGE_BYTES = 4096
LINE_BYTES = 64
ATOMICS_AT = PAGE_BYTES
DATA_AT = 2 * PAGE_BYTES
LAYOUT = 0x200
"""Version of pages 0 and 1, a part of the format version of every segment."""
_OWNER, _CLAIM = 0, 1  # locked bytes

_SPEC_AT = 256
_SPEC_BYTES = PAGE_BYTES - _SPEC_AT
# magic, format version, spec length, size, pid of the creator
_HEADER = struct.Struct("<8sIIQQ16x")
_CRC = struct.Struct("<I")

# Exceptions that parsing JSON of an unexpected structure can raise.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)


class TransportError(RuntimeError):
    """A segment or run directory cannot be used; the message gives the reason."""


def sanitize_for_log(value: object) -> str:
    """Escape a value of another process for a log: ASCII, at most 200 characters."""
    return str(value)[:200].encode("unicode_escape").decode("ascii")[:200]


@dataclass(frozen=True)
class Header:
    """Fields of page 0.

    Args:
        magic: Eight bytes that identify the kind of segment.
        pid: Process id of the creator, for information.
    """

    magic: bytes
    format_version: int
    size_bytes: int
    pid: int
    spec: dict[str, Any]

    def encode(self) -> bytes:
        """Return the bytes of page 0.

        Raises:
            TransportError: The spec is too large for the page.
        """
        spec = json.dumps(self.spec, separators=(",", ":")).encode()
        if len(spec) > _SPEC_BYTES:
            raise TransportError(
                f"the spec of a segment has {len(spec)} bytes, more than the limit of "
                f"{_SPEC_BYTES}: shorten engine_id or the layer list"
            )
        fixed = _HEADER.pack(
            self.magic, self.format_version, len(spec), self.size_bytes, self.pid
        )
        fixed += _CRC.pack(_shm.crc32c(spec, _shm.crc32c(fixed)))
        return fixed.ljust(_SPEC_AT, b"\0") + spec

    @classmethod
    def decode(cls, page: bytes) -> Header | None:
        """Read page 0; return None if it is not a complete, valid header."""
        if len(page) < PAGE_BYTES:
            return None
        magic, version, length, size, pid = _HEADER.unpack_from(page)
        if length > _SPEC_BYTES:
            return None
        spec = page[_SPEC_AT : _SPEC_AT + length]
        (crc,) = _CRC.unpack_from(page, _HEADER.size)
        if crc != _shm.crc32c(spec, _shm.crc32c(page[: _HEADER.size])):
            return None
        try:
            fields = json.loads(spec)
        except (ValueError, RecursionError):
            return None
        return cls(magic, version, size, pid, fields)


class Segment:
    """A mapped segment. Use :meth:`create` or :meth:`attach`."""

    def __init__(self, name: str, fd: int, header: Header, owned: bool) -> None:
        self.name = name
        self.header = header
        self.fd = fd
        self._locks: list[int] = []
        self._owner_pid = os.getpid() if owned else -1
        # Take the page faults now, not while serving.
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if owned else 0)
        self._map = mmap.mmap(fd, header.size_bytes, flags)
        # Hidden states encode user text: exclude them from core dumps.
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.buf: memoryview = memoryview(self._map)
        self.closed = False
        if owned:
            self._lock(_OWNER)

    @classmethod
    def create(
        cls,
        kind: str,
        magic: bytes,
        version: int,
        spec: dict[str, Any],
        data_bytes: int,
    ) -> Segment:
        """Create a segment with a random name, mode 0600, owned by this process.

        Args:
            kind: Part of the name: ``vllm_tide2_<kind>_<16 hex>``.
            magic: Eight bytes.
            spec: JSON-able description for page 0.

        Raises:
            TransportError: The memory cannot be allocated.
        """
        name = f"{NAME_PREFIX}{kind}_{secrets.token_hex(8)}"
        size = DATA_AT + data_bytes
        header = Header(magic, LAYOUT | version, size, os.getpid(), spec)
        page = header.encode()  # raises before anything is created
        try:
            fd = _shm.shm_create("/" + name, size)
        except OSError as error:
            raise TransportError(
                f"cannot create {size / 2**20:.0f} MiB of shared memory in {SHM_DIR}: "
                f"{error.strerror}; reduce the ring size or enlarge {SHM_DIR} "
                "(docker run --shm-size)"
            ) from error
        try:
            segment = cls(name, fd, header, owned=True)
        except (OSError, ValueError) as error:
            _unlink(name)
            os.close(fd)
            raise TransportError(f"cannot map segment {name}: {error}") from error
        segment.buf[: len(page)] = page
        _owned.add(segment)
        return segment

    @classmethod
    def attach(cls, name: str, magic: bytes, version: int) -> Segment:
        """Map a segment that another process created.

        Raises:
            TransportError: The segment is missing, damaged, of another user or version.
        """
        if not is_segment_name(name):
            raise TransportError(f"{name!r} is not the name of a vllm_tide segment")
        try:
            fd = _shm.shm_open("/" + name)
        except OSError as error:
            raise TransportError(
                f"cannot open segment {name}: {error.strerror}; its engine has "
                "stopped, or it was removed: restart its server"
            ) from error
        try:
            return cls(name, fd, _checked_header(name, fd, magic, version), owned=False)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise TransportError(f"cannot map segment {name}: {error}") from error
        except TransportError:
            os.close(fd)
            raise

    def intact(self) -> bool:
        """Return whether the segment still has its full size (one fstat)."""
        if self.closed:
            return False
        try:
            return _shm.fd_size(self.fd) >= self.header.size_bytes
        except OSError:
            return False

    def lost(self) -> bool:
        """Return whether it was truncated or unlinked (`rm`, systemd's RemoveIPC)."""
        if not self.intact():
            return not self.closed
        return os.fstat(self.fd).st_nlink == 0

    def load(self, index: int) -> int:
        """Load atomic number `index` of page 1 (acquire)."""
        return _shm.load(self.buf, ATOMICS_AT + index * LINE_BYTES)

    def store(self, index: int, value: int) -> None:
        """Store atomic number `index` of page 1 (release)."""
        _shm.store(self.buf, ATOMICS_AT + index * LINE_BYTES, value)

    def owner_alive(self) -> bool:
        """Return whether the creator is alive (one system call)."""
        return self._locked(_OWNER)

    def claim(self, index: int, role: str) -> None:
        """Acquire the role of the other side, until `close` or the end of the process.

        Args:
            index: Atomic for the pid, which is for messages only.

        Raises:
            TransportError: A live process, possibly this one, has the role.
        """
        try:
            claimed = self._lock(_CLAIM)
        except OSError as error:
            raise TransportError(f"cannot lock {self.name}: {error}") from error
        if not claimed:
            raise TransportError(
                f"process {self.load(index)} is already the {role} of {self.name}; "
                "stop it first"
            )
        self.store(index, os.getpid())

    def claimed(self) -> bool:
        """Return whether a live process has the role of the other side."""
        return self._locked(_CLAIM)

    def _lock(self, byte: int) -> bool:
        fd = locks.hold(f"{SHM_DIR}/{self.name}", byte)
        if fd is not None:
            self._locks.append(fd)
        return fd is not None

    def _locked(self, byte: int) -> bool:
        try:
            return not self.closed and locks.is_locked(self.fd, byte)
        except OSError:  # it is unknown, or another thread has just closed the segment
            return not self.closed

    def unlink(self) -> None:
        """Unlink the segment if this process created it. Idempotent, never raises.

        Existing mappings stay valid; the memory is freed with the last mapping. A
        forked child that inherited an owned segment does not unlink it.
        """
        if self._owner_pid == os.getpid():
            self._owner_pid = -1
            _unlink(self.name)

    def close(self) -> None:
        """Unmap, and unlink if this process created it. Idempotent, never raises."""
        if self.closed:
            return
        self.closed = True
        # A memoryview that a caller still references keeps the mapping.
        with contextlib.suppress(BufferError):
            self.buf.release()
            self._map.close()
        with contextlib.suppress(OSError):
            os.close(self.fd)
        while self._locks:
            locks.release(self._locks.pop())
        self.unlink()


def _checked_header(name: str, fd: int, magic: bytes, version: int) -> Header:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise TransportError(
            f"segment {name} belongs to user {status.st_uid}, this process runs as "
            f"{os.geteuid()}: run the trainer as the engine's user"
        )
    header = Header.decode(os.pread(fd, PAGE_BYTES, 0))
    if header is None or header.magic != magic:
        raise TransportError(f"segment {name} has a damaged header: restart its engine")
    if header.format_version != LAYOUT | version:
        raise TransportError(
            f"segment {name} has format {header.format_version}, this process supports "
            f"{LAYOUT | version}: run the same vllm_tide on both sides"
        )
    if not DATA_AT <= header.size_bytes <= status.st_size:
        raise TransportError(
            f"segment {name} was truncated to {status.st_size} bytes of "
            f"{header.size_bytes}: restart its engine"
        )
    return header


def is_segment_name(name: object) -> bool:
    """Return whether a value, possibly read from a file, is a valid segment name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


@contextlib.contextmanager
def open_readonly(name: str) -> Iterator[tuple[int, Header | None]]:
    """Open a segment of this user read-only, unmapped; yield descriptor and header.

    Raises:
        OSError: It does not exist, belongs to another user or is not a segment.
    """
    if not is_segment_name(name):
        raise FileNotFoundError(name)
    # O_NONBLOCK: any user can create a FIFO there, and opening one blocks.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(f"{SHM_DIR}/{name}", flags)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(name)
        yield fd, Header.decode(os.pread(fd, PAGE_BYTES, 0))
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Peek:
    """Header and atomics of a segment, as copied by :func:`peek`.

    Args:
        owner_alive: Whether its creator is alive.
        claimed: Whether a live process has the role of the other side.
    """

    header: Header
    atomics: bytes
    owner_alive: bool
    claimed: bool

    def load(self, index: int) -> int:
        """Return atomic number `index` of page 1."""
        return int.from_bytes(self.atomics[index * LINE_BYTES :][:8], "little")


def peek(name: str, magic: bytes) -> Peek | None:
    """Read a segment for monitoring; None if it is missing, damaged or another user's.

    The segment is neither claimed nor mapped: its memory is freed with its engine, and
    a truncated segment causes no SIGBUS here.
    """
    with contextlib.suppress(OSError), open_readonly(name) as (fd, header):
        page = os.pread(fd, PAGE_BYTES, ATOMICS_AT)
        if header is None or header.magic != magic or len(page) < PAGE_BYTES:
            return None
        if header.size_bytes < DATA_AT:
            return None
        owned, claimed = (locks.is_locked(fd, byte) for byte in (_OWNER, _CLAIM))
        return Peek(header, page, owned, claimed)
    return None


def is_orphaned(name: str) -> bool:
    """Return whether the owner of a segment of this user is dead.

    The segment is not mapped. One with no valid header is an orphan after a minute: a
    younger one may not be locked yet.
    """
    with contextlib.suppress(OSError), open_readonly(name) as (fd, header):
        old = time.time() - os.fstat(fd).st_mtime > _UNFINISHED_SECONDS
        return not locks.is_locked(fd, _OWNER) and (header is not None or old)
    return False


def unlink_if_orphaned(name: str) -> bool:
    """Unlink a segment if its owner is dead; return whether it was unlinked."""
    return is_orphaned(name) and _unlink(name)


def _unlink(name: str) -> bool:
    try:
        _shm.shm_unlink("/" + name)
    except OSError:
        return False
    return True


_owned: weakref.WeakSet[Segment] = weakref.WeakSet()


@atexit.register
def _close_owned() -> None:
    for segment in list(_owned):
        segment.close()
