"""The run directory: where an engine says what it made and a trainer finds it.

One JSON file per engine, ``engine-<engine_id>.json``, mode 0600 in a directory of mode
0700, replaced atomically. A file or segment whose owner is dead is reclaimed by the
next process that starts.

Here are also the one reader and the one writer of small files that all of vllm_tide
shares.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from vllm_tide.transport.process import Holder, pid_namespace
from vllm_tide.transport.shm import (
    NAME_PREFIX,
    SHM_DIR,
    TransportError,
    orphaned,
    unlink_if_orphaned,
)

RUN_DIR_VARIABLE = "TIDE_RUN_DIR"
SPOOL_VARIABLE = "TIDE_SPOOL_URL"
"""`tide.spool.url` for a relay: a manifest holds no credentials."""

_ENGINE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PREFIX, _SUFFIX = "engine-", ".json"
_OF_ENGINE = re.compile(
    r"(?:trainer|events|relay)-([0-9a-f]{16})(?:-\d+)?\.(?:jsonl?|new|log|log\.1)"
)
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
MAX_BYTES = 1 << 20
"""The most that a file of a run directory may hold (bytes)."""
_TEMPORARY = (".tide-", ".tmp")  # how a file begins and ends that is being written
ABANDONED_S = 3600.0  # age at which nobody writes it any more
KEPT = 4  # dead engines whose logs, events and status stay


@dataclass
class EngineManifest:
    """Facts about a live engine that a trainer needs."""

    engine_id: str  # letters, digits, dot, dash, underscore
    pid: int  # of the worker that owns the segments
    pid_start: int  # clock ticks since boot
    ring: str  # names of its segments
    weights: str
    target_path: str  # directories of the target and of the draft it started with
    draft_path: str
    target_dtype: str  # as torch names it
    hidden_size: int  # width of a hidden state
    vocab_size: int  # the target's
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]  # layers whose input is captured
    teacher: str  # "hidden" or "topk"
    teacher_topk: int
    feature_dtype: str
    num_speculative_tokens: int  # the largest draft length
    tide: dict[str, Any]  # the section of the engine's configuration
    created_unix: float  # s
    # Draft tensors that are the target's own modules: neither trained nor published.
    shared: list[str] = field(default_factory=list)
    pid_namespace: int = field(default_factory=pid_namespace)  # inode of that of `pid`
    model_name: str = ""  # served under; empty if it does not say
    draft_sample_method: str = "greedy"  # vLLM's: how drafted tokens are drawn
    tenant_key_id: str = ""  # of the key that its tenants' ids follow from
    gpu_uuid: str = ""  # of the GPU that it serves on

    def owner_alive(self) -> bool | None:
        """True if the engine lives; None where its pid cannot be looked up.

        A segment of it whose lock is free tells that also in another pid namespace.
        """
        if orphaned(self.ring) or orphaned(self.weights):
            return False
        return Holder(self.pid, self.pid_start, self.pid_namespace).alive()


class NobodyThere(TransportError):
    """No engine or no trainer runs in a run directory."""

    exit_status = 1  # of a command: an answer, not a mistake


def default_run_dir() -> Path:
    """Return `$TIDE_RUN_DIR`, else a directory of the user.

    Raises:
        TransportError: `$TIDE_RUN_DIR` is relative: each process has another folder.
    """
    if chosen := os.environ.get(RUN_DIR_VARIABLE):
        if not os.path.isabs(chosen):
            said = f"{RUN_DIR_VARIABLE}: {chosen!r} is relative; give an absolute path"
            raise TransportError(said)
        return Path(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "vllm_tide"
    return Path(tempfile.gettempdir()) / f"vllm_tide-{os.getuid()}"


def prepare_run_dir(run_dir: Path) -> Path:
    """Create the run directory, or check that it is ours and private.

    Raises:
        TransportError: If it is a link, another user's, open to others, or cannot be
            made. Its mode is left: what else lies in it may be other people's.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = run_dir.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise TransportError(
                f"run directory {run_dir} is not a directory of user {os.geteuid()}: "
                f"remove it or set {RUN_DIR_VARIABLE}"
            )
        if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
            raise TransportError(
                f"run directory {run_dir} has mode {mode:o} and would show users' text "
                f"to others: set {RUN_DIR_VARIABLE} to a directory of its own, or, if "
                f"it is one, chmod 700 {run_dir}"
            )
    except OSError as error:
        raise TransportError(
            f"cannot use run directory {run_dir}: {error.strerror}; set "
            f"{RUN_DIR_VARIABLE}"
        ) from error
    return run_dir


def require_readable(run_dir: Path) -> None:
    """See that a command can read what is in a run directory, if there is one.

    Raises:
        TransportError: It is not this user's, or not readable.
    """
    try:
        with os.scandir(run_dir):
            pass
    except FileNotFoundError:
        pass
    except OSError as error:
        raise TransportError(
            f"run directory {run_dir} cannot be read ({error.strerror}); run this as "
            "the server's user, or give its --run-dir"
        ) from None


