"""The engine core's process with a trainer: it sleeps while a worker computes."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import pytest

from vllm_tide.engine.scheduler import make_scheduler

pytestmark = pytest.mark.vllm


@pytest.fixture
def shm_broadcast(monkeypatch):
    from vllm.distributed.device_communicators import shm_broadcast as module

    monkeypatch.setattr(module, "busy_loop_limit_s", math.inf)
    monkeypatch.setattr(module, "SHM_READER_RECHECK_INTERVAL_MS", 5000)
    return module


def make_pair(shm_broadcast):
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    return writer, reader


def speculative(**train):
    tide = {"train": {"autostart": False}} | train
    return SimpleNamespace(tide=tide, num_speculative_tokens=3)


def test_only_a_server_with_a_trainer_yields_its_core(shm_broadcast):
    make_scheduler(SimpleNamespace(tide=None), None)
    make_scheduler(speculative(), None)
    make_scheduler(speculative(train={}, spool={"url": "/x"}), None)
    assert shm_broadcast.busy_loop_limit_s == math.inf
    make_scheduler(speculative(train={}), None)
    assert shm_broadcast.busy_loop_limit_s == 0.0


@pytest.mark.parametrize("limit", [0.0, math.inf])
def test_a_reader_receives_each_message_whether_it_polls_or_sleeps(
    shm_broadcast, monkeypatch, limit
):
    polls = []
    monkeypatch.setattr(shm_broadcast, "busy_loop_limit_s", limit)
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: polls.append(1))
    writer, reader = make_pair(shm_broadcast)

    def write() -> None:
        for number in range(20):
            time.sleep(0.01)
            writer.enqueue(number)

    thread = threading.Thread(target=write)
    thread.start()
    assert [reader.dequeue(timeout=20) for _ in range(20)] == list(range(20))
    thread.join()
    assert bool(polls) == (limit > 0)


def test_a_lost_notification_causes_no_delay(shm_broadcast):
    """The queue drops one that follows another within about a millisecond.

    As in a step, nothing follows before both have been read; a reader that sleeps on
    looks again after 5 s.
    """
    make_scheduler(speculative(train={}), None)
    writer, reader = make_pair(shm_broadcast)
    both_read = threading.Semaphore(1)

    def write() -> None:
        for number in range(40):
            both_read.acquire()
            time.sleep(0.01)
            writer.enqueue(number)
            time.sleep(0.0003)
            writer.enqueue(-number)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    for number in range(40):
        assert reader.dequeue(timeout=3) == number
        assert reader.dequeue(timeout=3) == -number
        both_read.release()
    thread.join()
