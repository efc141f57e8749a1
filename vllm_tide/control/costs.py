"""Limits on a step's time, and step times where the draft's first pass always runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tide.control.step_times import StepSample, StepTimes

CLIENT_SHARE = 0.93
"""Least share of the predicted tokens per second that clients' limits may leave."""


def step_limit(limits: np.ndarray, plain: float) -> tuple[float, bool]:
    """Return the limit that a step has to fit.

    Args:
        limits: float64 [n], seconds, inf for none.
        plain: Seconds of the step without drafts.

    Returns:
        The tightest limit that the shortest step meets (inf if there is none), and
        whether limits exist but none can be met.
    """
    tightest = float(np.minimum.reduce(limits)) if len(limits) else np.inf
    if tightest >= plain:
        return tightest, False
    # Infinite is no limit: one request without any does not make up for the others.
    feasible = limits[(limits >= plain) & (limits < np.inf)]
    if not len(feasible):
        return np.inf, True
    return float(feasible.min()), False


class FirstPassAlways:
    """Step times where the draft's first pass runs in every step.

    Model Runner V2 keeps the draft's KV cache without holes that way: the pass runs
    when nothing is drafted too, and the first drafted token costs nothing more.

    Args:
        times: With target and draft passes apart; learns from samples with `steps`
            of the passes that ran, at least one.
        lengths: Depths on offer, ascending, the last of them the largest that is asked
            about; empty: all.
    """

    def __init__(self, times: StepTimes, lengths: Sequence[int] = ()) -> None:
        self._times = times
        longest = max(lengths, default=0)
        self._missing = np.setdiff1d(np.arange(1, longest), lengths)

    @property
    def error(self) -> float:
        """As of `StepTimes`."""
        return self._times.error

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Seconds [most + 1] of the target step and the draft's first pass."""
        target = self._times.target_curve(requests, context, most, prefill)
        first = self._times.draft_curve(requests, context, requests + prefill, 1)
        return np.asarray(target + first[1])

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Cumulative seconds [most + 1] of 0..most draft passes but the first.

        `most` itself may always be drafted: who has no room for more gets no more.
        """
        curve = self._times.draft_curve(requests, context, first_rows, max(most, 1))
        beside = curve - curve[1]
        beside[0] = 0.0
        beside[self._missing[self._missing < most]] = np.inf
        return np.asarray(beside[: most + 1])

    def catchup_seconds(self, rows: int, context: int = 0) -> float:
        """Nothing is ever missed."""
        return 0.0

    def ratio_sd(self, requests: int, now: float) -> float:
        """As of `StepTimes`."""
        return self._times.ratio_sd(requests, now)

    @property
    def version(self) -> int:
        """As of `StepTimes`."""
        return self._times.version

    def observe(self, sample: StepSample, now: float) -> None:
        """As of `StepTimes`."""
        self._times.observe(sample, now)


Times = StepTimes | FirstPassAlways
"""Step times that decisions read."""