def require_room(run_dir: Path) -> None:
    """See that a start can write there all it has to.

    Raises:
        TransportError: It cannot; `is_full` tells of a full one.
    """
    path = prepare_run_dir(run_dir) / ".room"
    try:
        path.write_bytes(bytes(64 << 10))
    except OSError as error:
        said = f"no room in run directory {run_dir}: {error.strerror}"
        raise TransportError(said) from error
    finally:
        path.unlink(missing_ok=True)


def is_full(error: TransportError) -> bool:
    """Return whether a run directory had no room left."""
    return getattr(error.__cause__, "errno", None) in NO_ROOM


def write_private(path: Path, *parts: bytes | str, durable: bool = False) -> None:
    """Make or replace a file, mode 0600: a crash leaves all of it or nothing.

    Args:
        durable: It is on disk when this returns, the name too where the system can.

    Raises:
        OSError: If it cannot be written.
    """
    with _written_beside(path, parts, durable) as temporary:
        os.replace(temporary, path)
    if durable:
        try:
            sync_directory(path.parent)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def write_once(path: Path, data: bytes) -> None:
    """Makes a file, mode 0600; of two that start at once, the first one's stays."""
    with (
        _written_beside(path, [data], False) as temporary,
        contextlib.suppress(FileExistsError),
    ):
        os.link(temporary, path)  # not renamed: that would replace it


@contextlib.contextmanager
def _written_beside(
    path: Path, parts: Iterable[bytes | str], durable: bool
) -> Iterator[str]:
    """A new file beside a path that lasts as long as this, unless it is renamed."""
    # mkstemp makes it 0600, whatever the umask.
    begin, end = _TEMPORARY
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=begin, suffix=end)
    try:
        with os.fdopen(fd, "wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            if durable:
                file.flush()
                os.fsync(fd)
        yield temporary
    finally:
        Path(temporary).unlink(missing_ok=True)


def is_temporary(name: str) -> bool:
    """True for a file that a killed writer of ours left half written."""
    begin, end = _TEMPORARY
    return name.startswith(begin) and name.endswith(end)


def remove_abandoned(folder: Path) -> list[str]:
    """Remove files of a folder that killed writers of ours left, once they are old."""
    begin, end = _TEMPORARY
    removed = []
    with contextlib.suppress(OSError):  # the next start tries again
        for path in folder.glob(f"{begin}*{end}"):
            status = path.lstat()
            ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
            if ours and time.time() - status.st_mtime > ABANDONED_S:
                path.unlink()
                removed.append(path.name)
    return removed


def sync_directory(path: Path) -> None:
    """Returns once the names in a directory are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(folder: Path) -> None:
    """Make a directory and what is missing above it, each of mode 0700."""
    for level in reversed((folder, *folder.parents)):
        level.mkdir(mode=0o700, exist_ok=True)


def state_folder(run_dir: Path, state_dir: str | None) -> Path:
    """Return the folder of what outlives the run directory.

    It is `tide.train.state_dir`, else the user's, else (a user without a home) in the
    run directory.
    """
    if state_dir:
        return Path(state_dir).expanduser()
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home if os.path.isabs(home) else run_dir, "vllm_tide")


def lasting_folder(run_dir: Path, state_dir: str | None) -> Path:
    """Return the folder of what is a run directory's, by its path, and outlives it."""
    path = os.fsencode(os.path.realpath(run_dir))
    name = f"run-{hashlib.blake2b(path, digest_size=8).hexdigest()}"
    return state_folder(run_dir, state_dir) / name


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file to read; OSError also for a pipe, which would be waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return os.fdopen(fd, "rb")


def read_small(path: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a plain file; OSError also if there are more than `most`."""
    with open_plain(path) as file:
        # Its size, since `most` would be allocated.
        data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return data


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


def write_manifest(run_dir: Path, manifest: EngineManifest) -> Path:
    """Announce an engine; the file's path.

    Raises:
        TransportError: If the id is unfit for a file name or the file not writable.
    """
    path = _path(prepare_run_dir(run_dir), manifest.engine_id)
    try:
        write_private(path, json.dumps(asdict(manifest), indent=1))
    except OSError as error:
        raise TransportError(f"cannot write {path}: {error.strerror}") from error
    return path


def read_manifests(run_dir: Path) -> list[EngineManifest]:
    """Manifests of live engines, oldest first; unreadable files are passed over.

    Raises:
        TransportError: If the run directory is another user's.
    """
    found = [
        manifest
        for path in _manifest_paths(run_dir)
        if (manifest := _read(path)) is not None and manifest.owner_alive() is not False
    ]
    return sorted(found, key=lambda manifest: manifest.created_unix)


def state_dirs(run_dir: Path) -> list[str | None]:
    """Return the `tide.train.state_dir` of each live engine of a run directory.

    Raises:
        TransportError: If the run directory is another user's.
    """
    found: dict[str | None, None] = {}
    for manifest in read_manifests(run_dir):
        section = manifest.tide.get("train")
        given = section.get("state_dir") if isinstance(section, dict) else None
        found[given if isinstance(given, str) else None] = None
    return list(found)


def newest_engine(
    run_dir: Path, engine_id: str | None, hint: str = ""
) -> EngineManifest | None:
    """The engine of this id, or the one announced last; None if there is none.

    Raises:
        NobodyThere: There is none, and a hint.
    """
    found = [m for m in read_manifests(run_dir) if engine_id in (None, m.engine_id)]
    if not found and hint:
        which = f"engine {engine_id!r}" if engine_id else "engine"
        raise NobodyThere(f"no live {which} in {run_dir}: {hint}")
    return found[-1] if found else None


def inspect_manifests(run_dir: Path) -> list[tuple[Path, EngineManifest | None]]:
    """Every manifest file, those of dead engines too; None for an unreadable one.

    Changes nothing, and asks nothing of the directory: for tools that look on.
    """
    paths = sorted(run_dir.glob(f"{_PREFIX}*{_SUFFIX}"))
    return [(path, _read(path)) for path in paths]


def remove_manifest(run_dir: Path, engine_id: str) -> None:
    """Take an engine's manifest back; fine if it is gone already."""
    with contextlib.suppress(OSError):
        _path(run_dir, engine_id).unlink()


def group_of(manifest: EngineManifest) -> str:
    """Same for engines that one trainer serves: their target, draft, tide section."""
    facts = [manifest.target_path, manifest.draft_path, manifest.tide]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def reclaim_orphans(run_dir: Path) -> list[str]:
    """Remove what dead engines of this user left: manifests, segments, old files.

    Raises:
        TransportError: If the run directory is another user's.
    """
    removed: list[str] = []
    live = set()
    for path in _manifest_paths(run_dir):
        manifest = _read(path)
        if manifest is None:  # it may be a live engine's
            live.add(path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX))
        elif manifest.owner_alive() is False:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
        else:
            live.add(manifest.engine_id)
    removed += _remove_old_files(run_dir, live) + remove_abandoned(run_dir)
    # Every segment names its owner, so a manifest's segments are found here as well.
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(SHM_DIR)):
            if name.startswith(NAME_PREFIX) and unlink_if_orphaned(name):
                removed.append(name)
    return removed


