"""What fuzzing found in the two ends of orders, one test a defect."""

import json
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


def test_an_answer_nested_without_end_is_no_json(stranger):
    path, pieces = stranger
    pieces.append(b"[" * 100_000 + b"\n")
    with pytest.raises(TransportError, match="no JSON"):
        send(path, {"do": "status"}, 5)


def test_numbers_that_are_no_json_are_nothing(stranger):
    path, pieces = stranger
    pieces.append(b'{"ok": true, "loss": NaN, "rate": 1e999, "rows": 2.5}\n')
    found = send(path, {"do": "status"}, 5)
    assert found == {"ok": True, "loss": None, "rate": None, "rows": 2.5}


@pytest.mark.parametrize("answer", [{"ok": True, "text": "\ud800"}, {"ok": False}])
def test_text_that_is_no_utf8_is_passed_on(answer):
    pytest.importorskip("fastapi")
    from vllm_tide.engine.endpoint import PREFIX

    from tests.fuzz.orders import app, request

    headers = [(b"authorization", b"Bearer " + app()[1].encode())]
    given = {"method": "GET", "path": f"{PREFIX}/status", "headers": headers}
    given |= {"query": b"", "body": [], "answer": json.loads(json.dumps(answer))}
    assert request(given) == ("200" if answer["ok"] else "409")


def test_an_answer_that_cannot_be_written_is_an_error_and_no_crash():
    pytest.importorskip("fastapi")
    from vllm_tide.engine.endpoint import PREFIX

    from tests.fuzz.orders import app, request

    deep = {"ok": True}
    for _ in range(100_000):
        deep = {"ok": True, "in": deep}
    headers = [(b"authorization", b"Bearer " + app()[1].encode())]
    given = {"method": "GET", "path": f"{PREFIX}/status", "headers": headers}
    assert request({**given, "query": b"", "body": [], "answer": deep}) == "503"
