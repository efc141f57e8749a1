"""Fixed buffers between the model's tensors and the ring: no allocation per step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

WIRE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def wire_view(tensor: torch.Tensor) -> np.ndarray:
    """NumPy view of a CPU tensor as it goes over the wire.

    bfloat16 has no NumPy type, so it is seen as its bits (uint16).
    """
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    plain: np.ndarray = tensor.numpy()
    return plain


class Staging:
    """Features and hidden teachers of one step, in the wire's type.

    Args:
        max_rows: Most rows of one step (`max_num_batched_tokens`).
        num_aux: Number of captured layers.
        hidden_size: H.
        dtype: "bfloat16", "float16" or "float32".
        teacher: Whether hidden teachers are staged too.

    Attributes:
        features: [max_rows, num_aux * H], NumPy view.
        teacher: [max_rows, H] NumPy view, or None.
    """

    def __init__(
        self,
        max_rows: int,
        num_aux: int,
        hidden_size: int,
        dtype: str,
        teacher: bool,
    ) -> None:
        self._hidden_size = hidden_size
        kind = WIRE_DTYPES[dtype]
        self._features = torch.empty(max_rows, num_aux * hidden_size, dtype=kind)
        self.features = wire_view(self._features)
        self._teacher: torch.Tensor | None = None
        self.teacher: np.ndarray | None = None
        if teacher:
            self._teacher = torch.empty(max_rows, hidden_size, dtype=kind)
            self.teacher = wire_view(self._teacher)

    def fill(
        self, aux: Sequence[torch.Tensor], hidden: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Copy rows of one step in, converting the type.

        Args:
            aux: num_aux tensors [>= rows of the step, H], lowest layer first.
            hidden: The same after the target's final norm.
            rows: int32 [n], which.
        """
        width, n = self._hidden_size, len(rows)
        for i, tensor in enumerate(aux):
            out = self._features[:n, i * width : (i + 1) * width]
            out.copy_(tensor.index_select(0, rows))
        if self._teacher is not None:
            self._teacher[:n].copy_(hidden.index_select(0, rows))
