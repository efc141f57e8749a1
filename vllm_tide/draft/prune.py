"""Selection of a pruned draft's vocabulary from token counts of live traffic.

The size is fixed by the serving engine's tensors. A new selection is part of the next
publication, as another `d2t`. Rows of tokens in both vocabularies are unchanged; rows
of added tokens are copied from the target, as in a fresh draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tide.draft.config import DraftError
from vllm_tide.draft.module import Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap


def choose_vocab(counts: Tensor, size: int) -> Tensor:
    """Return the most frequent tokens, int64 [size], sorted; `counts` is [V_t].

    Ties go to the lower id (the more frequent one in a byte-pair vocabulary).

    Raises:
        DraftError: The size is out of range.
    """
    if counts.ndim != 1 or not 0 < size <= counts.numel():
        raise DraftError(
            f"draft vocabulary: cannot choose {size} of {counts.numel()} tokens."
        )
    rank = counts.detach().to("cpu", torch.float64)
    order = torch.argsort(rank, descending=True, stable=True)
    return order[:size].sort().values


def coverage(counts: Tensor, vocab: VocabMap) -> float:
    """Return the share of counted tokens in a draft vocabulary (0 to 1; 1 if none)."""
    total = float(counts.sum(dtype=torch.float64))
    if not total:
        return 1.0
    inside = counts.cpu()[vocab.target_ids]
    return float(inside.sum(dtype=torch.float64)) / total


def better_vocab(
    counts: Tensor, vocab: VocabMap, min_gain: float = 0.005
) -> VocabMap | None:
    """Return a vocabulary of the same size with at least `min_gain` more coverage.

    Only counted tokens are added, so uncounted ones mostly stay.

    Args:
        min_gain: Minimum gain in coverage (0 to 1), as added rows need training.
    """
    if vocab.is_identity or not bool((counts > 0).any()):
        return None
    # Half a count for current tokens: they win ties, also over uncounted tokens.
    biased = counts.detach().to("cpu", torch.float64, copy=True)
    biased[vocab.target_ids] += 0.5
    ids = choose_vocab(biased, vocab.target_ids.numel())
    new = VocabMap.from_target_ids(ids, vocab.draft_ids.numel())
    if coverage(counts, new) - coverage(counts, vocab) < min_gain:
        return None
    return new


def reprune(draft: Draft, vocab: VocabMap, target: TargetRows) -> Draft:
    """Copy a draft with another vocabulary of the same size.

    An optimizer's state for `lm_head.weight` is then of the old rows.

    Raises:
        DraftError: The size differs, or `lm_head` is shared with the target.
    """
    size = draft.vocab.target_ids.numel()
    if vocab.target_ids.numel() != size:
        raise DraftError(
            f"draft vocabulary: size {vocab.target_ids.numel()} differs from the "
            f"served size {size}."
        )
    if not draft.owns_lm_head:
        raise DraftError("draft vocabulary: lm_head is shared with the target.")
    tensors = {name: value.detach() for name, value in draft.named_tensors().items()}
    old = tensors["lm_head.weight"]
    at = draft.vocab.draft_ids[vocab.target_ids]  # [V_d], -1 for added tokens
    common = at >= 0
    rows = torch.empty_like(old)
    rows[common] = old[at[common]]
    rows[~common] = target.lm_head[vocab.target_ids[~common]].to(old)
    tensors["lm_head.weight"] = rows
    new = {"d2t": vocab.d2t, "t2d": vocab.t2d}
    constants = {
        name: new[name].to(value.dtype) for name, value in draft.constants.items()
    }
    out = draft.clone(tensors, vocab, constants)
    for name, value in draft.named_tensors().items():
        out.tensor(name).requires_grad_(value.requires_grad)
    return out


MIN_TOKENS = 4096
"""Counted tokens before the first selection."""
HALF_LIFE_TOKENS = 1 << 20
"""Counted tokens after which a count is halved."""


class LiveVocabulary:
    """Decayed counts, float64 [V_t], of generated tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.counts: Tensor = torch.zeros(vocab_size, dtype=torch.float64)
        self._since = 0

    def add(self, tokens: Tensor) -> None:
        """Count generated tokens, integer [n]."""
        self.counts += torch.bincount(tokens.long(), minlength=self.counts.numel())
        self._since += tokens.numel()
        if self._since >= HALF_LIFE_TOKENS // 8:
            self.counts *= 0.5 ** (self._since / HALF_LIFE_TOKENS)
            self._since = 0

    def better(self, vocab: VocabMap) -> VocabMap | None:
        """Return a vocabulary of the same size with more coverage, or None."""
        if float(self.counts.sum()) < MIN_TOKENS:
            return None
        return better_vocab(self.counts, vocab)
