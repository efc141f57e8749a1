"""The spool: records and drafts through storage that an engine and a trainer share.

On the engine's host `vllm-tide relay` drains the ring into the spool and puts drafts it
finds there into the weights segment, so an engine knows nothing of it. A trainer needs
nothing but the spool. Under the URL lie::

    engines/<engine>/engine.json            what the engine is (written once)
    engines/<engine>/state.json             heartbeat, shards there are, feedback
    engines/<engine>/records/<n>-<time>.safetensors, <n>.json
    engines/<engine>/heads/<version>.safetensors, latest.json   (drafts)
    engines/<engine>/readers/<reader>.json  cursor and wishes of a trainer
    engines/<engine>/draft/                 the draft the engine started with
    targets/<SHA-256 of files.json>/        embedding and output rows of a target

A manifest (``.json``) is written after the file it describes and is what makes it
exist; it carries the file's size and checksum. A draft's file holds the bytes of the
weights segment, and ``latest.json`` is the manifest of the newest. So a writer may die
at any moment, and what it left half done is never read. One relay writes an engine's
files, one trainer of each reader name its own; nobody waits for anybody.
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
from vllm_tide.transport.shm import MALFORMED, TransportError, said
from vllm_tide.transport.spool_store import NotOurs, Store

FORMAT_VERSION = 2
ENGINES = "engines"
DRAFTS = "heads"
KEPT_DRAFTS = 3
_LATEST = f"{DRAFTS}/latest.json"
MAX_JSON_BYTES = 16 << 20
"""A larger JSON file is not one of ours."""

BEAT_S = 2.0
"""A relay and a trainer say that they live this often (s), at the least."""
DEAD_S = 20.0
"""One not heard of for this long (s) counts as gone; storage may be slow."""

MAX_DRAFT_BYTES = 16 << 30
"""A trainer reads no larger draft; a relay none that its segment has no room for."""
MAX_LEAP = 1 << 36
"""Versions are counted: one so much newer than those before is nobody's."""

# NaN would differ from itself at every look, as a word does whose writer lives.
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
_Label = Annotated[str, AfterValidator(said)]  # it comes into a log
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
MADE = {
    "records": re.compile(r"[0-9]{12}(-[0-9]{1,20})?\.(json|safetensors)"),
    DRAFTS: re.compile(r"([0-9]{12}\.(json|safetensors)|latest\.json)"),
    "readers": re.compile(rf"{_NAME.pattern}\.json"),
    "draft": re.compile(r"[!-\-0-~][ -.0-~]*\.(json|safetensors)"),
    "": re.compile(r"(engine|state)\.json"),
}
"""What this package puts into each part of an engine's folder, the folder last."""


@dataclass(frozen=True)
class EngineEntry:
    """An engine as its relay announced it."""

    manifest: EngineManifest  # its pid and paths mean nothing on another host
    spec: RingSpec
    identity: dict[str, str]  # see `transport.identity`


@dataclass(frozen=True)
class EngineState:
    """State of an engine, which its relay repeats."""

    unix: _Number = 0.0  # s, the relay's clock; readers look whether it changes
    running: bool = True  # engine and relay live; False is the last word
    first_shard: int = 1  # the oldest that may still be there
    last_shard: int = 0  # the newest complete one; 0 if there is none
    published_version: _Version = 0  # newest draft in the engine's weights segment
    installed_version: _Version = 0  # serves now
    refused_version: _Version = 0  # the last one, 0 if none
    refused_reason: _Label = ""
    swap_pause_ms: _Number = 0.0  # how long the last installation held serving up
    rows: int = 0  # written to the spool by this relay
    dropped_rows: int = 0  # by the engine: the ring was full


@dataclass(frozen=True)
class ReaderState:
    """State of a trainer towards one engine."""

    instance: _Label  # see `this_instance`
    unix: _Number = 0.0  # s, the trainer's clock
    running: bool = True  # False is the last word
    collect: bool = True  # wants full rows, else metadata-only records
    paused: bool = False  # wants nothing; its last word holds
    publishes: bool = True  # sends drafts to this engine
    shard: int = 1  # reads it next
    index: int = 0  # records of it taken already


_State = TypeVar("_State", EngineState, ReaderState)


class DraftConflict(TransportError):  # noqa: N818 - says what it is
    """Another trainer has published meanwhile."""


