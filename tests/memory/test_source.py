"""The value of each source, and the choice of the better one."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tide.control.batch import Proposals
from vllm_tide.memory.ngram import Text
from vllm_tide.memory.source import DRAFT, MEMORY, Memory, SourceRecord

K = 3


def outcome(random, chance):
    """Draw accepted tokens of n requests: int64 [n], of probabilities [n, K]."""
    return np.logical_and.accumulate(random.random(chance.shape) < chance, 1).sum(1)


def play(random, draft, memory, num_steps, *, shifts=False, n=8, choose=None):
    """Return the expected tokens of a source that is chosen by its estimate.

    Args:
        draft, memory: Chances [n, K] of the two, with a match of bucket [n].
        shifts: The two change places in the middle.
        choose: Always so, instead of by the record.
    """
    record, slots = SourceRecord(n, K), np.arange(n)
    total = 0.0
    for number in range(num_steps):
        if shifts and number == num_steps // 2:
            draft, memory = memory, draft
        bucket = random.integers(0, 6, n)
        has_match = bucket > 0
        # A longer match is a better one; a stream without one has the draft only.
        better = memory ** (2.0 / (1 + bucket[:, None]))
        mine = record.survival(MEMORY, slots, bucket)
        mine[:, ~has_match] = -1.0
        ours = record.survival(DRAFT, slots, bucket)
        pick = Proposals(mine, ours).better(ours)
        if choose is not None:
            pick = has_match & choose(draft, better)
        chance = np.where(pick[:, None], better, draft)
        total += float(np.cumprod(chance, axis=1).sum()) + n
        # Both are graded by the emitted tokens, as far as those go.
        passed = {DRAFT: outcome(random, draft), MEMORY: outcome(random, better)}
        known = np.minimum(np.where(pick, passed[MEMORY], passed[DRAFT]) + 1, K)
        for source, right in passed.items():
            judged = np.minimum(right + 1, known)
            if source == MEMORY:
                judged = judged * has_match
            record.learn(source, slots, bucket, judged, np.minimum(right, judged))
    return total / num_steps


def chances(level, n=8):
    return np.full((n, K), level)


MIXED = np.repeat([[0.9], [0.15]], 4, axis=0) * np.ones(K)


@pytest.mark.parametrize(
    ("draft", "memory", "shifts"),
    [
        (chances(0.3), chances(0.7), False),
        (chances(0.6), MIXED, False),  # requests differ, their matches do not
        (chances(0.8), chances(0.2), True),
    ],
)
def test_never_below_the_better_single_source(draft, memory, shifts):
    num_steps = 500
    throughput = play(np.random.default_rng(0), draft, memory, num_steps, shifts=shifts)
    single = [
        play(
            np.random.default_rng(0), draft, memory, num_steps, shifts=shifts, choose=c
        )
        for c in (lambda d, m: np.zeros(8, bool), lambda d, m: np.ones(8, bool))
    ]
    ideal = play(
        np.random.default_rng(0),
        draft,
        memory,
        num_steps,
        shifts=shifts,
        choose=lambda d, m: np.cumprod(m, 1).sum(1) > np.cumprod(d, 1).sum(1),
    )
    assert throughput >= 0.98 * max(single)
    assert throughput >= (0.93 if shifts else 0.97) * ideal


def step(memory, table, upto, new, slot=0, caps=K):
    """Run a step of one request with `new` tokens after `upto` of its table."""
    view = Text(
        np.array([table], np.int32),
        np.array([upto]),
        np.array([[*new, *[-1] * (K + 1 - len(new))]]),
        np.array([len(new)]),
    )
    return memory.recall(np.array([slot]), view, np.array([caps]))


LOOP = list(range(50, 60)) * 6


def test_proposals_are_graded_by_the_next_tokens_chosen_or_not():
    memory = Memory(2, 256, K)
    bucket = np.array([5])
    before = memory.record.survival(MEMORY, np.zeros(1, int), bucket)[:, 0].copy()
    upto = 25
    proposals = step(memory, LOOP, upto, LOOP[upto : upto + 1])
    while upto < 45:  # plain decoding: every proposal's first token is right
        assert proposals[0][0].tolist() == LOOP[upto + 1 : upto + 1 + K]
        upto += 1
        proposals = step(memory, LOOP, upto, LOOP[upto : upto + 1])
    good = memory.record.survival(MEMORY, np.zeros(1, int), bucket)[:, 0].copy()
    assert good[0] > before[0] + 0.2
    other = LOOP[: upto + 1] + [7, 8, 9, 7, 8] * 4
    for at in range(upto + 1, upto + 9):
        step(memory, other, at, other[at : at + 1])
    bad = memory.record.survival(MEMORY, np.zeros(1, int), bucket)[:, 0]
    assert bad[0] < good[0]


def worth(memory, source):
    """Return the probability of each token of a long match's proposal, in order."""
    survival = memory.record.survival(source, np.zeros(1, int), np.array([5]))[:, 0]
    return survival / np.concatenate([[1.0], survival[:-1]])


def test_only_known_tokens_are_graded():
    """With two tokens, the third of the proposal may yet have been right."""
    memory = Memory(2, 256, K)
    for slot in range(2):
        step(memory, LOOP, 25, LOOP[25:26], slot)
        fresh = worth(memory, MEMORY)
        step(memory, LOOP, 26, LOOP[26:28], slot)
    assert (worth(memory, MEMORY)[:2] > fresh[:2]).all()


def test_drafts_are_graded_too_but_not_across_a_pause_or_another_request():
    memory = Memory(2, 256, K)
    before = worth(memory, DRAFT)
    for _ in range(4):
        step(memory, LOOP, 25, LOOP[25:26])
        memory.drafted(np.zeros(1, int), np.array([[LOOP[26], 0]]))
        step(memory, LOOP, 26, LOOP[26:28])
    after = worth(memory, DRAFT)
    assert after[1] < min(after[0], before[1])
    step(memory, LOOP, 40, LOOP[40:41])  # not the next tokens
    assert np.array_equal(worth(memory, DRAFT), after)
    memory.begin(0)
    fresh = worth(memory, DRAFT)
    step(memory, LOOP, 41, LOOP[41:42])  # nor tokens of the slot's previous request
    assert np.array_equal(worth(memory, DRAFT), fresh)


def test_proposals_are_cut_to_the_remaining_length():
    memory = Memory(2, 256, K)
    tokens, proposals = step(memory, LOOP, 25, LOOP[25:26], caps=1)
    assert (proposals.survival[:, 0] >= 0).tolist() == [True, False, False]
    assert (proposals.drafted[:, 0] >= 0).tolist() == [True, False, False]
    assert step(memory, LOOP, 26, LOOP[26:27], caps=0) is None
    assert step(memory, list(range(40)), 25, [25], slot=1) is None, "no match"
    assert len(tokens[0]) == K
