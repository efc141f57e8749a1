"""The trainer's GPU: memory, rests, and how a batch gets there.

Planned, packed, published and stored is on the host; the draft's parameters and the
target's rows are on `tide.train.device`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_tide.config import TrainConfig
from vllm_tide.draft.config import DraftError

logger = logging.getLogger("vllm_tide.train")


REST_S, LONGEST_REST_S = 30.0, 600.0
SHARED = 0.1
"""`gpu_share` beside a server."""
NAP_S = 0.05
"""Longest time without asking the caller (s)."""

Progress = Callable[[], bool]
"""Called between steps; False ends the cycle early."""


# Torch's allocator raises a class of its own. A context, a kernel's launch and a BLAS
# handle take memory outside of it, and fail with these words.
_WORDS = ("out of memory", "BLAS_STATUS_ALLOC_FAILED")


def lacks_memory(error: BaseException) -> bool:
    """True if an error says that the device has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    said = str(error) if isinstance(error, RuntimeError) else ""
    return any(words in said for words in _WORDS)


def no_memory(device: str, what: str, batch_tokens: int | None = None) -> str:
    """A sentence for the operator; `batch_tokens` is given where less would help."""
    smaller = ""
    if batch_tokens is not None:
        smaller = f"make tide.train.batch_tokens ({batch_tokens}) smaller, "
    return (
        f"tide.train.device: {device!r} has no memory left for {what}: {smaller}leave "
        "the trainer more of the GPU (--gpu-memory-utilization of vllm serve), or set "
        "tide.train.device to another GPU or 'cpu'; tide.train.gpu_share limits time, "
        "not memory."
    )


class Shortage:
    """After a cycle that the device had no memory for: a sentence, and a rest.

    The memory may be a server's of the same GPU, so it is tried again; every further
    rest in a row is twice as long.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._rest, self._until = config, REST_S, 0.0

    def cycle_done(self, starved: bool, now: float) -> None:
        if not starved:
            self._rest = REST_S
            return
        rest = f"training, which rests for {self._rest:.0f} s and tries again"
        config = self._config
        logger.error("%s", no_memory(config.device, rest, config.batch_tokens))
        self._until = now + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST_S)

    def resting(self, now: float) -> bool:
        return now < self._until


def gpu_uuid(device: torch.device | None) -> str:
    """Name of a GPU in every process; empty for a CPU."""
    if device is None or device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def with_share(config: TrainConfig, server: str) -> TrainConfig:
    """`config` with `gpu_share` filled in; `server` is the UUID of the server's GPU."""
    share = config.gpu_share
    if share is None and server and server == gpu_uuid(torch.device(config.device)):
        share = SHARED
        logger.info(
            "a server uses this GPU too: the trainer keeps it busy for %g of the time, "
            "unless tide.train.gpu_share says otherwise",
            share,
        )
    return config.model_copy(update={"gpu_share": share or 1.0})


def give_up_memory(optimizer: torch.optim.Optimizer) -> None:
    """Frees what a step that failed has left, also for other processes."""
    optimizer.zero_grad(set_to_none=True)
    give_back_cache()


def give_back_cache() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def claim(name: str) -> None:
    """Let this process work on a device (`tide.train.device`), behind the others there.

    Priorities of streams hold inside one process; between processes MPS has its own.

    Raises:
        DraftError: Torch has no such device, or it has no memory left.
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
    try:  # the first calls that make a context
        if device.index is not None:
            torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # of the lowest priority
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise DraftError(no_memory(name, "the trainer's context")) from error


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


class Turns:
    """Bounds the time that a shared GPU is busy to a share of wall time.

    A turn claims `busy / share` seconds from its beginning, or from the end of the
    claims before; time that nobody asked for is not saved up. Times this process's work
    by events on its own stream, also while the GPU waits for the host (at first for a
    compiler), so never too short.
    """

    def __init__(self, share: float) -> None:
        self.share, self._free_at, self._began = share, -math.inf, 0.0
        self._first: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._began = time.monotonic()
        self._first = torch.cuda.Event(enable_timing=True)
        self._first.record()

    def end(self) -> None:
        assert self._first is not None  # noqa: S101 - it was begun
        last = torch.cuda.Event(enable_timing=True, blocking=True)
        last.record()
        last.synchronize()
        self.worked(self._began, self._first.elapsed_time(last) / 1e3)

    def worked(self, began_s: float, busy_s: float) -> None:
        """A turn that began at `began_s` kept the GPU busy for `busy_s`."""
        self._free_at = max(self._free_at, began_s) + busy_s / self.share

    def rest(self, now_s: float) -> float:
        """Seconds until the next turn may begin."""
        return max(0.0, self._free_at - now_s)


class Watch:
    """The caller's `progress`, remembering that it said to stop; `turns` have rests.

    Attributes:
        elsewhere_s: Time in calls, rests included (s).
        evaluation_s: Time in evaluations, calls left out; its owner adds to it (s).
    """

    def __init__(self, progress: Progress | None, turns: Turns | None = None) -> None:
        self._progress, self._turns, self.going = progress, turns, True
        self.elsewhere_s = self.evaluation_s = 0.0
        if turns is not None:
            turns.begin()

    def __call__(self) -> bool:
        began = time.monotonic()
        if self._turns is None:
            self._ask()
        else:
            self._turns.end()
            while self._ask() and (rest := self._turns.rest(time.monotonic())):
                time.sleep(min(rest, NAP_S))
            self._turns.begin()
        self.elsewhere_s += time.monotonic() - began
        return self.going

    def _ask(self) -> bool:
        if self._progress is not None and self.going:
            self.going = self._progress()
        return self.going
