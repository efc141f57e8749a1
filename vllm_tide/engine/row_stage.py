"""One step's rows on their way from the device to the ring (Model Runner V2).

A captured graph hands out views of buffers that its next replay overwrites, so the rows
are packed on the model's stream and leave from there. On a CPU the host is the device
and packing is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_tide.capture.recorder import TopK
from vllm_tide.capture.staging import Staging


class RowStage:
    """Rows of one step.

    Args:
        max_rows: Most rows of a step.
        num_aux: Number of captured layers.
        hidden_size: H.
        dtype: "bfloat16", "float16" or "float32", of features and hidden states.
        hidden: Whether hidden teachers are staged too.
        max_logits: Most rows of logits of a step.
        topk: Tokens of a top-k teacher; 0 for none.
        device: Where the model runs; only the CPU in this version.
    """

    def __init__(
        self,
        max_rows: int,
        num_aux: int,
        hidden_size: int,
        dtype: str,
        hidden: bool,
        max_logits: int,
        topk: int,
        device: torch.device,
    ) -> None:
        if device.type != "cpu":
            raise NotImplementedError(f"rows are staged on a CPU, not on {device}.")
        self._staging = Staging(max_rows, num_aux, hidden_size, dtype, hidden)
        self._has_topk = False
        self._ids = torch.empty(max_logits, topk, dtype=torch.int32)
        self._logprobs = torch.empty(max_logits, topk)
        self._tail = torch.empty(max_logits)

    @property
    def features(self) -> np.ndarray:
        """[max_rows, num_aux * H] in the wire's type."""
        return self._staging.features

    @property
    def hidden(self) -> np.ndarray | None:
        """[max_rows, H] in the wire's type, or None."""
        return self._staging.teacher

    @property
    def topk(self) -> TopK | None:
        """Ids, log-probabilities and tail of the step's logits, or None."""
        if not self._has_topk:
            return None
        return self._ids.numpy(), self._logprobs.numpy(), self._tail.numpy()

    def fill(
        self,
        aux: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        num_rows: int,
        topk: tuple[torch.Tensor, ...] | None,
    ) -> None:
        """Pack a step's rows.

        Args:
            aux: num_aux tensors [>= num_rows, H], lowest layer first.
            hidden: [>= num_rows, H], after the target's final norm.
            num_rows: Rows of the step.
            topk: Ids int32 [m, k], log-probabilities [m, k], tail [m]; or None.
        """
        self._staging.fill(aux, hidden, num_rows)
        self._has_topk = topk is not None
        if topk is not None:
            ids, logprobs, tail = topk
            self._ids[: len(ids)].copy_(ids)
            self._logprobs[: len(ids)].copy_(logprobs)
            self._tail[: len(ids)].copy_(tail)
