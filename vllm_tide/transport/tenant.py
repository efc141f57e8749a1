"""Who sent a request, as a number that does not say who.

A tenant is named by the request (``vllm_xargs``: ``tide_tenant``); what leaves the
engine is a keyed hash of the name. The key is made once per run directory and stays
there (mode 0600): engines that share the directory, a restarted one included, give a
tenant the same id, and who cannot read the directory can neither guess a name from an
id nor an id from a name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import tempfile
from pathlib import Path

from vllm_tide.transport.header import TransportError
from vllm_tide.transport.rendezvous import prepare_run_dir

NOBODY = 0
"""Id of requests without a tenant."""

KEY_BYTES = 32
_FILE = "tenants.key"


def tenant_id(name: str, key: bytes) -> int:
    """Id of a tenant: a u64 that is never :data:`NOBODY`.

    Args:
        name: As the request gives it; any text.
        key: Of :func:`tenant_key`.
    """
    # surrogatepass: JSON can carry what UTF-8 cannot, and that must not raise here.
    text = name.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, key=key, person=b"tide_tenant")
    return int.from_bytes(digest.digest(), "little") or 1


def tenant_key(run_dir: Path, *, create: bool = True) -> bytes:
    """The run directory's key, made by the first engine.

    Args:
        run_dir: Run directory.
        create: Make it when it is not there.

    Raises:
        TransportError: If the directory is unfit, or the file damaged or not there.
    """
    path = run_dir / _FILE
    if not create and not path.exists():
        raise TransportError(
            f"no engine has named tenants in {run_dir}: give --run-dir of the engine"
        )
    prepare_run_dir(run_dir)
    try:
        if not path.exists():
            _make(path)
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


def _make(path: Path) -> None:
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(KEY_BYTES))
        # A link, not a rename: of two that start at once, the first one's key stays.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
