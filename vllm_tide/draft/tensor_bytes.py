"""Conversion of a draft's tensors to the bytes that are sent, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_tide.transport.draft_weights import TensorBytes


def to_bytes(tensors: Mapping[str, Tensor]) -> dict[str, TensorBytes]:
    """Return views of tensors on the host."""
    return {
        name: TensorBytes(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.contiguous().flatten().view(torch.uint8).numpy(),
        )
        for name, tensor in tensors.items()
    }


def from_bytes(tensors: Mapping[str, TensorBytes]) -> dict[str, Tensor]:
    """Return tensors that are views of writable bytes, else copies."""
    out = {}
    for name, (dtype, shape, data) in tensors.items():
        flat = torch.from_numpy(data if data.flags.writeable else data.copy())
        out[name] = flat.view(getattr(torch, dtype)).view(shape)
    return out
