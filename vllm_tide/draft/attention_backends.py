"""Which attention the trainer runs: the knob `tide.train.attention`."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from torch import Tensor

from vllm_tide.draft.attention import packed_attention, reference_attention
from vllm_tide.draft.config import DraftError
from vllm_tide.draft.rows import RowLayout


class Attention(Protocol):
    """Arguments and result as those of `attention.packed_attention`."""

    def __call__(
        self,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        kd: Tensor | None,
        vd: Tensor | None,
        active: Tensor,
        layout: RowLayout,
    ) -> Tensor:
        """Attend."""


def attention_backend(name: str, device: str) -> Attention:
    """The attention of this name.

    Args:
        name: auto, packed, flex, xformers or reference.
        device: Device type of the tensors, as in `torch.device.type`.

    Raises:
        DraftError: It cannot train on this device.
    """
    if name == "auto":
        name = "flex" if device == "cuda" else "packed"
    if name == "packed":
        return packed_attention
    if name == "reference":
        return reference_attention
    if name not in ("flex", "xformers"):
        raise DraftError(
            f"tide.train.attention is {name!r}; use auto, packed, flex, xformers or "
            "reference."
        )
    if device != "cuda":
        raise DraftError(
            f"tide.train.attention is {name!r}, which cannot train on {device}; use "
            "packed or auto."
        )
    if name == "flex":
        from vllm_tide.draft.attention_flex import flex_attention

        return flex_attention
    if importlib.util.find_spec("xformers") is None:
        raise DraftError(
            "tide.train.attention is 'xformers', which is not installed; install it or "
            "use flex or packed."
        )
    from vllm_tide.draft.attention_xformers import xformers_attention

    return xformers_attention
