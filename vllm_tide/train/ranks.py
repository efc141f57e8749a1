"""The processes that train one draft, and the messages between them.

A message is a safetensors file with JSON as metadata, no pickle. Gloo sends it from CPU
memory, also when training runs on GPUs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
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

LEADER = 0
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

    def send(
        self,
        command: str,
        details: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        to: int | None = None,
    ) -> None:
        """Send a command from the leader to one rank (None: to every other rank)."""
        header = {"command": json.dumps([command, details or {}])}
        parts = {name: part.contiguous() for name, part in (tensors or {}).items()}
        data = torch.frombuffer(bytearray(save(parts, header)), dtype=torch.uint8)
        for rank in range(1, self.size) if to is None else (to,):
            dist.send(torch.tensor([data.numel()]), rank)
            dist.send(data, rank)

    def receive(self) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        """Wait for a command of the leader."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, LEADER)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, LEADER)
        raw = data.numpy().tobytes()
        end = 8 + int.from_bytes(raw[:8], "little")  # of the JSON header
        command, details = json.loads(json.loads(raw[8:end])["__metadata__"]["command"])
        return command, details, load(raw)

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


def pack_message(batch: PackedBatch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the lists and the tensors of a batch."""
    listed = vars(batch.teacher) if isinstance(batch.teacher, TopK) else {}
    values = (vars(batch) | listed).items()
    tensors = {name: value for name, value in values if isinstance(value, Tensor)}
    return {"keys": batch.keys, "layout": vars(batch.layout)}, tensors


def unpack_message(lists: dict[str, Any], tensors: dict[str, Tensor]) -> PackedBatch:
    teacher = tensors.pop("teacher", None)
    if teacher is None:
        teacher = TopK(**{f.name: tensors.pop(f.name) for f in fields(TopK)})
    layout = RowLayout(**lists["layout"])
    return PackedBatch(layout=layout, keys=lists["keys"], teacher=teacher, **tensors)
