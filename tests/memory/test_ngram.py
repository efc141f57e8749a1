"""The index equals a search of the whole text, without other requests' tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tide.memory.ngram import NgramIndex, Text

K = 4


def text_of(rows: list[list[int]], new: list[list[int]], width: int = 4096) -> Text:
    """Return the runner's token table, with other tokens beyond each text."""
    table = np.full((len(rows), width), 7, np.int32)
    late = np.full((len(rows), max(map(len, new), default=0) + 1), -1)
    for i, (row, fresh) in enumerate(zip(rows, new, strict=True)):
        table[i, : len(row)] = row
        late[i, : len(fresh)] = fresh
    known, count = (np.array([len(r) for r in part]) for part in (rows, new))
    return Text(table, known, late, count)


def search(text: list[int]) -> tuple[list[int], int]:
    """Search by brute force: longest suffix of the orders, its latest occurrence."""
    for order in (5, 3, 2):
        for end in range(len(text) - 1, order - 1, -1):
            if text[end - order : end] != text[-order:]:
                continue
            match = order
            most = min(8, end)
            while match < most and text[end - match - 1] == text[-match - 1]:
                match += 1
            period = len(text) - end
            return [text[end + j % period] for j in range(K)], match
    return [-1] * K, 0


streams = st.lists(st.integers(0, 3), min_size=1, max_size=120)


@settings(max_examples=30, deadline=None)
@given(st.lists(streams, min_size=1, max_size=3), st.integers(1, 5))
def test_it_equals_a_search_of_the_whole_text(texts, step):
    """Requests of one batch grow by up to `step` tokens between two searches."""
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
            assert (tokens[i].tolist(), int(match[i])) == expected


def test_a_long_text_is_indexed_in_pieces():
    random = np.random.default_rng(1)
    text = random.integers(0, 50_000, 32_000).tolist()
    text += text[100:120]
    index = NgramIndex(1, 32_768, K)
    matches = []
    for _ in range(8):  # some thousand tokens of it in each
        view = text_of([text], [[]], len(text))
        tokens, match = index.propose(np.zeros(1, np.int64), view)
        matches.append((tokens[0].tolist(), int(match[0])))
    # The first piece has it already; so does the whole.
    assert matches[0] == matches[-1] == (text[120 : 120 + K], 8)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_slots_next_request_gets_no_tokens_of_the_previous_one(data):
    """With planted tokens, reset or not: proposals are read from the own text."""
    index = NgramIndex(2, 4096, K)
    former = data.draw(st.lists(st.integers(100, 103), min_size=20, max_size=80))
    slot = np.zeros(1, np.int64)
    index.propose(slot, text_of([former], [[]]))
    if data.draw(st.booleans()):
        index.begin(0)
    own = data.draw(st.lists(st.integers(100, 107), min_size=3, max_size=60))
    for upto in range(3, len(own) + 1):
        # The runner's table still has the previous tokens beyond the own text.
        table = np.array([[*own[:upto], *former]], np.int32)
        none = np.zeros((1, 1), np.int64)
        view = Text(table, np.array([upto]), none, np.zeros(1, np.int64))
        tokens, match = index.propose(slot, view)
        if match[0]:
            assert set(tokens[0].tolist()) <= set(own[:upto])
            gram = own[upto - 2 : upto]
            before = [own[e - 2 : e] for e in range(2, upto)]
            assert gram in before, "an occurrence of one's own"


@pytest.mark.parametrize(
    ("slot", "known", "count"), [(2, 1, 1), (-1, 1, 1), (0, 140, 5), (0, 1, 3)]
)
def test_positions_outside_of_the_index_are_refused(slot, known, count):
    index, new = NgramIndex(2, 128, K), np.ones((1, 2), np.int64)
    table = np.ones((1, 144), np.int32)
    with pytest.raises((ValueError, IndexError)):
        text = Text(table, np.array([known]), new, np.array([count]))
        index.propose(np.array([slot]), text)
    tokens, match = index.propose(np.zeros(1, np.int64), text_of([[1] * 20], [[]]))
    assert (tokens[0].tolist(), match[0]) == ([1] * K, 8), "it works on"
