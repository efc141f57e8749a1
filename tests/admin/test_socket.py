"""Commands through Unix sockets: delivery, refusals, permissions."""

import json
import os
import shutil
import socket
import stat
import threading
import time

import pytest

from tests.transport.commands import Command
from tests.transport.samples import make_manifest
from vllm_tide.cli.main import main
from vllm_tide.transport import admin
from vllm_tide.transport.admin import AdminSocket, display_names, send_to_all, sockets
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
    trainer, ending = AdminSocket("trainer", run_dir), threading.Event()
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


def trainers(*folders):
    return sockets(folders, "trainer")


def send(folder, request, timeout_s=5):
    """Return the answer of the only trainer of a folder."""
    (answer,) = send_to_all(trainers(folder), request, timeout_s).values()
    return answer


def client_of(folder):
    """Connect a client that has sent nothing yet."""
    (path,) = trainers(folder).values()
    fd = os.open(folder, os.O_RDONLY)
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    client.connect(f"/proc/self/fd/{fd}/{path.name}")
    os.close(fd)
    return client


def leave_socket(run_dir, name="trainer-1-0.sock"):
    """Make the file of a killed trainer."""
    dead = run_dir / name
    fd = os.open(run_dir, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"/proc/self/fd/{fd}/{dead.name}")
    os.close(fd)
    return dead


def test_a_command_of_its_user_is_executed_and_answered(served, run_dir):
    trainer, asked = served
    order = {"do": "pause", "what": 1}
    assert send(run_dir, order) == {"ok": True, "did": "pause", "what": 1}
    assert asked == [order]
    assert stat.S_IMODE((run_dir / trainer.name).stat().st_mode) == 0o600
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    # A failing command ends nothing.
    assert send(run_dir, {"do": "pause"}) == {
        "ok": False, "error": "the command failed (KeyError); see the log",
    }  # fmt: skip


