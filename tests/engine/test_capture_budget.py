"""More traffic than the trainer reads: whole requests of it, and nothing else."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.transport.samples import make_spec
from tests.transport.step_rows import request_rows, step_rows
from vllm_tide.capture.policy import (
    CUT_SHORT,
    FIRST_SLOT,
    NOT_CAPTURED,
    OVER_BUDGET,
    RowBudget,
    Ticket,
)
from vllm_tide.capture.step import Step
from vllm_tide.config import CaptureConfig
from vllm_tide.engine.capture import Capture
from vllm_tide.transport import RingReader, RingWriter
from vllm_tide.transport.ring import Collect

H, LAYERS, K, BATCH, STEPS = 2, (1, 2, 3), 3, 256, 30
RING_ROWS = 8192


class Server:
    """256 requests at once, 30 steps a second, 4 rows of each: 30,000 rows/s.

    The real capture writes a real ring; the clock is the step's number.
    """

    def __init__(self, seconds: float, seed: int = 0) -> None:
        self.random, self.seconds, self.now = random.Random(seed), seconds, 0.0
        spec = make_spec("hidden", hidden_size=H, layers=LAYERS)
        self.ring = RingWriter.create(spec, RING_ROWS * (spec.row_bytes + 64))
        self.reader = RingReader.attach(self.ring.name)
        runner = SimpleNamespace(
            device=torch.device("cpu"), max_num_tokens=BATCH * 800, max_num_reqs=BATCH,
            num_speculative_steps=K, vocab_size=50, dtype=torch.bfloat16,
        )  # fmt: skip
        self.capture = Capture(runner, self.ring, CaptureConfig(), K, 3)
        self.capture.budget = RowBudget(lambda: self.now)
        rows = runner.max_num_tokens
        self.ids = torch.zeros(rows, dtype=torch.int32)
        self.hidden = torch.zeros(rows, H, dtype=torch.bfloat16)
        self.count = self.staged = self.offered = 0
        self.served: dict[int, int] = {}  # rows of each request that ended, by key
        self.read: Counter[int] = Counter()
        self.live = [self.arrive(self.random.random()) for _ in range(BATCH)]

    def arrive(self, left: float = 1.0) -> dict:
        self.count += 1
        name = str(self.count)
        ticket = self.capture._admit(name, None, True)
        steps = self.random.expovariate(1 / self.seconds) * STEPS * left
        return {
            "name": name, "key": ticket.key, "rows": 0, "steps": max(int(steps), 1),
            "prompt": self.random.randrange(50, 600),
        }  # fmt: skip

    def step(self) -> None:
        self.now += 1 / STEPS
        live = self.live
        counts = [r["prompt"] if not r["rows"] else K + 1 for r in live]
        drafts = np.array([K if r["rows"] else 0 for r in live], np.int32)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        start = np.array([r["rows"] for r in live])
        step = Step(
            req_ids=[r["name"] for r in live], bounds=bounds, drafts=drafts,
            padding=np.zeros(BATCH, np.int32), logit_ends=np.cumsum(drafts + 1),
            num_prompt_tokens=np.array([r["prompt"] for r in live], np.int32),
            steps=K, version=0, buffer=None,
        )  # fmt: skip
        self.capture.stage(step, self.hidden, [self.hidden] * len(LAYERS))
        step.start, step.emitted = start, np.full(BATCH, K + 1, np.int32)
        step.sampled = np.zeros((BATCH, K + 1), np.int64)
        step.token_ids = self.ids.numpy()
        if step.full:
            self.staged += sum(counts[i] for i in step.taken)
        self.capture.write(step)
        if step.staged is not None:
            step.staged.release()
        for i, request in enumerate(live):
            request["rows"] += counts[i]
            request["steps"] -= 1
            if request["steps"] <= 0:
                self.capture.forget([request["name"]])
                self.served[request["key"]] = request["rows"]
                live[i] = self.arrive()
        self.offered += int(bounds[-1])

    def take(self, rows: float) -> int:
        """Read about so many rows, if present."""
        taken = 0
        while taken < rows and (record := self.reader.read()) is not None:
            taken += record.num_rows
            self.read[record.key] += record.num_rows
        return taken

    def whole(self) -> tuple[int, int]:
        """Return captured requests that ended, and those of them with every row."""
        self.take(float("inf"))
        ended = [key for key in self.read if key in self.served]
        return len(ended), sum(self.read[key] == self.served[key] for key in ended)

    def close(self) -> None:
        self.ring.close()
        self.capture.close()
        self.reader.close()


@pytest.fixture
def server():
    made = []

    def make(seconds):
        made.append(Server(seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("seconds", [1, 6])
def test_one_sixth_of_the_traffic_is_captured_as_whole_requests(server, seconds):
    """At 30,000 rows/s offered and 5,000 taken."""
    each = server(seconds)
    rate, taken, owed = 5_000, 0, 0.0
    length, warm = 24 * STEPS, 8 * STEPS
    for number in range(length):
        each.step()
        owed += rate / STEPS
        got = each.take(owed)
        owed = max(owed - got, 0.0) if got >= owed - 1 else 0.0
        taken += got * (number >= warm)
    assert each.offered > 25_000 * length / STEPS
    assert taken >= 0.8 * rate * (length - warm) / STEPS
    captured, whole = each.whole()
    assert captured >= 50 and whole >= 0.99 * captured
    assert each.staged == each.capture.rows == sum(each.read.values())
    assert not each.ring.drops and not each.capture.dropped["cut_short"]
    assert each.capture.dropped["over_budget"] == each.offered - each.staged


def test_a_trainer_that_stalled_receives_rows_again(server):
    each = server(2)
    for _ in range(6 * STEPS):
        each.step()
    assert each.capture.dropped["over_budget"] and not each.ring.drops
    before, taken = each.capture.rows, 0
    assert before * each.ring.spec.row_bytes > each.ring.capacity / 4
    for number in range(20 * STEPS):
        each.step()
        taken += each.take(5_000 / STEPS) * (number >= 10 * STEPS)
    assert taken >= 0.8 * 5_000 * 10


def test_a_request_longer_than_the_ring_is_admitted_again():
    """If none were admitted, nothing could be learned."""
    ring = SimpleNamespace(
        level=lambda: (0, 0), capacity=1 << 20, spec=SimpleNamespace(row_bytes=1 << 10)
    )
    budget, now = RowBudget(lambda: now[0]), [0.0]
    budget._output_rows = 1e6
    budget.update(ring)
    tickets = [Ticket(1, None), Ticket(2, None)]
    budget.take(tickets, np.array([10, 10]), np.array([5000, 5]))
    assert [ticket.refusal for ticket in tickets] == [None, "over_budget"]


def test_running_requests_keep_their_rows_while_others_are_refused_or_cut_short():
    ring = SimpleNamespace(
        level=lambda: (0, 0), capacity=1 << 20, spec=SimpleNamespace(row_bytes=960)
    )
    budget = RowBudget()
    budget._output_rows = 1.0
    tickets = [Ticket(key, None) for key in range(100)]  # more than the first places
    one, left_out = np.ones(100, np.int64), Ticket(0, "opted_out")
    budget.update(ring)
    first = budget.take(tickets, one, one)
    assert len(set(first.tolist())) == 100 and first.min() >= FIRST_SLOT
    budget.update(ring)
    new = Ticket(100, None)
    counts = np.array([*one[:98] * 8, 500, 1, 10, 10])
    slots = budget.take([*tickets, left_out, new], counts, counts)
    assert slots[:98].tolist() == first[:98].tolist()
    assert slots[98:].tolist() == [CUT_SHORT, first[99], NOT_CAPTURED, OVER_BUDGET]
    assert (tickets[98].refusal, new.refusal) == ("cut_short", "over_budget")
    # The place of a request that ended is used again.
    for ticket in tickets:
        budget.end(ticket)
    budget.update(ring)
    assert budget.take([Ticket(101, None)], one[:1], one[:1]).tolist() == [FIRST_SLOT]


def test_rows_from_the_prefix_cache_use_no_budget(server):
    """Long prompts with a common beginning: few of their rows are ever captured."""
    each = server(2)
    capture, budget = each.capture, each.capture.budget
    rows = np.zeros((10, len(LAYERS) * H), np.uint16)
    step = step_rows(each.ids.numpy(), rows, rows[:, :H].copy(), None, version=0)
    for number in range(30):
        budget.update(each.ring)
        ticket = capture._admit(f"long{number}", None, True)
        budget.take([ticket], np.array([10]), np.array([1000]))
        assert ticket.refusal is None
        of = {"count": 10, "start": 990, "num_prompt_tokens": 1000, "committed": 1}
        capture._write([ticket], request_rows([ticket], **of), step)
    assert capture.dropped["prefix_cached"] == 30 * 990


@pytest.mark.parametrize("by_trainer", [True, False])
def test_a_step_of_a_pause_writes_nothing_though_it_lands_after_it(server, by_trainer):
    each = server(2)
    capture = each.capture
    capture.stage = lambda *args, stage=capture.stage: (stage(*args), resume())
    done = []

    def resume():
        if not done:
            each.reader.set_collect(Collect.FULL)
            capture.off = False
        done.append(1)

    if by_trainer:
        each.reader.set_collect(Collect.NOTHING)
    capture.off = not by_trainer
    each.step()
    assert each.reader.read() is None
    each.step()
    assert each.take(1) > 0
