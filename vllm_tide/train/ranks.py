"""The processes that train one draft together, and the messages between them.

No pickle: an order is JSON, a batch is JSON that says what follows and then the bytes
of its tensors. Gloo carries them on the CPU, whatever device trains.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_tide.draft.config import DraftError
from vllm_tide.train.gpu import claim
from vllm_tide.train.packing import BranchRows, PackedBatch
from vllm_tide.train.sample import TopK
from vllm_tide.transport.shm import TransportError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(minutes=10)  # a silent rank is taken for lost


class RankLost(TransportError):
    """Another rank of this trainer died or fell silent; the run must be restarted."""


class Ranks:
    """The process group of one trainer.

    Args:
        device: `tide.train.device`; `cuda` takes the GPU of the local rank.

    Raises:
        DraftError: The device cannot be used by several ranks.
    """

    def __init__(self, device: str = "cpu") -> None:
        from torch.distributed.device_mesh import init_device_mesh

        kind = torch.device(device)
        backend = "gloo"
        if kind.type == "cuda":
            if kind.index is not None:
                raise DraftError(
                    f"tide.train.device: {device!r} names one GPU but several ranks "
                    "train; use 'cuda'."
                )
            claim(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
            backend = "cpu:gloo,cuda:nccl"
        elif kind.type != "cpu":
            raise DraftError(
                f"tide.train.device: {device!r} cannot be trained on by several ranks; "
                "use 'cpu' or 'cuda'."
            )
        dist.init_process_group(backend, timeout=TIMEOUT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(kind.type, (self.size,))

    @staticmethod
    def asked() -> bool:
        """True if torchrun started this process with more than one rank."""
        return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ

    @property
    def is_leader(self) -> bool:
        """True if this rank owns engines, buffers and the gate."""
        return self.rank == LEADER

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End a process that was a rank; use it instead of returning from `main`.

    Gloo's threads outlive the group (DTensor keeps it) and may drop a last tensor while
    the interpreter ends, which aborts the process after all is done
    (pytorch/pytorch#190489); torchrun would take that for a failed rank.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Name a failed collective for what it is.

    Raises:
        RankLost: A rank is gone or silent.
    """
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:  # gloo raises no class of its own
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise RankLost(
            "train: another rank of this trainer is gone or silent; start all ranks "
            "again (torchrun --max-restarts does) and they go on from the last "
            f"checkpoint ({str(error).splitlines()[0]})"
        ) from error


LEADER = 0
# Dataclasses that may be in a batch: nothing else is ever built from a message.
KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (PackedBatch, BranchRows, TopK)
}


def encode(value: Any) -> tuple[str, list[Tensor]]:
    """A dataclass of tensors, numbers and lists as JSON and the tensors it names.

    Raises:
        TypeError: It holds something else.
    """
    tensors: list[Tensor] = []

    def plain(item: Any) -> dict[str, Any]:
        name = type(item).__name__
        if isinstance(item, Tensor):
            tensors.append(item.contiguous())
            return {"tensor": len(tensors) - 1}
        if name not in KINDS:
            raise TypeError(f"a batch cannot carry a {name} to another rank.")
        return {"kind": name, **vars(item)}

    return json.dumps(value, default=plain), tensors


def decode(text: str, tensors: list[Tensor]) -> Any:
    """Inverse of `encode`.

    Raises:
        TransportError: The message names a class that is not in `KINDS`.
    """

    def made(tree: dict[str, Any]) -> Any:
        if "tensor" in tree:
            return tensors[tree["tensor"]]
        name = tree.pop("kind")
        if name not in KINDS:
            raise TransportError(
                f"ranks: a batch holds an unknown {name!r}; all ranks must run the "
                "same version of vllm_tide."
            )
        return KINDS[name](**tree)

    return json.loads(text, object_hook=made)


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
    text, tensors = encode(value)
    shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    head = _bytes(json.dumps([text, shapes]))
    dist.send(torch.tensor([head.numel()]), rank)
    dist.send(head, rank)
    for tensor in tensors:
        if tensor.numel():
            dist.send(_as_bytes(tensor), rank)


def receive() -> Any:
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, LEADER)
    head = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(head, LEADER)
    text, shapes = json.loads(head.numpy().tobytes())
    tensors = []
    for dtype, shape in shapes:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            dist.recv(_as_bytes(tensor), LEADER)
        tensors.append(tensor)
    return decode(text, tensors)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)  # contiguous: shares memory


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
