"""Purge requests: an operator writes a file, every data holder answers with a file.

A data holder is a process with captured data: a trainer, or the relay to a spool. Files
in the run directory (0700), written atomically, mode 0600::

    purge-<id>.json            {"tenant": hex or null, "asked_unix_s": s}
    purged-<id>-<holder>.json  {"kind", "pid", "start", "namespace", "counts": {...}}
    relay-<engine>-<pid>.json  {"pid", "start", "namespace", "updated_unix"}
    trainer-<engine>.json      the same and more (`TrainerStatus`)

A trainer also has a file trainer-<pid>-<start>-<namespace> in the `durable_folder`.

A request contains the id of a tenant, never the name. It is removed when the operator's
command has all answers. If the command exits earlier, the request also applies to data
holders that start later, as the ring of their engine may contain older rows. The
weights of the draft are not changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_tide.transport.process import Holder
from vllm_tide.transport.rendezvous import (
    durable_folder,
    make_private,
    prepare_run_dir,
    read_manifests,
    read_small,
    remove_abandoned,
    write_private,
)
from vllm_tide.transport.ring import peek_ring, ring_consumer
from vllm_tide.transport.shm import MALFORMED, TransportError

logger = logging.getLogger("vllm_tide.purge")

MAX_AGE_S = 30 * 86400.0
"""Age (s) at which a request is removed after it was answered."""

FRESH_S = 60.0
"""Maximum age (s) of the file of a live data holder in another pid namespace."""

ANNOUNCE_S = 10.0
"""Interval between heartbeats of a relay (s)."""

DataHolderKind = Literal["trainer", "relay"]

# Part of a glob pattern.
_ID = re.compile(r"[0-9A-Za-z]{1,64}")
# Exceptions that reading arbitrary JSON of another process can raise.
_UNREADABLE = (OSError, *MALFORMED)


@dataclass(frozen=True, order=True)
class DataHolder:
    """A process with captured data."""

    kind: str
    pid: int
    start: int = 0
    namespace: int = 0

    @property
    def process(self) -> Holder:
        """The process as identified in segments."""
        return Holder(self.pid, self.start, self.namespace)

    def __str__(self) -> str:
        return f"{self.kind} {self.pid}"


@dataclass(frozen=True)
class PurgeRequest:
    """A purge request.

    Args:
        tenant: Id of the tenant to purge; None purges all data.
        asked_unix_s: Unix time of the request (s).
    """

    id: str
    tenant: int | None
    asked_unix_s: float


class PurgeInbox:
    """The data holder's side: reads requests and writes answers."""

    def __init__(self, run_dir: Path, kind: DataHolderKind = "trainer") -> None:
        self._run_dir, self._kind = run_dir, kind
        self._name = secrets.token_hex(8)
        self._seen: set[str] = set()

    def pending(self) -> list[PurgeRequest]:
        """Return unanswered requests, oldest first (one directory scan)."""
        requests = []
        for path in sorted(self._run_dir.glob("purge-*.json")):
            name = path.stem.removeprefix("purge-")
            if name in self._seen:
                continue
            request = _read(path, name)
            if request is None:
                if path.exists():  # otherwise it was just withdrawn
                    self._seen.add(name)
                    logger.warning("%s is not a valid purge request: retry", path)
            else:
                requests.append(request)
        return sorted(requests, key=lambda request: request.asked_unix_s)

    def done(self, request: PurgeRequest, counts: Mapping[str, int]) -> None:
        """Confirm that all matching data captured before this call were deleted.

        The caller must drain the ring before it purges its buffers.
        """
        self._seen.add(request.id)
        if time.time() - request.asked_unix_s > MAX_AGE_S:
            withdraw(self._run_dir, request)
            return
        answer: dict[str, Any] = {"kind": self._kind, **Holder.current()._asdict()}
        answer["counts"] = dict(counts)
        path = self._run_dir / f"purged-{request.id}-{self._name}.json"
        _write(path, answer, "answer a purge in")


def ask(run_dir: Path, tenant: int | None) -> PurgeRequest:
    """Request a purge.

    Args:
        tenant: Id (`tenant.tenant_id`); None purges all data.

    Raises:
        TransportError: The directory cannot be written.
    """
    request = PurgeRequest(secrets.token_hex(8), tenant, time.time())
    content = {
        "tenant": None if tenant is None else f"{tenant:016x}",
        "asked_unix_s": request.asked_unix_s,
    }
    path = prepare_run_dir(run_dir) / f"purge-{request.id}.json"
    try:
        write_private(path, json.dumps(content))
    except OSError as error:
        raise TransportError(f"cannot write {path}: {error.strerror}") from error
    return request


def answers(run_dir: Path, request: PurgeRequest) -> dict[DataHolder, dict[str, int]]:
    result = {}
    for path in run_dir.glob(f"purged-{request.id}-*.json"):
        with contextlib.suppress(*_UNREADABLE):
            value = json.loads(read_small(path))
            counts = {str(k): int(v) for k, v in value["counts"].items()}
            result[_data_holder(str(value["kind"]), value)] = counts
    return result


def withdraw(run_dir: Path, request: PurgeRequest) -> None:
    for pattern in (f"purge-{request.id}.json", f"purged-{request.id}-*.json"):
        for path in run_dir.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def announce_relay(run_dir: Path, engine_id: str) -> None:
    """Announce this process as a relay: a purge waits for its answer.

    If the run directory cannot be written, this is only logged.
    """
    content = {**Holder.current()._asdict(), "updated_unix": time.time()}
    _write(_relay_file(run_dir, engine_id), content, "write")


