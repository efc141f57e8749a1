"""Setup of trainer and relay processes, and heartbeats."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

HEARTBEAT_TIMEOUT_NS = 10 * 10**9
"""A trainer with a last heartbeat older than this (10 s) does not read the ring."""

# Tolerated difference of clock readings on two cores.
_CLOCK_SLACK_NS = 10**9
_BOOT_UNIX = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_unix() -> float:
    """Return the Unix time (s), unaffected by clock steps since process start."""
    return _BOOT_UNIX + time.clock_gettime(time.CLOCK_BOOTTIME)


def disable_core_dumps() -> None:
    """Disable core dumps of this process: its heap contains user text.

    Set the soft limit to 1 byte, less than any core file. With this value Linux also
    starts no crash handler (`core_pattern` with a pipe); with 0 it would.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    soft = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def dump_stacks_on_signal() -> None:
    """Dump the stacks of all threads to stderr on SIGUSR1."""
    # The descriptor: sys.stderr may be an object without one.
    faulthandler.register(signal.SIGUSR1, file=2)


def prepare_sidecar_process() -> None:
    """Disable core dumps, register faulthandler and raise oom_score_adj."""
    disable_core_dumps()
    dump_stacks_on_signal()
    # Otherwise the OOM killer selects the engine, which is larger.
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        if int(score.read_text()) < 800:
            score.write_text("800")


def renice(increment: int, autogroup: Path = Path("/proc/self/autogroup")) -> None:
    """Raise the niceness of this process, and of its session if it is the leader.

    With `autogroup` Linux schedules sessions against each other, and the niceness of a
    process applies within its session only. A missing or read-only file is no error.
    """
    nice = os.nice(increment)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError), autogroup.open("r+b", buffering=0) as file:
            # Linux accepts one change per 0.1 s, over all sessions.
            for _ in range(20):
                if file.write(b"%d" % nice) is not None:
                    break
                time.sleep(0.1)


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT, and restore the previous handlers at the end.

    For processes that wait for an engine and have no loop to stop.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heartbeat_is_fresh(heartbeat_ns: int) -> bool:
    """Return whether a CLOCK_MONOTONIC reading (ns) is younger than 10 s."""
    age = time.monotonic_ns() - heartbeat_ns
    return -_CLOCK_SLACK_NS <= age < HEARTBEAT_TIMEOUT_NS
