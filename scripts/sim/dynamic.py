"""vLLM's own schedule: a length for each batch size, tuned in advance.

`num_speculative_tokens_per_batch_size` of vLLM 0.32. Tuned here as well as it can be:
on the true time model, with the regime's true mean acceptance. At K = 0 upstream still
runs the draft's first pass, to keep its KV cache fresh; so does this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_tide.control.batch import Batch, Outcome, Plan
from vllm_tide.control.time_model import TimeModel


def tune(
    model: TimeModel, mean_survival: np.ndarray, most: int, context: int
) -> np.ndarray:
    """The best length of each batch size.

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
        draft[0] = draft[1]  # K = 0 runs the first pass all the same
        seconds = target[::requests] + draft + model.overhead(requests)
        lengths[requests] = int((expected / seconds).argmax())
    return lengths


class DynamicPolicy:
    """Drafts as many steps as the table says for the number of requests.

    Args:
        lengths: [most batch size + 1] int64, see `tune`.

    Attributes:
        fresh: The draft's first pass is run even when nothing is drafted.
    """

    fresh = True

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self._steps = 0
        self._room = np.empty(0, np.int64)

    def plan(self, batch: Batch, now: float) -> Plan:
        """Look the length up."""
        self._steps = int(self._lengths[len(batch.slots)])
        self._room = batch.room
        return Plan(self._steps, "no_gain" if self._steps == 0 else "", False)

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        """Whatever the confidences say."""
        return step < self._steps

    def choose(self) -> np.ndarray:
        """All of them."""
        return np.minimum(self._room, self._steps)

    def observe(self, outcome: Outcome) -> None:
        """The table is fixed."""

    def add(self, slot: int, sampled: bool, now: float) -> None:
        """Nothing is kept of a request."""

    def drop(self, slot: int) -> None:
        """Nothing is kept of a request."""

    def draft_swapped(self) -> None:
        """The table is fixed."""

    def stats(self) -> dict[str, Any]:
        """Nothing to report."""
        return {}