def retract_relay(run_dir: Path, engine_id: str) -> None:
    """Undo :func:`announce_relay`."""
    with contextlib.suppress(OSError):
        _relay_file(run_dir, engine_id).unlink()


def announce_trainer(folders: Iterable[Path]) -> list[Path]:
    """Announce this process in folders that outlive the run directory.

    Args:
        folders: Results of `durable_folder`. Files of dead trainers in them are
            removed. If one cannot be written, this is only logged.

    Returns:
        The files, to be removed when this process exits.
    """
    name = "trainer-{}-{}-{}".format(*Holder.current())
    paths = []
    for folder in folders:
        with contextlib.suppress(OSError):
            make_private(folder)
            remove_abandoned(folder)
            for path, trainer in _announced(folder):
                if trainer.process.alive() is False:
                    path.unlink()
        paths.append(folder / name)
        _write(paths[-1], {}, "write")
    return paths


def _announced(folder: Path) -> Iterator[tuple[Path, DataHolder]]:
    for path in folder.glob("trainer-*"):
        with contextlib.suppress(ValueError):
            pid, start, namespace = map(int, path.name.split("-")[1:])
            yield path, DataHolder("trainer", pid, start, namespace)


def live_data_holders(run_dir: Path, *state_dirs: str | None) -> set[DataHolder]:
    """Return live trainers and relays, by their files and by the rings that they read.

    Files of dead relays are removed.

    Args:
        state_dirs: `tide.train.state_dir` of the engines; None is the user's default.

    Raises:
        TransportError: The run directory belongs to another user.
    """
    result = set(live_trainers(run_dir))
    for each in state_dirs:
        announced = _announced(durable_folder(run_dir, each))
        result |= {trainer for _, trainer in announced if trainer.process.alive()}
    for path in run_dir.glob("relay-*.json"):
        with contextlib.suppress(*_UNREADABLE):
            value = json.loads(read_small(path))
            relay = _data_holder("relay", value)
            alive = _alive(relay, value)
            if alive:
                result.add(relay)
            elif alive is False:
                path.unlink()
    # Readers of rings without a file: starting, or the run directory was removed.
    processes = {(each.pid, each.start) for each in result}
    for manifest in read_manifests(run_dir):
        reader = ring_consumer(manifest.ring)
        if reader is not None and (reader.pid, reader.start) not in processes:
            spool = manifest.tide.get("spool")
            spooled = isinstance(spool, dict) and spool.get("url")
            result.add(DataHolder("relay" if spooled else "trainer", *reader))
    return result


def unread_engines(run_dir: Path) -> list[str]:
    """Return live engines with rows in a ring without reader; a later one reads them.

    Raises:
        TransportError: The run directory belongs to another user.
    """
    return [
        manifest.engine_id
        for manifest in read_manifests(run_dir)
        if ring_consumer(manifest.ring) is None
        and (stats := peek_ring(manifest.ring)) is not None
        and stats.used_bytes
    ]


def live_trainers(run_dir: Path) -> dict[DataHolder, set[str]]:
    """Return `TrainerStatus.tenant_keys` of each live trainer."""
    result = {}
    for path in run_dir.glob("trainer-*.json"):
        with contextlib.suppress(*_UNREADABLE):
            status = json.loads(read_small(path))
            trainer, state = _data_holder("trainer", status), status["state"]
            # A stopped trainer has rows until its process exits; one without an engine
            # has released them.
            gone = state == "engine_gone" or (
                state == "stopped" and not trainer.process.alive()
            )
            if not gone and _alive(trainer, status):
                result[trainer] = set(map(str, status.get("tenant_keys", ())))
    return result


def _data_holder(kind: str, value: Mapping[str, Any]) -> DataHolder:
    # Older versions wrote only the pid.
    start, namespace = (int(value.get(name, 0)) for name in ("start", "namespace"))
    return DataHolder(kind, int(value["pid"]), start, namespace)


def _alive(member: DataHolder, value: Mapping[str, Any]) -> bool | None:
    """Return whether a data holder is alive, by its pid; it may hang.

    If the pid cannot be checked, the age of the file decides; None if it is too old.
    """
    alive = member.process.alive()
    if alive is None and time.time() - float(value["updated_unix"]) < FRESH_S:
        return True
    return alive


def _write(path: Path, content: dict[str, Any], verb: str) -> None:
    try:
        write_private(path, json.dumps(content))
    except OSError as error:
        logger.warning("cannot %s %s: %s", verb, path, error.strerror)


def _relay_file(run_dir: Path, engine_id: str) -> Path:
    return run_dir / f"relay-{engine_id}-{os.getpid()}.json"


def _read(path: Path, name: str) -> PurgeRequest | None:
    try:
        value = json.loads(read_small(path))
        tenant = None if value["tenant"] is None else int(value["tenant"], 16)
        asked = float(value["asked_unix_s"])
    except _UNREADABLE:
        return None
    valid = math.isfinite(asked) and 0 <= (tenant or 0) < 2**64
    if not valid or not _ID.fullmatch(name):
        return None
    return PurgeRequest(name, tenant, asked)
