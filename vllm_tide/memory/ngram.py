"""N-gram index of each running request's own tokens (prompt-lookup decoding).

For each request and order m a hash table holds where the m-gram of that hash ended
last. A hit is compared with the text before it is used, so a collision, or an entry of
the slot's former request, can hide an occurrence but never make one up; and what is
compared or proposed lies in front of the end of the request's own text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ORDERS = (8, 5, 3)
"""Lengths of the grams that are looked up, the longest that occurred before wins."""
MOST_MATCH = 16
"""A hit is extended backwards to this many tokens: how long a match counts."""
CHUNK = 4096
"""Tokens that a step adds to the tables, at most: long prompts take several steps, in
which the grams of their beginnings are already found. The first requests come first."""
_MOST_BITS = 17  # of a table: 1.5 MiB a slot, touched when the slot is used
_LONGEST = max(ORDERS)
# Odd 64-bit factors: the hash of a gram is the high bits of their sum of products.
_RANDOM = np.random.default_rng(0)
_FACTORS = _RANDOM.integers(1 << 64, size=_LONGEST, dtype=np.uint64) | np.uint64(1)
_SUMS = np.array(ORDERS) - 1
_BACK, _GRAM = np.arange(MOST_MATCH), np.arange(_LONGEST)


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of the requests of a step: those of a table, then this step's.

    Attributes:
        table: int [>= n, longest], row i of request i; read up to `known[i]` only.
        known: int64 [n], tokens in the table.
        new: int64 [n, w], this step's tokens.
        count: int64 [n], how many of them there are.
    """

    table: np.ndarray
    known: np.ndarray
    new: np.ndarray
    count: np.ndarray

    @property
    def length(self) -> np.ndarray:
        """int64 [n], tokens of each request."""
        return np.asarray(self.known + self.count)


class NgramIndex:
    """Proposes what followed the latest occurrence of a request's last tokens.

    Args:
        capacity: Slots of requests.
        longest: Tokens of a request, at most; sizes the tables.
        most: Tokens proposed, K.
    """

    def __init__(self, capacity: int, longest: int, most: int) -> None:
        self._bits = min(max(longest, 128).bit_length() + 1, _MOST_BITS)
        # End (exclusive) of the last gram of each hash, by order; 0 is none.
        self._last = np.zeros(len(ORDERS) * capacity << self._bits, np.int32)
        self._order = (np.arange(len(ORDERS)) * capacity << self._bits)[:, None]
        # A text begins after as many places as a look back may pass its beginning.
        self._width = longest + most + MOST_MATCH
        self._tokens = np.zeros(capacity * self._width, np.int32)
        self._length = np.zeros(capacity, np.int64)
        self._indexed = np.zeros(capacity, np.int64)  # grams that end there or before
        self._ahead = np.arange(most)

    def begin(self, slot: int) -> None:
        """Another request has the slot: nothing of the former one is left."""
        if self._length[slot]:
            last = self._last.reshape(len(ORDERS), -1)
            last[:, slot << self._bits : (slot + 1) << self._bits] = 0
            self._tokens[slot * self._width : (slot + 1) * self._width] = 0
            self._indexed[slot] = self._length[slot] = 0

    def propose(self, slots: np.ndarray, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """Index what is new of each text, and look its end up.

        What was proposed is followed over the end of the text, as in LZ77: a text that
        repeats with a period below K is continued so.

        Args:
            slots: int64 [n], each at most once.
            text: Of the requests; it only grows between calls.

        Returns:
            Tokens int64 [n, K], -1 where nothing matches; lengths of the matches
            int64 [n], 0 or from the least order to `MOST_MATCH`.
        """
        n, length = len(slots), text.length
        begin = slots * self._width + MOST_MATCH
        self._append(slots, text, begin, length)
        slot, start, end = self._waiting(slots, begin, length)
        grams = self._tokens[(start + end)[:, None] - 1 - _GRAM]
        cells = self._cells(slot, grams)
        old = end[:-n]
        for order, cell in zip(ORDERS, cells[:, :-n], strict=True):
            # Of the same gram twice the later end is left: assignment is in order.
            whole = old >= order
            self._last[cell[whole]] = old[whole]
        at = self._last[cells[:, -n:]]
        # An entry may be of a text that was longer: the slot's former request's.
        which, row = np.nonzero((at > 0) & (at < length))
        tokens, match = np.full((n, len(self._ahead)), -1), np.zeros(n, np.int64)
        if not len(row):
            return tokens, match
        there = at[which, row].astype(np.int64)
        first = begin[row]
        here = self._tokens[(first + length[row])[:, None] - 1 - _BACK]
        same = self._tokens[(first + there)[:, None] - 1 - _BACK] == here
        # One beyond the window, so that the first difference is always found.
        run = np.argmin(np.pad(same, ((0, 0), (0, 1))), axis=1)
        run = np.minimum(run, there)
        hit = run >= np.array(ORDERS)[which]
        # Rows of longer orders come first: they are written last.
        row, run, there, first = (a[hit][::-1] for a in (row, run, there, first))
        match[row] = run
        period = (length[row] - there)[:, None]
        tokens[row] = self._tokens[(first + there)[:, None] + self._ahead % period]
        return tokens, match

    def _append(
        self, slots: np.ndarray, text: Text, begin: np.ndarray, length: np.ndarray
    ) -> None:
        """Copy what is new; what the table has of a request, where it is another's."""
        for i in np.flatnonzero(self._length[slots] != text.known).tolist():
            known, at = int(text.known[i]), int(begin[i])
            self._tokens[at : at + known] = text.table[i, :known]
            self._indexed[slots[i]] = min(self._indexed[slots[i]], max(known - 1, 0))
        column = np.arange(text.new.shape[1])
        there = column < text.count[:, None]
        at = (begin + text.known)[:, None] + column
        self._tokens[at[there]] = text.new[there]
        self._length[slots] = length

    def _waiting(
        self, slots: np.ndarray, begin: np.ndarray, length: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Grams to be entered, all but the last of each text; then the last ones.

        Returns:
            Of each gram the slot, where its text begins, and its end in the text.
        """
        done = self._indexed[slots]
        count = np.maximum(length - 1 - done, 0)
        count = np.minimum(count, np.maximum(CHUNK - (np.cumsum(count) - count), 0))
        self._indexed[slots] = done + count
        of = np.repeat(np.arange(len(slots)), count)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        of = np.concatenate([of, np.arange(len(slots))])
        end = np.concatenate([done[of[: len(nth)]] + nth + 1, length])
        return slots[of], begin[of], end

    def _cells(self, slots: np.ndarray, back: np.ndarray) -> np.ndarray:
        """Cells of the grams, int64 [orders, r].

        Args:
            back: int [r, 8], tokens, the last one first.
        """
        sums = np.cumsum(back.astype(np.uint64) * _FACTORS, axis=1)[:, _SUMS].T
        cell = (sums >> np.uint64(64 - self._bits)).astype(np.int64)
        return np.asarray(cell + (slots << self._bits) + self._order)
