"""HTTP admin routes on the API server, as an endpoint plugin of vLLM.

Absent unless `vllm_tide` is named in `VLLM_PLUGINS`. Behind a token of their own
(`admin_token.py`): the key that clients of the model have opens nothing here. They pass
orders on to the trainers of this host, through their Unix sockets.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from vllm_tide.config import parse_tide
from vllm_tide.engine.admin_token import is_authorised, make_token, read_token
from vllm_tide.transport.admin import ask_all
from vllm_tide.transport.header import TransportError
from vllm_tide.transport.rendezvous import default_run_dir

logger = logging.getLogger("vllm.tide")

PREFIX = "/plugins/vllm_tide"
TIMEOUT_S = 30.0
ORDERS = ("rollback", "pause", "resume")


class AdminEndpoint:
    """See vLLM's `EndpointPlugin`."""

    name = "vllm_tide"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._token: Path | None = None
        self._why = "the server has not started yet"

    def attach_router(self, app: FastAPI) -> None:
        """Register the routes."""
        router = APIRouter(prefix=PREFIX, tags=["vllm_tide"])

        # Not `async`: the answer of a trainer is waited for in a thread.
        @router.get("/status")
        def status(request: Request) -> Response:
            return self._answer(request, "status")

        def order(what: str) -> None:
            @router.post(f"/{what}", name=what)
            def give(request: Request) -> Response:
                return self._answer(request, what)

        for what in ORDERS:
            order(what)
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find the run directory; without a `tide` section every request is refused."""
        config = getattr(engine_client, "vllm_config", None)
        speculative = getattr(config, "speculative_config", None)
        section = getattr(speculative, "tide", None)
        if section is None:
            self._why = "this server has no tide section"
            return
        chosen = parse_tide(section).run_dir
        try:
            self._token = make_token(Path(chosen) if chosen else default_run_dir())
            read_token(self._token)  # says now what every request would be told
        except TransportError as error:
            self._why = str(error)
            logger.error("vllm_tide: admin routes refuse everything: %s", error)
            return
        logger.info("vllm_tide: admin routes under %s, token %s", PREFIX, self._token)

    def _answer(self, request: Request, what: str) -> Response:
        if self._token is None:
            return _error(503, self._why)
        try:
            if not is_authorised(request.headers.get("authorization"), self._token):
                said = "give the token as 'Authorization: Bearer ...'"
                return _error(401, said, {"WWW-Authenticate": "Bearer"})
        except TransportError as error:
            return _error(503, str(error))
        try:
            answers = ask_all(self._token.parent, {"do": what}, TIMEOUT_S)
        except TransportError:
            return _error(503, "no trainer is running beside this server")
        done = all(answer.get("ok") for answer in answers.values())
        # Not a JSONResponse: an answer may hold text that is no UTF-8.
        try:
            text = json.dumps({"trainers": answers})
        except RecursionError:
            return _error(503, "a trainer's answer cannot be passed on")
        return Response(text, 200 if done else 409, media_type="application/json")


def _error(
    status: int, sentence: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": sentence}, status, headers)
