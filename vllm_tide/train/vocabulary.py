"""Which tokens a pruned draft should have, and which rows it can learn from.

At day 0 a pruned vocabulary is a guess. The tokens that the target really says are in
every captured document, so the guess is mended between two cycles; the next
publication carries the new `d2t`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tide.draft.prune import better_vocab
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.gpu import on_device
from vllm_tide.train.sample import Sample

MIN_TOKENS = 4096
"""Counted tokens before the first choice."""
HALF_LIFE_TOKENS = 1 << 20
"""Counted tokens after which one counts half."""


class LiveVocabulary:
    """Decayed counts of what the target says.

    Attributes:
        counts: float64 [V_t].
    """

    def __init__(self, vocab_size: int) -> None:
        self.counts: Tensor = torch.zeros(vocab_size, dtype=torch.float64)
        self._since = 0

    def add(self, sample: Sample) -> None:
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


_ROWS = 256  # looked at together: their logits are [_ROWS, V]


class InVocabulary:
    """Rows whose best token is in the draft vocabulary; others teach it nothing."""

    def __init__(self, target: TargetRows, dtype: torch.dtype) -> None:
        self._target, self._dtype = target, dtype
        self._rows: Tensor | None = None

    def rows_of(self, sample: Sample, vocab: VocabMap) -> Tensor:
        """Bool [S]: the target's best token is in the draft vocabulary.

        Args:
            sample: S rows; without a teacher all are False.
        """
        inside = vocab.t2d
        if sample.teacher_topk is not None:
            return inside[sample.teacher_topk.ids[:, 0].long()]
        out = torch.zeros(sample.num_tokens, dtype=torch.bool)
        if sample.teacher_hidden is None:
            return out
        if self._rows is None:  # once: they are the largest tensor there is
            self._rows = self._target.rows_in(self._dtype)
        rows = self._rows
        for lo in range(0, sample.num_tokens, _ROWS):
            hidden = on_device(sample.teacher_hidden[lo : lo + _ROWS], rows.device)
            z = self._target.logits(hidden.to(rows.dtype), rows)
            out[lo : lo + _ROWS] = inside[z.argmax(-1).cpu()]
        return out
