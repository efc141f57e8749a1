"""Times of an engine that runs the draft's first pass in every step.

Model Runner V2 keeps the draft's KV cache without holes that way: the pass runs when
nothing is drafted too. So it is part of the plain step, and the first drafted token
costs nothing more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_tide.control.costs import Times, TimeSource

# Of the controller's own work; without a price it would look in every step.
_LOOK_SECONDS = 1e-3


class KeptPass:
    """A time source whose plain step has the draft's first pass in it.

    Methods take and return what those of `TimeSource` do.

    Args:
        model: Where target step and draft passes are apart.
    """

    def __init__(self, model: TimeSource) -> None:
        self._model = model

    def target_curve(
        self, requests: int, context: int, most: int, prefill: int = 0
    ) -> np.ndarray:
        """Seconds [most + 1] of the target step and the draft's first pass."""
        target = self._model.target_curve(requests, context, most, prefill)
        first = self._model.draft_curve(requests, context, requests + prefill, 1)
        return np.asarray(target + first[1])

    def draft_curve(
        self, requests: int, context: int, first_rows: int, most: int
    ) -> np.ndarray:
        """Cumulative seconds [most + 1] of 0..most draft steps beside the first."""
        curve = self._model.draft_curve(requests, context, first_rows, max(most, 1))
        beside = curve - curve[1]
        beside[0] = 0.0
        return np.asarray(beside[: most + 1])

    def catchup_seconds(self, rows: int, context: int = 0) -> float:
        """Nothing is ever missed; a look at what was drafted costs our own work."""
        return _LOOK_SECONDS

    def overhead(self, requests: int) -> float:
        """Seconds of a round outside the forwards."""
        return self._model.overhead(requests)


class KeptPassTimes:
    """`Times` over `KeptPass`: what is measured of a step refines its parts.

    Args:
        times: Learns from samples whose `steps` are the passes that ran, at least one.
    """

    def __init__(self, times: Times) -> None:
        self._times = times
        self.model: TimeSource = KeptPass(times.model)

    @property
    def error(self) -> float:
        """Relative error of predictions; nan before the first measurement."""
        return self._times.error

    def observe(self, sample: Any) -> object:
        """Learn from one measured `RoundSample`."""
        return self._times.observe(sample)
