"""Which cores this process was given, as opposed to those vLLM bound it to.

The CPU backend binds the model's threads; a thread or child of ours would inherit that
and compete with the model. Other threads still carry what the operator gave.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def given_cores() -> set[int]:
    """Union of what the threads of this process, and its parent, may run on."""
    cores = set(os.sched_getaffinity(0))
    # A worker process may be bound as a whole; the process that started it is not.
    with contextlib.suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                cores |= os.sched_getaffinity(int(task))
    return cores


def call_on(cores: set[int], call: Callable[[], T]) -> T:
    """Run `call` in a thread on `cores`; processes it starts inherit them."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
        results.append(call())

    thread = Thread(target=run, name="vllm-tide-start")
    thread.start()
    thread.join()
    return results[0]
