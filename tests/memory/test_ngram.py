"""The index finds what a search of the whole text finds, and nothing of anybody."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tide.memory import ngram
from vllm_tide.memory.ngram import CHUNK, MOST_MATCH, ORDERS, NgramIndex, Text

K = 4


def text_of(rows: list[list[int]], new: list[list[int]], width: int = 4096) -> Text:
    """The runner's table of tokens, full of another's beyond each text."""
    table = np.full((len(rows), width), 7, np.int32)
    late = np.full((len(rows), max(map(len, new), default=0) + 1), -1)
    for i, (row, fresh) in enumerate(zip(rows, new, strict=True)):
        table[i, : len(row)] = row
        late[i, : len(fresh)] = fresh
    known, count = (np.array([len(r) for r in part]) for part in (rows, new))
    return Text(table, known, late, count)


def search(text: list[int]) -> tuple[list[int], int]:
    """The same by brute force: longest suffix of the orders, its latest occurrence."""
    for order in ORDERS:
        for end in range(len(text) - 1, order - 1, -1):
            if text[end - order : end] != text[-order:]:
                continue
            match = order
            most = min(MOST_MATCH, end)
            while match < most and text[end - match - 1] == text[-match - 1]:
                match += 1
            period = len(text) - end
            return [text[end + j % period] for j in range(K)], match
    return [-1] * K, 0


def collide(text: list[int], index: NgramIndex) -> bool:
    """True if two different grams of a text have one cell."""
    factors = [int(factor) for factor in ngram._FACTORS]
    for order in ORDERS:
        cells: dict[int, list[int]] = {}
        for end in range(order, len(text) + 1):
            gram = text[end - order : end][::-1]
            total = sum(t * f for t, f in zip(gram, factors, strict=False))
            cell = total % (1 << 64) >> (64 - index._bits)
            if cells.setdefault(cell, gram) != gram:
                return True
    return False


streams = st.lists(st.integers(0, 3), min_size=1, max_size=120)


@settings(max_examples=60, deadline=None)
@given(st.lists(streams, min_size=1, max_size=3), st.integers(1, 5))
def test_it_finds_what_a_search_of_the_whole_text_finds(texts, step):
    """Requests of one batch that grow by up to `step` tokens between two looks."""
    index = NgramIndex(8, 4096, K)
    slots = np.array([5, 0, 2])[: len(texts)]
    upto = [1] * len(texts)
    random = np.random.default_rng(0)
    while any(u < len(t) for u, t in zip(upto, texts, strict=True)):
        grown = [
            min(u + int(random.integers(0, step + 1)), len(t))
            for u, t in zip(upto, texts, strict=True)
        ]
        known = [t[:u] for u, t in zip(upto, texts, strict=True)]
        fresh = [t[u:g] for u, g, t in zip(upto, grown, texts, strict=True)]
        upto = grown
        tokens, match = index.propose(slots, text_of(known, fresh))
        for i, text in enumerate(texts):
            expected = search(text[: upto[i]])
            if (tokens[i].tolist(), int(match[i])) != expected:
                assert collide(text[: upto[i]], index)


def test_a_long_text_is_indexed_in_pieces_and_found_whole():
    random = np.random.default_rng(1)
    text = random.integers(0, 50_000, 32_000).tolist()
    text += text[100:120]
    index = NgramIndex(1, 32_768, K)
    looks = -(-len(text) // CHUNK)
    found = []
    for _ in range(looks):
        view = text_of([text], [[]], len(text))
        tokens, match = index.propose(np.zeros(1, np.int64), view)
        found.append((tokens[0].tolist(), int(match[0])))
    # The first piece has it already; so does the whole.
    assert found[0] == found[-1] == (text[120 : 120 + K], MOST_MATCH)
    assert index._indexed[0] == len(text) - 1


def test_many_long_texts_share_what_a_step_indexes():
    random = np.random.default_rng(3)
    texts = [random.integers(0, 50_000, 3000).tolist() for _ in range(8)]
    index, slots = NgramIndex(8, 4096, K), np.arange(8)
    for text in texts:
        text += text[100:120]
    done = 0
    while done < 8 * (len(texts[0]) - 1):
        tokens, match = index.propose(slots, text_of(texts, [[]] * 8, len(texts[0])))
        assert 0 < index._indexed.sum() - done <= CHUNK
        done = int(index._indexed.sum())
    assert tokens.tolist() == [text[120 : 120 + K] for text in texts]


def test_more_grams_than_cells_lose_old_ones_and_make_nothing_up(monkeypatch):
    monkeypatch.setattr(ngram, "_MOST_BITS", 6)
    index = NgramIndex(2, 4096, K)
    random = np.random.default_rng(2)
    text = random.integers(0, 40, 2000).tolist()
    hits = 0
    for upto in range(3, len(text)):
        view = text_of([text[:upto]], [[]])
        tokens, match = index.propose(np.ones(1, np.int64), view)
        if match[0]:
            hits += 1
            said = tokens[0].tolist()
            gram, period = text[upto - 3 : upto], None
            ends = [e for e in range(3, upto) if text[e - 3 : e] == gram]
            ends = [(text[:upto] + text[e:upto] * K)[e : e + K] for e in ends]
            assert said in ends, period
    assert hits
    # What is new is always found.
    text = text[:100] + [90, 91, 92, 93, 90, 91, 92]
    index.begin(0)
    tokens, match = index.propose(np.zeros(1, np.int64), text_of([text], [[]]))
    assert (tokens[0, 0], match[0]) == (93, 3)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_next_request_of_a_slot_is_never_offered_the_former_s_tokens(data):
    """Planted tokens, reset or not: what is proposed is read from the own text."""
    index = NgramIndex(2, 4096, K)
    former = data.draw(st.lists(st.integers(100, 103), min_size=20, max_size=80))
    slot = np.zeros(1, np.int64)
    index.propose(slot, text_of([former], [[]]))
    if data.draw(st.booleans()):
        index.begin(0)
        assert not index._last.any() and not index._tokens.any()
    own = data.draw(st.lists(st.integers(100, 107), min_size=3, max_size=60))
    for upto in range(3, len(own) + 1):
        # The runner's table still holds the former's tokens beyond the own text.
        table = np.array([[*own[:upto], *former]], np.int32)
        none = np.zeros((1, 1), np.int64)
        view = Text(table, np.array([upto]), none, np.zeros(1, np.int64))
        tokens, match = index.propose(slot, view)
        if match[0]:
            assert set(tokens[0].tolist()) <= set(own[:upto])
            gram = own[upto - 3 : upto]
            before = [own[e - 3 : e] for e in range(3, upto)]
            assert gram in before, "an occurrence of one's own"


def test_a_text_that_became_shorter_is_indexed_anew():
    index = NgramIndex(1, 4096, K)
    slot = np.zeros(1, np.int64)
    index.propose(slot, text_of([list(range(50))], [[]]))
    text = [*range(10), 1, 2, 3]
    tokens, match = index.propose(slot, text_of([text], [[]]))
    assert (tokens[0].tolist(), match[0]) == ([4, 5, 6, 7], 3)


@pytest.mark.parametrize(
    ("slot", "known", "count"), [(2, 1, 1), (-1, 1, 1), (0, 140, 5), (0, 1, 3)]
)
def test_what_lies_outside_of_the_index_is_refused_and_nothing_written(
    slot, known, count
):
    index = NgramIndex(2, 128, K)
    table, new = np.ones((1, 144), np.int32), np.ones((1, 2), np.int64)
    index._length[slot % 2] = known
    before = index._tokens.copy(), index._last.copy()
    slots = np.array([slot])
    with pytest.raises((ValueError, IndexError)):
        index.propose(slots, Text(table, np.array([known]), new, np.array([count])))
    assert (index._tokens == before[0]).all() and (index._last == before[1]).all()
