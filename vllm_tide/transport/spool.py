"""The spool: records and drafts through storage shared by engines and trainers.

On the engine's host, `vllm-tide relay` drains the ring into the spool and copies drafts
from the spool to the weights segment. The engine does not access the spool, the trainer
accesses nothing else. Layout under its URL::

    engines/<engine>/engine.json            description of the engine (written once)
    engines/<engine>/state.json             heartbeat, range of shards, feedback
    engines/<engine>/records/<n>-<time>.safetensors, <n>.json
    engines/<engine>/<DRAFTS>/<version>.safetensors, latest.json
    engines/<engine>/readers/<reader>.json  cursor and requested rows of a trainer
    engines/<engine>/draft/                 the initial draft of the engine
    targets/<SHA-256 of files.json>/        embedding and output rows of a target

A manifest (``.json``) is written after the file it describes and contains its size and
checksum. A file without a manifest is not read, so a writer may die at any time. A
draft's file contains the bytes of the weights segment; ``latest.json`` is the manifest
of the newest draft. One relay writes the files of an engine, and one trainer per reader
name its reader file, without waiting for each other.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from vllm_tide.transport.process import Holder
from vllm_tide.transport.publication import MAX_VERSION, DraftBlob, WeightsRefused
from vllm_tide.transport.record import RingSpec
from vllm_tide.transport.rendezvous import EngineManifest, manifest_from
from vllm_tide.transport.shm import MALFORMED, TransportError, sanitize_for_log
from vllm_tide.transport.spool_store import ForeignFileError, Store

FORMAT_VERSION = 2
ENGINES = "engines"
DRAFTS = "heads"
MAX_STORED_DRAFTS = 3
_LATEST = f"{DRAFTS}/latest.json"
MAX_JSON_BYTES = 16 << 20
"""Maximum size of a JSON file in a spool (bytes)."""

BEAT_S = 2.0
"""Maximum interval between heartbeats of a relay or a trainer (s)."""
DEAD_S = 20.0
"""Time without a heartbeat (s) after which a peer is considered dead."""

MAX_DRAFT_BYTES = 16 << 30
"""Maximum size of a draft for a trainer; for a relay it is that of its segment."""
MAX_LEAP = 1 << 36
"""Maximum plausible increase of a version; beyond it `latest.json` is invalid."""

# NaN differs from itself, so a heartbeat of NaN would always look changed.
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
_Label = Annotated[str, AfterValidator(sanitize_for_log)]  # appears in logs
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
FILE_PATTERNS = {
    "records": re.compile(r"[0-9]{12}(-[0-9]{1,20})?\.(json|safetensors)"),
    DRAFTS: re.compile(r"([0-9]{12}\.(json|safetensors)|latest\.json)"),
    "readers": re.compile(rf"{_NAME.pattern}\.json"),
    "draft": re.compile(r"[!-\-0-~][ -.0-~]*\.(json|safetensors)"),
    "": re.compile(r"(engine|state)\.json"),
}
"""Names of the files in each subfolder of an engine's folder, and in itself (last)."""


@dataclass(frozen=True)
class EngineEntry:
    """An engine as announced by its relay."""

    manifest: EngineManifest  # pid and paths are invalid on other hosts
    spec: RingSpec
    identity: dict[str, str]  # see `transport.identity`


@dataclass(frozen=True)
class EngineState:
    """State of an engine, written periodically by its relay."""

    unix: _Number = 0.0  # relay's clock (s); a heartbeat for readers
    running: bool = True  # False in the last state before exit
    first_shard: int = 1  # the oldest that may still exist
    last_shard: int = 0  # the newest complete one; 0 if there is none
    published_version: _Version = 0  # newest draft in the engine's weights segment
    installed_version: _Version = 0  # being served
    refused_version: _Version = 0  # last refused version, 0 if none
    refused_reason: _Label = ""
    swap_pause_ms: _Number = 0.0  # pause of serving in the last installation
    rows: int = 0  # written to the spool by this relay
    dropped_rows: int = 0  # dropped by the engine, as the ring was full


