"""The run directory: engines announce their segments, trainers discover them.

It contains a JSON file per engine, ``engine-<engine_id>.json``, replaced atomically,
mode 0600 in a directory of mode 0700. The engine has its file locked while it is alive.
The next process to start removes files and segments of dead ones. This module also
reads and writes small files for all modules.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from vllm_tide.transport import locks
from vllm_tide.transport.shm import (
    NAME_PREFIX,
    SHM_DIR,
    TransportError,
    unlink_if_orphaned,
)

RUN_DIR_VARIABLE = "TIDE_RUN_DIR"
SPOOL_VARIABLE = "TIDE_SPOOL_URL"
"""`tide.spool.url` for a relay: a manifest contains no credentials."""

_ENGINE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PREFIX, _SUFFIX = "engine-", ".json"
_OF_ENGINE = re.compile(
    r"(?:trainer|events|relay)-([0-9a-f]{16})\.(?:jsonl?|log|log\.1)"
)
NO_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
MAX_BYTES = 1 << 20
"""Maximum size of a file in a run directory (bytes)."""
_TEMPORARY = (".tide-", ".tmp")  # prefix and suffix of a file that is being written
ABANDONED_S = 3600.0  # age at which it is considered abandoned
MAX_DEAD_ENGINES = 4  # dead engines with retained logs, events and status


@dataclass
class EngineManifest:
    """Properties of a live engine that a trainer needs."""

    engine_id: str  # letters, digits, dot, dash, underscore
    pid: int  # of the worker that created the segments
    ring: str  # names of its segments
    weights: str
    target_path: str  # directories of the target and of the initial draft
    draft_path: str
    target_dtype: str  # torch dtype name
    hidden_size: int  # of the target
    vocab_size: int  # the target's
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]  # layers with captured inputs
    teacher: str  # "hidden" or "topk"
    teacher_topk: int
    feature_dtype: str
    num_speculative_tokens: int  # the largest draft length
    tide: dict[str, Any]  # the `tide` section of the engine's configuration
    created_unix: float  # s
    # Draft tensors shared with the target: neither trained nor published.
    shared: list[str] = field(default_factory=list)
    model_name: str = ""  # served model name; empty if unknown
    draft_sample_method: str = "greedy"  # vLLM's: how draft tokens are sampled
    tenant_key_id: str = ""  # of the key of its tenant ids
    # Of the GPUs of all ranks.
    gpu_uuids: list[str] = field(default_factory=list)


_manifest_locks: dict[Path, int | None] = {}  # of this process


class NotRunningError(TransportError):
    """An engine, trainer or draft that a command needs is not in service."""

    exit_status = 1  # of a command; a usage error has another status


def default_run_dir() -> Path:
    """Return `$TIDE_RUN_DIR`, or the user's default directory.

    Raises:
        TransportError: `$TIDE_RUN_DIR` is relative, and so depends on the process.
    """
    if chosen := os.environ.get(RUN_DIR_VARIABLE):
        if not os.path.isabs(chosen):
            reason = f"{RUN_DIR_VARIABLE}: {chosen!r} is relative; use an absolute path"
            raise TransportError(reason)
        return Path(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "vllm_tide"
    return Path(tempfile.gettempdir()) / f"vllm_tide-{os.getuid()}"


def prepare_run_dir(run_dir: Path) -> Path:
    """Create the run directory, or check that it is private to this user.

    Raises:
        TransportError: It is a link, of another user, accessible to others, or cannot
            be created. The mode is not changed, as other files may depend on it.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = run_dir.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise TransportError(
                f"run directory {run_dir} is not a directory of user {os.geteuid()}: "
                f"remove it or set tide.run_dir or {RUN_DIR_VARIABLE}"
            )
        if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
            raise TransportError(
                f"run directory {run_dir} has mode {mode:04o} and would expose user "
                f"text to others: set tide.run_dir or {RUN_DIR_VARIABLE} to a private "
                f"directory, or, if only this server uses it, chmod 700 {run_dir}"
            )
    except OSError as error:
        raise TransportError(
            f"cannot use run directory {run_dir}: {error.strerror}; set tide.run_dir "
            f"or {RUN_DIR_VARIABLE}"
        ) from error
    return run_dir


