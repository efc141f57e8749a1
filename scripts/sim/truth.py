"""True times of the simulated engine, and the initial time model of the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vllm_tide.control.time_model import ForwardModel, TimeModel

_DRAFT = ForwardModel((1,), (1e-3,), 0.0)
GUESS = TimeModel(ForwardModel((1,), (10e-3,), 0.0), _DRAFT, _DRAFT)
"""Equal to `vllm_tide.engine.policy_start.first_guess`: constant in the step's size."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Errors of the policy's initial time model.

    Attributes:
        target: Factor on the target's seconds.
        draft: Factor on the draft's seconds.
        noise: Standard deviation of the logarithm of a measured time over the true
            one. Only the measurement is noisy, not the simulated time.
        cold: The initial model is `GUESS`.
    """

    target: float = 1.0
    draft: float = 1.0
    noise: float = 0.0
    cold: bool = False

    def initial_model(self, model: TimeModel) -> TimeModel:
        """Return the time model that the policy starts with."""
        if self.cold:
            return GUESS
        return replace(
            model,
            target=_scaled(model.target, self.target),
            draft_first=_scaled(model.draft_first, self.draft),
            draft_next=_scaled(model.draft_next, self.draft),
        )


class Truth:
    """True seconds of each part of a step.

    The methods return scalars without arrays, because the event loop calls them several
    times per step.

    Args:
        model: The true time model.
        noise: See `Mismatch.noise`.
        seed: Seed of the noise.
    """

    def __init__(self, model: TimeModel, noise: float = 0.0, seed: int = 0) -> None:
        self.model = model
        self._noise = noise
        self._rng = np.random.default_rng([seed, 1])
        self._drawn: list[float] = []

    def target(self, requests: int, context: int, verified: int, prefill: int) -> float:
        """Return the target's time; arguments as in `TimeModel.step_seconds`."""
        return self.model.target(requests + verified + prefill, context)

    def draft_first(self, context: int, rows: int) -> float:
        """Return the time of the first draft pass."""
        return self.model.draft_first(rows, context)

    def draft_next(self, requests: int, context: int, passes: int) -> float:
        """Return the total time of the draft passes after the first."""
        each, grown = self.model.further(requests, context)
        return (each + grown * passes) * passes

    def measured(self, seconds: float) -> float:
        """Return the time as measured in the engine, with noise."""
        if not self._noise:
            return seconds
        if not self._drawn:
            drawn = np.exp(self._noise * self._rng.standard_normal(4096))
            self._drawn = drawn.tolist()
        return seconds * self._drawn.pop()


def _scaled(model: ForwardModel, factor: float) -> ForwardModel:
    return replace(
        model,
        seconds=tuple(value * factor for value in model.seconds),
        alpha=model.alpha * factor,
    )
