"""The trainer's GPU, and how a batch gets there.

Planned, packed, published and stored is on the host; the draft's parameters and the
target's rows are on `tide.train.device`.
"""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_tide.draft.config import DraftError


def claim(name: str) -> None:
    """Let this process work on a device (`tide.train.device`), behind the others there.

    Priorities of streams hold inside one process; between processes MPS has its own.

    Raises:
        DraftError: Torch has no such device.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return
    os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= seen:
        raise DraftError(
            f"tide.train.device: {name!r}, but torch {torch.__version__} sees {seen} "
            "GPUs here; use 'cpu', or torch for CUDA or ROCm and a visible GPU."
        )
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream())  # of the lowest priority


def on_device(thing: Any, device: torch.device) -> Any:
    """Tensors on the host, and dataclasses and sequences of them, on a device.

    Nobody waits for the copies: they are made from pinned memory.
    """
    if device.type == "cpu":
        return thing
    if isinstance(thing, Tensor):
        return thing.pin_memory().to(device, non_blocking=True)
    if isinstance(thing, (list, tuple)):
        return type(thing)(on_device(x, device) for x in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        held = {f.name: getattr(thing, f.name) for f in fields(thing)}
        return replace(thing, **{n: on_device(x, device) for n, x in held.items()})
    return thing
