"""The processes that train one draft together, and the messages between them.

No pickle: an order is JSON, a batch JSON and safetensors. Gloo carries them on the CPU,
whatever device trains.
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
from vllm_tide.train.gpu import claim
from vllm_tide.train.packing import PackedBatch
from vllm_tide.train.sample import TopK
from vllm_tide.transport.shm import TransportError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(minutes=10)  # a silent rank is taken for lost


class RankLost(TransportError):
    """Another rank of this trainer died or fell silent; the run must be restarted."""


class Ranks:
    """The process group of one trainer; `cuda` takes the GPU of the local rank.

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


def encode(batch: PackedBatch) -> tuple[bytes, bytes]:
    teacher = batch.teacher
    listed = vars(teacher) if isinstance(teacher, TopK) else {}
    held = {n: t for n, t in (vars(batch) | listed).items() if isinstance(t, Tensor)}
    lists = {"keys": batch.keys, "layout": vars(batch.layout)}
    return json.dumps(lists).encode(), save(
        {n: t.contiguous() for n, t in held.items()}
    )


def decode(text: bytes, raw: bytes) -> PackedBatch:
    lists, held = json.loads(text), load(raw)
    if "teacher" not in held:
        held["teacher"] = TopK(**{f.name: held.pop(f.name) for f in fields(TopK)})
    return PackedBatch(layout=RowLayout(**lists["layout"]), keys=lists["keys"], **held)


def broadcast_json(value: Any = None) -> Any:
    """Give `value` of the leader to every rank (blocks until all have it)."""
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
