"""Which cores this process was given, as opposed to those vLLM bound it to.

The CPU backend binds the model's threads; a thread or child of ours would inherit that
and compete with the model. Other threads still carry what the operator gave.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def _bound(process: int | str) -> list[set[int]]:
    """Cores that each thread of a process may run on."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                found.append(os.sched_getaffinity(int(task)))
    return found


def given_cores() -> set[int]:
    """Union of what the threads of this process, and its parent, may run on."""
    cores = set(os.sched_getaffinity(0))
    # A worker process may be bound as a whole; the process that started it is not.
    with contextlib.suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    return cores.union(*_bound("self"))


def free_cores(given: set[int]) -> set[int]:
    """Those of `given` that no rank of the engine is bound to; all if none is left.

    A rank's thread is bound if it may run on less than `given` and on other cores than
    the process that started the ranks.
    """
    parent = os.getppid()
    ranks = {str(os.getpid())}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(OSError):
                ranks |= set((task / "children").read_text().split())
    started = set().union(*_bound(parent))
    bound = {
        core
        for rank in ranks
        for cores in _bound(rank)
        if cores < given and cores != started
        for core in cores
    }
    return given - bound or given


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
