"""One parser, one input: its outcome, within limits of time and memory.

A parser may return or raise what it documents. Anything else is a finding: another
exception, more memory than its bound, more processor time than it can need.
"""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

CPU_SECONDS = 5.0
"""What no parser needs for an input of these sizes."""


@dataclass(frozen=True)
class Parser:
    """A reader of bytes that another process wrote.

    Args:
        name: For the tables.
        inputs: Strategy of its inputs.
        read: Parses one input and checks the result.
        documented: Exceptions that it may raise.
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
        AssertionError: It took more time or memory than it may.
        Exception: An undocumented exception of the parser.
    """
    tracemalloc.start()
    began = time.process_time()
    try:
        with contextlib.suppress(*parser.documented):
            parser.read(value)
    finally:
        took = time.process_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= parser.bound_bytes, f"{peak >> 20} MiB"
    assert took <= CPU_SECONDS, f"{took:.1f} s of processor time"
