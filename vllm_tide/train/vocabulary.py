"""Which tokens a pruned draft should know: counted while it serves.

At day 0 a pruned vocabulary is a guess. The tokens that the target really says are in
every captured document, so the guess is mended between two cycles; the next
publication carries the new `d2t`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tide.draft.prune import better_vocab
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.sample import Sample

MIN_TOKENS = 4096
"""Counted tokens before the first choice."""
HALF_LIFE_TOKENS = 1 << 20
"""Counted tokens after which one counts half."""


class LiveVocabulary:
    """Decayed counts of what the target says.

    Args:
        vocab_size: V_t.

    Attributes:
        counts: float64 [V_t].
    """

    def __init__(self, vocab_size: int) -> None:
        self.counts: Tensor = torch.zeros(vocab_size, dtype=torch.float64)
        self._since = 0

    def add(self, sample: Sample) -> None:
        """Count the generated tokens of a document."""
        first = max(0, sample.num_prompt_tokens - sample.start)
        tokens = sample.tokens[first:].long()
        self.counts += torch.bincount(tokens, minlength=self.counts.numel())
        self._since += tokens.numel()
        if self._since >= HALF_LIFE_TOKENS // 8:
            self.counts *= 0.5 ** (self._since / HALF_LIFE_TOKENS)
            self._since = 0

    def better(self, vocab: VocabMap) -> VocabMap | None:
        """A vocabulary of the same size that covers traffic better, or None."""
        if float(self.counts.sum()) < MIN_TOKENS:
            return None
        return better_vocab(self.counts, vocab)
