"""The best length and verification set of a step, its probabilities being known.

Knows the true time model and the true acceptance probability of every token it could
draft; not the outcomes, nor which requests arrive next. Its draft's KV cache is always
fresh, so it turns drafting off and on for nothing. Each step it takes the (length,
verification set) with the most expected tokens per second (AdaSpec eq. 8), over every
length and every number of verified tokens: no policy that is judged step by step can
do better, so what it reaches is the measure of regret.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.dynamic import PlannedPolicy
from vllm_tide.control.batch import Batch, Plan
from vllm_tide.control.time_model import TimeModel


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best verification set of each draft length.

    Attributes:
        rate: [K + 1] float64 expected tokens per second of drafting 0..K steps.
        verified: [K + 1] int64 tokens that the best set of each verifies.
        order: [n * K] int64 row-major indices of drafts, likeliest first.
    """

    rate: np.ndarray
    verified: np.ndarray
    order: np.ndarray

    def lengths(self, steps: int, requests: int) -> np.ndarray:
        """int64 [n] drafts of each request that the best set of *steps* verifies."""
        top = len(self.rate) - 1
        kept = self.order[self.order % top < steps][: self.verified[steps]]
        return np.bincount(kept // top, minlength=requests)


def candidates(
    survival: np.ndarray, emitting: int, target: np.ndarray, spent: np.ndarray
) -> Candidates:
    """The best verification set of each draft length.

    Args:
        survival: [n, K] probability that drafts 1..j+1 of a request are all accepted,
            non-increasing in j; 0 where a request has no such token.
        emitting: Requests that emit a token whatever is drafted.
        target: [n * K + 1] seconds of the target step that verifies m drafts.
        spent: [K + 1] seconds of the rest of a round that drafts 0..K steps.
    """
    requests, top = survival.shape
    flat = survival.ravel()
    # Stable, and row-major: of equally likely drafts the shallower comes first, so
    # any number of the likeliest drafts is a prefix for each request.
    order = np.argsort(-flat, kind="stable")
    value = flat[order].astype(np.float64)
    depth = order % top
    useful = int(np.count_nonzero(value))
    order, value, depth = order[:useful], value[:useful], depth[:useful]
    rate = np.empty(top + 1)
    verified = np.zeros(top + 1, np.int64)
    rate[0] = emitting / (spent[0] + target[0])
    for steps in range(1, top + 1):
        kept = value if steps == top else value[depth < steps]
        expected = np.empty(len(kept) + 1)
        expected[0] = emitting
        np.cumsum(kept, out=expected[1:])
        expected[1:] += emitting
        rates = expected / (target[: len(expected)] + spent[steps])
        verified[steps] = best = int(rates.argmax())
        rate[steps] = rates[best]
    return Candidates(rate, verified, order)


class ClairvoyantPolicy(PlannedPolicy):
    """A policy that is shown the true probabilities before it plans.

    Args:
        model: The true time model.

    Attributes:
        punctual: Its draft catches up for nothing.
    """

    punctual = True

    def __init__(self, model: TimeModel) -> None:
        super().__init__()
        self._model = model
        self._survival = np.empty((0, 0), np.float32)
        self._emitting = 0

    def reveal(self, survival: np.ndarray, emitting: int) -> None:
        """Show the step's truth; see `candidates`."""
        self._survival = survival
        self._emitting = emitting

    def plan(self, batch: Batch, now: float) -> Plan:
        """Take the best (length, verification set)."""
        found = judge(self._survival, self._emitting, self._model, batch)
        steps = int(found.rate.argmax())
        return self.planned(steps, found.lengths(steps, len(batch.slots)))


def judge(
    survival: np.ndarray, emitting: int, model: TimeModel, batch: Batch
) -> Candidates:
    """`candidates` of a batch on a time model, catching up for nothing."""
    requests, top = survival.shape
    context = int(batch.context.sum())
    # Requests that just ended are in the batch, as in the engine, and cost nothing.
    rows = max(emitting, 1)
    target = model.target_curve(rows, context, requests * top, batch.prefill)
    draft = model.draft_curve(requests, context, batch.first_rows, top)
    return candidates(survival, emitting, target, draft + model.host)
