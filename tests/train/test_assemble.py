"""Assembler: any chunking, interleaving or preemption yields exactly the rows."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tide.train.assemble import Assembler
from vllm_tide.transport.record import Phase, Record

PREFILL, VERIFY = Phase
WIDTH, HIDDEN, VOCAB = 6, 2, 1000


def token(key: int, position: int) -> int:
    """Return the token of a request at a position."""
    return (key * 7919 + position * 31) % VOCAB


def row(key: int, position: int, width: int) -> np.ndarray:
    """Return a feature or teacher row that names its origin."""
    return np.full(width, key * 1000 + position, np.float32)


def record(key, start, tokens, *, phase, prompt, accepted=None, finished=False):
    """Return a record; its rejected rows have other tokens than `token` returns."""
    n = len(tokens)

    def stack(width):
        return np.stack([row(key, start + i, width) for i in range(n)])

    return Record(
        key=key,
        phase=phase,
        start=start,
        num_prompt_tokens=prompt,
        num_accepted=n - 1 if accepted is None else accepted,
        next_token=-1,
        draft_version=3,
        token_ids=np.array(tokens, np.int32),
        features=stack(WIDTH),
        teacher_start=0,
        teacher_hidden=stack(HIDDEN),
        finished=finished,
    )


@st.composite
def requests(draw, key: int) -> SimpleNamespace:
    """Return records of one request, and the first captured position."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    prompt = rng.randint(1, 20)
    first = rng.choice([0, rng.randint(0, prompt - 1)])  # prefix-cache hit
    s = SimpleNamespace(key=key, prompt=prompt, first=first, records=[])

    def prefill(until: int, start: int) -> int:
        while start < until:
            n = rng.randint(1, until - start)
            tokens = [token(key, start + i) for i in range(n)]
            s.records.append(record(key, start, tokens, phase=PREFILL, prompt=prompt))
            start += n
        return start

    at = prefill(prompt, first)
    for _ in range(rng.randint(1, 8)):
        if rng.random() < 0.2:  # preempted: everything so far is computed again
            prefill(at, rng.choice([0, first]) if first == 0 else first)
        drafts = rng.randint(0, 4)
        accepted = rng.randint(0, drafts)
        good = [token(key, at + i) for i in range(accepted + 1)]
        bad = [VOCAB - 1 - i for i in range(drafts - accepted)]
        s.records.append(
            record(key, at, good + bad, phase=VERIFY, prompt=prompt, accepted=accepted)
        )
        at += accepted + 1
    s.size = at
    return s


@settings(max_examples=60, deadline=None)
@given(requests(1), requests(2), requests(3), st.randoms(use_true_random=False))
def test_any_interleaving_yields_exactly_the_rows(a, b, c, rng):
    assembler = Assembler(WIDTH, "float32")
    queues = [list(s.records) for s in (a, b, c)]
    out = []
    while any(queues):
        queue = rng.choice([q for q in queues if q])
        out += assembler.add(queue.pop(0), 0.0)
    assert out == []
    assert assembler.flush_idle(29.0) == []
    out = {s.key: s for s in assembler.flush_idle(31.0)}
    assert assembler.open_rows == 0
    assert not assembler.skipped
    for s in (a, b, c):
        sample = out[s.key]
        positions = list(range(s.first, s.size))
        assert sample.start == s.first
        assert sample.num_prompt_tokens == s.prompt
        assert sample.tokens.tolist() == [token(s.key, p) for p in positions]
        expected = torch.tensor([s.key * 1000.0 + p for p in positions])
        assert torch.equal(sample.features, expected[:, None].expand(-1, WIDTH))
        assert torch.equal(sample.teacher_hidden, expected[:, None].expand(-1, HIDDEN))
        assert bool(sample.has_teacher.all())


def _verify(start, count, key=1, **more):
    tokens = [token(key, start + i) for i in range(count)]
    return record(key, start, tokens, phase=VERIFY, prompt=2, **more)


