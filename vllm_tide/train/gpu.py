"""The trainer's GPU: memory, time budget, and host-to-device copies.

Batches are planned and packed on the host, and drafts are published and stored from
there; the draft's parameters and the target's rows are on `tide.train.device`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_tide.config import GIB, TrainConfig
from vllm_tide.draft.config import DraftConfig, DraftError

logger = logging.getLogger("vllm_tide.train")

PAUSE_S, MAX_PAUSE_S = 30.0, 600.0
DEFAULT_GPU_SHARE = 0.1
"""`gpu_share` on the GPU of a server."""
CONTEXT_BYTES = 600 << 20
"""CUDA context and kernels of a process (bytes)."""
LOSS_BYTES = 512 << 20
"""Logits and gradients of a chunk of the loss (bytes)."""
MARGIN = 1.25
"""Most memory of training, as a multiple of its estimate."""
CALL_INTERVAL_S = 0.05
"""Longest time between two calls of `progress` during a pause (s)."""

Progress = Callable[[], bool]
"""Called between steps; False ends the cycle early."""
INTERRUPTED = "ended early by pause, purge or shutdown"


# Torch's allocator raises OutOfMemoryError. Contexts, kernel launches and BLAS handles
# allocate outside of it and raise a RuntimeError with one of these phrases.
_OUT_OF_MEMORY = ("out of memory", "BLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device is out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    message = str(error) if isinstance(error, RuntimeError) else ""
    return any(phrase in message for phrase in _OUT_OF_MEMORY)


def memory_message(device: str, what: str, batch_tokens: int | None = None) -> str:
    """Build the error message; give `batch_tokens` if a smaller value would help."""
    smaller = ""
    if batch_tokens is not None:
        smaller = f"reduce tide.train.batch_tokens ({batch_tokens}), "
    return (
        f"tide.train.device: {device!r} is out of memory for {what}: {smaller}lower "
        "--gpu-memory-utilization of vllm serve, or set tide.train.device to another "
        "GPU or 'cpu'; tide.train.gpu_share limits time, not memory."
    )


def memory_need(draft: DraftConfig, config: TrainConfig, depth: int) -> int:
    """Return an upper estimate of the device memory of training (bytes).

    Master weights, the served draft, gradients and two moments in fp32, and a copy in
    bf16; embedding and lm_head rows of the target; the activations of one batch, and
    the logits of one chunk of the loss.

    Args:
        depth: num_speculative_tokens.
    """
    trained = sum(map(math.prod, draft.parameter_shapes().values()))
    trained += draft.draft_vocab_size * draft.hidden_size
    frozen = 2 * 2 * draft.vocab_size * draft.target_hidden_size
    steps = draft.num_steps(config.ttt_steps, depth)
    rows = draft.computed_rows(config.batch_tokens, steps)
    values = 20 * draft.hidden_size + 6 * draft.intermediate_size
    return 22 * trained + frozen + 4 * values * rows + LOSS_BYTES + CONTEXT_BYTES


_claim: list[tuple[torch.device, int]] = []  # at most one, of this process


def claim_memory(device: torch.device, num_bytes: int) -> None:
    """Take the memory of training before anything is loaded, and never take more.

    On the GPU of a server, memory that is taken later could be missing when the server
    needs it. The allocator keeps what is freed here for the models and the steps. If it
    is exceeded, the trainer runs out of memory, not the server.

    Args:
        num_bytes: Estimate of the need; `MARGIN` times it is taken.

    Raises:
        DraftError: The device has less memory free.
    """
    free, total = torch.cuda.mem_get_info(device)
    limit = int(MARGIN * num_bytes)
    missing = limit - CONTEXT_BYTES - torch.cuda.memory_reserved(device)
    if missing > free:
        raise DraftError(
            f"tide.train.device: training needs {limit / GIB:.1f} GiB on "
            f"{str(device)!r}, the server's GPU, but {free / GIB:.1f} GiB are free; "
            "lower --gpu-memory-utilization of vllm serve, reduce "
            "tide.train.batch_tokens, or set tide.train.device to another GPU or 'cpu'."
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    _claim[:] = [(device, limit - CONTEXT_BYTES)]
    _take_claim()


def _take_claim() -> None:
    for device, size in _claim:
        missing = size - torch.cuda.memory_reserved(device)
        if missing > 0:
            torch.empty(missing, dtype=torch.uint8, device=device)  # and freed at once


class MemoryBackoff:
    """Pauses training after a cycle that ran out of device memory.

    A server on the same GPU may free memory later, so training is retried; each further
    pause in a row is twice as long.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._pause_s, self._until = config, PAUSE_S, 0.0

    def cycle_done(self, out_of_memory: bool, now: float) -> None:
        if not out_of_memory:
            self._pause_s = PAUSE_S
            return
        what = f"training (retry in {self._pause_s:.0f} s)"
        config = self._config
        logger.error("%s", memory_message(config.device, what, config.batch_tokens))
        self._until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def is_paused(self, now: float) -> bool:
        return now < self._until


