"""The processes that train one draft, and the messages between them.

No pickle: a command is JSON, a batch is JSON and safetensors. Gloo sends both from CPU
memory, also when training runs on GPUs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from vllm_tide.draft.config import DraftError
from vllm_tide.draft.rows import RowLayout
from vllm_tide.train.gpu import use_device
from vllm_tide.train.packing import PackedBatch
from vllm_tide.train.sample import TopK
from vllm_tide.transport.shm import TransportError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(minutes=10)  # after which a silent rank counts as lost


class RankLost(TransportError):
    """Another rank died or does not respond; all ranks must be restarted."""


class Ranks:
    """The process group of one trainer; `cuda` selects the GPU of the local rank.

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
            use_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
            backend = "cpu:gloo,cuda:nccl"
        elif kind.type != "cpu":
            raise DraftError(
                f"tide.train.device: {device!r} is not supported with several ranks; "
                "use 'cpu' or 'cuda'."
            )
        dist.init_process_group(backend, timeout=TIMEOUT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(kind.type, (self.size,))

    @property
    def is_leader(self) -> bool:
        """True for the rank with engines, buffers and the gate."""
        return self.rank == LEADER

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def exit_rank(status: int) -> NoReturn:
    """Exit the process of a rank; use it instead of returning from `main`.

    Gloo's threads outlive the process group (DTensor references it) and may free a
    tensor during interpreter shutdown, which aborts the process
    (pytorch/pytorch#190489); torchrun would report a failed rank.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def detect_lost_ranks() -> Iterator[None]:
    """Convert the error of a failed collective to `RankLost`.

    Raises:
        RankLost: A rank is gone or silent.
    """
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:  # gloo raises plain RuntimeError
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise RankLost(
            "train: another rank of this trainer is gone or does not respond; restart "
            "all ranks (torchrun --max-restarts does); they resume from the last "
            f"checkpoint ({str(error).splitlines()[0]})"
        ) from error


LEADER = 0


def encode(batch: PackedBatch) -> tuple[bytes, bytes]:
    teacher = batch.teacher
    listed = vars(teacher) if isinstance(teacher, TopK) else {}
    every = vars(batch) | listed
    tensors = {n: t.contiguous() for n, t in every.items() if isinstance(t, Tensor)}
    lists = {"keys": batch.keys, "layout": vars(batch.layout)}
    return json.dumps(lists).encode(), save(tensors)


def decode(text: bytes, raw: bytes) -> PackedBatch:
    lists, tensors = json.loads(text), load(raw)
    if "teacher" not in tensors:
        topk = {f.name: tensors.pop(f.name) for f in fields(TopK)}
        tensors["teacher"] = TopK(**topk)
    layout = RowLayout(**lists["layout"])
    return PackedBatch(layout=layout, keys=lists["keys"], **tensors)


def broadcast_json(value: Any = None) -> Any:
    """Broadcast the leader's `value`; blocks until every rank has it."""
    leads = dist.get_rank() == LEADER
    raw = (
        _bytes(json.dumps(value).encode())
        if leads
        else torch.empty(0, dtype=torch.uint8)
    )
    size = torch.tensor([raw.numel()])
    dist.broadcast(size, LEADER)
    if not leads:
        raw = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(raw, LEADER)
    return value if leads else json.loads(raw.numpy().tobytes())


def send(batch: PackedBatch | None, rank: int) -> None:
    parts = (b"", b"") if batch is None else encode(batch)
    dist.send(torch.tensor([len(part) for part in parts]), rank)
    for part in filter(None, parts):
        dist.send(_bytes(part), rank)


def receive() -> PackedBatch | None:
    sizes, parts = torch.empty(2, dtype=torch.int64), []
    dist.recv(sizes, LEADER)
    for size in filter(None, sizes.tolist()):
        raw = torch.empty(size, dtype=torch.uint8)
        dist.recv(raw, LEADER)
        parts.append(raw.numpy().tobytes())
    return decode(*parts) if parts else None


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
