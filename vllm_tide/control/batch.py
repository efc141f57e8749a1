"""Input and output of a control policy: plain arrays, one set per round.

A *round* is: plan, some draft steps, choose, then one target step that verifies what
was chosen. The engine adapter and the simulator both speak exactly these types, so a
decision that was simulated is the decision that is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm_tide.control.online_time import RoundSample


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

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Plan:
    """Decision before the first draft step.

    Attributes:
        steps: Most draft steps; 0: do not draft.
        reason: Why not, when `steps` is 0: "no_room", "no_gain", "slo", "override"
            or "check" (to measure what a round takes undrafted).
        probe: With `steps` 0: a shadow probe is wanted (see `Outcome.probe`). With
            `steps` >= 1: this round is a trial while speculation is off.
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
        verified: int64 [n], draft tokens that were sent to verification.
        accepted: int64 [n], 0..verified.
        emitted: int64 [n], tokens emitted; 0 for a prefill chunk.
        now: Time at which this is known (s), on the clock given to `Policy.plan`.
        sample: Measured times of the step, or None if it was not timed.
        probe: Result of a shadow probe: slots int64 [p], confidence float [p] of the
            draft's token, hit bool [p]: the target then sampled that token.
        rounds: Rounds since `Policy.plan`, those that it let pass without being asked
            (`Plan.rest`) included; counts and sample are of one of them.
    """

    slots: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    now: float
    sample: RoundSample | None = None
    probe: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    rounds: int = 1
