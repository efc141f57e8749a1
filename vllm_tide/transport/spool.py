"""The spool: records and drafts through storage shared by engines and trainers.

On the engine's host, `vllm-tide relay` moves records from the ring to the spool, and
drafts from the spool to the weights segment. The engine does not access the spool, the
trainer accesses nothing else. Layout under its URL::

    engines/<engine>/engine.json    the engine, and the files of its initial draft
    engines/<engine>/state.json     of the relay: heartbeat, newest shard, feedback
    engines/<engine>/trainer.json   of the trainer: heartbeat, cursor, newest draft
    engines/<engine>/records/<number>-<time>-<CRC-32C>.safetensors
    engines/<engine>/drafts/<version>-<SHA-256>.safetensors
    engines/<engine>/initial/<SHA-256>

A file is written before the JSON file that refers to it, and its name contains its
checksum. So a writer may die at any time. An engine has one relay and one trainer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import posixpath
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from vllm_tide.config import without_credentials
from vllm_tide.transport.draft_weights import DraftWeights, WeightsRefused
from vllm_tide.transport.record import RingSpec
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    is_temporary,
    make_private,
    manifest_from,
    write_private,
)
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.shm import MALFORMED, TransportError, sanitize_for_log
from vllm_tide.transport.versions import MAX_VERSION, version_name

FORMAT_VERSION = 3
MAX_JSON_BYTES = 16 << 20
MAX_DRAFT_BYTES = 16 << 30
"""Maximum size of a draft for a trainer; for a relay it is that of its segment."""
MAX_LEAP = 1 << 36
"""Maximum plausible increase of a version; a draft beyond it is ignored."""
NUM_STORED_DRAFTS = 2  # the relay may be reading the last but one

BEAT_S = 2.0
"""Maximum interval between heartbeats of a relay or a trainer (s)."""
DEAD_S = 20.0
"""Time without a heartbeat (s) after which a peer is considered dead."""

_ENGINES = "engines"
RECORDS, DRAFTS, INITIAL = "records", "drafts", "initial"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
SHARD_NAME = re.compile(r"([0-9]{12})-([0-9]{1,20})-([0-9a-f]{8})\.safetensors")
DRAFT_NAME = re.compile(r"([0-9]{19})-([0-9a-f]{64})\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")
# The files of an engine, by subfolder; no others are read or removed.
_FILES = {
    RECORDS: SHARD_NAME,
    DRAFTS: DRAFT_NAME,
    INITIAL: SHA256,
    "": re.compile(r"(engine|state|trainer)\.json"),
}

# NaN differs from itself, so a heartbeat of NaN would always look changed.
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
_Label = Annotated[str, AfterValidator(sanitize_for_log)]  # appears in logs


class StoreError(TransportError):
    """The storage is not usable at present; a retry may succeed."""


class Store:
    """A set of files with slash-separated names, in any storage that fsspec supports.

    Files are replaced atomically: in a directory by write, sync and rename, in an
    object store by a put. All methods may raise StoreError.

    Attributes:
        url: For messages, without credentials.

    Args:
        create: Whether a missing directory is created.

    Raises:
        TransportError: The URL is invalid, or the package of its protocol is missing;
            without `create`, there is no spool.
    """

    def __init__(self, url: str, *, create: bool = True) -> None:
        self.url = without_credentials(url)
        self._full_url, self._create = url, create
        self._fs: Any = None
        self._root, self._local = "", False
        with contextlib.suppress(StoreError):  # each access tries again
            self._connect()

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file, and its folder if that is missing."""
        with self._using("written"):
            path = self._path(name)
            if self._local:
                make_private(Path(path).parent)
                write_private(Path(path), data, durable=True)
            else:
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                self._fs.pipe_file(path, data)

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Read a regular file; None if it is missing or larger than `max_bytes`."""
        with self._using("read", missing_ok=True):
            self._fs.invalidate_cache()  # other processes write to it, too
            info = self._fs.info(self._path(name))
            if info["type"] == "file" and int(info["size"] or 0) <= max_bytes:
                return bytes(self._fs.cat_file(self._path(name)))
        return None

    def read_start(self, name: str, num_bytes: int) -> bytes:
        """Read the first bytes of a listed file; empty if it was removed."""
        with self._using("read", missing_ok=True):
            return bytes(self._fs.cat_file(self._path(name), start=0, end=num_bytes))
        return b""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the regular files of a folder and their sizes."""
        return {
            name: int(entry.get("size") or 0)
            for name, entry in self._list(folder)
            if entry["type"] == "file" and not name.startswith(".")
        }

    def folders(self, folder: str) -> list[str]:
        """Return the subfolders of a folder, sorted."""
        entries = self._list(folder)
        return sorted(name for name, entry in entries if entry["type"] == "directory")

    def remove(self, *names: str) -> list[str]:
        """Remove files; return those that exist and could not be removed."""
        failed = []
        for name in names:
            try:
                with self._using("cleaned up", missing_ok=True):
                    self._fs.rm_file(self._path(name))
            except StoreError:
                failed.append(name)
        return failed

    def remove_unfinished(self, folder: str, min_age_s: float = -math.inf) -> None:
        """Remove temporary files of killed writers; only directories have them."""
        if self._local:
            now = time.time()
            self.remove(
                *(
                    f"{folder}/{name}"
                    for name, entry in self._list(folder)
                    if is_temporary(name) and now - entry["mtime"] > min_age_s
                )
            )

    def remove_folder(self, folder: str) -> None:
        """Remove a folder if it exists and is empty."""
        with self._using("cleaned up"), contextlib.suppress(OSError):
            self._fs.rmdir(self._path(folder))

    def _list(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        with self._using("read", missing_ok=True):
            path = self._path(folder)
            self._fs.invalidate_cache()
            return [
                (posixpath.basename(entry["name"].rstrip("/")), entry)
                for entry in self._fs.ls(path, detail=True)
                # Object stores list the marker of the folder itself.
                if entry["name"].rstrip("/") != path
            ]
        return []

    def _path(self, name: str) -> str:
        return "/".join(filter(None, (self._root, name)))

    def _connect(self) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        from fsspec.implementations.local import (  # type: ignore[import-untyped]
            LocalFileSystem,
        )

        with self._converted("opened"):
            try:
                fs, self._root = url_to_fs(os.path.expanduser(self._full_url))
            except (ImportError, ValueError) as error:
                raise TransportError(self._message("opened", error)) from error
            self._local = isinstance(fs, LocalFileSystem)
            if not (self._create or fs.isdir(self._root)):
                raise TransportError(
                    f"--spool: there is no spool at {self.url}; give the server's "
                    "tide.spool.url"
                )
            if self._local:
                make_private(Path(self._root))
                if os.stat(self._root).st_mode & 0o007:
                    raise StoreError(
                        f"tide.spool.url: {self._root} is accessible to all users and "
                        f"would expose request text: chmod o-rwx {self._root}"
                    )
            self._fs = fs

    @contextlib.contextmanager
    def _using(self, verb: str, *, missing_ok: bool = False) -> Iterator[None]:
        """Connect if necessary, and convert the exceptions of any backend."""
        if self._fs is None:
            self._connect()
        missing = (FileNotFoundError, NotADirectoryError) if missing_ok else ()
        with self._converted(verb), contextlib.suppress(*missing):
            yield

    @contextlib.contextmanager
    def _converted(self, verb: str) -> Iterator[None]:
        try:
            yield
        except TransportError:
            raise
        except Exception as error:  # noqa: BLE001 - backends raise any exception
            raise StoreError(self._message(verb, error)) from error

    def _message(self, verb: str, error: Exception) -> str:
        detail = sanitize_for_log(without_credentials(str(error)))
        return (
            f"tide.spool.url: {self.url} cannot be {verb} ({type(error).__name__}: "
            f"{detail}): check the URL, the access rights, the free space, and that "
            "the package of its protocol is installed"
        )


@dataclass(frozen=True)
class EngineEntry:
    """An engine as announced by its relay.

    Attributes:
        identity: See `transport.identity`; "rows" identifies the target's embedding.
        draft_files: SHA-256 of each file of the initial draft, by file name.
    """

    manifest: EngineManifest  # pid and paths are invalid on other hosts
    spec: RingSpec
    identity: dict[str, str]
    draft_files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineState:
    """State of an engine, written periodically by its relay."""

    unix: _Number = 0.0  # relay's clock (s); a heartbeat for the trainer
    running: bool = True  # False in the last state before exit
    last_shard: int = 0  # number of the newest shard; 0 if there was none
    published_version: _Version = 0  # newest draft in the engine's weights segment
    installed_version: _Version = 0  # being served
    refused_version: _Version = 0  # last refused version, 0 if none
    refused_reason: _Label = ""
    swap_pause_ms: _Number = 0.0  # pause of serving in the last installation
    dropped_rows: int = 0  # dropped by the engine, as the ring was full


@dataclass(frozen=True)
class TrainerState:
    """State of an engine's trainer, written periodically by it."""

    instance: _Label = ""  # host, pid and a random number; empty if there was none
    unix: _Number = 0.0  # trainer's clock (s); a heartbeat for the relay
    running: bool = False  # False in the last state before exit
    collect: Collect = Collect.FULL  # NOTHING applies also after exit
    shard: int = 1  # next shard to read
    index: int = 0  # records of it already read
    draft: str = ""  # file name of the newest draft, empty if none


_State = TypeVar("_State", EngineState, TrainerState)


class EngineFolder:
    """The folder of one engine in a spool; all methods may raise TransportError."""

    def __init__(self, store: Store, engine_id: str) -> None:
        if not _NAME.fullmatch(engine_id):
            raise TransportError(
                f"engine '{sanitize_for_log(engine_id)}': use letters, digits, dot, "
                "dash and underscore, and no leading dot"
            )
        self.store = store
        self.engine_id = engine_id

    def path(self, *names: str) -> str:
        return "/".join((_ENGINES, self.engine_id, *filter(None, names)))

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        text = json.dumps(value, separators=(",", ":"))
        self.store.write(self.path(name), text.encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object; None if it is missing, too large or invalid."""
        raw = self.store.read(self.path(name), MAX_JSON_BYTES)
        try:
            value = json.loads(raw or b"")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def write_engine(self, entry: EngineEntry) -> None:
        value = asdict(entry) | {"format": FORMAT_VERSION}
        value["manifest"]["tide"].pop("spool", None)  # readers have the URL already
        self.write_json("engine.json", value)

    def read_engine(self) -> EngineEntry | None:
        """Read the engine's announcement; None if it is missing or invalid."""
        value = self.read_json("engine.json")
        if value is None:
            return None
        if value.get("format") != FORMAT_VERSION:
            version = sanitize_for_log(value.get("format"))
            raise TransportError(
                f"engine {self.engine_id} in {self.store.url} has spool format "
                f"{version}, this process supports {FORMAT_VERSION}: run the same "
                "vllm_tide on both sides"
            )
        try:
            manifest, spec = manifest_from(value["manifest"]), value["spec"]
            identity, files = (
                {str(k): str(v) for k, v in value[name].items()}
                for name in ("identity", "draft_files")
            )
            return EngineEntry(manifest, RingSpec.from_fields(spec), identity, files)
        except MALFORMED:
            return None

    def write_state(self, state: EngineState) -> None:
        self.write_json("state.json", asdict(state))

    def read_state(self) -> EngineState | None:
        """Read the engine's state; None if it is missing or invalid."""
        return self._read_state(EngineState, "state.json")

    def write_trainer(self, state: TrainerState) -> None:
        self.write_json("trainer.json", asdict(state))

    def read_trainer(self) -> TrainerState | None:
        """Read the trainer's state; None if it is missing or invalid."""
        return self._read_state(TrainerState, "trainer.json")

    def _read_state(self, kind: type[_State], name: str) -> _State | None:
        with contextlib.suppress(ValidationError):
            return TypeAdapter(kind).validate_python(self.read_json(name))
        return None

    def shards(self) -> dict[str, int]:
        """Return the names of all shards, oldest first, and their sizes (bytes)."""
        sizes = self.store.sizes(self.path(RECORDS))
        return {name: sizes[name] for name in sorted(sizes) if shard_number(name)}

    def write_draft(self, weights: DraftWeights) -> str:
        """Store a draft and remove old ones; return its file name."""
        name = f"{weights.version:019d}-{weights.sha256.hex()}.safetensors"
        self.store.write(self.path(DRAFTS, name), bytes(weights.data))
        stored = filter(DRAFT_NAME.fullmatch, self.store.sizes(self.path(DRAFTS)))
        old = sorted(other for other in stored if other <= name)[:-NUM_STORED_DRAFTS]
        self.store.remove(*(self.path(DRAFTS, each) for each in old))
        return name

    def read_draft(self, name: str, max_bytes: int = MAX_DRAFT_BYTES) -> DraftWeights:
        """Read a draft without verifying it.

        Raises:
            WeightsRefused: It is larger than `max_bytes` (reason "segment").
            StoreError: It cannot be read at present.
        """
        version, digest = draft_version(name), bytes.fromhex(name[20:84])
        size = self.store.sizes(self.path(DRAFTS)).get(name, 0)
        if size > max_bytes:
            raise WeightsRefused(
                "segment",
                f"draft {version_name(version)} has {size} bytes, more than "
                f"{max_bytes}",
            )
        data = self.store.read(self.path(DRAFTS, name), max_bytes)
        if data is None:
            where = self.store.url
            raise StoreError(f"draft {version_name(version)} is not in {where}")
        return DraftWeights(version, digest, data)

    def remove_unfinished(self, min_age_s: float = -math.inf) -> None:
        """Remove temporary files of killed writers."""
        for part in _FILES:
            self.store.remove_unfinished(self.path(part), min_age_s)

    def remove(self) -> None:
        """Remove the files of the engine, and its folders if they are empty then."""
        self.remove_unfinished()
        for part, pattern in _FILES.items():
            names = filter(pattern.fullmatch, self.store.sizes(self.path(part)))
            self.store.remove(*(self.path(part, name) for name in names))
            self.store.remove_folder(self.path(part))


class HeartbeatMonitor:
    """Detects a stale heartbeat by the local clock, as clocks of hosts differ."""

    def __init__(self, timeout_s: float = DEAD_S) -> None:
        self._timeout_s = timeout_s
        self._value: object = None
        self._changed_at = time.monotonic()
        self.changed = False
        """True if the value has changed since the first observation."""

    def observe(self, value: object) -> None:
        if value != self._value:
            self.changed = self._value is not None
            self._value, self._changed_at = value, time.monotonic()

    @property
    def fresh(self) -> bool:
        """True if the value changed, or was first observed, within the timeout."""
        return time.monotonic() - self._changed_at < self._timeout_s


def engine_folders(store: Store) -> Iterable[EngineFolder]:
    """Return the folders of all engines of a spool."""
    names = filter(_NAME.fullmatch, store.folders(_ENGINES))
    return [EngineFolder(store, name) for name in names]


def shard_number(name: str) -> int:
    """Return the shard number in a file name; 0 for other files."""
    match = SHARD_NAME.fullmatch(name)
    return int(match[1]) if match else 0


def draft_version(name: str, known: int = MAX_VERSION) -> int:
    """Return the version in a draft's file name; 0 if it is invalid.

    Args:
        known: A version that was seen; one more than `MAX_LEAP` greater is invalid.
    """
    match = DRAFT_NAME.fullmatch(name)
    version = int(match[1]) if match else 0
    return version if version <= min(known + MAX_LEAP, MAX_VERSION) else 0
