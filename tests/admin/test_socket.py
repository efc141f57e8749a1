"""Orders through the Unix socket: delivery, refusals, permissions."""

import json
import os
import shutil
import socket
import stat
import threading
import time

import pytest

from tests.transport.samples import make_manifest
from vllm_tide.cli.main import main
from vllm_tide.transport import admin
from vllm_tide.transport.admin import AdminSocket, send, send_to_all, trainer_sockets
from vllm_tide.transport.rendezvous import write_manifest
from vllm_tide.transport.shm import TransportError


@pytest.fixture
def run_dir(tmp_path):
    # Longer than a socket's name may be.
    (tmp_path / ("x" * 100)).mkdir()
    return tmp_path / ("x" * 100) / "run"


@pytest.fixture
def served(run_dir):
    """A socket that is polled as by a trainer."""
    trainer, ending = AdminSocket(run_dir), threading.Event()
    asked = []

    def execute(request):
        asked.append(request)
        return {"ok": True, "did": request["do"], "what": request["what"]}

    def loop():
        while not ending.wait(0.005):
            trainer.poll(execute)

    thread = threading.Thread(target=loop)
    thread.start()
    yield trainer, asked
    ending.set()
    thread.join()
    trainer.close()


def client_of(path):
    """Connect a client that has sent nothing yet."""
    fd = os.open(path.parent, os.O_RDONLY)
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    client.connect(f"/proc/self/fd/{fd}/{path.name}")
    os.close(fd)
    return client


def leave_socket(run_dir):
    """Make the files of a killed trainer."""
    dead = run_dir / "admin-1.sock"
    fd = os.open(run_dir, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"/proc/self/fd/{fd}/{dead.name}")
    os.close(fd)
    return dead


def test_an_order_of_its_user_is_executed_and_answered(served, run_dir):
    trainer, asked = served
    order = {"do": "pause", "what": 1}
    answers = send_to_all(run_dir, order, 5)
    assert answers == {
        f"trainer {os.getpid()}": {"ok": True, "did": "pause", "what": 1}
    }
    assert asked == [order]
    assert stat.S_IMODE(trainer.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    # A failing order ends nothing.
    assert send(trainer.path, {"do": "pause"}, 5) == {
        "ok": False, "error": "the command failed (KeyError); see the log",
    }  # fmt: skip


def test_a_socket_without_its_name_is_bound_again(served, run_dir):
    """The run directory was cleaned: by a logout, `rm`, systemd-tmpfiles."""
    order = {"do": "pause", "what": 1}
    for remove in (shutil.rmtree, clear, shutil.rmtree):
        remove(run_dir)
        until = time.monotonic() + 20
        while not trainer_sockets(run_dir):
            assert time.monotonic() < until
            time.sleep(0.01)
        (answer,) = send_to_all(run_dir, order, 5).values()
        assert answer["ok"]
        (path,) = trainer_sockets(run_dir)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_a_failed_socket_is_made_later(run_dir, caplog, monkeypatch):
    monkeypatch.setattr(admin, "CHECK_PERIOD_S", 0.0, raising=False)
    run_dir.touch()
    trainer = AdminSocket(run_dir)
    for _ in range(3):
        trainer.poll(dict)
    assert caplog.text.count("no admin socket") == 1
    run_dir.unlink()
    trainer.poll(dict)
    assert trainer_sockets(run_dir) == [trainer.path]
    trainer.close()
    trainer.poll(dict)
    assert trainer_sockets(run_dir) == []


def clear(run_dir):
    for path in run_dir.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "line",
    [b"pause\n", b"[]\n", b'{"do": 3}\n', b"\xff\n", b"x" * 5000, b"[" * 4000],
)
def test_an_invalid_request_is_answered_with_a_message(served, line):
    trainer, asked = served
    if not line.endswith(b"\n"):
        line = line[:4000] + b"x" * 1000
    with client_of(trainer.path) as client:
        client.sendall(line)
        answer = json.loads(client.recv(1 << 16))
    assert not answer["ok"] and answer["error"].startswith("a request must be")
    assert asked == []


def test_an_answer_larger_than_the_socket_buffer_arrives_whole(run_dir):
    trainer, ending = AdminSocket(run_dir), threading.Event()
    long = "x" * 3_000_000
    answering = threading.Thread(
        target=lambda: [
            trainer.poll(lambda _request: {"ok": True, "long": long})
            for _ in iter(lambda: ending.wait(0.005), True)
        ]
    )
    idle = client_of(trainer.path)  # it sends and does not read
    idle.sendall(b'{"do": "status"}\n')
    answering.start()
    try:
        for _ in range(2):
            assert send(trainer.path, {"do": "status"}, 10) == {
                "ok": True,
                "long": long,
            }
    finally:
        ending.set()
        answering.join()
        idle.close()
        trainer.close()