@dataclass(frozen=True)
class ReaderState:
    """State of a trainer for one engine."""

    instance: _Label  # see `this_instance`
    unix: _Number = 0.0  # trainer's clock (s)
    running: bool = True  # False in the last state before exit
    collect: bool = True  # requests full rows, else metadata-only records
    paused: bool = False  # requests no rows, also after exit
    publishes: bool = True  # sends drafts to this engine
    shard: int = 1  # next shard to read
    index: int = 0  # records of it already read


_State = TypeVar("_State", EngineState, ReaderState)


class DraftConflict(TransportError):
    """Another trainer has published a draft in the meantime."""


class EngineFolder:
    """The folder of one engine in a spool; all methods may raise TransportError."""

    def __init__(self, store: Store, engine_id: str) -> None:
        self.store = store
        self.engine_id = engine_id
        self._at = f"{ENGINES}/{checked_name(engine_id, 'engine')}"

    def path(self, *names: str) -> str:
        return "/".join((self._at, *filter(None, names)))

    def write_json(self, name: str, value: dict[str, Any], durable: bool) -> None:
        text = json.dumps(value, separators=(",", ":"))
        self.store.write(self.path(name), text.encode(), durable=durable)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file; None if it is missing or incomplete."""
        return parse_json(self.store.read(self.path(name), MAX_JSON_BYTES + 1))

    def read_sized(self, name: str, size: object) -> bytes | None:
        """Read a file with the size of its manifest, which is not validated."""
        max_bytes = max(size, 0) + 1 if type(size) is int else 0
        return self.store.read(self.path(name), max_bytes)

    def write_engine(self, entry: EngineEntry) -> None:
        manifest = asdict(entry.manifest)
        manifest["tide"].pop("spool", None)  # readers have the URL already
        value = {
            "format": FORMAT_VERSION,
            "manifest": manifest,
            "spec": asdict(entry.spec),
            "identity": entry.identity,
        }
        self.write_json("engine.json", value, durable=True)

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
            manifest = manifest_from(value["manifest"])
            identity = {str(k): str(v) for k, v in value["identity"].items()}
            return EngineEntry(manifest, RingSpec.from_fields(value["spec"]), identity)
        except MALFORMED:
            return None

    def write_state(self, state: EngineState) -> None:
        self.write_json("state.json", asdict(state), durable=False)

    def read_state(self) -> EngineState | None:
        """Read the engine's state; None if it is missing or invalid."""
        return self._read_state_file(EngineState, "state.json")

    def write_reader(self, name: str, state: ReaderState) -> None:
        """Write a trainer's state, durably because it contains the cursor."""
        self.write_json(f"readers/{name}.json", asdict(state), durable=True)

    def read_reader(self, name: str) -> ReaderState | None:
        """Read a trainer's state; None if it is missing or invalid."""
        return self._read_state_file(ReaderState, f"readers/{name}.json")

    def _read_state_file(self, kind: type[_State], name: str) -> _State | None:
        with contextlib.suppress(ValidationError):
            return TypeAdapter(kind).validate_python(self.read_json(name))
        return None

    def read_readers(self) -> dict[str, ReaderState]:
        readers = {}
        for file in self.store.sizes(self.path("readers")):
            name = file.removesuffix(".json")
            state = self.read_reader(name) if name != file else None
            if state is not None:
                readers[name] = state
        return readers

    def write_draft(self, blob: DraftBlob) -> None:
        """Store a draft as the latest; raise DraftConflict if it is not newer."""
        entry = {
            "version": blob.version,
            "bytes": len(blob.data),
            "sha256": blob.sha256.hex(),
        }
        latest = self.latest_draft(blob.version)
        # An equal entry: an earlier write that the storage reported as failed.
        if blob.version <= latest and self.read_json(_LATEST) != entry:
            raise DraftConflict(
                f"engine {self.engine_id}: draft {blob.version} is not newer than "
                f"{latest} in {self.store.url}: another trainer publishes to it; stop "
                "one of them"
            )
        file = _draft_file(blob.version)
        self.store.write(self.path(DRAFTS, file), blob.data)
        self.write_json(_LATEST, entry, durable=True)
        is_draft = FILE_PATTERNS[DRAFTS].fullmatch
        names = filter(is_draft, self.store.sizes(self.path(DRAFTS)))
        for name in sorted(name for name in names if name <= file)[:-MAX_STORED_DRAFTS]:
            with contextlib.suppress(ForeignFileError):
                self.store.remove(self.path(DRAFTS, name))

    def latest_draft(self, known: int = 0) -> int:
        """Return the version of the latest draft; 0 if there is none.

        Args:
            known: An earlier version; one more than `MAX_LEAP` greater is invalid.
        """
        return _version(self.read_json(_LATEST) or {}, known)

    def read_draft(self, known: int = 0, limit: int = MAX_DRAFT_BYTES) -> DraftBlob:
        """Read the latest draft, of at most `limit` bytes, without verifying it.

        Raises:
            WeightsRefused: With reason empty, truncated, format or segment.
        """
        entry = self.read_json(_LATEST)
        if entry is None:
            raise WeightsRefused("empty", "no draft has been stored yet")
        try:
            if not (version := _version(entry, known)):
                raise ValueError(version)
            size = int(entry["bytes"])
            digest = bytes.fromhex(entry["sha256"])
        except MALFORMED as error:
            raise WeightsRefused(
                "format",
                f"the draft of engine {self.engine_id} in {self.store.url} was stored "
                "by another version: run the same vllm_tide on both sides",
            ) from error
        if size > limit:
            raise WeightsRefused(
                "segment", f"draft {version} has {size} bytes, more than {limit}"
            )
        body = self.read_sized(f"{DRAFTS}/{_draft_file(version)}", size)
        if body is None or len(body) != size:
            raise WeightsRefused("truncated", f"draft {version} is incomplete")
        return DraftBlob(version, digest, body)


