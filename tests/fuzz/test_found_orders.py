"""Defects that fuzzing found at the two ends of orders, one test each."""

import socket
import threading

import pytest

from vllm_tide.transport.admin import send_to_all


@pytest.fixture
def stranger(tmp_path):
    """A socket that answers with these bytes, one piece after another."""
    path = tmp_path / "trainer-1-0.sock"
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
    (answer,) = send_to_all({"it": path}, {"do": "status"}, 5).values()
    assert not answer["ok"] and "no valid answer" in answer["error"]
