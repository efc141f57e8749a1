"""Input and output of a control policy: plain arrays, one set per decode step.

A step is: plan, some draft passes, choose, then one target pass that verifies the
chosen tokens. The engine and the simulator use the same types and policies, so both
make the same decisions.
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
        drafted: float32 [K, n], the same for the draft's tokens, from counts; None for
            a policy that predicts acceptance.
        force: Run the draft even if no request needs it. Otherwise there would be no
            data about it while the memory is better.
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
        """Return `caps` with 0 where the proposal is better than the expected draft.

        Args:
            accepted: float [n], expected accepted tokens of the draft.
        """
        if self.force:
            return caps
        return np.where(self.better(accepted[None]), 0, caps)

    def merge(
        self, drafted: np.ndarray, size: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Select the better of draft and proposal for each request.

        Args:
            drafted: float32 [s, n], survivals of the draft's tokens.
            size: int64 [n], number of draft tokens of each request.

        Returns:
            float32 [k, n] survivals; int64 [n] tokens; bool [n], True for the proposal.
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
        slots: int64 [n], index of each request in the per-request state, assigned by
            the caller: 0..capacity-1, unique until the request ends.
        context: int64 [n], tokens in the KV cache after this step.
        caps: int64 [n], maximum useful draft tokens; 0: none are drafted (a prefill
            chunk, opted out, at the length limit).
        sampled: bool [n], temperature above zero.
        limit: float64 [n], seconds this step may take for the request's SLO; inf
            without an SLO (`vllm_tide.control.slo.SloBook.limits`). A policy that
            applies the clients' limits stores `asked` here.
        asked: The same with the limits requested by clients; None if there are none.
        first_rows: Rows of the first draft pass, including committed and rejected ones.
        catchup_rows: Missed rows that the draft reads first; 0 while drafting.
        prefill: Prefill rows expected in the next target step; 0 if unknown.
        memory: Proposals that need no draft pass; None if there are none.
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
        passes: Maximum draft passes; 0: do not draft.
        reason: Reason for `passes` of 0: "no_room", "no_gain", "slo", "memory" (all
            requests have better proposals) or "check" (to measure the time of a step
            without drafts).
        unasked: With `passes` 0: further steps, of a similar batch size and without
            limits, for which `plan` need not be called. The next observation counts
            them (`Outcome.steps`), except those with prefill rows.
        foreseen: With `passes` >= 1: best number of draft passes before confidences
            are known, so also a prediction for later steps; 0: not predicted.
    """

    passes: int
    reason: str = ""
    unasked: int = 0
    foreseen: int = 0


@dataclass(slots=True)
class Outcome:
    """Result of a step, after the target has sampled.

    Attributes:
        slots: int64 [n].
        verified: int64 [n], draft tokens that were sent to verification; 0 for a
            request with a proposal of the memory.
        accepted: int64 [n], 0..verified.
        emitted: int64 [n], tokens emitted; 0 for a prefill chunk.
        now: Time of this result (s), on the clock of `Policy.plan`.
        sample: Measured times of the step, or None if it was not timed.
        steps: Steps since `Policy.plan`, including those without a call of it
            (`Plan.unasked`); counts and sample are those of one step.
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
