"""Who sent a request, as a number that does not say who.

A tenant is named by the request (``vllm_xargs``: ``tide_tenant``); what leaves the
engine is a keyed hash of the name. The key is made once (mode 0600) and outlives a
reboot: it lies in `tide.train.state_dir`, else in $XDG_STATE_HOME/vllm_tide. Engines
that share it give a tenant the same id, and who cannot read it can neither guess a name
from an id nor an id from a name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from pathlib import Path

from vllm_tide.transport.rendezvous import (
    prepare_run_dir,
    remove_abandoned,
    state_folder,
    write_once,
)
from vllm_tide.transport.shm import TransportError

logger = logging.getLogger("vllm_tide")

NOBODY = 0
"""Id of requests without a tenant."""

KEY_BYTES = 32
_FILE = "tenants.key"


def tenant_id(name: str, key: bytes) -> int:
    """Id of a tenant: a u64 that is never :data:`NOBODY`."""
    # surrogatepass: JSON can carry what UTF-8 cannot, and that must not raise here.
    text = name.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, key=key, person=b"tide_tenant")
    return int.from_bytes(digest.digest(), "little") or 1


def key_id(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=4, person=b"tide_key_id").hexdigest()


def tenant_key(
    run_dir: Path, state_dir: str | None = None, *, create: bool = True
) -> bytes:
    """The key, made by the first engine.

    Args:
        run_dir: Run directory: a key that lies there is moved, and where
            `state_dir` or the user's home cannot be written it stays.
        create: Make it when it is not there.

    Raises:
        TransportError: If the directory is unfit, or the file damaged or not there.
    """
    folder = state_folder(run_dir, state_dir)
    path, before = folder / _FILE, run_dir / _FILE
    if create:
        remove_abandoned(folder)
    if not (create or os.path.exists(path) or before.exists()):
        raise TransportError(
            f"no engine has named tenants in {folder}: give --run-dir of the engine, "
            "or --state-dir where tide.train.state_dir is set"
        )
    try:
        try:
            _provide(path, before)
        except OSError:
            if not os.path.exists(path):  # else another start has just moved it
                path = prepare_run_dir(run_dir) / _FILE
                _provide(path, before)
                said = "%s may not outlive a reboot: set tide.train.state_dir"
                logger.warning(said, path)
        if path.stat().st_uid != os.geteuid():
            raise TransportError(f"{path} is another user's: remove it")
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except OSError as error:
        raise TransportError(f"cannot use {path}: {error.strerror}") from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise TransportError(
            f"{path} is damaged: remove it (the ids of all tenants change then)"
        )
    return key


def _provide(path: Path, before: Path) -> None:
    if os.path.exists(path):  # Path's raises in a folder that cannot be searched
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    moved = before.read_bytes() if before.exists() else b""
    write_once(path, moved or secrets.token_hex(KEY_BYTES).encode())
    if moved and path.read_bytes() == moved:
        before.unlink(missing_ok=True)