def test_silent_clients_block_nothing_and_the_oldest_is_closed(served):
    trainer, _ = served
    order = {"do": "status", "what": 1}
    silent = [client_of(trainer.path) for _ in range(8)]
    assert send(trainer.path, order, 60)["ok"]
    silent += [client_of(trainer.path) for _ in range(admin.MAX_CLIENTS)]
    assert send(trainer.path, order, 60)["ok"]
    silent[0].settimeout(60)
    error = f"too many idle clients ({admin.MAX_CLIENTS}); closing the oldest"
    assert json.loads(silent[0].recv(4096)) == {"ok": False, "error": error}
    assert len(trainer._clients) <= admin.MAX_CLIENTS
    for client in silent:
        client.close()
    # The sender reads the answer before the trainer has closed the connection.
    until = time.monotonic() + 60
    while trainer._clients and time.monotonic() < until:
        assert send(trainer.path, order, 5)["ok"]
        time.sleep(0.05)
    assert trainer._clients == {}


def test_the_socket_of_a_killed_trainer_is_not_running_and_is_removed(run_dir):
    run_dir.mkdir(mode=0o700)
    leave_socket(run_dir)
    staged = run_dir / ".admin-1-00000000.new"
    staged.touch()
    with pytest.raises(TransportError, match="no trainer is running"):
        send_to_all(run_dir, {"do": "status"}, 1)
    trainer = AdminSocket(run_dir)
    assert trainer_sockets(run_dir) == [trainer.path]
    trainer.close()
    assert list(run_dir.iterdir()) == [staged]  # it may just be starting
    os.utime(staged, (0, 0))
    AdminSocket(run_dir).close()
    assert list(run_dir.iterdir()) == []


def test_a_socket_that_does_not_listen_yet_is_not_removed(run_dir, monkeypatch):
    run_dir.mkdir(mode=0o700)
    seen = []

    class Slow(socket.socket):
        """Between bind and listen another trainer starts."""

        def listen(self, *backlog):
            monkeypatch.setattr(admin.socket, "socket", plain)
            other = AdminSocket(run_dir)
            seen.extend(trainer_sockets(run_dir))
            other.close()
            super().listen(*backlog)

    plain = socket.socket
    monkeypatch.setattr(admin.socket, "socket", Slow)
    trainer = AdminSocket(run_dir)
    assert trainer_sockets(run_dir) == [trainer.path]
    assert len(seen) == 1 and trainer.path not in seen
    (answer,) = send_to_all(run_dir, {"do": "status"}, 0.05).values()
    assert "has not answered" in answer["error"]  # connected: it is only not polled
    trainer.close()


def test_two_trainers_with_the_same_pid_are_distinguished(run_dir):
    """As in two containers that share the run directory."""
    first, second = AdminSocket(run_dir), AdminSocket(run_dir)
    assert sorted([first.path, second.path]) == trainer_sockets(run_dir)
    names = sorted(send_to_all(run_dir, {"do": "status"}, 0.05))
    assert len(names) == 2
    assert all(name.startswith(f"trainer {os.getpid()}-") for name in names)
    first.close()
    assert list(send_to_all(run_dir, {"do": "status"}, 0.05)) == [
        f"trainer {os.getpid()}"
    ]
    second.close()


def test_a_folder_without_sockets_stops_no_trainer(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = AdminSocket(tmp_path / "file")
    trainer.poll(lambda _: {})
    trainer.close()


def probe(run_dir, *more, wait="0.05"):
    return main(["status", "--run-dir", str(run_dir), "--timeout", wait, *more])


def test_a_health_check_requires_a_trainer_only_where_an_engine_serves(run_dir):
    assert probe(run_dir, "--probe") == 0  # not made yet
    run_dir.mkdir(mode=0o700)
    leave_socket(run_dir)
    assert probe(run_dir, "--probe") == 0  # it waits for an engine
    assert probe(run_dir) == 1  # from the command line: not running
    write_manifest(run_dir, make_manifest())
    assert probe(run_dir, "--probe") == 1
    hung = AdminSocket(run_dir)  # listens, and never polls
    assert probe(run_dir, "--probe") == 1
    hung.close()
    for wait in ("-1", "nan", "soon"):
        with pytest.raises(SystemExit, match="2"):
            probe(run_dir, wait=wait)
