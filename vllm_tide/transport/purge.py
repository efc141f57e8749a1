"""Purge on request: an operator asks through a file, every keeper answers with one.

A keeper is a process that holds captured data: a trainer, or the relay to a spool. In
the run directory (0700), written atomically, mode 0600::

    purge-<id>.json            {"tenant": hex or null, "asked_unix_s": s}
    purged-<id>-<keeper>.json  {"kind": kind, "pid": pid, "counts": {...}}
    relay-<engine>-<pid>.json  {"pid", "start", "namespace", "updated_unix"}

A request names a tenant by id, never by name. It stays until the one who asked has all
answers; one that nobody waits for any more serves the next keeper that starts, whose
engine's ring may still hold older rows. The draft itself keeps what it has learnt.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_tide.transport.process import Holder
from vllm_tide.transport.rendezvous import prepare_run_dir, read_small, write_private
from vllm_tide.transport.shm import MALFORMED, TransportError

logger = logging.getLogger("vllm_tide.purge")

MAX_AGE_S = 30 * 86400.0
"""A request that nobody took back is removed at this age (s)."""

FRESH_S = 60.0
"""A trainer whose status file is older than this (s) counts as gone; a relay's age is
looked at only where its pid cannot be."""

ANNOUNCE_S = 10.0
"""How often a relay says that it lives (s)."""

KeeperKind = Literal["trainer", "relay"]

_GONE = ("stopped", "engine_gone")
# It becomes part of a pattern of file names.
_ID = re.compile(r"[0-9A-Za-z]{1,64}")
# What reading the JSON of another process can raise, whatever it says.
_UNREADABLE = (OSError, *MALFORMED)


@dataclass(frozen=True, order=True)
class Keeper:
    """A process that holds captured data."""

    kind: str
    pid: int

    def __str__(self) -> str:
        return f"{self.kind} {self.pid}"


@dataclass(frozen=True)
class PurgeRequest:
    """One request.

    Args:
        tenant: Id of the tenant whose data go; None is everybody's.
        asked_unix_s: When it was made (s).
    """

    id: str
    tenant: int | None
    asked_unix_s: float


class PurgeInbox:
    """A keeper's end."""

    def __init__(self, run_dir: Path, kind: KeeperKind = "trainer") -> None:
        self._run_dir, self._kind = run_dir, kind
        self._name = secrets.token_hex(8)
        self._seen: set[str] = set()

    def pending(self) -> list[PurgeRequest]:
        """Requests not answered by this keeper, oldest first (one directory scan)."""
        found = []
        for path in sorted(self._run_dir.glob("purge-*.json")):
            name = path.stem.removeprefix("purge-")
            if name in self._seen:
                continue
            request = _read(path, name)
            if request is None:
                if path.exists():  # else it was just taken back
                    self._seen.add(name)
                    logger.warning("%s is no purge request: ask again", path)
            elif time.time() - request.asked_unix_s > MAX_AGE_S:
                withdraw(self._run_dir, request)
            else:
                found.append(request)
        return sorted(found, key=lambda request: request.asked_unix_s)

    def done(self, request: PurgeRequest, counts: Mapping[str, int]) -> None:
        """Answer: nothing that was captured before this call is held any more.

        To be true, the ring has to be drained before the buffers are purged.
        """
        self._seen.add(request.id)
        answer = {"kind": self._kind, "pid": os.getpid(), "counts": dict(counts)}
        path = self._run_dir / f"purged-{request.id}-{self._name}.json"
        _write(path, answer, "answer a purge in")


def ask(run_dir: Path, tenant: int | None) -> PurgeRequest:
    """Request a purge.

    Args:
        tenant: Id (`tenant.tenant_id`); None is everybody.

    Raises:
        TransportError: If the directory cannot be written.
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


def answers(run_dir: Path, request: PurgeRequest) -> dict[Keeper, dict[str, int]]:
    found = {}
    for path in run_dir.glob(f"purged-{request.id}-*.json"):
        with contextlib.suppress(*_UNREADABLE):
            value = json.loads(read_small(path))
            counts = {str(k): int(v) for k, v in value["counts"].items()}
            found[Keeper(str(value["kind"]), int(value["pid"]))] = counts
    return found


def withdraw(run_dir: Path, request: PurgeRequest) -> None:
    for pattern in (f"purge-{request.id}.json", f"purged-{request.id}-*.json"):
        for path in run_dir.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def announce_relay(run_dir: Path, engine_id: str) -> None:
    """Say that this process relays, or is about to: a purge waits for its answer.

    A run directory that cannot be written is only logged.
    """
    content = {**Holder.me()._asdict(), "updated_unix": time.time()}
    _write(_relay_file(run_dir, engine_id), content, "write")


def retract_relay(run_dir: Path, engine_id: str) -> None:
    """Take :func:`announce_relay` back."""
    with contextlib.suppress(OSError):
        _relay_file(run_dir, engine_id).unlink()


def live_keepers(run_dir: Path) -> set[Keeper]:
    """Trainers and relays that work, by what they say in the run directory.

    What a relay left that was killed is removed.
    """
    found = {Keeper("trainer", pid) for pid in live_trainers(run_dir)}
    for path in run_dir.glob("relay-*.json"):
        with contextlib.suppress(*_UNREADABLE):
            value = json.loads(read_small(path))
            names = ("pid", "start", "namespace")
            holder = Holder(*(int(value[name]) for name in names))
            updated = float(value["updated_unix"])
            # One that hangs in its storage still holds rows: its age says nothing.
            alive = holder.alive()
            if alive is False:
                path.unlink()
            elif alive or time.time() - updated < FRESH_S:
                found.add(Keeper("relay", holder.pid))
    return found


def live_trainers(run_dir: Path) -> dict[int, set[str]]:
    """`TrainerStatus.tenant_keys` of trainers that work, by pid."""
    found = {}
    for path in run_dir.glob("trainer-*.json"):
        with contextlib.suppress(*_UNREADABLE):
            status = json.loads(read_small(path))
            age_s = time.time() - float(status["updated_unix"])
            if status["state"] not in _GONE and age_s < FRESH_S:
                found[int(status["pid"])] = set(map(str, status.get("tenant_keys", ())))
    return found


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
    sound = math.isfinite(asked) and 0 <= (tenant or 0) < 2**64
    if not sound or not _ID.fullmatch(name):
        return None
    return PurgeRequest(name, tenant, asked)
