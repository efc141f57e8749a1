"""The best length and verification set of a step for known probabilities.

The policy has the true time model and the true acceptance probability of every possible
draft token, but neither the outcomes nor future arrivals. Its draft's KV cache is
always complete, so switching drafting off and on is free. In each step it selects the
(length, verification set) with the most expected tokens per second (AdaSpec eq. 8),
over every length and every number of verified tokens. No policy that maximises each
step separately can be better, so regret is measured against it.
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
        verified: [K + 1] int64 size of the best verification set of each.
        order: [n * K] int64 row-major indices of drafts, most probable first.
    """

    rate: np.ndarray
    verified: np.ndarray
    order: np.ndarray

    def lengths(self, steps: int, requests: int) -> np.ndarray:
        """Return each request's drafts in the best set of `steps`, int64 [n]."""
        top = len(self.rate) - 1
        chosen = self.order[self.order % top < steps][: self.verified[steps]]
        return np.bincount(chosen // top, minlength=requests)


def candidates(
    survival: np.ndarray, emitting: int, target: np.ndarray, spent: np.ndarray
) -> Candidates:
    """Return the best verification set of each draft length.

    Args:
        survival: [n, K] probability that drafts 1..j+1 of a request are all accepted,
            non-increasing in j; 0 if a request has no such token.
        emitting: Requests that emit a token with any draft.
        target: [n * K + 1] seconds of the target step that verifies m drafts.
        spent: [K + 1] seconds of a step with 0..K draft steps, without the target.
    """
    requests, top = survival.shape
    flat = survival.ravel()
    # The sort is stable and row-major: of equally probable drafts the shallower one is
    # first, so the most probable drafts are a prefix of each request's draft.
    order = np.argsort(-flat, kind="stable")
    value = flat[order].astype(np.float64)
    depth = order % top
    useful = int(np.count_nonzero(value))
    order, value, depth = order[:useful], value[:useful], depth[:useful]
    rate = np.empty(top + 1)
    verified = np.zeros(top + 1, np.int64)
    rate[0] = emitting / (spent[0] + target[0])
    for steps in range(1, top + 1):
        values = value if steps == top else value[depth < steps]
        expected = np.empty(len(values) + 1)
        expected[0] = emitting
        np.cumsum(values, out=expected[1:])
        expected[1:] += emitting
        rates = expected / (target[: len(expected)] + spent[steps])
        verified[steps] = best = int(rates.argmax())
        rate[steps] = rates[best]
    return Candidates(rate, verified, order)


class ClairvoyantPolicy(PlannedPolicy):
    """A policy that plans with the true probabilities.

    Args:
        model: The true time model.

    Attributes:
        free_catchup: Catching up of the draft costs nothing.
    """

    free_catchup = True

    def __init__(self, model: TimeModel) -> None:
        super().__init__()
        self._model = model
        self._survival = np.empty((0, 0), np.float32)
        self._emitting = 0

    def reveal(self, survival: np.ndarray, emitting: int) -> None:
        """Set the true probabilities of the step; see `candidates`."""
        self._survival = survival
        self._emitting = emitting

    def plan(self, batch: Batch, now: float) -> Plan:
        """Plan the best (length, verification set)."""
        best = batch_candidates(self._survival, self._emitting, self._model, batch)
        steps = int(best.rate.argmax())
        return self.planned(steps, best.lengths(steps, len(batch.slots)))


def batch_candidates(
    survival: np.ndarray, emitting: int, model: TimeModel, batch: Batch
) -> Candidates:
    """Return the `candidates` of a batch on a time model, with free catch-up."""
    requests, top = survival.shape
    context = int(batch.context.sum())
    # Requests that just ended are in the batch, as in the engine, without cost.
    rows = max(emitting, 1)
    target = model.target_curve(rows, context, requests * top, batch.prefill)
    draft = model.draft_curve(requests, context, batch.first_rows, top)
    return candidates(survival, emitting, target, draft + model.host)
