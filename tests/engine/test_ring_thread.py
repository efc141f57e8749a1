"""Capture that writes in a thread: the same records, without waiting."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.engine.test_device_stage import Engine
from tests.transport.samples import identity
from vllm_tide.capture import recorder
from vllm_tide.capture.guard import Guard
from vllm_tide.transport.ring import Collect

ROWS = 9 + 4 + 1  # of a step of `Engine`


class Threaded(Engine):
    """An engine with a thread that writes as often as the test permits."""

    def __init__(self, teacher="hidden", capacity=1 << 18, open_=True):
        super().__init__(teacher, capacity)
        self.capture._thread = ThreadPoolExecutor(1)
        self.write_permits = threading.Semaphore(1000 if open_ else 0)
        put = self.capture._put

        def put_when_permitted(write):
            assert self.write_permits.acquire(timeout=30)
            put(write)

        self.capture._put = put_when_permitted

    def write(self, seed=0, learn=False):
        step = self.stage(seed)
        self.capture.write(step)
        if learn:
            self.learn()
        return step

    def learn(self):
        """Wait for the thread, then poll it as the next step would."""
        for done, _ in list(self.capture._under_way):
            done.exception(timeout=30)
        self.capture._settle()

    def seeds(self):
        """Return the versions of the records of each key; 1 each for an end record."""
        seeds = defaultdict(list)
        for record in self.records():
            seeds[record.key].append(record.draft_version)
        return dict(seeds)

    def close(self):
        self.write_permits.release(1000)
        self.capture.close()
        super().close()


@pytest.fixture
def engine():
    made = []

    def make(*args, **kwargs):
        made.append(Threaded(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_records_equal_those_without_a_thread(engine, teacher):
    plain, threaded, records = Engine(teacher), engine(teacher), []
    for each in (plain, threaded):
        for seed in range(3):
            step = each.stage(seed)
            each.capture.write(step)
            if step.staged is not None:
                step.staged.release()
        each.capture.forget("abc")
        if each is threaded:
            each.learn()
        records.append([identity(record) for record in each.records()])
        assert each.capture.rows == 3 * ROWS and each.capture.budget.staged == 0
        stats = each.ring.stats()
        assert (stats.written_records, stats.written_rows) == (12, 3 * ROWS)
    assert records[0] == records[1] and len(records[0]) == 12
    plain.close()


def test_rows_are_stored_until_written_and_the_step_does_not_wait(engine):
    each = engine(open_=False)
    begin = time.monotonic()
    steps = [each.write(seed) for seed in range(3)]
    assert all(step.staged is None for step in steps)  # the log gives nothing back
    assert each.capture.budget.staged == sum(step.size for step in steps) > 0
    assert each.stage(3).staged is None  # no place is free
    assert each.capture.dropped["behind"] == ROWS
    each.capture.forget("c")
    assert time.monotonic() - begin < 10 and each.records() == []
    assert each.capture.rows == each.ring.stats().written_records == 0
    each.write_permits.release(4)
    each.learn()
    assert each.capture.rows == 3 * ROWS and each.capture.budget.staged == 0
    assert [record.finished for record in each.records()] == [False] * 9 + [True]
    assert each.stage(4).staged is not None


def test_a_truncated_request_has_no_record_after_the_gap(engine):
    """Though its later steps were in flight, and there is space again."""
    each = engine(capacity=1 << 11, open_=False)
    each.capture.budget._has_space = lambda size: True
    each.capture.budget._fits = lambda prompt: True
    for seed in range(3):
        step = each.stage(seed)
        step.version = seed
        each.capture.write(step)
    each.write_permits.release(2)
    for done, _ in list(each.capture._under_way)[:2]:
        done.result(timeout=30)
    before = each.seeds()
    whole = {0: 3, 1: 1, 2: 1}  # a's rows come in pieces; one of step 1 may be there
    assert all(seeds.count(0) == whole[key] for key, seeds in before.items())
    cut = {key for key, seeds in before.items() if seeds.count(1) < whole[key]}
    assert cut and len(before) == 3
    each.write_permits.release(1)
    each.learn()
    expected = {key: [2] * whole[key] for key in before if key not in cut}
    assert each.seeds() == expected
    tickets = {t.key: t for t in each.capture._tickets.values()}
    assert {k for k, t in tickets.items() if t.refusal == "cut_short"} == cut
    lost = each.ring.dropped_rows["full"] + each.capture.dropped["cut_short"]
    assert each.capture.rows + lost == 3 * ROWS
    # Only their end distinguishes them from the others.
    each.write_permits.release(1)
    each.capture.forget("abc")
    each.learn()
    assert sorted(each.seeds()) == sorted(before)
    assert not each.capture._cut


def test_a_fault_of_the_thread_is_counted_by_the_guard(engine, monkeypatch):
    each, guard = engine(), Guard("capture")
    write = each.ring.write

    def fails(frames):
        monkeypatch.setattr(each.ring, "write", write)
        raise RuntimeError

    monkeypatch.setattr(each.ring, "write", fails)
    first = each.stage(0)
    guard.always("write", each.capture.write, first)
    for done, _ in list(each.capture._under_way):
        done.exception(timeout=30)
    guard.always("write", each.capture.write, each.stage(1))
    each.learn()
    assert guard.faults == {"write": 1} and each.capture.rows == ROWS
    assert len(each.records()) == 3 and each.capture.budget.staged == 0
    guard.always("forget", each.capture.forget, "a")
    assert guard.faults == {"write": 1}
    assert len(each.capture._stage._free) == 3


def test_pending_writes_are_written_before_the_end(engine):
    each = engine(open_=False)
    each.write(), each.capture.forget("ab")
    threading.Timer(0.2, each.write_permits.release, (2,)).start()
    each.capture.close()
    assert len(each.records()) == 5 and each.capture.rows == ROWS


def test_shutdown_waits_no_longer_than_it_must(engine, monkeypatch):
    monkeypatch.setattr(recorder, "DRAIN_S", 0.1)
    each = engine(open_=False)
    each.write()
    begin = time.monotonic()
    each.capture.close()
    each.ring.close()
    assert time.monotonic() - begin < 10
    each.write_permits.release(1)
    each.learn()
    assert each.ring.drops == {"closed": 3} and each.capture.rows == 0


def test_a_pause_ends_requests_behind_pending_writes(engine):
    each = engine(open_=False)
    each.write(0)
    late = each.stage(1)
    each.reader.set_collect(Collect.NOTHING)
    each.capture.write(late)
    late.staged.release()
    each.write_permits.release(1000)
    each.learn()
    records = each.records()
    assert [(r.finished, r.num_rows) for r in records] == [
        (False, 9), (False, 4), (False, 1), (True, 0), (True, 0), (True, 0),
    ]  # fmt: skip
    assert each.capture.dropped["paused"] == 9 + 4 + 2
    assert replace(records[3], key=0).draft_version == each.capture.draft_version
