"""Draft versions: the number of a base draft, and a step of Test-Time Speculation.

A version is `number << 16 | step`. Every publication of the trainer has a new number,
the same for all its engines; 0 is the draft that the server started with. Logs, metrics
and commands show the number. Steps follow over a served draft: an odd step is a fast
draft, an even one the draft's own weights, sent again to replace a fast draft.
"""

from __future__ import annotations

STEP_BITS = 16
MAX_VERSION = 2**63 - 1


def first_version(number: int) -> int:
    return number << STEP_BITS


def number_of(version: int) -> int:
    return version >> STEP_BITS


def is_fast(version: int) -> bool:
    return bool(version & 1)


def step_of(version: int) -> int:
    return version & (1 << STEP_BITS) - 1


def version_name(version: int) -> str:
    """Return a version for messages: its number, with the step if there is one."""
    number, step = number_of(version), step_of(version)
    return f"{number}.{step}" if step else str(number)


def next_step(version: int, *, fast: bool) -> int | None:
    """Return the next greater version of a number; None if it has no step left."""
    after = version + (1 if is_fast(version) != fast else 2)
    # The last even step stays free to replace the last fast draft.
    return after if number_of(after + fast) == number_of(version) else None
