"""Messages between the ranks of one trainer: JSON orders to all, batches to one.

No pickle: an order is JSON, a batch is JSON that says what follows and then the bytes
of its tensors. Gloo carries them on the CPU, whatever device trains.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_tide.train.branch_rows import BranchRows
from vllm_tide.train.packing import PackedBatch
from vllm_tide.train.sample import TopK
from vllm_tide.transport.header import TransportError

LEADER = 0
# Dataclasses that may be in a batch: nothing else is ever built from a message.
KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (PackedBatch, BranchRows, TopK)
}


def encode(value: Any) -> tuple[Any, list[Tensor]]:
    """A dataclass of tensors, numbers and lists as JSON and the tensors it names.

    Raises:
        TypeError: It holds something else.
    """
    tensors: list[Tensor] = []
    return _encode(value, tensors), tensors


def decode(tree: Any, tensors: list[Tensor]) -> Any:
    """Inverse of `encode`.

    Raises:
        TransportError: The message names a class that is not in `KINDS`.
    """
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "tuple" in tree:
        return tuple(decode(item, tensors) for item in tree["tuple"])
    kind = KINDS.get(tree["kind"])
    if kind is None:
        raise TransportError(
            f"ranks: a batch holds an unknown {tree['kind']!r}; all ranks must run "
            "the same version of vllm_tide."
        )
    return kind(**{k: decode(v, tensors) for k, v in tree["fields"].items()})


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.contiguous())
        return {"tensor": len(tensors) - 1}
    if is_dataclass(value) and type(value).__name__ in KINDS:
        inside = {
            f.name: _encode(getattr(value, f.name), tensors) for f in fields(value)
        }
        return {"kind": type(value).__name__, "fields": inside}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a batch cannot carry a {type(value).__name__} to another rank.")


def broadcast_json(value: Any = None) -> Any:
    """Give `value` of the leader to every rank (blocks until all have it)."""
    leads = dist.get_rank() == LEADER
    raw = _bytes(json.dumps(value)) if leads else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([raw.numel()])
    dist.broadcast(size, LEADER)
    if not leads:
        raw = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(raw, LEADER)
    return value if leads else json.loads(raw.numpy().tobytes())


def send(value: Any, rank: int) -> None:
    """Send a batch to one rank, which calls `receive`."""
    tree, tensors = encode(value)
    shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    head = _bytes(json.dumps([tree, shapes]))
    dist.send(torch.tensor([head.numel()]), rank)
    dist.send(head, rank)
    for tensor in tensors:
        if tensor.numel():
            dist.send(_as_bytes(tensor), rank)


def receive() -> Any:
    """Receive a batch from the leader."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, LEADER)
    head = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(head, LEADER)
    tree, shapes = json.loads(head.numpy().tobytes())
    tensors = []
    for dtype, shape in shapes:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            dist.recv(_as_bytes(tensor), LEADER)
        tensors.append(tensor)
    return decode(tree, tensors)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)  # contiguous: shares memory


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
