"""Input and output of a control policy: plain arrays, one set per decode step.

A step is: plan, some draft passes, choose, then one target pass that verifies the
chosen tokens. The engine and the simulator use the same types, so a decision that was
simulated is the decision that is served.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm_tide.control.step_times import StepSample


@dataclass(slots=True)
class Proposals:
    """Drafts from the requests' own texts (`vllm_tide.memory`).

    Attributes:
        survival: float32 [K, n], probability that token j of the proposal and all
            before it are accepted; below 0 where there is no such token.
        drafted: float32 [K, n], the same of the draft's tokens, by counts; None for a
            policy that predicts acceptance.
        force: The draft runs even if no request needs it: else nothing would be learnt
            of it where the memory is better for long.
    """

    survival: np.ndarray
    drafted: np.ndarray | None = None
    force: bool = False

    def better(self, drafted: np.ndarray) -> np.ndarray:
        """Return where the proposal has the larger sum of survivals, bool [n].

        Args:
            drafted: float [s, n], survivals of the draft's tokens.
        """
        worth = [np.maximum(s, 0.0).sum(axis=0) for s in (self.survival, drafted)]
        return np.asarray(worth[0] > worth[1])

    def left_to_draft(self, caps: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """`Batch.caps`, 0 where the proposal is worth more than is expected of a draft.

        Args:
            accepted: float [n], tokens of the draft expected to be accepted.
        """
        if self.force:
            return caps
        return np.where(self.better(accepted[None]), 0, caps)

    def merge(
        self, drafted: np.ndarray, size: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take the better one of draft and proposal for each request.

        Args:
            drafted: float32 [s, n], survivals of the draft's tokens.
            size: int64 [n], how many of them each request has.

        Returns:
            float32 [k, n] survivals; int64 [n] tokens; bool [n] True for the proposal.
        """
        better = self.better(drafted)
        size = np.where(better, (self.survival >= 0).sum(axis=0), size)
        survival = np.full((int(size.max()), len(size)), -1.0, np.float32)
        survival[: len(drafted)] = drafted[: len(survival)]
        survival[:, better] = self.survival[: len(survival), better]
        return survival, size, better


@dataclass(slots=True)
class Batch:
    """The requests of one step, between sampling and drafting.

    Attributes:
        slots: int64 [n], index of each request in the per-request state; given out by
            the caller, 0..capacity-1, unique until the request ends.
        context: int64 [n], tokens in the KV cache after this step.
        caps: int64 [n], most draft tokens that can be of use; 0: none are drafted (a
            prefill chunk, opted out, at the length limit).
        sampled: bool [n], temperature above zero.
        limit: float64 [n], seconds this step may take for the request's SLO; inf
            where there is none (`vllm_tide.control.slo.SloBook.limits`). A policy that
            keeps the limits of clients puts `asked` here.
        asked: The same with the limits that clients ask for; None if there are none.
        first_rows: Rows of the first draft pass (committed and rejected rows too).
        catchup_rows: Missed rows to catch up before drafting; 0 while drafting.
        prefill: Prefill rows expected in the next target step; 0 if unknown.
        memory: Drafts that need no draft pass; None if there are none.
    """

    slots: np.ndarray
    context: np.ndarray
    caps: np.ndarray
    sampled: np.ndarray
    limit: np.ndarray
    first_rows: int
    catchup_rows: int = 0
    prefill: int = 0
    asked: np.ndarray | None = None
    memory: Proposals | None = None

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Plan:
    """Decision before the first draft pass.

    Attributes:
        passes: Most draft passes; 0: do not draft.
        reason: Why not, when `passes` is 0: "no_room", "no_gain", "slo",
            "memory" (all requests have better proposals) or "check" (to measure what a
            step takes undrafted).
        unasked: With `passes` 0: steps of about as many requests, none with a limit,
            for which `plan` need not be called; the next observation counts them
            (`Outcome.steps`), without those that had prefill rows.
        foreseen: With `passes` >= 1: draft passes that pay before any confidence of
            this step, so those of a later one; 0: not predicted.
    """

    passes: int
    reason: str = ""
    unasked: int = 0
    foreseen: int = 0


@dataclass(slots=True)
class Outcome:
    """Outcome of a step, once the target has sampled.

    Attributes:
        slots: int64 [n].
        verified: int64 [n], tokens of the draft that were sent to verification; 0 of a
            request with a proposal of the memory.
        accepted: int64 [n], 0..verified.
        emitted: int64 [n], tokens emitted; 0 for a prefill chunk.
        now: Time at which this is known (s), on the clock given to `Policy.plan`.
        sample: Measured times of the step, or None if it was not timed.
        steps: Steps since `Policy.plan`, those without a call of it (`Plan.unasked`)
            included; counts and sample are of one of them.
    """

    slots: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    now: float
    sample: StepSample | None = None
    steps: int = 1


_COUNTS = (
    "steps",
    "draft_passes",
    "drafted_tokens",
    "verified_tokens",
    "accepted_tokens",
    "trimmed_tokens",
    "exploration_steps",
    "slo_unreachable_steps",
    "client_limits_dropped",
)


def totals(
    count: Counter[str], undrafted: Counter[str], by_depth: np.ndarray
) -> dict[str, Any]:
    """Return the counters of a policy's `stats`."""
    return {
        **{name: count[name] for name in _COUNTS},
        "steps_without_drafts": dict(undrafted),
        "steps_by_depth": by_depth.tolist(),
    }
