"""Time limits of a step, and step times if the draft's first pass always runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tide.control.step_times import Learnt, StepSample, StepTimes

CLIENT_SHARE = 0.93
"""Minimum share of the predicted tokens per second that clients' limits must leave."""


def step_limit(limits: np.ndarray, plain: float) -> tuple[float, bool]:
    """Return the time limit of a step.

    Args:
        limits: float64 [n], seconds; inf: no limit.
        plain: Seconds of the step without drafts.

    Returns:
        The tightest limit that a step without drafts meets (inf if there is none),
        and whether limits exist but none can be met.
    """
    tightest = float(np.minimum.reduce(limits)) if len(limits) else np.inf
    if tightest >= plain:
        return tightest, False
    # A request without a limit does not make the others' limits feasible.
    feasible = limits[(limits >= plain) & (limits < np.inf)]
    if not len(feasible):
        return np.inf, True
    return float(feasible.min()), False


class FirstPassAlways:
    """Step times if the draft's first pass runs in every step.

    Model Runner V2 runs this pass even without drafting, so that the draft's KV cache
    has no gaps. The first draft token therefore has no additional cost.

    Args:
        times: Times of target and draft passes, separately. Its samples must count
            all draft passes in `steps`, at least one.
        lengths: Available depths, ascending; the last is the largest depth of any
            call; empty: all.
    """

    def __init__(self, times: StepTimes, lengths: Sequence[int] = ()) -> None:
        self._times = times
        longest = max(lengths, default=0)
        self._missing = np.setdiff1d(np.arange(1, longest), lengths)

    @property
    def error(self) -> float:
        """See `StepTimes`."""
        return self._times.error

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Return seconds [most + 1] of the target step and the first draft pass."""
        target = self._times.target_curve(requests, context, most, prefill)
        first = self._times.draft_curve(requests, context, requests + prefill, 1)
        return np.asarray(target + first[1])

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Return seconds [most + 1] of 0..most draft passes, without the first.

        Depth `most` is always available, because the requests may not allow more.
        """
        curve = self._times.draft_curve(requests, context, first_rows, max(most, 1))
        further = curve - curve[1]
        further[0] = 0.0
        further[self._missing[self._missing < most]] = np.inf
        return np.asarray(further[: most + 1])

    def catchup_seconds(self, rows: int, context: int = 0) -> float:
        """Return 0, because the draft reads every row."""
        return 0.0

    def ratio_sd(self, requests: int, now: float) -> float:
        """See `StepTimes`."""
        return self._times.ratio_sd(requests, now)

    @property
    def version(self) -> int:
        """See `StepTimes`."""
        return self._times.version

    def observe(self, sample: StepSample, now: float) -> None:
        """Update the times; see `StepTimes`."""
        self._times.observe(sample, now)

    def take(self, learnt: Learnt) -> None:
        """Replace what was learnt; see `StepTimes`."""
        self._times.take(learnt)


Times = StepTimes | FirstPassAlways
"""Step times that a policy uses."""
