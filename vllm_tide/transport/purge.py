"""Purge on request: an operator asks through a file, every keeper answers with one.

A keeper is a process that holds captured data: a trainer, or the relay to a spool. In
the run directory (0700), written atomically, mode 0600::

    purge-<id>.json            {"tenant": hex or null, "asked_unix_s": s}
    purged-<id>-<keeper>.json  {"kind", "pid", "start", "namespace", "counts": {...}}
    relay-<engine>-<pid>.json  {"pid", "start", "namespace", "updated_unix"}
    trainer-<engine>.json      the same and more (`TrainerStatus`)

A trainer is named in the `lasting_folder` as well, trainer-<pid>-<start>-<namespace>.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_tide.transport.process import Holder
from vllm_tide.transport.rendezvous import (
    lasting_folder,
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
"""A request that nobody took back is removed at this age (s), once it is answered."""

FRESH_S = 60.0
"""A keeper in another pid namespace counts as gone when its file is older (s)."""

ANNOUNCE_S = 10.0
"""How often a relay says that it lives (s)."""

KeeperKind = Literal["trainer", "relay"]

# It becomes part of a pattern of file names.
_ID = re.compile(r"[0-9A-Za-z]{1,64}")
# What reading the JSON of another process can raise, whatever it says.
_UNREADABLE = (OSError, *MALFORMED)


@dataclass(frozen=True, order=True)
class Keeper:
    """A process that holds captured data."""

    kind: str
    pid: int
    start: int = 0
    namespace: int = 0

    @property
    def holder(self) -> Holder:
        """The process, as segments name it."""
        return Holder(self.pid, self.start, self.namespace)

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
            else:
                found.append(request)
        return sorted(found, key=lambda request: request.asked_unix_s)

    def done(self, request: PurgeRequest, counts: Mapping[str, int]) -> None:
        """Answer: nothing that was captured before this call is held any more.

        To be true, the ring has to be drained before the buffers are purged.
        """
        self._seen.add(request.id)
        if time.time() - request.asked_unix_s > MAX_AGE_S:
            withdraw(self._run_dir, request)
            return
        answer = {"kind": self._kind, **Holder.me()._asdict(), "counts": dict(counts)}
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
            found[_keeper(str(value["kind"]), value)] = counts
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


def announce_trainer(folders: Iterable[Path]) -> list[Path]:
    """Name this process where the end of the run directory does not reach.

    Args:
        folders: Of `lasting_folder`. One that cannot be written is only logged; what
            dead trainers left there is removed.

    Returns:
        The files, to be removed at the end.
    """
    name = "trainer-{}-{}-{}".format(*Holder.me())
    paths = []
    for folder in folders:
        with contextlib.suppress(OSError):
            make_private(folder)
            remove_abandoned(folder)
            for path, left in _announced(folder):
                if left.holder.alive() is False:
                    path.unlink()
        paths.append(folder / name)
        _write(paths[-1], {}, "write")
    return paths


def _announced(folder: Path) -> Iterator[tuple[Path, Keeper]]:
    for path in folder.glob("trainer-*"):
        with contextlib.suppress(ValueError):
            pid, start, namespace = map(int, path.name.split("-")[1:])
            yield path, Keeper("trainer", pid, start, namespace)


def live_keepers(run_dir: Path, *state_dirs: str | None) -> set[Keeper]:
    """Live trainers and relays, by their files and by the rings that they read.

    What a relay left that was killed is removed.

    Args:
        state_dirs: `tide.train.state_dir` of the engines; None: the user's.

    Raises:
        TransportError: If the run directory is another user's.
    """
    found = set(live_trainers(run_dir))
    for each in state_dirs:
        announced = _announced(lasting_folder(run_dir, each))
        found |= {keeper for _, keeper in announced if keeper.holder.alive()}
    for path in run_dir.glob("relay-*.json"):
        with contextlib.suppress(*_UNREADABLE):
            value = json.loads(read_small(path))
            keeper = _keeper("relay", value)
            alive = _alive(keeper, value)
            if alive:
                found.add(keeper)
            elif alive is False:
                path.unlink()
    # One that starts has no file yet, and files vanish with the run directory.
    processes = {(keeper.pid, keeper.start) for keeper in found}
    for manifest in read_manifests(run_dir):
        reader = ring_consumer(manifest.ring)
        if reader is not None and (reader.pid, reader.start) not in processes:
            spool = manifest.tide.get("spool")
            spooled = isinstance(spool, dict) and spool.get("url")
            found.add(Keeper("relay" if spooled else "trainer", *reader))
    return found


def unread_engines(run_dir: Path) -> list[str]:
    """Live engines with rows in a ring that nobody reads: the next reader gets them.

    Raises:
        TransportError: If the run directory is another user's.
    """
    return [
        manifest.engine_id
        for manifest in read_manifests(run_dir)
        if ring_consumer(manifest.ring) is None
        and (stats := peek_ring(manifest.ring)) is not None
        and stats.used_bytes
    ]


def live_trainers(run_dir: Path) -> dict[Keeper, set[str]]:
    """`TrainerStatus.tenant_keys` of live trainers."""
    found = {}
    for path in run_dir.glob("trainer-*.json"):
        with contextlib.suppress(*_UNREADABLE):
            status = json.loads(read_small(path))
            keeper, state = _keeper("trainer", status), status["state"]
            # A stopped one's rows go with its process; one that outlived its engine
            # has let them go.
            gone = state == "engine_gone" or (
                state == "stopped" and not keeper.holder.alive()
            )
            if not gone and _alive(keeper, status):
                found[keeper] = set(map(str, status.get("tenant_keys", ())))
    return found


def _keeper(kind: str, value: Mapping[str, Any]) -> Keeper:
    # Versions before this one wrote the pid alone.
    start, namespace = (int(value.get(name, 0)) for name in ("start", "namespace"))
    return Keeper(kind, int(value["pid"]), start, namespace)


def _alive(keeper: Keeper, value: Mapping[str, Any]) -> bool | None:
    """True if it lives, by its pid, which also one that hangs has.

    Where that cannot be looked up its age counts; None if it is too old.
    """
    alive = keeper.holder.alive()
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
    sound = math.isfinite(asked) and 0 <= (tenant or 0) < 2**64
    if not sound or not _ID.fullmatch(name):
        return None
    return PurgeRequest(name, tenant, asked)
