"""The server restarts its sidecar: real child processes that are no trainers."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from tests.transport.samples import make_spec
from vllm_tide.config import SpoolConfig
from vllm_tide.engine import trainer_process
from vllm_tide.engine.trainer_process import TrainerProcess, call_on, pause_after
from vllm_tide.engine.worker import WorkerTide
from vllm_tide.transport.ring import RingReader, RingWriter
from vllm_tide.transport.shm import SHM_DIR
from vllm_tide.transport.weights import WeightsSegment

pytestmark = pytest.mark.slow

GROUP = "00000000000000aa"
LIVES = 'echo "$$ $*" >> "$0.started"; exec sleep 600'
DIES = 'echo "$$ $*" >> "$0.started"; exit 3'
TALKS = """echo "$$ $*" >> "$0.started"
while :; do printf '%9000s' | tr ' ' x; echo; echo newest; sleep 0.05; done
"""
WAIT_S = 60.0


@pytest.fixture
def sidecar(tmp_path, monkeypatch):
    made = []
    program = tmp_path / "python"

    def make(does, engine_id="e1", url=None, **more):
        program.write_text("#!/bin/sh\n" + does + "\n")
        program.chmod(0o700)
        spool = SpoolConfig(url=url)
        made.append(TrainerProcess(engine_id, tmp_path, GROUP, spool, **more))
        return made[-1]

    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(trainer_process, "POLL_S", 0.05)
    monkeypatch.setattr(trainer_process, "pause_after", lambda deaths: 0.05)
    yield make
    for one in made:
        one.close()


def started(tmp_path: Path) -> list[int]:
    try:
        lines = (tmp_path / "python.started").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [int(line.split()[0]) for line in lines if " " in line]


def until(check):
    end = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_restart_delays_grow_to_a_minute_and_then_to_an_hour():
    assert [pause_after(n) for n in range(1, 8)] == [1, 2, 4, 8, 16, 32, 60]
    assert {pause_after(n) for n in range(8, 2000)} == {3600}


def test_a_dead_process_is_started_again(tmp_path, sidecar):
    one = sidecar(LIVES)
    one.start()
    until(lambda: len(started(tmp_path)) == 1)
    os.kill(started(tmp_path)[0], signal.SIGKILL)
    until(lambda: len(started(tmp_path)) == 2)
    one.close()
    assert len(started(tmp_path)) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(started(tmp_path)[1], 0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_restarted_process_has_the_cores_of_the_start(tmp_path, sidecar):
    """By then all threads of a worker may be bound to its core."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    one = sidecar(LIVES)
    call_on({second}, one.start)
    until(lambda: len(started(tmp_path)) == 1)
    os.sched_setaffinity(one._thread.native_id, {first})
    os.kill(started(tmp_path)[0], signal.SIGKILL)
    until(lambda: len(started(tmp_path)) == 2)
    assert os.sched_getaffinity(started(tmp_path)[1]) == {second}


def test_deaths_are_counted_until_a_process_has_run_long_enough(tmp_path, sidecar):
    one = sidecar(DIES)
    one.start()
    until(lambda: one._deaths >= 3)
    one.close()
    deaths = one._deaths
    for lived in (70.0, 600.0):  # restarts do not cure out-of-memory
        one._began = time.monotonic() - lived
        one._failed(time.monotonic(), "ended with status -9")
    assert one._deaths == deaths + 2
    one._began = time.monotonic() - 1801.0
    one._failed(time.monotonic(), "ended with status 3")
    assert one._deaths == 1


def test_a_hanging_process_is_killed_and_started_again(tmp_path, sidecar, monkeypatch):
    monkeypatch.setattr(trainer_process, "HUNG_S", 0.5)
    silent = threading.Event()
    one = sidecar(LIVES, reads=lambda: not silent.is_set())
    one.start()
    until(lambda: len(started(tmp_path)) == 1)
    time.sleep(1.5)  # its heartbeat moves
    assert len(started(tmp_path)) == 1
    os.kill(started(tmp_path)[0], signal.SIGSTOP)  # SIGTERM would wait
    silent.set()
    until(lambda: len(started(tmp_path)) == 2)
    silent.clear()
    assert one._deaths == 1


def test_a_hanging_process_dumps_its_stacks_before_it_is_killed(
    tmp_path, sidecar, monkeypatch
):
    monkeypatch.setattr(trainer_process, "HUNG_S", 0.05)  # one poll
    log = tmp_path / "trainer-e1.log"
    tells = "trap 'echo here' USR1\n" + 'echo "$$ " >> "$0.started"\n'
    tells += "while :; do sleep 0.01; done"
    polls = count()

    def reads():
        number = next(polls)
        if number == 0:
            until(lambda: started(tmp_path))
        elif number == 2:  # before the kill, however slow the machine is
            until(log.read_text)
        return number == 0

    one = sidecar(tells, reads=reads)
    one.start()
    until(lambda: one._deaths)
    assert log.read_text() == "here\n"