def _version(entry: dict[str, Any], known: int) -> int:
    version = entry.get("version")
    limit = min(known + MAX_LEAP, MAX_VERSION)
    return version if type(version) is int and 0 < version <= limit else 0


def _draft_file(version: int) -> str:
    return f"{version:012d}.safetensors"


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


def engine_ids(store: Store) -> list[str]:
    """Return all engines of a spool that were not removed."""
    return [name for name in store.folders(ENGINES) if _NAME.fullmatch(name)]


def checked_name(name: str, kind: str) -> str:
    """Return a name if it is valid in a path, else raise TransportError."""
    if not _NAME.fullmatch(name):
        raise TransportError(
            f"{kind} '{sanitize_for_log(name)}': use letters, digits, dot, dash and "
            "underscore, and no leading dot"
        )
    return name


def this_instance() -> str:
    """Return an id of this process, unique among hosts: boot, namespace, pid, start."""
    process = Holder.current()
    return f"{_boot_id()}:{process.namespace}:{process.pid}:{process.start}"


def instance_gone(instance: str) -> bool:
    """Return whether a process is dead; False if that cannot be determined here."""
    try:
        boot, namespace, pid, start = instance.split(":")
        holder = Holder(int(pid), int(start), int(namespace))
    except ValueError:
        return False
    return boot == _boot_id() and holder.alive() is False


def failure_message(error: Exception) -> str:
    """Return the message of an error; also of unexpected ones (MemoryError, bugs)."""
    if isinstance(error, TransportError):
        return str(error)
    detail = sanitize_for_log(error)
    return f"the spool cannot be used ({type(error).__name__}: {detail})"


def parse_json(raw: bytes | None) -> dict[str, Any] | None:
    """Parse a JSON object; None if the bytes are not one."""
    if raw is None or len(raw) > MAX_JSON_BYTES:
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _boot_id() -> str:
    with (
        contextlib.suppress(OSError),
        open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file,
    ):
        return file.read().strip()
    return "unknown"
