"""The records of a step, written at once, equal those of its requests to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.transport.samples import identity, make_record, make_spec
from tests.transport.step_rows import expected, request_rows, step_rows
from vllm_tide.capture.policy import Ticket
from vllm_tide.capture.step import end_records, lay_out
from vllm_tide.transport import Phase
from vllm_tide.transport.record import FEATURE_DTYPES, Status

H, LAYERS, TOPK, VOCAB = 4, (1, 2), 3, 100


def spec_of(teacher, dtype="bfloat16"):
    return make_spec(teacher, dtype, hidden_size=H, topk=TOPK, layers=LAYERS)


def floats(rng, shape, dtype):
    values = rng.standard_normal(shape).astype(np.float32)
    return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype("u2")


def random_step(rng, teacher, dtype, light):
    """Chunks and last chunks of prompts, verifications, placeholders, of n requests."""
    n = int(rng.integers(1, 12))
    drafts = rng.integers(0, 4, n)
    known = np.where(rng.random(n) < 0.5, 1, rng.integers(1, 60, n))
    padding = np.where(rng.random(n) < 0.2, drafts, 0)
    drafts, count = drafts - padding, known + drafts - padding
    whole = count + padding
    committed = np.where(
        (drafts + padding == 0) & (rng.random(n) < 0.4),
        0,  # a chunk that is not the last
        rng.integers(1, drafts + padding + 2),
    )
    gaps = rng.integers(0, 3, n)  # rows of others between
    first = np.cumsum(whole + gaps) - whole
    low = rng.permutation(n)  # rows are staged in any order
    at = np.empty(n, np.int64)
    at[low] = np.cumsum(count[low]) - count[low]
    logits = drafts + padding + 1
    tickets = [
        Ticket(
            key=int(rng.integers(2**64, dtype=np.uint64)),
            refusal=None,
            tenant=int(rng.integers(2**64, dtype=np.uint64)),
            sampled=bool(rng.integers(2)),
        )
        for _ in range(n)
    ]
    requests = request_rows(
        tickets, float(rng.random()), low=at, first=first, count=count, drafts=drafts,
        padding=padding, start=rng.integers(0, 2**40, n), logit_end=np.cumsum(logits),
        num_prompt_tokens=rng.integers(1, 2**31, n), committed=committed,
        next_token=np.where(committed > 0, rng.integers(0, VOCAB, n), -1),
    )  # fmt: skip
    rows, outputs = int(count.sum()), int(logits.sum())
    step = step_rows(
        token_ids=rng.integers(VOCAB, size=int((whole + gaps).sum()), dtype=np.int32),
        features=floats(rng, (rows, len(LAYERS) * H), dtype),
        hidden=floats(rng, (rows, H), dtype) if teacher == "hidden" else None,
        topk=(
            rng.integers(VOCAB, size=(outputs, TOPK), dtype=np.int32),
            floats(rng, (outputs, TOPK), "float32"),
            floats(rng, outputs, "float32"),
        )
        if teacher == "topk" and rng.random() < 0.8
        else None,
        version=7,
        drafted_by=[None, 6][rng.integers(2)],
        concurrency=n,
        cost=float(rng.random()),
    )
    requests["cost"] = step.cost
    return tickets, requests, replace(step, full=False) if light else step


def written(ring_pair, spec, frames):
    writer, reader = ring_pair(spec, 1 << 20)
    writer.write(frames)
    writer.count(frames)
    assert not frames.status.any() and not writer.drops
    records = []
    while (record := reader.read()) is not None:
        records.append(record)
    assert reader.stats().corrupt_records == 0
    stats = writer.stats()
    rows = sum(record.num_rows for record in records)
    assert (stats.written_records, stats.written_rows) == (len(records), rows)
    return records


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_records_of_a_step_are_those_of_its_requests(ring_pair, teacher, dtype, light):
    spec, topk = spec_of(teacher, dtype), TOPK * (teacher == "topk")
    pieces = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tickets, table, step = random_step(rng, teacher, dtype, light)
        max_rows = (7, 1000)[seed % 2]
        want = expected(tickets, table, step, FEATURE_DTYPES[dtype], max_rows)
        frames, of = lay_out(table, step, spec, topk, max_rows)
        records = written(ring_pair, spec, frames)
        assert [identity(record) for record in records] == [
            identity(record) for record in want
        ]
        keys = [tickets[i].key for i in of]
        assert keys == [record.key for record in want]
        # A piece behind one that was not written would follow a gap.
        assert frames.follows.tolist() == [
            i > 0 and of[i] == of[i - 1] for i in range(len(of))
        ]
        pieces += len(of) - len(tickets)
    assert (pieces == 0) is light


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_an_end_record_has_no_rows_and_the_rings_widths(ring_pair, teacher):
    spec, topk = spec_of(teacher), TOPK * (teacher == "topk")
    tickets = [Ticket(5, None, tenant=9, sampled=True), Ticket(2**64 - 1, "paused")]
    records = written(ring_pair, spec, end_records(tickets, 3, spec, topk))
    like = make_record(spec, 0, num_rows=0)
    for record, ticket in zip(records, tickets, strict=True):
        want = replace(
            like, key=ticket.key, tenant=ticket.tenant, phase=Phase.VERIFY, start=0,
            num_prompt_tokens=0, num_accepted=0, next_token=-1, draft_version=3,
            finished=True, sampled=False, concurrency=0, cost=1.0, verify_chance=1.0,
        )  # fmt: skip
        assert identity(record) == identity(want)


@pytest.mark.parametrize(
    "change",
    [
        {"features": np.zeros((64, H), np.uint16)},
        {"features": np.zeros((64, len(LAYERS) * H), np.float32)},
        {"hidden": np.zeros((64, H + 1), np.uint16)},
        {"token_ids": np.zeros(64, np.int64)},
        {"features": np.zeros((2, len(LAYERS) * H), np.uint16)},  # too few
        {"topk": (np.zeros((9, 3), np.int32), np.zeros((9, 3)), np.zeros(9))},
    ],
)
def test_rows_that_the_ring_does_not_carry_are_invalid(ring_pair, change):
    spec = spec_of("hidden")
    writer, reader = ring_pair(spec)
    rows = {
        "token_ids": np.zeros(64, np.int32),
        "features": np.zeros((64, len(LAYERS) * H), np.uint16),
        "hidden": np.zeros((64, H), np.uint16),
    }
    requests = request_rows([Ticket(1, None)] * 2, count=4, drafts=3, committed=1)
    for one, fits in ((rows, True), (rows | change, False)):
        frames, _ = lay_out(requests, step_rows(**one), spec, 0, 100)
        writer.write(frames)
        writer.count(frames)
        assert (frames.status == Status.WRITTEN).all() == fits
    assert writer.drops == {"invalid": 2} and writer.dropped_rows == {"invalid": 8}
    assert reader.read() and reader.read() and reader.read() is None
    # Counts that contradict each other are one record's fault.
    tickets = [Ticket(key, None) for key in range(3)]
    odd = request_rows(tickets, count=[4, 2, 4], drafts=[3, 3, 3])
    frames, _ = lay_out(odd, step_rows(**rows), spec, 0, 100)
    writer.write(frames)
    assert frames.status.tolist() == [Status.WRITTEN, Status.INVALID, Status.WRITTEN]
