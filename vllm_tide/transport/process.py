"""Setup of trainer and relay processes, heartbeats, and the identity of a process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

HEARTBEAT_TIMEOUT_NS = 10 * 10**9
"""A trainer with a last heartbeat older than this (10 s) does not read the ring."""

# Tolerated difference of clock readings on two cores.
_CLOCK_SLACK_NS = 10**9
_BOOT_UNIX = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_unix() -> float:
    """Return the Unix time (s), unaffected by clock steps since process start."""
    return _BOOT_UNIX + time.clock_gettime(time.CLOCK_BOOTTIME)


def start_time(pid: int) -> int | None:
    """Return a process's start in ticks since boot; None if it is dead or a zombie.

    Raises:
        OSError: It cannot be determined, for example without free descriptors.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may contain spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return None


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


@lru_cache(maxsize=1)
def pid_namespace() -> int:
    """Return the inode of this process's pid namespace; 0 if it is unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Holder(NamedTuple):
    """A process as identified in a spool.

    Args:
        pid: Process id in its pid namespace.
        start: Start time (clock ticks since boot).
    """

    pid: int
    start: int
    namespace: int

    @classmethod
    def current(cls) -> Holder:
        return cls(os.getpid(), start_time(os.getpid()) or 0, pid_namespace())

    def alive(self) -> bool | None:
        """Return whether the process is alive; None if its pid cannot be checked."""
        if self.namespace != pid_namespace():
            return None
        try:
            return self.pid > 0 and start_time(self.pid) == self.start
        except OSError:
            return None


def heartbeat_is_fresh(heartbeat_ns: int) -> bool:
    """Return whether a CLOCK_MONOTONIC reading (ns) is younger than 10 s."""
    age = time.monotonic_ns() - heartbeat_ns
    return -_CLOCK_SLACK_NS <= age < HEARTBEAT_TIMEOUT_NS