def gpu_uuid(device: torch.device | None) -> str:
    """Return the UUID of a GPU, the same in every process; empty for a CPU."""
    if device is None or device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def serves_on(config: TrainConfig, servers: Collection[str]) -> bool:
    """Return whether the trainer's GPU is one of the servers', given by UUIDs."""
    return bool(servers) and gpu_uuid(torch.device(config.device)) in servers


def with_gpu_share(config: TrainConfig, servers: Collection[str]) -> TrainConfig:
    """Fill in `gpu_share`.

    Args:
        servers: UUIDs of the GPUs of all ranks of all engines.
    """
    share = config.gpu_share
    if share is None and serves_on(config, servers):
        share = DEFAULT_GPU_SHARE
        logger.info(
            "trainer and server share a GPU: training is limited to %g of the time; "
            "change it with tide.train.gpu_share",
            share,
        )
    return config.model_copy(update={"gpu_share": share or 1.0})


def release_cache() -> None:
    """Free torch's cache of device memory, except what was claimed on a shared GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        with contextlib.suppress(torch.OutOfMemoryError):
            _take_claim()


def give_back_memory() -> None:
    """Free all unused memory, also what was claimed."""
    _claim.clear()
    release_cache()


def use_device(name: str) -> None:
    """Make `tide.train.device` the current device, at the lowest priority.

    Stream priorities apply within one process; MPS client priorities between processes.

    Raises:
        DraftError: Torch has no such device, or it is out of memory.
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
    try:  # these calls create the CUDA context
        if device.index is not None:
            torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # of the lowest priority
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DraftError(memory_message(name, "the trainer's context")) from error


def on_device(thing: Any, device: torch.device) -> Any:
    """Copy host tensors, also in dataclasses and sequences, through pinned memory."""
    if device.type == "cpu":
        return thing
    if isinstance(thing, Tensor):
        return thing.pin_memory().to(device, non_blocking=True)
    if isinstance(thing, (list, tuple)):
        return type(thing)(on_device(x, device) for x in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        values = {f.name: getattr(thing, f.name) for f in fields(thing)}
        return replace(thing, **{n: on_device(x, device) for n, x in values.items()})
    return thing


class GpuTimeBudget:
    """Limits the busy time of a shared GPU to a share of wall time.

    A work interval of `busy` seconds reserves `busy / share` seconds from its start, or
    from the end of earlier reservations; unused time does not accumulate. Busy time is
    measured by events on this process's stream. It includes time in which the GPU waits
    for the host (such as for a compiler), so it is not underestimated.
    """

    def __init__(self, share: float) -> None:
        self.share, self._reserved_until, self._began = share, -math.inf, 0.0
        self._first: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._began = time.monotonic()
        self._first = torch.cuda.Event(enable_timing=True)
        self._first.record()

    def end(self) -> None:
        assert self._first is not None  # noqa: S101 - set by begin()
        last = torch.cuda.Event(enable_timing=True, blocking=True)
        last.record()
        last.synchronize()
        self.add_busy(self._began, self._first.elapsed_time(last) / 1e3)

    def add_busy(self, began_s: float, busy_s: float) -> None:
        """Add an interval from `began_s` in which the GPU was busy for `busy_s`."""
        start = max(self._reserved_until, began_s)
        self._reserved_until = start + busy_s / self.share

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until work may start."""
        return max(0.0, self._reserved_until - now_s)


class ProgressCallback:
    """Calls `progress` until it returns False; sleeps when `budget` is used up.

    Attributes:
        stopped: Why the cycle ends early; empty while it runs.
        elsewhere_s: Time in calls, sleeps included (s).
        evaluation_s: Time in evaluations without calls; the trainer adds to it (s).
    """

    def __init__(
        self, progress: Progress | None, budget: GpuTimeBudget | None = None
    ) -> None:
        self._progress, self._budget, self.stopped = progress, budget, ""
        self.elsewhere_s = self.evaluation_s = 0.0
        if budget is not None:
            budget.begin()

    @property
    def running(self) -> bool:
        return not self.stopped

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason

    def __call__(self) -> bool:
        began = time.monotonic()
        if self._budget is None:
            self._call()
        else:
            self._budget.end()
            while self._call() and (wait := self._budget.wait_s(time.monotonic())):
                time.sleep(min(wait, CALL_INTERVAL_S))
            self._budget.begin()
        self.elsewhere_s += time.monotonic() - began
        return self.running

    def _call(self) -> bool:
        if self._progress is not None and self.running and not self._progress():
            self.stop(INTERRUPTED)
        return self.running
