"""vLLM's schedule: a length for each batch size, tuned in advance.

This is `num_speculative_tokens_per_batch_size` of vLLM 0.32, tuned on the true time
model with the regime's true mean acceptance. As in vLLM, the draft's first pass runs at
K = 0 too, to keep its KV cache complete.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_tide.control.batch import Batch, Outcome, Plan
from vllm_tide.control.time_model import TimeModel


def tune(
    model: TimeModel, mean_survival: np.ndarray, most: int, context: int
) -> np.ndarray:
    """Return the best length of each batch size.

    Args:
        model: The true time model.
        mean_survival: [K] mean probability that drafts 1..j+1 are all accepted.
        most: Largest batch size.
        context: Mean tokens in a request's KV cache.

    Returns:
        int64 [most + 1] lengths; entry 0 is not used.
    """
    top = len(mean_survival)
    expected = 1.0 + np.concatenate([[0.0], np.cumsum(mean_survival)])
    lengths = np.zeros(most + 1, np.int64)
    for requests in range(1, most + 1):
        cached = requests * context
        target = model.target_curve(requests, cached, requests * top)
        draft = model.draft_curve(requests, cached, requests, top)
        draft[0] = draft[1]  # K = 0 also runs the first pass
        seconds = target[::requests] + draft + model.host
        lengths[requests] = int((expected / seconds).argmax())
    return lengths


class PlannedPolicy:
    """A policy that drafts and verifies its plan, without learning."""

    def __init__(self) -> None:
        self._steps = 0
        self._lengths = np.empty(0, np.int64)

    def planned(self, steps: int, lengths: np.ndarray) -> Plan:
        """Store and return a plan of `steps` draft steps, verifying `lengths` [n]."""
        self._steps, self._lengths = steps, lengths
        return Plan(steps, "no_gain" if steps == 0 else "")

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        """Continue as planned, independent of the confidences."""
        return step < self._steps

    def choose(self) -> np.ndarray:
        """Return the planned lengths."""
        return self._lengths

    def observe(self, outcome: Outcome) -> None:
        """Ignore it."""

    def add(self, slot: int, sampled: bool, now: float) -> None:
        """Ignore it."""

    def drop(self, slot: int) -> None:
        """Ignore it."""

    def draft_swapped(self) -> None:
        """Ignore it."""

    def stats(self) -> dict[str, Any]:
        """Return no statistics."""
        return {}


class DynamicPolicy(PlannedPolicy):
    """A policy with a table of draft steps by the number of requests.

    Args:
        lengths: [largest batch size + 1] int64, see `tune`.

    Attributes:
        fresh: The draft's first pass runs in steps without drafts too.
    """

    fresh = True

    def __init__(self, lengths: np.ndarray) -> None:
        super().__init__()
        self._table = lengths

    def plan(self, batch: Batch, now: float) -> Plan:
        """Plan the table's length."""
        steps = int(self._table[len(batch.slots)])
        return self.planned(steps, np.minimum(batch.caps, steps))
