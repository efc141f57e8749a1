"""Seconds as they pass in the simulated engine, and what the policy is told of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vllm_tide.control.time_model import ForwardModel, TimeModel

_DRAFT = ForwardModel((1,), (1e-3,), 0.0)
GUESS = TimeModel(ForwardModel((1,), (10e-3,), 0.0), _DRAFT, _DRAFT)
"""As `vllm_tide.engine.policy_start.first_guess`: no size of a step says anything."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How the time model that a policy starts from differs from the true one.

    Attributes:
        target: Factor on the target's seconds.
        draft: Factor on the draft's seconds.
        noise: Standard deviation of the logarithm of a measured time over the true
            one. The time itself passes as it is: only the measurement is noisy.
        cold: Nothing is known: see `GUESS`.
    """

    target: float = 1.0
    draft: float = 1.0
    noise: float = 0.0
    cold: bool = False

    def believed(self, model: TimeModel) -> TimeModel:
        """The time model that the policy starts from."""
        if self.cold:
            return GUESS
        return replace(
            model,
            target=_scaled(model.target, self.target),
            draft_first=_scaled(model.draft_first, self.draft),
            draft_next=_scaled(model.draft_next, self.draft),
        )


class Truth:
    """Seconds of each part of a step.

    One number at a time and without arrays: the event loop asks several times a step.

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
        """The target's step; arguments as of `TimeModel.step_seconds`."""
        return self.model.target(requests + verified + prefill, context)

    def draft_first(self, context: int, rows: int) -> float:
        """The first draft pass."""
        return self.model.draft_first(rows, context)

    def draft_next(self, requests: int, context: int, passes: int) -> float:
        """The draft passes after the first, in all."""
        each, grown = self.model.further(requests, context)
        return (each + grown * passes) * passes

    def measured(self, seconds: float) -> float:
        """What a clock in the engine says of a time."""
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