def test_a_gap_starts_a_new_document_and_an_end_without_rows_closes_it():
    assembler = Assembler(WIDTH, "float32")
    assembler.add(_verify(2, 4), 0.0)
    assembler.add(_verify(9, 3), 0.0)
    end = Record(
        1, VERIFY, 12, 2, 0, -1, 0, np.zeros(0, np.int32),
        np.zeros((0, WIDTH), np.float32), 0, finished=True,
    )  # fmt: skip
    out = assembler.add(end, 0.0)
    assert [(s.start, s.num_tokens) for s in out] == [(2, 4), (9, 3)]
    assert assembler.num_holes == 3
    assert assembler.add(end, 0.0) == []


def test_memory_is_bounded_by_closing_the_least_recent_request():
    assembler = Assembler(WIDTH, "float32", max_open_rows=10)
    out = []
    for key in range(1, 6):
        out += assembler.add(_verify(2, 4, key=key), 0.0)
        assert assembler.open_rows <= 10
    assert [s.key for s in out] == [1, 2, 3]
    assert assembler.num_early == 3


def test_a_long_request_is_cut_and_continues_with_context():
    assembler = Assembler(
        WIDTH, "float32", max_request_rows=20, context_rows=4, max_open_rows=1000
    )
    out, at = [], 2
    for _ in range(20):
        out += assembler.add(_verify(at, 3), 0.0)
        at += 3
        assert assembler.open_rows <= 23
    out += assembler.flush()
    assert len(out) > 2
    trained: list[int] = []
    for s in out:
        positions = torch.arange(s.start, s.start + s.num_tokens)
        trained += positions[1:][s.valid[1:]].tolist()
    assert trained == list(range(3, at))


def test_rejected_rows_become_a_branch_if_configured():
    """At most so many of a request, and none drafted by the memory."""
    assembler = Assembler(WIDTH, "float32", max_branches=2)
    for start, memory in ((2, False), (4, True)):
        assembler.add(replace(_verify(start, 5, accepted=1), memory=memory), 0.0)
    (one,) = assembler.flush()
    assert [branch.position for branch in one.branches] == [3]
    assert one.tokens.tolist() == [token(1, p) for p in (2, 3, 4, 5)]
    assembler = Assembler(WIDTH, "float32", max_branches=1)
    for start in (2, 4):
        assembler.add(_verify(start, 5, accepted=1), 0.0)
    (sample,) = assembler.flush()
    (branch,) = sample.branches
    assert branch.position == 3
    assert branch.tokens.tolist() == [token(1, p) for p in (4, 5, 6)]
    assert branch.features[:, 0].tolist() == [1004.0, 1005.0, 1006.0]
    assert sample.tokens.tolist() == [token(1, p) for p in (2, 3, 4, 5)]


def test_positions_that_the_memory_drafted_are_marked_and_not_trained():
    assembler = Assembler(WIDTH, "float32")
    assembler.add(_verify(2, 3), 0.0)
    assembler.add(replace(_verify(5, 4, accepted=1), memory=True), 0.0)
    assembler.add(_verify(7, 2), 0.0)
    (sample,) = assembler.flush()
    positions = [2, 3, 4, 5, 6, 7, 8]
    assert [sample.start + i for i in range(sample.num_tokens)] == positions
    assert sample.by_memory.tolist() == [p in (5, 6) for p in positions]
    assert sample.trained_positions.tolist() == [3, 4, 7, 8]
    assert sample.window(2, 6, 0).by_memory.tolist() == [False, True, True, False]
    assembler.add(replace(_verify(2, 4), memory=True), 0.0)
    assert assembler.flush() == []
    assert assembler.skipped["nothing_to_train"] == 4


def test_a_recomputed_row_without_teacher_keeps_its_old_one():
    assembler = Assembler(WIDTH, "float32")
    assembler.add(_verify(2, 3), 0.0)
    assembler.add(replace(_verify(2, 3), teacher_start=3, teacher_hidden=None), 0.0)
    (sample,) = assembler.flush()
    assert bool(sample.has_teacher.all())
    assert sample.teacher_hidden[:, 0].tolist() == [1002.0, 1003.0, 1004.0]


