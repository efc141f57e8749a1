"""Defects that fuzzing found at the two ends of orders, one test each."""

import socket
import threading

import pytest

from vllm_tide.transport import TransportError
from vllm_tide.transport.admin import send


@pytest.fixture
def stranger(tmp_path):
    """A socket that answers with these bytes, one piece after another."""
    path = tmp_path / "admin-1.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    pieces = []

    def serve():
        client, _ = listener.accept()
        with client:
            client.recv(100)
            client.sendall(b"".join(pieces))

    thread = threading.Thread(target=serve)
    thread.start()
    yield path, pieces
    thread.join()
    listener.close()


def test_an_endlessly_nested_answer_is_no_json(stranger):
    path, pieces = stranger
    pieces.append(b"[" * 100_000 + b"\n")
    with pytest.raises(TransportError, match="invalid JSON"):
        send(path, {"do": "status"}, 5)


def test_invalid_json_numbers_are_ignored(stranger):
    path, pieces = stranger
    pieces.append(b'{"ok": true, "loss": NaN, "rate": 1e999, "rows": 2.5}\n')
    answer = send(path, {"do": "status"}, 5)
    assert answer == {"ok": True, "loss": None, "rate": None, "rows": 2.5}
