"""Input and output of a control policy: plain arrays, one set per round.

A *round* is: plan, some draft steps, choose, then one target step that verifies what
was chosen. The engine adapter and the simulator both speak exactly these types, so a
decision that was simulated is the decision that is served.
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
    """Drafts from the requests' own texts (`vllm_tide.memory`), beside the draft's.

    Attributes:
        survival: float32 [K, n], probability that token j of the proposal and all
            before it are accepted; below 0 where there is no such token.
        drafted: float32 [K, n], the same of the draft's tokens, by counts; None for a
            policy that knows better.
        look: The draft is to run even if no request needs it: else nothing would be
            learnt of it where the memory is better for long.
    """

    survival: np.ndarray
    drafted: np.ndarray | None = None
    look: bool = False

    def better(self, drafted: np.ndarray) -> np.ndarray:
        """True where the proposal has the larger sum of survivals; bool [n].

        Args:
            drafted: float [s, n], survivals of the draft's tokens.
        """
        worth = [np.maximum(s, 0.0).sum(axis=0) for s in (self.survival, drafted)]
        return np.asarray(worth[0] > worth[1])

    def left_to_draft(self, room: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """`Batch.room`, 0 where the proposal is worth more than is expected of a draft.

        Args:
            accepted: float [n], tokens of the draft expected to be accepted.
        """
        if self.look:
            return room
        return np.where(self.better(accepted[None]), 0, room)

    def merge(
        self, drafted: np.ndarray, size: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The better one of draft and proposal for each request.

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
            the caller, 0..capacity-1, unique while the request lives.
        context: int64 [n], tokens in the KV cache after this step.
        room: int64 [n], most draft tokens that can be of use; 0 = must not be drafted
            for (a prefill chunk, opted out, at the length limit).
        sampled: bool [n], temperature above zero.
        limit: float64 [n], seconds this round may take for the request's SLO; inf
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
    room: np.ndarray
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
    """Decision before the first draft step.

    Attributes:
        steps: Most draft steps; 0: do not draft.
        reason: Why not, when `steps` is 0: "no_room", "no_gain", "slo",
            "memory" (all requests have better proposals) or "check" (to measure what a
            round takes undrafted).
        probe: This round drafts to see what that yields, while it should not pay.
        rest: With `steps` 0: rounds of about as many requests, none with a limit, that
            may stay off without being asked about; the next observation counts them
            (`Outcome.rounds`), without those that had prefill rows.
        foreseen: With `steps` >= 1: draft steps that pay by what is known before any
            confidence of this round, so those of a later one; 0: not foreseen.
    """

    steps: int
    reason: str = ""
    probe: bool = False
    rest: int = 0
    foreseen: int = 0


@dataclass(slots=True)
class Outcome:
    """Outcome of a round, once the target has sampled.

    Attributes:
        slots: int64 [n].
        verified: int64 [n], tokens of the draft that were sent to verification; 0 of a
            request whose proposal was the memory's.
        accepted: int64 [n], 0..verified.
        emitted: int64 [n], tokens emitted; 0 for a prefill chunk.
        now: Time at which this is known (s), on the clock given to `Policy.plan`.
        sample: Measured times of the step, or None if it was not timed.
        rounds: Rounds since `Policy.plan`, those that it let pass without being asked
            (`Plan.rest`) included; counts and sample are of one of them.
    """

    slots: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    now: float
    sample: StepSample | None = None
    rounds: int = 1


_COUNTS = (
    "rounds",
    "draft_steps",
    "drafted_tokens",
    "verified_tokens",
    "accepted_tokens",
    "trimmed_tokens",
    "probes",
    "slo_misses",
    "limits_left_out",
)


def totals(
    count: Counter[str], off: Counter[str], lengths: np.ndarray
) -> dict[str, Any]:
    """The part of a policy's `stats` that only counts."""
    return {
        **{name: count[name] for name in _COUNTS},
        "off_rounds": dict(off),
        "length_hist": lengths.tolist(),
    }