def test_a_process_that_has_not_read_yet_is_left_alone(tmp_path, sidecar, monkeypatch):
    """It loads models from slow storage, or reads the rings of other engines."""
    monkeypatch.setattr(trainer_process, "HUNG_S", 0.1)
    one = sidecar(LIVES, reads=lambda: False)
    one.start()
    until(lambda: len(started(tmp_path)) == 1)
    time.sleep(1.0)
    assert not one._deaths


def test_a_relay_may_upload_models_for_longer(tmp_path, sidecar, monkeypatch):
    monkeypatch.setattr(trainer_process, "HUNG_S", 0.1)
    one = sidecar(LIVES, url="/spool", reads=lambda: False)
    one.start()
    until(lambda: len(started(tmp_path)) == 1)
    time.sleep(1.0)
    assert not one._deaths


def test_engines_of_a_group_share_a_trainer_and_each_has_its_relay(tmp_path, sidecar):
    first, second = sidecar(LIVES), sidecar(LIVES, "e2")
    first.start()
    second.start()
    until(lambda: len(started(tmp_path)) == 1)
    for _ in range(3):
        second._check()
    assert len(started(tmp_path)) == 1
    first.close()  # as its engine ends
    until(lambda: len(started(tmp_path)) == 2)
    lines = (tmp_path / "python.started").read_text()
    assert lines.count(f"train --engine {GROUP}") == 2
    for name in ("e1", "e2"):
        sidecar(LIVES, name, "/spool").start()
    until(lambda: len(started(tmp_path)) == 4)


def test_the_trainer_of_a_killed_engine_keeps_others_from_starting_one(
    tmp_path, sidecar
):
    first, second = sidecar(LIVES), sidecar(LIVES, "e2")
    first.start()
    until(lambda: len(started(tmp_path)) == 1)
    first._stop.set()  # as if it had been killed: its child is not informed
    first._thread.join()
    orphan, first.process = first.process, None
    first.close()
    second.start()
    for _ in range(3):
        second._check()
    assert len(started(tmp_path)) == 1
    orphan.kill()
    orphan.wait()
    until(lambda: len(started(tmp_path)) == 2)


def test_its_log_is_bounded_and_continues(tmp_path, sidecar, monkeypatch):
    monkeypatch.setattr(trainer_process, "LOG_BYTES", 100_000)
    one = sidecar(TALKS)
    one.start()
    log, before = tmp_path / "trainer-e1.log", tmp_path / "trainer-e1.log.1"
    until(before.exists)
    until(lambda: log.exists() and b"newest" in log.read_bytes())
    one.close()
    one._next = math.inf  # it only polls after the log
    one._check()
    assert log.stat().st_size <= 100_000
    assert sorted(os.listdir(tmp_path)) == [
        "python", "python.started", "trainer-e1.log", "trainer-e1.log.1",
        "trainers.lock",
    ]  # fmt: skip


def test_a_child_that_cannot_start_does_not_end_the_server(
    tmp_path, sidecar, monkeypatch
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    one = TrainerProcess("e1", tmp_path, GROUP, SpoolConfig())
    one.start()
    until(lambda: one._deaths >= 2)
    one.close()


def test_a_trainer_proves_progress_in_the_ring_that_it_reads(tmp_path):
    tide = object.__new__(WorkerTide)
    tide._ring = None
    assert tide._trainer_reads()
    ring = tide._ring = RingWriter.create(make_spec(), 1 << 16)
    assert not tide._trainer_reads()
    reader = RingReader.attach(ring.name)
    assert tide._trainer_reads()
    ring.unlink()  # another engine of its group may be the only one that it can read
    reader.close()
    assert tide._trainer_reads()
    ring.close()


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))  # also in a print
print("ready", flush=True)
while True:
    time.sleep(60)
"""


def test_a_stopping_worker_writes_no_text_while_it_waits(tmp_path, monkeypatch):
    """vLLM kills one that takes longer than its trainer may."""
    monkeypatch.setattr(trainer_process, "_STOP_SECONDS", 600)
    tide = object.__new__(WorkerTide)
    tide._leader, tide._run_dir, tide._engine_id = True, tmp_path, "e1"
    tide.capture = tide.swapper = None
    tide._stop = threading.Event()
    ring = tide._ring = RingWriter.create(make_spec(), 1 << 16)
    segment = tide._segment = WeightsSegment.create(1 << 16)
    manifest = tmp_path / "engine-e1.json"
    manifest.write_text("{}")
    left = [manifest, *(Path(SHM_DIR, part.name) for part in (ring, segment))]
    assert all(path.exists() for path in left)
    tide._trainer = trainer = TrainerProcess("e1", tmp_path, "group", SpoolConfig())
    child = trainer.process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        closing = threading.Thread(target=tide.close)
        closing.start()
        assert child.stdout.readline() == "asked\n"
        until = time.monotonic() + 60
        while any(path.exists() for path in left):
            assert time.monotonic() < until, left
            time.sleep(0.01)
        assert closing.is_alive() and child.poll() is None
    finally:
        child.kill()
    closing.join(timeout=60)
    assert not closing.is_alive() and tide._trainer is None
    # Asked once: a second signal would end a trainer that saves its state.
    assert child.stdout.read() == ""
    ring.close()
