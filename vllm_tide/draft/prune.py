"""Chooses a pruned draft's vocabulary anew, from counts of live traffic.

The size stays: a serving engine's tensors have it. A new choice travels with the next
publication as another `d2t`. Rows of tokens that stay keep what they learnt; rows of
tokens that come are the target's, as a fresh head's are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tide.draft.config import DraftError
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap


def choose_vocab(counts: Tensor, size: int) -> Tensor:
    """The most counted tokens, int64 [size], increasing; `counts` is [V_t].

    Equal counts go to the lower id (the more frequent one in a byte-pair vocabulary).

    Raises:
        DraftError: The size does not fit.
    """
    if counts.ndim != 1 or not 0 < size <= counts.numel():
        raise DraftError(
            f"draft vocabulary: {size} tokens cannot be chosen from {counts.numel()}."
        )
    rank = counts.detach().to("cpu", torch.float64)
    order = torch.argsort(rank, descending=True, stable=True)
    return order[:size].sort().values


def coverage(counts: Tensor, vocab: VocabMap) -> float:
    """Share of counted tokens that are in a draft vocabulary (0 to 1; 1 if none)."""
    total = float(counts.sum(dtype=torch.float64))
    if not total:
        return 1.0
    inside = counts.cpu()[vocab.target_ids]
    return float(inside.sum(dtype=torch.float64)) / total


def better_vocab(
    counts: Tensor, vocab: VocabMap, min_gain: float = 0.005
) -> VocabMap | None:
    """A vocabulary of the same size that covers traffic better, if that is worth it.

    Tokens never counted stay where they are: only as many change as were heard.

    Args:
        min_gain: Least gain in coverage for which a change pays (0 to 1): rows that
            come must be trained.
    """
    if vocab.is_identity or not bool((counts > 0).any()):
        return None
    # Half a count for what is in use: it wins ties and beats what was never heard.
    biased = counts.detach().to("cpu", torch.float64, copy=True)
    biased[vocab.target_ids] += 0.5
    ids = choose_vocab(biased, vocab.target_ids.numel())
    new = VocabMap.from_target_ids(ids, vocab.draft_ids.numel())
    if coverage(counts, new) - coverage(counts, vocab) < min_gain:
        return None
    return new


def reprune(draft: Eagle3Draft, vocab: VocabMap, target: TargetRows) -> Eagle3Draft:
    """A draft like this one over another vocabulary of the same size.

    An optimizer's state for `lm_head.weight` belongs to the old rows.

    Raises:
        DraftError: The size differs, or the LM head is the target's own.
    """
    size = draft.vocab.target_ids.numel()
    if vocab.target_ids.numel() != size:
        raise DraftError(
            f"draft vocabulary: {vocab.target_ids.numel()} tokens cannot replace "
            f"{size}; a serving engine's size is fixed."
        )
    if not draft.owns_lm_head:
        raise DraftError("draft vocabulary: the LM head is the target's own.")
    tensors = {name: value.detach() for name, value in draft.named_tensors().items()}
    old = tensors["lm_head.weight"]
    at = draft.vocab.draft_ids[vocab.target_ids]  # [V_d], -1 where the token comes
    stays = at >= 0
    rows = torch.empty_like(old)
    rows[stays] = old[at[stays]]
    rows[~stays] = target.lm_head[vocab.target_ids[~stays]].to(old)
    tensors["lm_head.weight"] = rows
    fresh = {"d2t": vocab.d2t, "t2d": vocab.t2d}
    constants = {
        name: fresh[name].to(value.dtype) for name, value in draft.constants.items()
    }
    out = draft.clone(tensors, vocab, constants)
    for name, value in draft.named_tensors().items():
        out.tensor(name).requires_grad_(value.requires_grad)
    return out


MIN_TOKENS = 4096
"""Counted tokens before the first choice."""
HALF_LIFE_TOKENS = 1 << 20
"""Counted tokens after which one counts half."""


class LiveVocabulary:
    """Decayed counts, float64 [V_t], of what the target says."""

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
        """A vocabulary of the same size that covers traffic better, or None."""
        if float(self.counts.sum()) < MIN_TOKENS:
            return None
        return better_vocab(self.counts, vocab)
