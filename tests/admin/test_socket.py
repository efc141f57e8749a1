"""Orders through the Unix socket: what arrives, what is refused, who may ask."""

import json
import os
import socket
import stat
import threading

import pytest

from vllm_tide.cli.main import main
from vllm_tide.transport import admin
from vllm_tide.transport.admin import AdminSocket, ask_all, send, trainer_sockets
from vllm_tide.transport.shm import TransportError


@pytest.fixture
def run_dir(tmp_path):
    # Longer than a socket's name may be.
    return tmp_path / ("x" * 100) / "run"


@pytest.fixture
def served(run_dir):
    """A socket that is polled as a trainer does."""
    run_dir.parent.mkdir()
    trainer, ending = AdminSocket(run_dir), threading.Event()
    asked = []

    def carry_out(request):
        asked.append(request)
        return {"ok": True, "did": request["do"]}

    def loop():
        while not ending.wait(0.005):
            trainer.poll(carry_out)

    thread = threading.Thread(target=loop)
    thread.start()
    yield trainer, asked
    ending.set()
    thread.join()
    trainer.close()


def raw(path, data):
    """What a client is answered that sends these bytes."""
    fd = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(f"/proc/self/fd/{fd}/{path.name}")
        os.close(fd)
        client.sendall(data)
        return client.recv(1 << 16)


def test_an_order_is_carried_out_and_answered(served, run_dir):
    trainer, asked = served
    answers = ask_all(run_dir, {"do": "pause"}, 5)
    assert answers == {f"trainer {os.getpid()}": {"ok": True, "did": "pause"}}
    assert asked == [{"do": "pause"}]


def test_only_its_user_may_open_it(served, run_dir):
    trainer, _ = served
    assert stat.S_IMODE(trainer.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "said", [b"pause\n", b"[]\n", b'{"do": 3}\n', b"\xff\n", b"x" * 5000, b"[" * 4000]
)
def test_what_is_no_request_is_answered_with_a_sentence(served, said):
    trainer, asked = served
    if not said.endswith(b"\n"):
        said = said[:4000] + b"x" * 1000
    answer = json.loads(raw(trainer.path, said))
    assert not answer["ok"] and answer["error"].startswith("a request is")
    assert asked == []


def test_silent_clients_hold_nothing_up(served, run_dir):
    trainer, _ = served
    fd = os.open(run_dir, os.O_RDONLY)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    for client in silent:
        client.connect(f"/proc/self/fd/{fd}/{trainer.path.name}")
    os.close(fd)
    assert send(trainer.path, {"do": "status"}, 5) == {"ok": True, "did": "status"}
    for client in silent:
        client.close()
    assert send(trainer.path, {"do": "status"}, 5) == {"ok": True, "did": "status"}
    assert trainer._clients == {}


def test_of_too_many_clients_the_oldest_is_sent_away(served, run_dir):
    trainer, _ = served
    fd = os.open(run_dir, os.O_RDONLY)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(admin.MAX_CLIENTS + 8)]
    for client in silent:
        client.connect(f"/proc/self/fd/{fd}/{trainer.path.name}")
    os.close(fd)
    assert send(trainer.path, {"do": "status"}, 60) == {"ok": True, "did": "status"}
    silent[0].settimeout(60)
    error = f"{admin.MAX_CLIENTS} clients say nothing; the oldest is sent away"
    assert json.loads(silent[0].recv(4096)) == {"ok": False, "error": error}
    assert len(trainer._clients) < admin.MAX_CLIENTS
    for client in silent:
        client.close()


def test_a_killed_trainers_socket_is_nobody_and_is_swept(run_dir):
    run_dir.parent.mkdir()
    run_dir.mkdir()
    dead = run_dir / "admin-1.sock"
    fd = os.open(run_dir, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"/proc/self/fd/{fd}/{dead.name}")
    os.close(fd)
    with pytest.raises(TransportError, match="no trainer is running"):
        ask_all(run_dir, {"do": "status"}, 1)
    trainer = AdminSocket(run_dir)
    assert trainer_sockets(run_dir) == [trainer.path]
    trainer.close()
    assert trainer_sockets(run_dir) == []


def test_a_socket_that_does_not_listen_yet_is_not_swept(run_dir, monkeypatch):
    run_dir.parent.mkdir()
    run_dir.mkdir()
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
    (answer,) = ask_all(run_dir, {"do": "status"}, 0.05).values()
    assert "has not answered" in answer["error"]  # connected: it only is not polled
    trainer.close()


def test_a_start_that_was_killed_leaves_nothing_for_long(run_dir):
    run_dir.parent.mkdir()
    run_dir.mkdir()
    staged = run_dir / ".admin-1-00000000.new"
    staged.touch()
    AdminSocket(run_dir).close()
    assert staged.exists()
    os.utime(staged, (0, 0))
    AdminSocket(run_dir).close()
    assert list(run_dir.iterdir()) == []


def test_trainers_of_one_pid_are_two(run_dir):
    """As in two containers that share the run directory."""
    run_dir.parent.mkdir()
    first, second = AdminSocket(run_dir), AdminSocket(run_dir)
    assert sorted([first.path, second.path]) == trainer_sockets(run_dir)
    names = sorted(ask_all(run_dir, {"do": "status"}, 0.05))
    assert len(names) == 2
    assert all(name.startswith(f"trainer {os.getpid()}-") for name in names)
    first.close()
    assert list(ask_all(run_dir, {"do": "status"}, 0.05)) == [f"trainer {os.getpid()}"]
    second.close()


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "soon"])
def test_a_time_to_wait_is_more_than_nothing(run_dir, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["status", "--run-dir", str(run_dir), "--timeout", text])
    assert "--timeout: " in (said := capsys.readouterr().err)
    assert "is no time to wait; give seconds" in said


def test_a_trainer_that_hangs_is_named(run_dir):
    run_dir.parent.mkdir()
    trainer = AdminSocket(run_dir)  # nobody polls it
    (answer,) = ask_all(run_dir, {"do": "status"}, 0.05).values()
    assert "has not answered in 0.05 s" in answer["error"]
    trainer.close()


def test_a_place_without_sockets_stops_no_trainer(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = AdminSocket(tmp_path / "file")
    trainer.poll(lambda _: {})
    trainer.close()