def test_a_command_is_repeated_until_it_has_an_answer(run_dir):
    """Also if its client has ended meanwhile: a purge is not forgotten."""
    trainer, answers = AdminSocket("trainer", run_dir), [None, None, {"ok": True}]
    command, ended = (Command(run_dir, do="purge") for _ in range(2))
    ended.close()
    calls = []

    def execute(request):
        calls.append(request)
        return answers[(len(calls) - 1) // 2]

    for expected in (None, None, {"ok": True}):
        trainer.poll(execute)
        assert command.answer == expected
    assert len(calls) == 6
    trainer.poll(execute)
    assert len(calls) == 6

    def refuse(_):
        raise TransportError("the reason")

    refused = Command(run_dir, do="purge")
    trainer.poll(refuse)
    assert refused.answer == {"ok": False, "error": "the reason"}
    trainer.close()


def test_a_process_has_a_socket_in_each_folder_and_is_asked_once(run_dir, tmp_path):
    lasting = tmp_path / "state" / "run"
    trainer = AdminSocket("trainer", lasting)
    trainer.listen_in(run_dir)
    assert trainers(run_dir, lasting) == {trainer.name: run_dir / trainer.name}
    shutil.rmtree(run_dir)
    assert trainers(run_dir, lasting) == {trainer.name: lasting / trainer.name}
    assert stat.S_IMODE(lasting.stat().st_mode) == 0o700
    command = Command(lasting, do="status")
    trainer.poll(lambda _: {"ok": True})
    assert command.answer == {"ok": True}
    assert not sockets([lasting], "relay")
    trainer.close()
    assert trainers(run_dir, lasting) == {}


def test_a_socket_without_its_name_is_bound_again(served, run_dir):
    """The run directory was cleaned: by a logout, `rm`, systemd-tmpfiles."""
    for remove in (shutil.rmtree, clear, shutil.rmtree):
        remove(run_dir)
        until = time.monotonic() + 20
        while not trainers(run_dir):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert send(run_dir, {"do": "pause", "what": 1})["ok"]
        (path,) = trainers(run_dir).values()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_a_file_appears_when_its_socket_accepts_clients(run_dir, monkeypatch):
    before = []

    class Listener(socket.socket):
        def listen(self, *backlog):
            before.append(trainers(run_dir))
            super().listen(*backlog)

    monkeypatch.setattr(socket, "socket", Listener)
    trainer = AdminSocket("trainer", run_dir)
    assert before == [{}]
    assert list(trainers(run_dir)) == [trainer.name]
    trainer.close()
    assert not list(run_dir.iterdir())


def clear(run_dir):
    for path in run_dir.iterdir():
        path.unlink()


def test_a_failed_socket_is_made_later(run_dir, caplog, monkeypatch):
    monkeypatch.setattr(admin, "CHECK_PERIOD_S", 0.0)
    run_dir.touch()
    trainer = AdminSocket("trainer", run_dir)
    for _ in range(3):
        trainer.poll(dict)
    assert caplog.text.count("no admin socket") == 1
    run_dir.unlink()
    trainer.poll(dict)
    assert list(trainers(run_dir)) == [trainer.name]
    trainer.close()
    trainer.poll(dict)
    assert trainers(run_dir) == {}


@pytest.mark.parametrize(
    "line",
    [b"pause\n", b"[]\n", b'{"do": 3}\n', b"\xff\n", b"x" * 5000, b"[" * 4000],
)
def test_an_invalid_request_is_answered_with_a_message(served, run_dir, line):
    _, asked = served
    if not line.endswith(b"\n"):
        line = line[:4000] + b"x" * 1000
    with client_of(run_dir) as client:
        client.sendall(line)
        answer = json.loads(client.recv(1 << 16))
    assert not answer["ok"] and answer["error"].startswith("a request must be")
    assert asked == []


def test_an_answer_larger_than_the_socket_buffer_arrives_whole(run_dir):
    trainer, ending = AdminSocket("trainer", run_dir), threading.Event()
    long = "x" * 3_000_000
    answering = threading.Thread(
        target=lambda: [
            trainer.poll(lambda _request: {"ok": True, "long": long})
            for _ in iter(lambda: ending.wait(0.005), True)
        ]
    )
    idle = client_of(run_dir)  # it sends and does not read
    idle.sendall(b'{"do": "status"}\n')
    answering.start()
    try:
        for _ in range(2):
            assert send(run_dir, {"do": "status"}, 10) == {"ok": True, "long": long}
    finally:
        ending.set()
        answering.join()
        idle.close()
        trainer.close()


def test_silent_clients_block_nothing_and_the_oldest_is_closed(served, run_dir):
    order = {"do": "status", "what": 1}
    silent = [client_of(run_dir) for _ in range(8)]
    assert send(run_dir, order, 60)["ok"]
    silent += [client_of(run_dir) for _ in range(admin.MAX_CLIENTS)]
    assert send(run_dir, order, 60)["ok"]
    silent[0].settimeout(60)
    assert silent[0].recv(4096) == b""
    silent[-1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        silent[-1].recv(4096)  # connected
    for client in silent:
        client.close()


def test_the_socket_of_a_killed_trainer_is_not_running_and_is_removed(run_dir, capsys):
    run_dir.mkdir(mode=0o700)
    dead = leave_socket(run_dir)
    assert send_to_all(trainers(run_dir), {"do": "status"}, 1) == {}
    assert main(["status", "--run-dir", str(run_dir)]) == 1
    assert "no trainer is running" in capsys.readouterr().err
    trainer = AdminSocket("trainer", run_dir)
    assert list(trainers(run_dir)) == sorted([dead.name, trainer.name])
    trainer.close()  # the other may just be starting
    os.utime(dead, (0, 0))
    os.utime(leave_socket(run_dir, ".trainer-2-0.sock"), (0, 0))
    AdminSocket("trainer", run_dir).close()
    assert list(run_dir.iterdir()) == []


def test_trainers_that_hang_are_waited_for_at_the_same_time(run_dir):
    """Their pids are equal, as in two containers that share the run directory."""
    first, second = (AdminSocket("trainer", run_dir) for _ in range(2))
    began = time.monotonic()
    answers = send_to_all(trainers(run_dir), {"do": "status"}, 0.4)
    assert time.monotonic() - began < 0.75
    assert all("has not answered" in answer["error"] for answer in answers.values())
    names = display_names(answers)
    assert set(names) == {first.name, second.name}
    expected = {f"trainer {name[8:-5]}" for name in (first.name, second.name)}
    assert set(names.values()) == expected
    first.close()
    answers = send_to_all(trainers(run_dir), {"do": "status"}, 0.05)
    assert list(display_names(answers).values()) == [f"trainer {os.getpid()}"]
    second.close()


def test_a_folder_without_sockets_stops_no_trainer(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = AdminSocket("trainer", tmp_path / "file")
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
    hung = AdminSocket("trainer", run_dir)  # listens, and never polls
    assert probe(run_dir, "--probe") == 1
    hung.close()
    for wait in ("-1", "nan", "soon"):
        with pytest.raises(SystemExit, match="2"):
            probe(run_dir, wait=wait)