def require_readable(run_dir: Path) -> None:
    """Check that a run directory is readable if it exists.

    Raises:
        TransportError: It is not readable, or of another user.
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


def require_space(run_dir: Path) -> None:
    """Check that the run directory has space for the files of a start.

    Raises:
        TransportError: It cannot be written; see `is_full`.
    """
    path = prepare_run_dir(run_dir) / ".room"
    try:
        path.write_bytes(bytes(64 << 10))
    except OSError as error:
        message = f"no space in run directory {run_dir}: {error.strerror}"
        raise TransportError(message) from error
    finally:
        path.unlink(missing_ok=True)


def is_full(error: TransportError) -> bool:
    """Return whether an error of `require_space` means a full disk or quota."""
    return getattr(error.__cause__, "errno", None) in NO_SPACE_ERRORS


def write_private(path: Path, *parts: bytes | str, durable: bool = False) -> None:
    """Create or replace a file atomically, mode 0600.

    Args:
        durable: Sync the file to disk, and its name if the file system supports it.

    Raises:
        OSError: The file cannot be written.
    """
    with _temporary_file(path, parts, durable) as temporary:
        os.replace(temporary, path)
    if durable:
        try:
            sync_directory(path.parent)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def write_once(path: Path, data: bytes) -> None:
    """Create a file, mode 0600, unless it exists, also with concurrent calls."""
    with (
        _temporary_file(path, [data], False) as temporary,
        contextlib.suppress(FileExistsError),
    ):
        os.link(temporary, path)  # a rename would replace an existing file


@contextlib.contextmanager
def _temporary_file(
    path: Path, parts: Iterable[bytes | str], durable: bool
) -> Iterator[str]:
    """Write a temporary file in the directory of `path`; remove it if not renamed."""
    # mkstemp sets mode 0600 independently of the umask.
    prefix, suffix = _TEMPORARY
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=suffix)
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
    """Return whether a name is that of a temporary file of `write_private`."""
    prefix, suffix = _TEMPORARY
    return name.startswith(prefix) and name.endswith(suffix)


def remove_abandoned(folder: Path) -> list[str]:
    """Remove old temporary files that killed writers left in a folder."""
    prefix, suffix = _TEMPORARY
    removed = []
    with contextlib.suppress(OSError):  # the next start retries
        for path in folder.glob(f"{prefix}*{suffix}"):
            status = path.lstat()
            ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
            if ours and time.time() - status.st_mtime > ABANDONED_S:
                path.unlink()
                removed.append(path.name)
    return removed


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(folder: Path) -> None:
    """Create a directory and its missing parents, each of mode 0700."""
    for level in reversed((folder, *folder.parents)):
        level.mkdir(mode=0o700, exist_ok=True)


def state_folder(run_dir: Path, state_dir: str | None) -> Path:
    """Return the folder for files that outlive the run directory.

    It is `tide.train.state_dir`, or the user's state directory, or for a user without
    a home a folder in the run directory.
    """
    if state_dir:
        return Path(state_dir).expanduser()
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home if os.path.isabs(home) else run_dir, "vllm_tide")


def durable_folder(run_dir: Path, state_dir: str | None) -> Path:
    """Return the persistent folder that belongs to a run directory, by its path."""
    path = os.fsencode(os.path.realpath(run_dir))
    name = f"run-{hashlib.blake2b(path, digest_size=8).hexdigest()}"
    return state_folder(run_dir, state_dir) / name


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file to read; raise OSError for others, e.g. a blocking FIFO."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_small(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a regular file; raise OSError if it is too large."""
    with open_plain(path) as file:
        # Pass the actual size: read() allocates what is requested.
        data = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return data


