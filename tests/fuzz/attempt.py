"""One parser, one input: what comes of it, within limits of time and memory.

A parser may return or raise what it documents. Anything else is a finding: another
exception, more memory than its bound, more processor time than it can need.
"""

from __future__ import annotations

import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

CPU_SECONDS = 5.0
"""What no parser needs for an input of these sizes."""


class TooSlow(BaseException):
    """Used up its processor time; no parser can suppress it by chance."""


class TooLarge(AssertionError):
    """Allocated more than its bound."""


@dataclass(frozen=True)
class Parser:
    """Something that reads what another process wrote.

    Args:
        name: For the tables.
        inputs: What it is given.
        read: Gives it one input, and checks what comes back.
        documented: What it may raise.
        bound_bytes: The most memory it may allocate for one input.
    """

    name: str
    inputs: SearchStrategy[Any]
    read: Callable[[Any], None]
    documented: tuple[type[Exception], ...] = ()
    bound_bytes: int = 64 << 20


def attempt(parser: Parser, value: Any) -> None:
    """Give a parser one input.

    Raises:
        Whatever the parser raises and does not document, TooSlow or TooLarge.
    """
    tracemalloc.start()
    try:
        with _processor_time():
            parser.read(value)
    except parser.documented:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if peak > parser.bound_bytes:
        raise TooLarge(f"{peak >> 20} MiB, and {parser.bound_bytes >> 20} is its bound")


@contextmanager
def _processor_time() -> Iterator[None]:
    # Signals are handled by the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TooSlow(f"more than {CPU_SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
