"""Purge on request: an operator asks through a file, every trainer answers with one.

In the run directory (0700), written atomically, mode 0600::

    purge-<id>.json            {"tenant": hex or null, "asked_unix_s": s}
    purged-<id>-<trainer>.json {"pid": pid, "counts": {...}}

A request names a tenant by id, never by name. It stays until the one who asked has all
answers; one that nobody waits for any more serves the next trainer that starts, whose
engine's ring may still hold older rows. The head itself keeps what it has learnt.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tide.transport.header import TransportError
from vllm_tide.transport.rendezvous import prepare_run_dir, write_private

logger = logging.getLogger("vllm_tide.train")

MAX_AGE_S = 30 * 86400.0
"""A request that nobody took back is removed at this age (s)."""

FRESH_S = 60.0
"""A trainer whose status file is older than this (s) counts as gone."""

_GONE = ("stopped", "engine_gone")


@dataclass(frozen=True)
class PurgeRequest:
    """One request.

    Args:
        id: Random name.
        tenant: Id of the tenant whose data go; None is everybody's.
        asked_unix_s: When it was made (s).
    """

    id: str
    tenant: int | None
    asked_unix_s: float


class PurgeInbox:
    """The trainer's end.

    Args:
        run_dir: Run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        """Answer nothing yet."""
        self._run_dir = run_dir
        self._name = secrets.token_hex(8)
        self._seen: set[str] = set()

    def pending(self) -> list[PurgeRequest]:
        """Requests not answered by this trainer, oldest first (one directory scan)."""
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

        Args:
            request: From :meth:`pending`.
            counts: What was removed, by name.
        """
        self._seen.add(request.id)
        answer = {"pid": os.getpid(), "counts": dict(counts)}
        path = self._run_dir / f"purged-{request.id}-{self._name}.json"
        try:
            write_private(path, json.dumps(answer))
        except OSError as error:
            logger.warning("cannot answer a purge in %s: %s", path, error.strerror)


def ask(run_dir: Path, tenant: int | None) -> PurgeRequest:
    """Request a purge.

    Args:
        run_dir: The trainers' run directory.
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


def answers(run_dir: Path, request: PurgeRequest) -> dict[int, dict[str, int]]:
    """Counts of every trainer that answered, by its pid."""
    found = {}
    for path in run_dir.glob(f"purged-{request.id}-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            value = json.loads(path.read_text(encoding="utf-8"))
            counts = {str(k): int(v) for k, v in value["counts"].items()}
            found[int(value["pid"])] = counts
    return found


def withdraw(run_dir: Path, request: PurgeRequest) -> None:
    """Remove a request and its answers."""
    for pattern in (f"purge-{request.id}.json", f"purged-{request.id}-*.json"):
        for path in run_dir.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def live_trainers(run_dir: Path) -> set[int]:
    """Pids of the trainers whose status files say that they work."""
    found = set()
    for path in run_dir.glob("trainer-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            status = json.loads(path.read_text(encoding="utf-8"))
            age_s = time.time() - float(status["updated_unix"])
            if status["state"] not in _GONE and age_s < FRESH_S:
                found.add(int(status["pid"]))
    return found


def _read(path: Path, name: str) -> PurgeRequest | None:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        tenant = value["tenant"]
        asked = float(value["asked_unix_s"])
        if not math.isfinite(asked):
            return None
        return PurgeRequest(name, None if tenant is None else int(tenant, 16), asked)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