class EngineFolder:
    """One engine's part of a spool; all may raise TransportError, also for the id."""

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
        """Read a small file; None if it is not there, or not whole."""
        return parse_json(self.store.read(self.path(name), MAX_JSON_BYTES + 1))

    def read_sized(self, name: str, told: object) -> bytes | None:
        """Read a file of which a manifest tells the size, which may be anything."""
        most = max(told, 0) + 1 if type(told) is int else 0
        return self.store.read(self.path(name), most)

    def write_engine(self, entry: EngineEntry) -> None:
        manifest = asdict(entry.manifest)
        manifest["tide"].pop("spool", None)  # a reader of it needs no way to it
        value = {
            "format": FORMAT_VERSION,
            "manifest": manifest,
            "spec": asdict(entry.spec),
            "identity": entry.identity,
        }
        self.write_json("engine.json", value, durable=True)

    def read_engine(self) -> EngineEntry | None:
        """The engine as announced; None if it was not, or not readably."""
        value = self.read_json("engine.json")
        if value is None:
            return None
        if value.get("format") != FORMAT_VERSION:
            raise TransportError(
                f"engine {self.engine_id} in {self.store.url} has spool format "
                f"{said(value.get('format'))}, this process speaks {FORMAT_VERSION}: "
                "run the same vllm_tide on both sides"
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
        """The engine's state; None if there is none, or not whole."""
        return self._told(EngineState, "state.json")

    def write_reader(self, name: str, state: ReaderState) -> None:
        """Replace a trainer's word; it carries the cursor, so it is kept safe."""
        self.write_json(f"readers/{name}.json", asdict(state), durable=True)

    def read_reader(self, name: str) -> ReaderState | None:
        """A trainer's word; None if there is none, or not whole."""
        return self._told(ReaderState, f"readers/{name}.json")

    def _told(self, kind: type[_State], name: str) -> _State | None:
        with contextlib.suppress(ValidationError):
            return TypeAdapter(kind).validate_python(self.read_json(name))
        return None

    def read_readers(self) -> dict[str, ReaderState]:
        found = {}
        for file in self.store.sizes(self.path("readers")):
            name = file.removesuffix(".json")
            state = self.read_reader(name) if name != file else None
            if state is not None:
                found[name] = state
        return found

    def write_draft(self, blob: DraftBlob) -> None:
        """Store a draft and make it the latest; DraftConflict if it is not newer."""
        entry = {
            "version": blob.version,
            "bytes": len(blob.data),
            "sha256": blob.sha256.hex(),
        }
        latest = self.latest_draft(blob.version)
        # Its own, where the storage said that it failed, and it had not.
        if blob.version <= latest and self.read_json(_LATEST) != entry:
            raise DraftConflict(
                f"engine {self.engine_id}: draft {blob.version} is not newer than "
                f"{latest} in {self.store.url}: another trainer publishes to it; stop "
                "one"
            )
        mine = _draft_file(blob.version)
        self.store.write(self.path(DRAFTS, mine), blob.data)
        self.write_json(_LATEST, entry, durable=True)
        names = filter(MADE[DRAFTS].fullmatch, self.store.sizes(self.path(DRAFTS)))
        for name in sorted(name for name in names if name <= mine)[:-KEPT_DRAFTS]:
            with contextlib.suppress(NotOurs):
                self.store.remove(self.path(DRAFTS, name))

    def latest_draft(self, known: int = 0) -> int:
        """Version of the latest draft; 0 if there is none.

        Args:
            known: A version that was there: `MAX_LEAP` beyond it there is none.
        """
        return _version(self.read_json(_LATEST) or {}, known)

    def read_draft(self, known: int = 0, most: int = MAX_DRAFT_BYTES) -> DraftBlob:
        """The latest draft's bytes, at most `most`, not verified.

        Raises:
            WeightsRefused: empty, truncated, format or segment.
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
        if size > most:
            raise WeightsRefused(
                "segment", f"draft {version} has {size} bytes, and {most} are the most"
            )
        body = self.read_sized(f"{DRAFTS}/{_draft_file(version)}", size)
        if body is None or len(body) != size:
            raise WeightsRefused("truncated", f"draft {version} is not whole")
        return DraftBlob(version, digest, body)


def _version(entry: dict[str, Any], known: int) -> int:
    version = entry.get("version")
    most = min(known + MAX_LEAP, MAX_VERSION)
    return version if type(version) is int and 0 < version <= most else 0


def _draft_file(version: int) -> str:
    return f"{version:012d}.safetensors"


class Freshness:
    """Whether a word that changes with every heartbeat still changes.

    Told by this process's clock alone: clocks of two hosts may differ.
    """

    def __init__(self, timeout_s: float = DEAD_S) -> None:
        self._timeout_s = timeout_s
        self._seen: object = None
        self._changed = time.monotonic()
        self.moved = False
        """Whether it changed since it was first seen."""

    def look(self, word: object) -> None:
        if word != self._seen:
            self.moved = self._seen is not None
            self._seen, self._changed = word, time.monotonic()

    @property
    def fresh(self) -> bool:
        """True if it changed, or was first seen, within the timeout."""
        return time.monotonic() - self._changed < self._timeout_s


def engine_ids(store: Store) -> list[str]:
    """Every engine that ever announced itself and was not yet removed."""
    return [name for name in store.folders(ENGINES) if _NAME.fullmatch(name)]


def checked_name(name: str, what: str) -> str:
    """A name that may be part of a path; TransportError if it may not."""
    if not _NAME.fullmatch(name):
        raise TransportError(
            f"{what} '{said(name)}': only letters, digits, dot, dash and underscore, "
            "and no dot first"
        )
    return name


def this_instance() -> str:
    """This process, by boot, pid namespace, pid and start: unique among hosts."""
    me = Holder.me()
    return f"{_boot_id()}:{me.namespace}:{me.pid}:{me.start}"


def instance_gone(instance: str) -> bool:
    """True if a process is surely dead; False where that cannot be known from here."""
    try:
        boot, namespace, pid, start = instance.split(":")
        holder = Holder(int(pid), int(start), int(namespace))
    except ValueError:
        return False
    return boot == _boot_id() and holder.alive() is False


def why_failed(error: Exception) -> str:
    """A sentence, also of what no storage should raise (MemoryError, any bug)."""
    if isinstance(error, TransportError):
        return str(error)
    return f"the spool cannot be used ({type(error).__name__}: {said(error)})"


def parse_json(raw: bytes | None) -> dict[str, Any] | None:
    """A JSON object; None if the bytes are not one."""
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
