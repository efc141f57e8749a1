"""Each fault is counted by what moves for it alone, or says why nothing does."""

import asyncio
import contextlib
import random
import signal
from types import SimpleNamespace

import pytest

from tests.faults import processes, requests, soak, spool
from tests.faults.counters import GIVEN_UP, given_up
from tests.faults.load import Load
from tests.faults.memory import damage_words
from tests.faults.processes import GENERATED, hang_engine
from tests.faults.report import by_kind, markdown, table
from tests.faults.scene import NotRecovered
from tests.faults.suite import FAULTS, Row
from tests.transport.samples import make_record, make_spec
from vllm_tide.transport import RingReader, RingWriter
from vllm_tide.transport.feed import hostile

PLAIN = {
    GENERATED,
    "vllm_tide:captured_rows_total",
    "trainer:rows_read",
    "trainer:requests",
}
"""Moves under the load alone."""


def test_no_fault_is_counted_by_what_moves_without_it():
    for fault in FAULTS:
        assert fault.gauge or fault.counter not in PLAIN, fault.kind
        assert bool(fault.uncounted) == (fault.counter is None), fault.kind


def test_a_row_says_that_nothing_counts_it():
    kinds = by_kind([Row("damage_words", "ok", 1.0, 0.0), Row("fill_ring", "ok", 1, 1)])
    assert kinds["damage_words"]["counter"] is None
    assert "stores it again" in kinds["damage_words"]["uncounted"]
    assert "uncounted" not in kinds["fill_ring"]
    assert "nothing: the word's owner" in table(kinds)
    assert "| nothing: the word's owner" in markdown(kinds)[2]


def page(first_tokens, ended, running, waiting=0):
    return {
        "vllm:time_to_first_token_seconds_count": float(first_tokens),
        "vllm:request_success_total{length}": float(ended),
        "vllm:num_requests_running": float(running),
        "vllm:num_requests_waiting": float(waiting),
    }


def test_only_a_request_given_up_moves_their_count():
    # Load alone: requests begin, wait, are preempted, end.
    states = [(0, 0, 0), (0, 0, 3), (2, 0, 3), (3, 1, 2), (3, 1, 1, 1), (9, 9, 0)]
    assert max(given_up(page(*state)) for state in states) == 0
    assert given_up(page(9, 7, 1)) == 1
    assert given_up(page(9, 7, 2)) == 0  # one of the two may be without a token yet


class Engine:
    """An engine whose tokens are counted while it runs, or by a liar always."""

    def __init__(self, liar):
        self.liar, self.running, self.tokens = liar, True, 5.0
        self.load = SimpleNamespace()

    def engine(self):
        return self

    def send_signal(self, number):
        self.running = number == signal.SIGCONT

    def struck(self):
        pass

    async def reading(self):
        self.tokens += self.running or self.liar
        return {GENERATED: self.tokens}

    async def until(self, what, check, timeout_s=1.0):
        for _ in range(5):
            now = await self.reading()
            if check(now):
                return now
        raise NotRecovered(what)


@pytest.mark.parametrize("liar", [False, True])
def test_a_hang_is_one_only_if_no_token_comes_in_it(liar, monkeypatch):
    monkeypatch.setattr(processes, "ON_THEIR_WAY_S", 0.001)
    engine = Engine(liar)
    rng = SimpleNamespace(uniform=lambda low, high: 0.001)
    with (
        pytest.raises(NotRecovered, match="stood still")
        if liar
        else contextlib.nullcontext()
    ):
        asyncio.run(hang_engine(engine, rng))
    assert engine.running


@pytest.mark.parametrize("counted_at", [1, 3, 9])
def test_an_abort_that_came_too_late_is_tried_again(counted_at, monkeypatch):
    rounds = []

    class Scene(Engine):
        async def reading(self):
            count = float(len(rounds) >= counted_at)
            return dict.fromkeys(requests.QUEUES, 1.0) | {GIVEN_UP: count}

    async def hang_up(scene, after_s):
        if after_s == requests._SOON_S:
            rounds.append(after_s)

    monkeypatch.setattr(requests, "_hang_up", hang_up)
    with (
        pytest.raises(NotRecovered, match="a count of it")
        if counted_at > requests.TRIES
        else contextlib.nullcontext()
    ):
        scene = Scene(False)
        scene.load = SimpleNamespace(clients=3)
        asyncio.run(requests.abort_requests(scene, random.Random(0)))
    assert len(rounds) == min(counted_at, requests.TRIES)


def test_a_damaged_word_has_to_be_stored_again(monkeypatch):
    from tests.faults import memory

    words, mending = {}, [False]
    monkeypatch.setattr(memory, "word", lambda ring, w: words.get(w, 0))
    monkeypatch.setattr(memory, "set_word", lambda ring, w, v: words.update({w: v}))

    class Scene(Engine):
        def manifest(self):
            return SimpleNamespace(ring="ring")

        async def reading(self):
            if mending[0]:
                words.clear()
            self.tokens += 1
            return {name: self.tokens for name in PLAIN}

    with pytest.raises(NotRecovered, match="a stored word"):
        asyncio.run(damage_words(Scene(False), random.Random(1)))
    mending[0] = True
    asyncio.run(damage_words(Scene(False), random.Random(1)))


def test_a_soak_that_breaks_off_keeps_the_problems_before_it(monkeypatch):
    class Scene(Engine):
        def __init__(self, places, session, load):
            super().__init__(False)
            self.segments = SimpleNamespace(made=frozenset())

        async def start_server(self):
            pass

        def start_trainer(self):
            pass

        async def trainer_reads(self):
            pass

        async def stop(self):
            return True

    minutes = []

    async def minute(scene, load):
        load.problems.append(f"wrong token {len(minutes)}")
        if minutes:
            raise NotRecovered("the trainer died")
        return {"swaps": 1.0}

    async def idle(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr(soak, "Scene", Scene)
    monkeypatch.setattr(soak, "_minute", minute)
    monkeypatch.setattr(soak, "_swap", idle)
    monkeypatch.setattr(Load, "run", idle)
    args = SimpleNamespace(seed=0, clients=1, swap_s=1.0, minutes=5)
    problems = asyncio.run(soak.soak(None, [], args, minutes.append))
    assert problems == ["wrong token 0", "wrong token 1", "the trainer died"]


def test_a_forged_record_is_sound_but_for_its_token():
    spec = make_spec()
    ring = RingWriter.create(spec, 1 << 16)
    reader = RingReader.attach(ring.name)
    try:
        for seed in range(3):
            assert ring.try_write(make_record(spec, seed))
        spool._forge(ring.name)
        read = [reader.read() for _ in range(3)]
        assert reader.stats().corrupt_records == 0
        assert [hostile(r, spec, spec.vocab_size) for r in read] == [False, False, True]
        assert read[2].token_ids[0] == -(2**31)
    finally:
        reader.close()
        ring.close()
