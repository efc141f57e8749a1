"""Device, affinity, niceness, threads and title of the trainer's process."""

from __future__ import annotations

import contextlib
import os

import torch

from vllm_tide.config import TrainConfig
from vllm_tide.draft.config import DraftError
from vllm_tide.train.gpu import claim


def prepare_process(config: TrainConfig, engine_id: str, *, pin: bool = True) -> None:
    """Device, affinity, niceness, threads and title of this process.

    Args:
        config: `tide.train`.
        engine_id: Shown in the title.
        pin: Choose cores and threads; not with several ranks, which torchrun arranges.

    Raises:
        DraftError: A knob cannot be honoured on this machine.
    """
    claim(config.device)
    if pin:
        _pin(config)
    if config.nice:
        os.nice(config.nice)
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(f"vllm-tide train {engine_id}")


def _pin(config: TrainConfig) -> None:
    allowed = len(os.sched_getaffinity(0))
    if config.cpus is None:
        # Where we were started; the server leaves out the cores of its engine.
        torch.set_num_threads(max(1, allowed // 4))
        return
    try:
        os.sched_setaffinity(0, config.cpus)
        # Attaching to an engine may already have started threads (checksums of files).
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), config.cpus)
    except OSError as error:
        raise DraftError(
            f"tide.train.cpus: {config.cpus} cannot be used ({error.strerror})."
        ) from None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
