"""The draft vocabulary: a sorted subset D of the target's token ids.

EAGLE-3 checkpoints store it twice: `d2t[j] = D[j] - j` (an offset, int64 [V_d]) and
`t2d[v] = (v in D)` (bool [V_t]).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tide.draft.config import DraftError


@dataclass(frozen=True)
class VocabMap:
    """Map between draft ids and target ids.

    Attributes:
        target_ids: int64 [V_d], target id of each draft id, strictly increasing.
        draft_ids: int64 [V_t], draft id of each target id, -1 outside D.
    """

    target_ids: Tensor
    draft_ids: Tensor

    @property
    def is_identity(self) -> bool:
        return self.target_ids.numel() == self.draft_ids.numel()

    @property
    def d2t(self) -> Tensor:
        """Offsets `D[j] - j`, int64 [V_d]."""
        return self.target_ids - torch.arange(self.target_ids.numel())

    @property
    def t2d(self) -> Tensor:
        """Membership `v in D`, bool [V_t]."""
        return self.draft_ids >= 0

    @classmethod
    def identity(cls, vocab_size: int) -> VocabMap:
        ids = torch.arange(vocab_size)
        return cls(ids, ids.clone())

    @classmethod
    def from_target_ids(cls, target_ids: Tensor, vocab_size: int) -> VocabMap:
        """Build the map from sorted target ids.

        Args:
            target_ids: Integer [V_d], strictly increasing target ids.

        Raises:
            DraftError: An id is out of range or the ids do not increase.
        """
        ids = target_ids.to(torch.int64).cpu().contiguous()
        if ids.ndim != 1 or ids.numel() == 0:
            raise DraftError("draft vocabulary: the list of target ids is empty.")
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise DraftError(
                f"d2t: maps to target ids {int(ids.min())}..{int(ids.max())}, outside "
                f"the target vocabulary 0..{vocab_size - 1}."
            )
        if not bool((ids[1:] > ids[:-1]).all()):
            raise DraftError("d2t: target ids of the draft vocabulary must increase.")
        draft_ids = torch.full((vocab_size,), -1, dtype=torch.int64)
        draft_ids[ids] = torch.arange(ids.numel())
        return cls(ids, draft_ids)

    @classmethod
    def from_d2t(cls, d2t: Tensor, vocab_size: int) -> VocabMap:
        """Build from the checkpoint's offsets `d2t` (integer [V_d])."""
        offsets = d2t.to(torch.int64).cpu()
        return cls.from_target_ids(offsets + torch.arange(offsets.numel()), vocab_size)

    def check_t2d(self, t2d: Tensor) -> None:
        """Raise DraftError unless the stored `t2d` (bool [V_t]) is the same set."""
        if t2d.numel() != self.draft_ids.numel() or not bool(
            (t2d.to(torch.bool).cpu() == self.t2d).all()
        ):
            raise DraftError("t2d: marks other tokens than d2t.")
