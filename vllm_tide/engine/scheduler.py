"""The engine core's side: orders swaps at one step for all ranks, carries numbers.

Every rank acts on what the scheduler's output says, so all of them switch drafts at
the same step; no rank decides by itself.
"""

from __future__ import annotations

from typing import Any


def make_scheduler(speculative_config: Any) -> SchedulerTide | None:
    """None unless `tide` is configured: the cost of *off* is one `is None`."""
    if speculative_config is None or speculative_config.tide is None:
        return None
    return SchedulerTide()


class SchedulerTide:
    """TIDE in the scheduler."""

    def __init__(self) -> None:
        self._staged = 0
        self._ordered = 0
        self._depth: int | None = None
        self._stats: dict[str, Any] | None = None
        self._swap_seconds: list[float] = []

    def control(self) -> dict[str, int] | None:
        """What the next step's workers are told, or None."""
        if self._staged == 0 or self._staged == self._ordered:
            return None
        self._ordered = self._staged
        return {"install": self._staged}

    def draft_depth(self, most: int) -> int:
        """Draft steps of the step that is being scheduled.

        Model Runner V2's worker predicts them (`ControlV2.depth`); V1's decides for
        itself when the step has come that far.

        Args:
            most: What vLLM would draft.
        """
        return most if self._depth is None else min(self._depth, most)

    def observe(self, report: dict[str, Any] | None) -> None:
        """Take a worker's report (`ModelRunnerOutput.tide`).

        A version that is still staged after it was ordered is ordered again: a rank
        did not hold it yet.
        """
        if report is None:
            return
        self._depth = report.get("depth")
        if "staged" not in report:
            return  # no numbers this time
        if report["staged"] == self._ordered:
            self._ordered = 0
        self._staged = report["staged"]
        self._swap_seconds += report.get("swap_seconds", ())
        self._stats = report

    def stats(self) -> dict[str, Any] | None:
        """Numbers for the API server's metrics, once per report."""
        stats, self._stats = self._stats, None
        if stats is not None:
            stats = stats | {"swap_seconds": self._swap_seconds}
            self._swap_seconds = []
        return stats
