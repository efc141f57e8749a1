"""Draft depth of an engine's steps: counted, and fixed for measurements."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Depths:
    """Counts the draft depths of a worker's steps; `freeze` fixes them.

    The policy continues to work, so its time is measured; only the depth that the
    scheduler takes for the next step is replaced.

    Args:
        tide: `WorkerTideV2`.

    Attributes:
        counts: Steps by depth, since the last `freeze`.
    """

    def __init__(self, tide: Any) -> None:
        self.counts: Counter[int] = Counter()
        self._tide, self._depth, inner = tide, -1, tide.on_step

        def on_step(output: Any, *args: Any) -> None:
            inner(output, *args)
            if tide._is_dummy:
                return
            self.counts[int(args[-1])] += 1
            if self._depth >= 0:
                output.tide = {**(output.tide or {}), "depth": self._depth}

        tide.on_step = on_step

    @property
    def choices(self) -> list[int]:
        """The depths that an engine drafts: those with CUDA graphs, ascending."""
        most = self._tide._runner.num_speculative_steps
        return list(self._tide._lengths) or list(range(most + 1))

    def freeze(self, depth: int) -> None:
        """Fix the depth of the steps from the one after the next; see `check`."""
        assert depth in self.choices, f"depth {depth} is not one of {self.choices}"
        self._depth = depth

    def clear(self) -> None:
        """Forget the counts, some steps after `freeze`."""
        self.counts.clear()

    def check(self) -> None:
        """Check that all steps since `clear` had the frozen depth.

        Raises:
            AssertionError: One had another.
        """
        assert self.counts.keys() == {self._depth}, (
            f"steps were to draft {self._depth} tokens; by depth: {dict(self.counts)}"
        )
