"""Pseudonymous tenant ids.

The request contains the tenant's name (``vllm_xargs``: ``tide_tenant``). Only a keyed
hash of the name leaves the engine. The key is created once (mode 0600) and survives a
reboot in `tide.train.state_dir`, or else in $XDG_STATE_HOME/vllm_tide. Engines with the
same key give a tenant the same id. Without the key, a name cannot be derived from an id
nor an id from a name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_tide.transport.rendezvous import (
    prepare_run_dir,
    remove_abandoned,
    state_folder,
    write_once,
)
from vllm_tide.transport.shm import TransportError

logger = logging.getLogger("vllm_tide")

NO_TENANT = 0
"""Id of requests without a tenant."""

KEY_BYTES = 32
_FILE = "tenants.key"
_ID = re.compile(r"[0-9A-Fa-f]{1,16}")


def tenant_id(name: str, key: bytes) -> int:
    """Return the id of a tenant, a u64 other than :data:`NO_TENANT`."""
    # surrogatepass: JSON may contain lone surrogates, which must not raise here.
    text = name.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, key=key, person=b"tide_tenant")
    return int.from_bytes(digest.digest(), "little") or 1


def parse_id(text: object) -> int:
    """Return the tenant id of a hexadecimal text.

    Raises:
        TransportError: It is not one of 64 bits.
    """
    if isinstance(text, str) and _ID.fullmatch(text):
        return int(text, 16)
    raise TransportError(f"{text!r} is not a hexadecimal id of 64 bits")


def purged_tenant(request: Mapping[str, Any]) -> int | None:
    """Return the tenant of a command to purge; None for all.

    Raises:
        TransportError: It has no valid one.
    """
    given = request.get("tenant", "")
    return None if given is None else parse_id(given)


def key_id(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=4, person=b"tide_key_id").hexdigest()


def tenant_key(
    run_dir: Path, state_dir: str | None = None, *, create: bool = True
) -> bytes:
    """Return the key, which the first engine creates.

    Args:
        run_dir: Run directory. A key in it is moved to `state_dir` or the user's state
            directory, or stays if neither can be written.
        create: Create the key if it does not exist.

    Raises:
        TransportError: The directory is unusable, or the file damaged or missing.
    """
    folder = state_folder(run_dir, state_dir)
    path, before = folder / _FILE, run_dir / _FILE
    if create:
        remove_abandoned(folder)
    if not (create or os.path.exists(path) or before.exists()):
        raise TransportError(
            f"no tenant key in {folder}: give --run-dir of the engine, or --state-dir "
            "if tide.train.state_dir is set"
        )
    try:
        try:
            _provide(path, before)
        except OSError:
            if not os.path.exists(path):  # else another process has just moved it
                path = prepare_run_dir(run_dir) / _FILE
                _provide(path, before)
                message = "%s may not survive a reboot: set tide.train.state_dir"
                logger.warning(message, path)
        if path.stat().st_uid != os.geteuid():
            raise TransportError(f"{path} belongs to another user: remove it")
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except OSError as error:
        raise TransportError(f"cannot use {path}: {error.strerror}") from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise TransportError(
            f"{path} is damaged: remove it (this changes the ids of all tenants)"
        )
    return key


def _provide(path: Path, before: Path) -> None:
    if os.path.exists(path):  # Path.exists raises in an unreadable folder
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    old = before.read_bytes() if before.exists() else b""
    write_once(path, old or secrets.token_hex(KEY_BYTES).encode())
    if old and path.read_bytes() == old:
        before.unlink(missing_ok=True)
