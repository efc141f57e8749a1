"""A fault: its name, its frequency, and the counter that must count it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .scene import Scene

Strike = Callable[[Scene, random.Random], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        kind: Its name.
        strike: Injects it and returns when the system has recovered.
        counter: What must have moved by then, as `Scene.reading` names it, and moves
            for this fault only; a gauge that `strike` saw fall and rise again counts as
            moved. None where nothing counts it.
        weight: How often it is drawn, against the others.
        gauge: Whether the counter is such a gauge.
        uncounted: Why nothing counts it, and what shows it instead.
        lasting: Whether a part of the server stays off until a restart. The suite
            injects such a fault late and restarts the server after it.
    """

    kind: str
    strike: Strike
    counter: str | None
    weight: float = 1.0
    gauge: bool = False
    uncounted: str = ""
    lasting: bool = False
