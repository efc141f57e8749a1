"""Rows whose best token the draft can say: a pruned one learns nothing from others."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.train.gpu import on_device
from vllm_tide.train.sample import Sample

_ROWS = 256  # looked at together: their logits are [_ROWS, V]


class Sayable:
    """Tells them of one target.

    Args:
        target: Rows of the target.
        dtype: Logits are computed in.
    """

    def __init__(self, target: TargetRows, dtype: torch.dtype) -> None:
        self._target, self._dtype = target, dtype
        self._rows: Tensor | None = None

    def rows_of(self, sample: Sample, vocab: VocabMap) -> Tensor:
        """Bool [S]: the target's best token is in the draft vocabulary.

        Args:
            sample: S rows; without a teacher all are False.
            vocab: The draft's.
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