def _remove_old_files(run_dir: Path, live: set[str]) -> list[str]:
    """Logs, events, status of dead engines, but of the `KEPT` that wrote last."""
    wrote: dict[str, list[tuple[float, Path]]] = {}
    for path in run_dir.glob("*"):
        named = _OF_ENGINE.fullmatch(path.name)
        if named is not None and named[1] not in live:
            with contextlib.suppress(OSError):  # another start removes them too
                written = path.lstat().st_mtime
                wrote.setdefault(named[1], []).append((written, path))
    removed = []
    for paths in sorted(wrote.values(), key=max)[:-KEPT]:
        for _, path in paths:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def take_lock(run_dir: Path, group: str) -> int | None:
    """Become the one who starts a group's trainer; None while another is.

    Returns:
        A descriptor. The lock is free once nobody has it, a child of ours included.

    Raises:
        OSError: The file cannot be made.
    """
    path, flags = run_dir / "trainers.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    place = int(group, 16) >> 1  # a byte of the file for each group
    lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _path(run_dir: Path, engine_id: str) -> Path:
    if not _ENGINE_ID.fullmatch(engine_id):
        raise TransportError(
            f"engine_id {engine_id!r}: only letters, digits, dot, dash and underscore"
        )
    return run_dir / f"{_PREFIX}{engine_id}{_SUFFIX}"


def _manifest_paths(run_dir: Path) -> list[Path]:
    if not run_dir.exists():
        return []
    return sorted(prepare_run_dir(run_dir).glob(f"{_PREFIX}*{_SUFFIX}"))


def manifest_from(data: Any) -> EngineManifest:
    """Read what :func:`write_manifest` wrote, in this version or a later one.

    Args:
        data: Parsed JSON of another process: it may be anything.

    Raises:
        TypeError, ValueError: If a field is absent, of another type,
            or out of every range.
    """
    manifest = TypeAdapter(EngineManifest).validate_python(data)
    if not _ENGINE_ID.fullmatch(manifest.engine_id):
        raise ValueError("engine_id of an engine's manifest is no name")
    return manifest


def _read(path: Path) -> EngineManifest | None:
    try:
        return manifest_from(json.loads(read_small(path)))
    except (OSError, RecursionError, TypeError, ValueError):
        return None
