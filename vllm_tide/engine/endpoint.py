"""HTTP admin routes on the API server, as an endpoint plugin of vLLM.

Absent unless `vllm_tide` is named in `VLLM_PLUGINS`. They pass commands on to the Unix
sockets of this host's trainers, behind a bearer token of their own: `admin.token` in
the run directory, made at the first start and read for every request.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from vllm_tide.config import parse_tide
from vllm_tide.transport.admin import ask_all
from vllm_tide.transport.rendezvous import default_run_dir, prepare_run_dir, write_once
from vllm_tide.transport.shm import TransportError

logger = logging.getLogger("vllm.tide")

PREFIX = "/plugins/vllm_tide"
JSON = "application/json"  # not a JSONResponse: an answer may hold what UTF-8 cannot
LEAST_CHARS, MOST_CHARS, TIMEOUT_S = 16, 4096, 30.0
UNSENDABLE = """only ASCII letters, digits and signs can be sent, and no blanks; write \
such a text into the file, or remove the file and start the server again"""


class AdminEndpoint:
    """vLLM's `EndpointPlugin`."""

    name, required_tasks = "vllm_tide", ("generate",)

    def __init__(self) -> None:
        self._token: Path | None = None
        self._why = "the server has not started yet"

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes."""
        for what in ("status", "rollback", "pause", "resume"):
            method = "GET" if what == "status" else "POST"
            # Not `async`: the answer of a trainer is waited for in a thread.
            give = partial(self._answer, what)
            app.add_api_route(f"{PREFIX}/{what}", give, methods=[method], name=what)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Finds the run directory; without a `tide` section nothing is answered."""
        config = getattr(engine_client, "vllm_config", None)
        section = getattr(getattr(config, "speculative_config", None), "tide", None)
        if section is None:
            self._why = "this server has no tide section"
            return
        try:
            self._token = make_token(parse_tide(section).run_dir)
            read_token(self._token)  # says now what every request would be told
        except TransportError as error:
            self._why = str(error)
            logger.error("vllm_tide: admin routes refuse everything: %s", error)
            return
        logger.info("vllm_tide: admin routes under %s, token %s", PREFIX, self._token)

    def _answer(self, what: str, request: Request) -> Response:
        why = ""
        try:
            if self._token is None:
                return _refusal(self._why)
            if not is_authorised(request.headers.get("authorization"), self._token):
                return _refusal("give the token as 'Authorization: Bearer ...'", 401)
            why = "no trainer is running beside this server"
            answers = ask_all(self._token.parent, {"do": what}, TIMEOUT_S)
            text = json.dumps({"trainers": answers})
        except TransportError as error:
            return _refusal(why or str(error))
        except RecursionError:
            return _refusal("a trainer's answer cannot be passed on")
        status = 200 if all(answer.get("ok") for answer in answers.values()) else 409
        return Response(text, status, media_type=JSON)


def _refusal(sentence: str, status: int = 503) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return Response(json.dumps({"error": sentence}), status, headers, JSON)


def make_token(run_dir: Path | str | None) -> Path:
    """Makes the file of the token if there is none; its path."""
    path = prepare_run_dir(Path(run_dir or default_run_dir())) / "admin.token"
    try:
        if not path.exists():
            write_once(path, secrets.token_hex(32).encode() + b"\n")
    except OSError as error:
        raise TransportError(f"cannot make {path}: {error.strerror}") from error
    return path


def read_token(path: Path) -> bytes:
    """The token; a TransportError where it is unfit, or others can read it."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            token = file.read(MOST_CHARS + 2).strip()
    except OSError as error:
        raise TransportError(f"{path.name}: {error.strerror}") from None

    private = not status.st_mode & 0o077 and status.st_uid == os.geteuid()
    mistakes = (
        (not private, "others can read it; chmod 600 it"),
        (len(token) < LEAST_CHARS, f"shorter than {LEAST_CHARS} characters"),
        (len(token) > MOST_CHARS, f"longer than {MOST_CHARS} characters"),
        # Clients encode anything else in different ways, or refuse to send it.
        (not all(0x21 <= byte <= 0x7E for byte in token), UNSENDABLE),
    )
    if why := next((why for wrong, why in mistakes if wrong), None):
        raise TransportError(f"{path.name}: {why}")
    return token


def is_authorised(header: str | None, path: Path) -> bool:
    """True if an `Authorization` header carries the token; takes constant time."""
    token = read_token(path)
    scheme, _, given = (header or "").partition(" ")
    text = given.strip().encode("utf-8", "surrogatepass")
    return scheme.lower() == "bearer" and hmac.compare_digest(text, token)