def test_bfloat16_bits_are_read_as_bfloat16():
    assembler = Assembler(WIDTH, "bfloat16")
    values = torch.randn(4, WIDTH).bfloat16()
    bits = values.view(torch.int16).numpy().view(np.uint16)
    assembler.add(replace(_verify(2, 4), features=bits), 0.0)
    (sample,) = assembler.flush()
    assert torch.equal(sample.features, values)


def _light(start, count, **more):
    empty = np.zeros((count, 0), np.float32)
    full = _verify(start, count, **more)
    return replace(full, features=empty, teacher_hidden=None)


def test_a_metadata_only_record_is_a_gap_that_is_counted_once():
    assembler = Assembler(WIDTH, "float32")
    assembler.add(_verify(2, 4), 0.0)
    (before,) = assembler.add(_light(6, 3), 0.0)
    assert (before.start, before.num_tokens) == (2, 4)
    assert assembler.open_rows == 0
    assert assembler.add(_light(9, 2), 0.0) == []
    assert assembler.add(_verify(11, 3), 0.0) == []
    (after,) = assembler.add(_light(14, 2, finished=True), 0.0)
    assert (after.start, after.num_tokens) == (11, 3)
    assert assembler.skipped == {"not_collected": 7}
    assert assembler.num_holes == 0


def test_a_sample_has_its_tenant_and_errors_are_counted():
    assembler = Assembler(WIDTH, "float32")
    first = _verify(2, 2)
    assembler.add(replace(first, tenant=77), 0.0)
    assembler.add(replace(first, start=4, tenant=77), 0.0)
    (sample,) = assembler.flush()
    assert sample.tenant == 77
    assert sample.captured_unix_s > 0
    for sampled in (True, False):
        served = replace(_verify(2, 4, finished=True), sampled=sampled)
        assert [s.sampled for s in assembler.add(served, 0.0)] == [sampled]
    narrow = Assembler(WIDTH - 1, "float32")
    assert narrow.add(first, 0.0) == []
    assert narrow.skipped["malformed"] == 2


def test_a_purge_forgets_the_open_requests_of_a_tenant():
    assembler = Assembler(WIDTH, "float32")
    for key, tenant in ((1, 7), (2, 8)):
        assembler.add(replace(_verify(2, 4, key=key), tenant=tenant), 0.0)
    assert assembler.purge(7) == 4
    assert assembler.open_rows == 4
    assert [s.key for s in assembler.flush()] == [2]
    assert assembler.purge() == 0


def test_a_branch_keeps_a_topk_teacher_and_ends_at_a_placeholder():
    assembler = Assembler(WIDTH, "float32", max_branches=2)
    full = _verify(2, 5, accepted=1)
    ids = full.token_ids.copy()
    ids[4] = -1
    k = 3
    full = replace(
        full,
        token_ids=ids,
        teacher_hidden=None,
        teacher_start=1,
        teacher_topk_ids=np.arange(4 * k, dtype=np.int32).reshape(4, k),
        teacher_topk_logprobs=np.zeros((4, k), np.float32),
        teacher_tail_logprob=np.arange(4, dtype=np.float32),
    )
    assembler.add(full, 0.0)
    ids = ids.copy()
    ids[2] = -1  # nothing was drafted after the accepted token
    assembler.add(replace(full, token_ids=ids, start=4), 0.0)
    (sample,) = assembler.flush()
    (branch,) = sample.branches
    assert branch.tokens.tolist() == [token(1, 4), token(1, 5)]
    assert branch.features.shape == (2, WIDTH)
    assert branch.teacher_hidden is None
    assert branch.teacher_topk.ids.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert branch.teacher_topk.tail_logprob.tolist() == [1.0, 2.0]
