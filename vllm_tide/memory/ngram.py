"""N-gram index of each running request's own tokens (prompt-lookup decoding).

For each request and order m a hash table stores the last end of the m-gram with a given
hash. A hit is compared with the text before use. So a collision, or an entry of the
slot's former request, can hide an occurrence but not produce a false one. Compared and
proposed tokens are before the end of the request's own text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_tide._shm import ngram_propose

ORDERS = (5, 3, 2)
"""Lengths of the looked-up n-grams; the longest that occurred before is used. Equal to
those of `csrc/ngram.h`."""
MOST_MATCH = 8
"""Limit of the match length: a hit is extended backwards to this many tokens."""
CHUNK = 4096
"""Most tokens indexed per step, in the order of the requests. A long prompt is indexed
from its start over several steps."""
_MOST_BITS = 17  # of a table: 1.5 MiB per slot, allocated lazily by the kernel
_LONGEST = max(ORDERS)
# Odd 64-bit factors: the hash of a gram is the high bits of their sum of products.
_RANDOM = np.random.default_rng(0)
_FACTORS = _RANDOM.integers(1 << 64, size=_LONGEST, dtype=np.uint64) | np.uint64(1)


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of the requests of a step: those in a table, then this step's.

    Attributes:
        table: int [>= n, longest], row i of request i; read up to `known[i]` only.
        known: int64 [n], tokens in the table.
        new: int64 [n, w], this step's tokens.
        count: int64 [n], number of this step's tokens.
    """

    table: np.ndarray
    known: np.ndarray
    new: np.ndarray
    count: np.ndarray

    @property
    def length(self) -> np.ndarray:
        """Tokens of each request, int64 [n]."""
        return np.asarray(self.known + self.count)


class NgramIndex:
    """Proposals: the tokens after the last occurrence of a request's latest tokens."""

    def __init__(self, capacity: int, longest: int, most: int) -> None:
        self._bits = min(max(longest, 128).bit_length() + 1, _MOST_BITS)
        # End (exclusive) of the last gram of each hash, by order; 0 is none.
        self._last = np.zeros(len(ORDERS) * capacity << self._bits, np.int32)
        # Padding of `MOST_MATCH` before a text, for backward extension of matches.
        self._width = longest + most + MOST_MATCH
        self._tokens = np.zeros(capacity * self._width, np.int32)
        self._length = np.zeros(capacity, np.int64)
        self._indexed = np.zeros(capacity, np.int64)  # grams that end there or before
        self._most = most

    def begin(self, slot: int) -> None:
        """Clear a slot for another request."""
        if self._length[slot]:
            last = self._last.reshape(len(ORDERS), -1)
            last[:, slot << self._bits : (slot + 1) << self._bits] = 0
            self._tokens[slot * self._width : (slot + 1) * self._width] = 0
            self._indexed[slot] = self._length[slot] = 0

    def propose(self, slots: np.ndarray, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """Index the new tokens of each text, and look up its end.

        A proposal may continue beyond the end of the text, as in LZ77: a text that
        repeats with a period below K is continued periodically.

        Args:
            slots: int64 [n], distinct.
            text: Texts of the requests; they only grow between calls.

        Returns:
            Tokens int64 [n, K], -1 without a match; lengths of the matches int64 [n],
            0 or from the smallest order to `MOST_MATCH`.
        """
        width, shape = self._width, (len(slots), self._most)
        # Copy a request's table into a slot with other contents.
        for i in np.flatnonzero(self._length[slots] != text.known).tolist():
            slot, known = int(slots[i]), int(text.known[i])
            begin = slot * width + MOST_MATCH
            self._tokens[begin : begin + known] = text.table[i, :known]
            self._indexed[slot] = min(self._indexed[slot], max(known - 1, 0))
        tokens, match = np.empty(shape, np.int64), np.empty(shape[0], np.int64)
        ngram_propose(
            self._last, self._tokens, self._length, self._indexed, _FACTORS,
            self._bits, MOST_MATCH, slots, text.known, text.count,
            np.ascontiguousarray(text.new, np.int32), tokens, match, CHUNK,
        )  # fmt: skip
        return tokens, match
