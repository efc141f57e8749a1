"""One shared-memory segment: created once, mapped by both sides, unlinked by its owner.

Gives up ``multiprocessing.shared_memory``: its resource tracker unlinks a segment when
a process that merely attached exits.

Page 0 is the header, written once before the name is told to anyone: magic, format
version, size, owner, length and CRC at 0, the spec as JSON at 256. Page 1 holds words
of 8 bytes, each on a cache line of its own; the data follow. ``Segment`` may raise; the
objects built on it decide what their side is allowed to let out.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
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
from vllm_tide.transport.process import Holder, heartbeat_is_fresh

NAME_PREFIX = "vllm_tide_"
SHM_DIR = "/dev/shm"  # noqa: S108 - where Linux keeps POSIX segments, not a scratch file
_NAME = re.compile(re.escape(NAME_PREFIX) + r"[A-Za-z0-9_.-]{1,200}")
# A segment without a valid header is being created, or its creator died doing so.
_UNFINISHED_SECONDS = 60.0

PAGE_BYTES = 4096
LINE_BYTES = 64
WORDS_AT = PAGE_BYTES
DATA_AT = 2 * PAGE_BYTES

_SPEC_AT = 256
_SPEC_BYTES = PAGE_BYTES - _SPEC_AT
# magic, format version, spec length, size, owner pid, owner start, owner namespace
_HEADER = struct.Struct("<8sIIQQQQ")
_CRC = struct.Struct("<I")

# What JSON of the wrong shape can raise while it is read.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)


class TransportError(RuntimeError):
    """A segment or run directory cannot be used; one sentence says why."""


def said(value: object) -> str:
    """What another process wrote, fit for a log: printable, 200 characters at most."""
    return str(value)[:200].encode("unicode_escape").decode("ascii")[:200]


@dataclass(frozen=True)
class Header:
    """Fields of page 0.

    Args:
        magic: Eight bytes naming the kind of segment.
    """

    magic: bytes
    format_version: int
    size_bytes: int
    owner: Holder
    spec: dict[str, Any]

    def encode(self) -> bytes:
        """The bytes of page 0.

        Raises:
            TransportError: If the spec is too large for the page.
        """
        spec = json.dumps(self.spec, separators=(",", ":")).encode()
        if len(spec) > _SPEC_BYTES:
            raise TransportError(
                f"the description of a segment takes {len(spec)} bytes, and "
                f"{_SPEC_BYTES} is the most: shorten engine_id or the layer list"
            )
        head = _HEADER.pack(
            self.magic, self.format_version, len(spec), self.size_bytes, *self.owner
        )
        head += _CRC.pack(_shm.crc32c(spec, _shm.crc32c(head)))
        return head.ljust(_SPEC_AT, b"\0") + spec

    @classmethod
    def decode(cls, page: bytes) -> Header | None:
        """Read page 0; None if it is not a complete, undamaged header."""
        if len(page) < PAGE_BYTES:
            return None
        magic, version, length, size, *owner = _HEADER.unpack_from(page)
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
        return cls(magic, version, size, Holder(*owner), fields)


class Segment:
    """A mapped segment. Use :meth:`create` or :meth:`attach`."""

    def __init__(self, name: str, fd: int, header: Header, owned: bool) -> None:
        self.name = name
        self.header = header
        self.fd = fd
        self._me = Holder.me()
        self._owner_pid = os.getpid() if owned else -1
        flags = mmap.MAP_SHARED
        if owned:
            # Held until this process ends: proof of life that no damage can hide. At
            # most somebody who just looks for orphans holds it for a moment.
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Page faults now rather than in the first lap of serving.
            flags |= mmap.MAP_POPULATE
        self._map = mmap.mmap(fd, header.size_bytes, flags)
        # Hidden states are text in another form: no core file may hold them.
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.buf: memoryview = memoryview(self._map)
        self.closed = False

    @classmethod
    def create(
        cls,
        kind: str,
        magic: bytes,
        version: int,
        spec: dict[str, Any],
        data_bytes: int,
    ) -> Segment:
        """Create a segment of this process under a random name, mode 0600.

        Args:
            kind: Part of the name: ``vllm_tide_<kind>_<16 hex>``.
            magic: Eight bytes.
            spec: JSON-able description for page 0.

        Raises:
            TransportError: If the memory is not to be had.
        """
        name = f"{NAME_PREFIX}{kind}_{secrets.token_hex(8)}"
        size = DATA_AT + data_bytes
        header = Header(magic, version, size, Holder.me(), spec)
        page = header.encode()  # refuses what does not fit before anything is made
        try:
            fd = _shm.shm_create("/" + name, size)
        except OSError as error:
            raise TransportError(
                f"cannot create {size / 2**20:.0f} MiB of shared memory in {SHM_DIR}: "
                f"{error.strerror}; make the ring smaller or {SHM_DIR} larger "
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
            TransportError: If it is absent, foreign, damaged or of another version.
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
        """True if every mapped byte still has memory behind it (one fstat)."""
        if self.closed:
            return False
        try:
            return _shm.fd_size(self.fd) >= self.header.size_bytes
        except OSError:
            return False

    def lost(self) -> bool:
        """True if it was cut short, or its name is gone (`rm`, systemd's RemoveIPC)."""
        if not self.intact():
            return not self.closed
        return os.fstat(self.fd).st_nlink == 0

    def load(self, word: int) -> int:
        """Load word number `word` of page 1 (acquire)."""
        return _shm.load(self.buf, WORDS_AT + word * LINE_BYTES)

    def store(self, word: int, value: int) -> None:
        """Store word number `word` of page 1 (release)."""
        _shm.store(self.buf, WORDS_AT + word * LINE_BYTES, value)

    def owner_alive(self, beat: int) -> bool:
        """True if the creator lives, as `holder_alive`; `beat` is its heartbeat."""
        alive = self.header.owner.alive()
        if alive is None:
            return self.intact() and heartbeat_is_fresh(self.load(beat))
        return alive

    def claim(self, word: int, what: str) -> None:
        """Become the single `what` of the segment.

        Three words from `word`: the holder, its pid namespace, its heartbeat.

        Raises:
            TransportError: If a live process, this one included, holds the claim.
        """
        while True:
            held = self.load(word)
            if held and self.holder_alive(word):
                raise TransportError(
                    f"process {Holder.from_word(held, 0).pid} is already the {what} of "
                    f"{self.name}; stop it first"
                )
            at = WORDS_AT + word * LINE_BYTES
            if _shm.compare_exchange(self.buf, at, held, self._me.word):
                break
        self._beat(word)

    def hold(self, word: int, what: str) -> None:
        """Renew the heartbeat of a claim; take it again if the word was damaged.

        Raises:
            TransportError: If another live process holds it now.
        """
        if self.load(word) == self._me.word:
            self._beat(word)
        else:
            self.claim(word, what)

    def _beat(self, word: int) -> None:
        self.store(word + 1, self._me.namespace)
        self.store(word + 2, time.monotonic_ns())

    def holder_alive(self, word: int) -> bool:
        """Whether the claim at `word` is held by a live process.

        By its pid; by its heartbeat alone where the pid cannot be looked up.
        """
        holder = Holder.from_word(self.load(word), self.load(word + 1))
        alive = holder.alive()
        if alive is None:
            return heartbeat_is_fresh(self.load(word + 2))
        return alive

    def release(self, word: int) -> None:
        """Give up the claim at `word`, if it is this process's."""
        at = WORDS_AT + word * LINE_BYTES
        _shm.compare_exchange(self.buf, at, self._me.word, 0)

    def unlink(self) -> None:
        """Take its name away if this process created it. Idempotent, never raises.

        Who has mapped it goes on; its memory goes with the last of them, by whatever
        end. A forked child that inherited an owned segment does not unlink it.
        """
        if self._owner_pid == os.getpid():
            self._owner_pid = -1
            _unlink(self.name)

    def close(self) -> None:
        """Unmap, and unlink if this process created it. Idempotent, never raises."""
        if self.closed:
            return
        self.closed = True
        # A view still held by a caller keeps the mapping until that view goes.
        with contextlib.suppress(BufferError):
            self.buf.release()
            self._map.close()
        with contextlib.suppress(OSError):
            os.close(self.fd)
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
    if header.format_version != version:
        raise TransportError(
            f"segment {name} has format {header.format_version}, this process speaks "
            f"{version}: run the same vllm_tide on both sides"
        )
    if not DATA_AT <= header.size_bytes <= status.st_size:
        raise TransportError(
            f"segment {name} was truncated to {status.st_size} bytes of "
            f"{header.size_bytes}: restart its engine"
        )
    return header


def is_segment_name(name: object) -> bool:
    """True if it can be the name of a segment; it may come from a file."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


@contextlib.contextmanager
def looked_at(name: str) -> Iterator[tuple[int, Header | None]]:
    """Descriptor and sound header of a segment of this user, which is not mapped.

    Raises:
        OSError: It is gone, another user's or none.
    """
    if not is_segment_name(name):
        raise FileNotFoundError(name)
    # Every user may put a pipe there, and opening one waits for its other end.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(f"{SHM_DIR}/{name}", flags)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(name)
        yield fd, Header.decode(os.pread(fd, PAGE_BYTES, 0))
    finally:
        os.close(fd)


def peek_words(name: str, magic: bytes) -> tuple[Header, bytes] | None:
    """Header and page of words of a segment of one kind, for tools that look on.

    Nothing is claimed and nothing is mapped, so a watched segment lives no longer than
    its engine, and one that shrinks cannot hurt the watcher.
    """
    with contextlib.suppress(OSError), looked_at(name) as (fd, header):
        words = os.pread(fd, PAGE_BYTES, WORDS_AT)
        if header is None or header.magic != magic or len(words) < PAGE_BYTES:
            return None
        return (header, words) if header.size_bytes >= DATA_AT else None
    return None


def word_of(words: bytes, word: int) -> int:
    """Word number `word` of a copy of page 1."""
    return int.from_bytes(words[word * LINE_BYTES :][:8], "little")


def orphaned(name: str) -> bool:
    """True if a segment of this user was left behind by a dead owner.

    Never maps it. Its owner's lock is asked first: a pid says nothing in another pid
    namespace, and a header may be damaged. One without a valid header counts once it
    is a minute old: its owner may not have come to the lock yet.
    """
    with contextlib.suppress(OSError), looked_at(name) as (fd, header):
        if header is None:
            old = time.time() - os.fstat(fd).st_mtime > _UNFINISHED_SECONDS
            return old and not _locked(fd)
        # A forked child may hold the lock of a parent that is dead.
        return not _locked(fd) or header.owner.alive() is False
    return False


def _locked(fd: int) -> bool:
    """True if the creator of a segment, which locked it, still lives."""
    try:
        # Shared: two that look at once do not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def unlink_if_orphaned(name: str) -> bool:
    """Unlink a segment whose owner is dead; True if it was."""
    return orphaned(name) and _unlink(name)


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
