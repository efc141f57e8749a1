"""In which order arms and cells are visited.

Arms take turns within a cell, and every other cell and repeat takes them backwards,
so that a drift of the machine does not favour the arms at one end.  Arm ``none``
opens every cell of the first repeat: it settles how much work the cell is and what
its TPOT limits are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .control_arms import Arm


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the plan: a closed loop at a batch size, or a trace."""

    domain: str
    batch: int | None = None
    trace: str | None = None

    @property
    def name(self) -> str:
        """What progress lines call it."""
        place = f"batch {self.batch}" if self.trace is None else self.trace
        return f"{place}, {self.domain}"


@dataclass(frozen=True, slots=True)
class Visit:
    """One measurement."""

    repeat: int
    cell: Cell
    arm: Arm


def _turn(arms: Sequence[Arm], repeat: int, place: int) -> list[Arm]:
    order = list(arms) if (repeat + place) % 2 == 0 else list(reversed(arms))
    if repeat == 0:
        order.sort(key=lambda arm: arm.name != "none")  # stable: the rest stays
    return order


def visit_order(
    cells: Sequence[Cell],
    arms: Sequence[Arm],
    repeats: int,
    *,
    interleaved: bool,
    defer_dynamic: bool,
) -> Iterator[Visit]:
    """Yield the visits.

    Args:
        cells: In the order of a sweep.
        arms: In the order given.
        repeats: Number of sweeps.
        interleaved: Servers of all arms live at once; otherwise each arm sweeps all
            cells before the next arm's server starts.
        defer_dynamic: ``vllm_dynamic`` is tuned from the first repeat's static arms
            and so comes after them.
    """
    for repeat in range(repeats):
        late = defer_dynamic and repeat == 0
        now = [arm for arm in arms if not (late and arm.is_dynamic)]
        after = [arm for arm in arms if late and arm.is_dynamic]
        if interleaved:
            for place, cell in enumerate(cells):
                for arm in _turn(now, repeat, place):
                    yield Visit(repeat, cell, arm)
        else:
            for arm in _turn(now, repeat, 0):
                for cell in cells:
                    yield Visit(repeat, cell, arm)
        for arm in after:
            for cell in cells:
                yield Visit(repeat, cell, arm)
