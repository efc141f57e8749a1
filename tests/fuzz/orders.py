"""Orders to a trainer: its Unix socket from both sides."""

from __future__ import annotations

import functools
import json
import os
import queue
import socket
import threading
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.attempt import Parser
from tests.fuzz.damage import damaged, json_or_bytes
from tests.fuzz.files import Folder, folders
from vllm_tide.transport.admin import AdminSocket, send_to_all

ORDER = {"do": "pause", "for_s": 3}
ANSWER = {"ok": True, "state": "waiting", "loss": 1.5, "engines": {"e1": [1, 2]}}


@functools.cache
def trainer() -> AdminSocket:
    folders.append(folder := Folder())
    return AdminSocket("trainer", folder.path)


def say(requests: list[bytes]) -> None:
    """Send these pieces to a trainer, and read its answer."""
    server = trainer()
    (folder,) = server._listeners
    fd = os.open(folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        client.connect(f"/proc/self/fd/{fd}/{server.name}")
        os.close(fd)
        for piece in requests:
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
    assert not answer or isinstance(json.loads(answer), dict)


@functools.cache
def stranger() -> tuple[Path, queue.Queue[bytes]]:
    """A socket that answers with given bytes."""
    folders.append(folder := Folder())
    path, answers = folder.path / "trainer-1-0.sock", queue.Queue[bytes]()
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


def ask(answer: bytes) -> None:
    path, answers = stranger()
    answers.put(answer)
    (reply,) = send_to_all({"it": path}, {"do": "status"}, 5.0).values()
    assert isinstance(reply, dict)


def parsers() -> list[Parser]:
    """Return the parsers of orders."""
    orders = json_or_bytes(ORDER).map(lambda text: [text + b"\n"])
    pieces = st.lists(damaged([b'{"do": "status"}\n']), max_size=4)
    answers = st.one_of(
        json_or_bytes(ANSWER).map(lambda text: text + b"\n"),
        st.sampled_from((b"", b"x" * 100, b"\n", b"1" * (1 << 20))),
    )
    return [
        Parser("admin_server", st.one_of(orders, pieces), say),
        Parser("admin_client", answers, ask),
    ]
