"""Control of the speculative length: the parts shared by both model runners."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from vllm_tide.capture.guard import Suspension
from vllm_tide.config import ControlConfig
from vllm_tide.control.batch import Batch
from vllm_tide.control.policies import Policy
from vllm_tide.control.step_times import StepTimes
from vllm_tide.engine.requests import Requests

logger = logging.getLogger("vllm.tide")


class Control:
    """Requests, policy and fault handling of control, for both model runners.

    Attributes:
        policy: Chooses the length. None before the time model exists (the length is
            static), on other ranks than the leader, and for a while after a fault
            (the length is 0).
        start: Creates the policy and its time model, at start and after a fault; None
            without a policy.
        times: Time model of the policy, if it has one.
        suspension: Time for which the length is 0 after a fault.
        explored: Verification probability, by request, of the newest drafts that are
            verified for exploration only.
        remembered: Requests with newest drafts from the n-gram memory.
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
        self._requests = Requests(capacity, longest, config)
        self._slo = self._requests.slo
        self._reported = (0, 0)
        self._continues = False
        self._memory_count = np.zeros(2, np.int64)  # proposals, accepted tokens

    def _add(self, slot: int, now: float) -> None:
        if self.policy is not None:
            self.policy.add(slot, bool(self._requests.sampled[slot]), now)

    def draft_swapped(self) -> None:
        """Discount the statistics of the old draft after a swap."""
        if self.policy is not None:
            self._contain("swap", self.policy.draft_swapped)

    def stop(self) -> None:
        self.policy = self.times = None

    def stats(self) -> dict[str, Any]:
        """Return metrics; `draft_depth` is the mean since the last call."""
        stats: dict[str, Any] = {"control_suspended_s": self.suspension.left}
        if self.policy is None:
            return stats
        counted = self._contain("stats", self.policy.stats)
        if counted is None:
            return {"control_suspended_s": self.suspension.left}
        stats |= counted
        stats |= self._counted(stats)
        steps, passes = stats["steps"], stats["draft_passes"]
        new_steps, new_passes = steps - self._reported[0], passes - self._reported[1]
        self._reported = (steps, passes)
        proposals, accepted = self._memory_count.tolist()
        return stats | {
            "memory_proposals": proposals,
            "memory_accepted_tokens": accepted,
            "draft_depth": new_passes / new_steps if new_steps else None,
            "malformed_limits": self._requests.malformed_limits,
            "ignored_limits": self._requests.ignored_limits,
            "slo_requests": {"met": self._slo.met, "missed": self._slo.missed},
        }

    def choose(
        self, req_ids: list[str], draft_token_ids: list[list[int]]
    ) -> list[list[int]]:
        """Return the prefix of each request's drafts that is verified."""
        raise NotImplementedError

    def _counted(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Return counts of this runner that extend or replace the policy's `stats`."""
        raise NotImplementedError

    def _admit(
        self,
        req_id: str,
        running: Collection[str],
        num_prompt_tokens: int,
        params: Any,
    ) -> int:
        slot, released = self._requests.add(req_id, running, num_prompt_tokens, params)
        if released is not None:
            self._freed(released)
        self._add(slot, time.monotonic())
        return slot

    def _forget(self, req_ids: Sequence[str]) -> None:
        for req_id in req_ids:
            slot = self._requests.remove(req_id)
            if slot is not None:
                self._freed(slot)

    def _freed(self, slot: int) -> None:
        """Drop what belonged to the request that had a slot."""

    def _batch(
        self,
        slots: np.ndarray,
        context: np.ndarray,
        emitted: np.ndarray,
        now: float,
        first_rows: int,
        catchup_rows: int = 0,
    ) -> Batch:
        caps = self._requests.caps(slots, context, self.num_speculative_tokens)
        caps[emitted == 0] = 0
        return Batch(
            slots=slots,
            context=context,
            caps=caps,
            sampled=self._requests.sampled[slots],
            limit=self._slo.limits(slots, now),
            asked=self._slo.asked(slots, now),
            first_rows=first_rows,
            catchup_rows=catchup_rows,
        )

    def _contain(
        self, where: str, call: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        """Call a part of control and return its result; return None on an exception."""
        try:
            return call(*args, **named)
        except Exception as error:  # noqa: BLE001 - the serving boundary
            self._lose(where, error)
            return None

    def _start_again(self, now: float) -> bool:
        """Create a new policy after a fault, unless control is still suspended."""
        if self.start is None or self.suspension.left:
            return False
        self.start()
        self._reported = (0, 0)
        for slot in self._requests.slot_of.values():
            self._add(slot, now)
        return self.policy is not None

    def _lose(self, where: str, error: Exception) -> None:
        """Stop drafting after a fault of the policy, until the suspension ends."""
        self.faults[f"control_{where}" if where else "control"] += 1
        self.stop()
        if self.suspension.left:
            return
        # Only the type: the message may quote a request's content.
        logger.error(
            "vllm_tide: control failed%s (%s); the speculative length is 0 for the "
            "next %d s, then control restarts.",
            where and f" in {where}",
            type(error).__name__,
            self.suspension.begin(),
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )


def explored(policy: Policy, req_ids: Sequence[str]) -> dict[str, float]:
    """Return the verification probability of requests verified for exploration only."""
    chance = getattr(policy, "verify_chance", None)
    if chance is None:
        return {}
    return {req_ids[i]: float(chance[i]) for i in np.flatnonzero(chance < 1.0)}
