"""The bearer token of the HTTP admin routes: a file that only the server's user reads.

`admin.token` in the run directory, made with the first server that has the routes; put
your own text there to choose it, and change it to change the token: it is read for
every request.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from vllm_tide.transport.header import TransportError
from vllm_tide.transport.rendezvous import prepare_run_dir

FILE = "admin.token"
LEAST_CHARS, MOST_CHARS = 16, 4096
_BEARER = "bearer "


def make_token(run_dir: Path) -> Path:
    """Make the file if there is none; its path.

    Raises:
        TransportError: It cannot be made.
    """
    path = prepare_run_dir(run_dir) / FILE
    if path.exists():
        return path
    try:
        fd, temporary = tempfile.mkstemp(dir=run_dir, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32) + "\n")
            # A link, not a rename: of two that start at once, the first one's stays.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise TransportError(f"cannot make {path}: {error.strerror}") from error
    return path


def read_token(path: Path) -> bytes:
    """The token.

    Raises:
        TransportError: It is absent, others can read it, or it is no text that a header
            carries as it stands.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            token = file.read(MOST_CHARS + 2).strip()
    except OSError as error:
        raise TransportError(f"{path.name}: {error.strerror}") from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
        raise TransportError(f"{path.name}: others can read it; chmod 600 it")
    if not LEAST_CHARS <= len(token) <= MOST_CHARS:
        wrong = "shorter" if len(token) < LEAST_CHARS else "longer"
        bound = LEAST_CHARS if wrong == "shorter" else MOST_CHARS
        raise TransportError(f"{path.name}: {wrong} than {bound} characters")
    # Clients encode anything else in different ways, or refuse to send it.
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise TransportError(
            f"{path.name}: only ASCII letters, digits and signs can be sent, and no "
            "blanks; write such a text into the file, or remove the file and start "
            "the server again"
        )
    return token


def is_authorised(header: str | None, path: Path) -> bool:
    """Whether an `Authorization` header carries the token; compared in constant time.

    Raises:
        TransportError: There is no usable token, so nobody is authorised.
    """
    token = read_token(path)
    given = header or ""
    if given[: len(_BEARER)].lower() != _BEARER:
        return False
    text = given[len(_BEARER) :].strip().encode("utf-8", "surrogatepass")
    return hmac.compare_digest(text, token)