def to_builtins(value: Any) -> Any:
    """Convert to builtin types and 64-bit integers: others hang vLLM's encoder."""
    if isinstance(value, Mapping):
        return {to_builtins(key): to_builtins(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [to_builtins(entry) for entry in value]
    if value is None or isinstance(value, bool):
        return value
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, tensors
        return to_builtins(value.tolist())
    if isinstance(value, int):
        return min(max(int(value), -(2**63)), 2**64 - 1)
    return float(value) if isinstance(value, float) else str(value)


def write_manifest(run_dir: Path, manifest: EngineManifest) -> Path:
    """Write the manifest of this process's engine, locked; return its path.

    Raises:
        TransportError: The id is not a valid file name or the file not writable.
    """
    path = _path(prepare_run_dir(run_dir), manifest.engine_id)
    text = json.dumps(asdict(manifest), indent=1)
    try:
        with _temporary_file(path, [text], False) as temporary:
            lock = locks.hold(temporary)
            try:
                os.replace(temporary, path)
            except OSError:
                locks.release(lock)
                raise
    except OSError as error:
        raise TransportError(f"cannot write {path}: {error.strerror}") from error
    release_manifest(path)
    _manifest_locks[path] = lock
    return path


def release_manifest(path: Path) -> None:
    """Unlock a manifest of this process, as if the process had ended."""
    locks.release(_manifest_locks.pop(path, None))


def is_live(path: Path) -> bool:
    """Return whether the engine of a manifest is alive; True if that is unknown."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return locks.is_locked(fd)
    except OSError:
        return True
    finally:
        os.close(fd)


def read_manifests(run_dir: Path) -> list[EngineManifest]:
    """Return manifests of live engines, oldest first; skip unreadable files.

    Raises:
        TransportError: The run directory belongs to another user.
    """
    manifests = [
        manifest
        for path in _manifest_paths(run_dir)
        if (manifest := _read(path)) is not None and is_live(path)
    ]
    return sorted(manifests, key=lambda manifest: manifest.created_unix)


def is_spooled(manifest: EngineManifest) -> bool:
    """Return whether the trainer reads a spool, and the ring's reader is a relay."""
    spool = manifest.tide.get("spool")
    return isinstance(spool, dict) and bool(spool.get("url"))


def state_dirs(run_dir: Path) -> list[str | None]:
    """Return the `tide.train.state_dir` of each live engine of a run directory.

    Raises:
        TransportError: If the run directory is another user's.
    """
    result: dict[str | None, None] = {}
    for manifest in read_manifests(run_dir):
        section = manifest.tide.get("train")
        given = section.get("state_dir") if isinstance(section, dict) else None
        result[given if isinstance(given, str) else None] = None
    return list(result)


def newest_engine(
    run_dir: Path, engine_id: str | None, hint: str = ""
) -> EngineManifest | None:
    """Return the engine of this id, or the newest; None if there is none.

    Raises:
        NotRunningError: There is none, and `hint` is not empty.
    """
    matches = [m for m in read_manifests(run_dir) if engine_id in (None, m.engine_id)]
    if not matches and hint:
        which = f"engine {engine_id!r}" if engine_id else "engine"
        raise NotRunningError(f"no live {which} in {run_dir}: {hint}")
    return matches[-1] if matches else None


def inspect_manifests(run_dir: Path) -> list[tuple[Path, EngineManifest | None]]:
    """Return all manifest files, also of dead engines; None for an unreadable one.

    For monitoring tools: it changes nothing and does not check the directory.
    """
    paths = sorted(run_dir.glob(f"{_PREFIX}*{_SUFFIX}"))
    return [(path, _read(path)) for path in paths]


def remove_manifest(run_dir: Path, engine_id: str) -> None:
    """Remove an engine's manifest if it exists."""
    path = _path(run_dir, engine_id)
    with contextlib.suppress(OSError):
        path.unlink()
    release_manifest(path)


def group_of(manifest: EngineManifest) -> str:
    """Return a hash of target, draft and tide section; one trainer serves a group."""
    key = [manifest.target_path, manifest.draft_path, manifest.tide]
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()


def reclaim_orphans(run_dir: Path) -> list[str]:
    """Remove manifests, segments and old files of dead engines of this user.

    Raises:
        TransportError: The run directory belongs to another user.
    """
    removed: list[str] = []
    live = set()
    for path in _manifest_paths(run_dir):
        manifest = _read(path)
        if manifest is None:  # may belong to a live engine
            live.add(path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX))
        elif not is_live(path):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
        else:
            live.add(manifest.engine_id)
    removed += _remove_old_files(run_dir, live) + remove_abandoned(run_dir)
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(SHM_DIR)):
            if name.startswith(NAME_PREFIX) and unlink_if_orphaned(name):
                removed.append(name)
    return removed


def _remove_old_files(run_dir: Path, live: set[str]) -> list[str]:
    """Remove files of dead engines except the `MAX_DEAD_ENGINES` most recent ones."""
    files: dict[str, list[tuple[float, Path]]] = {}
    for path in run_dir.glob("*"):
        match = _OF_ENGINE.fullmatch(path.name)
        if match is not None and match[1] not in live:
            with contextlib.suppress(OSError):  # another process removes them too
                written = path.lstat().st_mtime
                files.setdefault(match[1], []).append((written, path))
    removed = []
    for paths in sorted(files.values(), key=max)[:-MAX_DEAD_ENGINES]:
        for _, path in paths:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def take_lock(run_dir: Path, group: str) -> int | None:
    """Lock the start of a group's trainer; return None if another process has the lock.

    Returns:
        A descriptor. The lock is released when all copies of it are closed, also in
        child processes.

    Raises:
        OSError: The file cannot be created.
    """
    path, flags = run_dir / "trainers.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    if locks.try_lock(fd, int(group, 16) >> 1):  # each group locks one byte of the file
        return fd
    os.close(fd)
    return None


def _path(run_dir: Path, engine_id: str) -> Path:
    if not _ENGINE_ID.fullmatch(engine_id):
        raise TransportError(
            f"engine_id {engine_id!r}: use letters, digits, dot, dash and underscore"
        )
    return run_dir / f"{_PREFIX}{engine_id}{_SUFFIX}"


def _manifest_paths(run_dir: Path) -> list[Path]:
    if not run_dir.exists():
        return []
    return sorted(prepare_run_dir(run_dir).glob(f"{_PREFIX}*{_SUFFIX}"))


def manifest_from(data: Any) -> EngineManifest:
    """Parse a manifest of :func:`write_manifest`, of this or a later version.

    Args:
        data: Parsed JSON of another process, not validated.

    Raises:
        TypeError, ValueError: A field is missing, of another type or out of range.
    """
    manifest = TypeAdapter(EngineManifest).validate_python(data)
    if not _ENGINE_ID.fullmatch(manifest.engine_id):
        raise ValueError("engine_id of an engine's manifest is not a valid name")
    return manifest


def _read(path: Path) -> EngineManifest | None:
    try:
        return manifest_from(json.loads(read_small(path)))
    except (OSError, RecursionError, TypeError, ValueError):
        return None
