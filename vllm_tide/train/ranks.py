"""The processes that train one draft together, and how they begin and end."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from vllm_tide.draft.config import DraftError
from vllm_tide.train.gpu import claim
from vllm_tide.train.rank_messages import LEADER
from vllm_tide.transport.header import TransportError

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
        """Join the group that torchrun describes in the environment."""
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
        """Whether torchrun started this process with more than one rank."""
        return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ

    @property
    def is_leader(self) -> bool:
        """Whether this rank owns engines, buffers and the gate."""
        return self.rank == LEADER

    def close(self) -> None:
        """Leave the group."""
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
