"""Control shared by both model runners, which differ in when they ask."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_tide.capture.guard import Suspension
from vllm_tide.config import ControlConfig
from vllm_tide.control.batch import Batch
from vllm_tide.control.policies import Policy
from vllm_tide.control.step_times import StepTimes
from vllm_tide.engine.requests import RequestBook

logger = logging.getLogger("vllm.tide")


class Control:
    """Parts of control on both model runners: requests, a policy, its faults.

    Attributes:
        policy: Who decides; None until the time model is known (the length is static),
            on followers, and after a fault (the length is 0, for a while).
        start: Gives a new policy and its times, at first and after a fault; None
            where nobody decides.
        times: What the policy predicts times with, if it does.
        suspension: How long a fault keeps the length at 0.
        explored: Chance, by request, of the newest drafts that only exploration sends
            to verification.
        remembered: Requests whose newest drafts are the memory's.
    """

    def __init__(
        self, capacity: int, longest: int, config: ControlConfig, most: int
    ) -> None:
        self.capacity, self.num_speculative_tokens = capacity, most
        self.policy: Policy | None = None
        self.start: Callable[[], None] | None = None
        self.times: StepTimes | None = None
        self.suspension = Suspension()
        self.explored: dict[str, float] = {}
        self.remembered: set[str] = set()
        self.faults: Counter[str] = Counter()
        self._book = RequestBook(capacity, longest, config)
        self._table, self._slo = self._book.table, self._book.slo
        self._told = (0, 0)
        self._continues = False
        self._memory_count = np.zeros(2, np.int64)  # proposals, accepted tokens

    def _add(self, slot: int, now: float) -> None:
        if self.policy is not None:
            self.policy.add(slot, bool(self._table.sampled[slot]), now)

    def _end(self, slot: int) -> None:
        self._slo.finish(slot)

    def draft_swapped(self) -> None:
        """Another draft is live: what was learnt of the old one counts less."""
        if self.policy is not None:
            self._contain("swap", self.policy.draft_swapped)

    def stop(self) -> None:
        self.policy = self.times = None

    def stats(self) -> dict[str, Any]:
        """Totals and values for the metrics; the length is that since the last call."""
        stats: dict[str, Any] = {"control_suspended_s": self.suspension.left}
        if self.policy is None:
            return stats
        counted = self._contain("stats", self.policy.stats)
        if counted is None:
            return {"control_suspended_s": self.suspension.left}
        stats |= counted
        stats |= self._counted(stats)
        steps, passes = stats["steps"], stats["draft_passes"]
        new_steps, new_passes = steps - self._told[0], passes - self._told[1]
        self._told = (steps, passes)
        proposals, accepted = self._memory_count.tolist()
        return stats | {
            "memory_proposals": proposals,
            "memory_accepted_tokens": accepted,
            "draft_depth": new_passes / new_steps if new_steps else None,
            "malformed_slo": self._book.malformed_slo,
            "slo_requests": {"met": self._slo.met, "missed": self._slo.missed},
        }

    def choose(
        self, req_ids: list[str], draft_token_ids: list[list[int]]
    ) -> list[list[int]]:
        """The prefix of each request's drafts that is verified."""
        raise NotImplementedError

    def _counted(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Counts of the runner beside a policy's `stats`, or in their place."""
        raise NotImplementedError

    def _admit(
        self, req_id: str, running: set[str], num_prompt_tokens: int, params: Any
    ) -> int:
        slot, given_up = self._table.begin(req_id, running)
        if given_up is not None:
            self._end(given_up)
        self._book.admit(slot, num_prompt_tokens, params)
        self._add(slot, time.monotonic())
        return slot

    def _forget(self, req_ids: Sequence[str]) -> None:
        for req_id in req_ids:
            slot = self._table.end(req_id)
            if slot is not None:
                self._end(slot)

    def _batch(
        self,
        slots: np.ndarray,
        context: np.ndarray,
        emitted: np.ndarray,
        now: float,
        first_rows: int,
        catchup_rows: int = 0,
    ) -> Batch:
        caps = self._book.caps(slots, context, self.num_speculative_tokens)
        caps[emitted == 0] = 0
        return Batch(
            slots=slots,
            context=context,
            caps=caps,
            sampled=self._table.sampled[slots],
            limit=self._slo.limits(slots, now),
            asked=self._slo.asked(slots, now),
            first_rows=first_rows,
            catchup_rows=catchup_rows,
        )

    def _contain(
        self, where: str, call: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        """Run a part that only the draft's quality depends on; None after a fault."""
        try:
            return call(*args, **named)
        except Exception as error:  # noqa: BLE001 - the serving boundary
            self._lose(where, error)
            return None

    def _start_again(self, now: float) -> bool:
        """A new policy in the place of one that failed, unless it is too soon."""
        if self.start is None or self.suspension.left:
            return False
        self.start()
        self._told = (0, 0)
        for slot in self._table.slot_of.values():
            self._add(slot, now)
        return self.policy is not None

    def _lose(self, where: str, error: Exception) -> None:
        """A fault of the policy's: nothing is drafted until it is tried again."""
        self.faults[f"control_{where}" if where else "control"] += 1
        self.stop()
        if self.suspension.left:
            return
        # The type, not the message: a message may quote content.
        logger.error(
            "vllm_tide: control failed%s (%s); the speculative length is 0 for the "
            "next %d s, then control begins anew.",
            where and f" in {where}",
            type(error).__name__,
            self.suspension.begin(),
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )


def explored(policy: Policy, req_ids: Sequence[str]) -> dict[str, float]:
    """Requests whose drafts only exploration sends to verification, and its chance."""
    chance = getattr(policy, "verify_chance", None)
    if chance is None:
        return {}
    return {req_ids[i]: float(chance[i]) for i in np.flatnonzero(chance < 1.0)}
