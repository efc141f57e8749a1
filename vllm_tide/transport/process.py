"""Who holds a segment, and whether that process still lives.

A process is named by its pid and its start time (a pid alone is reused). Both fit one
u64, so that a claim is one compare-and-exchange. The pid namespace travels beside it:
from another container a pid means nothing, and then only heartbeats count.
"""

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
"""A peer whose last heartbeat is older than this (10 s) counts as gone."""

# /proc/<pid>/stat counts the start in ticks of 10 ms: 42 bits last 1,394 years.
_START_BITS = 42
_START_MASK = (1 << _START_BITS) - 1
# Clock readings of two cores may differ by this much without meaning anything.
_CLOCK_SLACK_NS = 10**9
_BOOT_UNIX = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_unix() -> float:
    """Unix time (s) that no step of the clock in this process's life has moved."""
    return _BOOT_UNIX + time.clock_gettime(time.CLOCK_BOOTTIME)


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it is gone or a zombie.

    Raises:
        OSError: It cannot be looked up, as where no descriptor is left.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may itself hold spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return None


def refuse_core_dumps() -> None:
    """Let no core of this process be written: its heap holds what users wrote.

    The soft limit becomes 1 byte. That is less than any core file, and the one value
    with which Linux starts no crash handler either (`core_pattern` with a pipe), which
    it does at 0.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    soft = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def show_stacks_on_signal() -> None:
    """SIGUSR1 writes to stderr where each thread of this process is; it goes on."""
    # The descriptor: what is at sys.stderr may have none.
    faulthandler.register(signal.SIGUSR1, file=2)


def become_sidecar() -> None:
    """What trainer and relay do first: no cores, stacks on a signal, killed first."""
    refuse_core_dumps()
    show_stacks_on_signal()
    # The OOM killer would else take the engine, which is larger.
    with contextlib.suppress(OSError, ValueError):
        wanted = Path("/proc/self/oom_score_adj")
        if int(wanted.read_text()) < 800:
            wanted.write_text("800")


def be_nice(increment: int, autogroup: Path = Path("/proc/self/autogroup")) -> None:
    """Raise this process's niceness, and that of its session where it leads one.

    Linux may weigh sessions against each other (`autogroup`): then the niceness of a
    process counts within its session only. A file that is missing or refuses is no
    error.
    """
    nice = os.nice(increment)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError), autogroup.open("r+b", buffering=0) as file:
            # Linux takes one change in 0.1 s, of all sessions together.
            for _ in range(20):
                if file.write(b"%d" % nice) is not None:
                    break
                time.sleep(0.1)


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop`; afterwards they do again what they did before.

    A process that waits for its next engine has no loop to end.
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
    """Inode of this process's pid namespace; 0 if the system does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Holder(NamedTuple):
    """A process named in shared memory.

    Args:
        pid: Its process id, in its own namespace.
        start: Its start time (clock ticks since boot).
    """

    pid: int
    start: int
    namespace: int

    @classmethod
    def me(cls) -> Holder:
        return cls(os.getpid(), start_time(os.getpid()) or 0, pid_namespace())

    @classmethod
    def from_word(cls, word: int, namespace: int) -> Holder:
        """The inverse of :attr:`word`."""
        return cls(word >> _START_BITS, word & _START_MASK, namespace)

    @property
    def word(self) -> int:
        """Pid and start as one u64; 0 is nobody."""
        return (self.pid & ((1 << 22) - 1)) << _START_BITS | self.start & _START_MASK

    def alive(self) -> bool | None:
        """True if it lives; None where its pid cannot be looked up from here."""
        if self.namespace != pid_namespace():
            return None
        try:
            return self.pid > 0 and start_time(self.pid) == self.start
        except OSError:
            return None


def heartbeat_is_fresh(heartbeat_ns: int) -> bool:
    """True if a CLOCK_MONOTONIC reading (ns) is younger than 10 s."""
    age = time.monotonic_ns() - heartbeat_ns
    return -_CLOCK_SLACK_NS <= age < HEARTBEAT_TIMEOUT_NS
