"""Orders: the Unix socket from both sides, and the HTTP routes."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import queue
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fastapi import FastAPI
from hypothesis import strategies as st
from vllm_tide.engine.endpoint import read_token

from tests.fuzz.attempt import Parser, shape
from tests.fuzz.damage import damaged, json_or_bytes
from tests.fuzz.files import Folder, kept
from vllm_tide.engine import endpoint
from vllm_tide.transport.admin import AdminSocket, send
from vllm_tide.transport.shm import TransportError

ORDER = {"do": "pause", "for_s": 3}
ANSWER = {"ok": True, "state": "waiting", "loss": 1.5, "engines": {"e1": [1, 2]}}


@functools.cache
def trainer() -> AdminSocket:
    kept.append(folder := Folder())
    return AdminSocket(folder.path)


def say(said: list[bytes]) -> str:
    """What a trainer answers to these pieces."""
    server = trainer()
    fd = os.open(server.path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        client.connect(f"/proc/self/fd/{fd}/{server.path.name}")
        os.close(fd)
        for piece in said:
            try:
                client.sendall(piece)
            except OSError:
                break
            server.poll(lambda request: {"ok": True, "did": request["do"]})
        client.shutdown(socket.SHUT_WR)
        server.poll(lambda request: {"ok": True, "did": request["do"]})
        server.poll(lambda request: {"ok": True, "did": request["do"]})
        try:
            answer = client.recv(1 << 16)
        except ConnectionResetError:  # it had not read all that was sent
            answer = b""
    assert not server._clients, "it waits for one that hung up"
    return shape(str(json.loads(answer).get("error", "done"))) if answer else "nothing"


@functools.cache
def stranger() -> tuple[Path, queue.Queue[bytes]]:
    """A socket that answers whatever it is told to answer."""
    kept.append(folder := Folder())
    path, answers = folder.path / "admin-1.sock", queue.Queue[bytes]()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)

    def serve() -> None:
        while True:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                try:
                    client.sendall(answers.get())
                except OSError:
                    continue

    threading.Thread(target=serve, daemon=True).start()
    return path, answers


def ask(answer: bytes) -> str:
    path, answers = stranger()
    answers.put(answer)
    found = send(path, {"do": "status"}, 5.0)
    json.dumps(found, allow_nan=False)
    return "an answer"


@functools.cache
def app() -> tuple[FastAPI, str, asyncio.AbstractEventLoop]:
    kept.append(folder := Folder())
    plugin, made = endpoint.AdminEndpoint(), FastAPI()
    plugin.attach_router(made)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(tide={"run_dir": str(folder.path)})
    )
    loop = asyncio.new_event_loop()
    client = SimpleNamespace(vllm_config=config)
    loop.run_until_complete(plugin.init_state(client, made.state, None))
    return made, read_token(folder.path / "admin.token").decode(), loop


@st.composite
def http_requests(draw: st.DrawFn) -> dict[str, Any]:
    """A request as a server hands it on, and what a trainer would answer."""
    names = st.sampled_from(
        (b"authorization", b"content-type", b"content-length", b"x")
    )
    values = st.one_of(
        st.binary(max_size=40), st.just(b"Bearer "), st.just(b"1" * 9000)
    )
    headers = draw(st.lists(st.tuples(names, values), max_size=3))
    if draw(st.booleans()):
        headers.insert(0, (b"authorization", b"Bearer " + app()[1].encode()))
    text = draw(json_or_bytes(ANSWER))
    try:
        answer = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        answer = {"ok": False, "error": "answered with no JSON"}
    path = draw(st.sampled_from(("/status", "/pause", "/resume", "/rollback", "/x")))
    return {
        "method": draw(st.sampled_from(("GET", "POST", "PUT", "HEAD"))),
        "path": endpoint.PREFIX + path,
        "headers": headers,
        "query": draw(st.binary(max_size=30)),
        "body": draw(st.lists(damaged([b'{"do": "pause"}']), max_size=3)),
        "answer": answer if isinstance(answer, dict) else {"ok": False},
    }


def request(given: dict[str, Any]) -> str:
    made, _, loop = app()
    pieces = list(given["body"])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not pieces:
            return {"type": "http.disconnect"}
        return {
            "type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)
        }  # fmt: skip

    async def reply(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1",
        "method": given["method"], "path": given["path"], "root_path": "",
        "raw_path": given["path"].encode(), "query_string": given["query"],
        "headers": given["headers"], "scheme": "http", "client": ("test", 1),
        "server": ("test", 80),
    }  # fmt: skip
    with mock.patch.object(endpoint, "ask_all", lambda *_: {"t": given["answer"]}):
        loop.run_until_complete(made(scope, receive, reply))
    status = sent[0]["status"]
    assert status in (200, 401, 404, 405, 409, 503), status
    json.loads(b"".join(message.get("body", b"") for message in sent))
    return str(status)


def parsers() -> list[Parser]:
    """Those of orders."""
    orders = json_or_bytes(ORDER).map(lambda text: [text + b"\n"])
    pieces = st.lists(damaged([b'{"do": "status"}\n']), max_size=4)
    answers = st.one_of(
        json_or_bytes(ANSWER).map(lambda text: text + b"\n"),
        st.sampled_from((b"", b"x" * 100, b"\n", b"1" * (1 << 20))),
    )
    return [
        Parser("admin_server", "transport.admin", st.one_of(orders, pieces), say),
        Parser("admin_client", "transport.admin", answers, ask, (TransportError,)),
        Parser("http_admin", "engine.endpoint", http_requests(), request),
    ]
