"""State of each request in control: its slot (an index of arrays) and limits."""

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
from vllm_tide.control.online_time import OnlineTime, RoundSample
from vllm_tide.control.policies import Policy
from vllm_tide.control.slo import SloBook

logger = logging.getLogger("vllm.tide")


class RequestTable:
    """Gives slots to requests.

    Attributes:
        most_tokens: int64 [capacity] prompt and output tokens the request may have.
        sampled: bool [capacity] temperature > 0.
        constrained: bool [capacity] its output follows a grammar.
        k_max: int64 [capacity] draft tokens it wants at most.
    """

    def __init__(self, capacity: int) -> None:
        self.slot_of: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._latest: tuple[list[str], np.ndarray] | None = None  # of `slots`
        self.most_tokens = np.zeros(capacity, np.int64)
        self.sampled = np.zeros(capacity, bool)
        self.constrained = np.zeros(capacity, bool)
        self.k_max = np.zeros(capacity, np.int64)

    def begin(self, req_id: str, running: set[str]) -> tuple[int, int | None]:
        """Give a slot to a request.

        Args:
            running: Requests of this step; any other may lose its slot.

        Returns:
            The slot, and the slot again if a waiting (preempted) request lost it.
        """
        given_up = self._latest = None
        if not self._free:
            waiting = next(name for name in self.slot_of if name not in running)
            given_up = self.slot_of.pop(waiting)
            self._free.append(given_up)
        slot = self._free.pop()
        self.slot_of[req_id] = slot
        return slot, given_up

    def end(self, req_id: str) -> int | None:
        """Take a request's slot back; None if it had none."""
        slot = self.slot_of.pop(req_id, None)
        if slot is not None:
            self._free.append(slot)
            self._latest = None
        return slot

    def slots(self, req_ids: list[str]) -> np.ndarray:
        """int64 [n] slots of requests that have one; not to be written."""
        if self._latest is None or self._latest[0] != req_ids:
            found = [self.slot_of[name] for name in req_ids]
            self._latest = list(req_ids), np.array(found, np.int64)
        return self._latest[1]


def argument(params: Any, name: str) -> Any:
    """Value that a request gives in its `vllm_xargs`; None if none."""
    return (getattr(params, "extra_args", None) or {}).get(name)


def length_cap(params: Any, most: int) -> int | None:
    """The request's `tide_k_max`, cut to `most`; None where it is no length."""
    asked = argument(params, "tide_k_max")
    return min(asked, most) if type(asked) is int and asked >= 0 else None


class RequestBook:
    """Requests under control.

    Args:
        longest: Most tokens of any request (`max_model_len`).
        config: `tide.control`: the server's limit, and the least of a client's.

    Attributes:
        table: Slots and what is known of them.
        malformed_slo: Requests whose own limit was no positive number.
    """

    def __init__(self, capacity: int, longest: int, config: ControlConfig) -> None:
        self.table = RequestTable(capacity)
        self.slo = SloBook(capacity)
        self.malformed_slo = 0
        self._longest = longest
        self._slo_ms, self._least_ms = config.slo_tpot_ms, config.client_slo_tpot_ms

    def admit(self, slot: int, num_prompt_tokens: int, params: Any) -> None:
        """A request got a slot."""
        wanted = self._longest
        if params is not None and params.max_tokens is not None:
            wanted = num_prompt_tokens + params.max_tokens
        self.table.most_tokens[slot] = min(wanted, self._longest)
        self.table.sampled[slot] = params is not None and params.temperature > 1e-5
        self.table.constrained[slot] = (
            params is not None and params.structured_outputs is not None
        )
        cap = length_cap(params, self._longest)
        self.table.k_max[slot] = self._longest if cap is None else cap
        own, asked = self._slo_ms, self._asked_ms(params)
        if own is not None and asked is not None and asked >= own:
            own, asked = asked, None  # looser than the server's: it costs nobody
        self.slo.add(slot, _seconds(own), _seconds(asked))

    def room(self, slots: np.ndarray, context: np.ndarray, most: int) -> np.ndarray:
        """Draft tokens that can be of use: int64 [n], at most `most`.

        Args:
            slots: int64 [n].
            context: int64 [n] tokens in the KV cache after this step.
        """
        # `context + 1` tokens exist; the target adds one more by itself.
        room = np.minimum(self.table.most_tokens[slots] - context - 2, most)
        return np.maximum(np.minimum(room, self.table.k_max[slots]), 0)

    def known(self, req_ids: Sequence[str]) -> list[int]:
        """Places of those requests that have a slot."""
        slot_of = self.table.slot_of
        return [i for i, req_id in enumerate(req_ids) if req_id in slot_of]

    def _asked_ms(self, params: Any) -> float | None:
        """The request's own limit, where requests may have one; nonsense is counted."""
        given = argument(params, "tide_slo_tpot_ms")
        if given is None:
            return None
        try:
            limit = float(given)
        except (OverflowError, TypeError, ValueError):
            limit = 0.0
        if not 0 < limit < float("inf"):
            self.malformed_slo += 1
            return None
        return None if self._least_ms is None else max(limit, self._least_ms)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


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
    """

    def __init__(
        self, capacity: int, longest: int, config: ControlConfig, most: int
    ) -> None:
        self.capacity, self.num_speculative_tokens = capacity, most
        self.policy: Policy | None = None
        self.start: Callable[[], None] | None = None
        self.times: OnlineTime | None = None
        self.suspension = Suspension()
        self.explored: dict[str, float] = {}
        self.faults: Counter[str] = Counter()
        self.on_round: list[Callable[[RoundSample], None]] = []
        self._book = RequestBook(capacity, longest, config)
        self._table, self._slo = self._book.table, self._book.slo
        # Drafted in vain: slots, confidences, first tokens.
        self._probed: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._told = (0, 0)
        self._continues = False

    def _add(self, slot: int, now: float) -> None:
        if self.policy is not None:
            self.policy.add(slot, bool(self._table.sampled[slot]), now)

    def _end(self, slot: int) -> None:
        self._slo.finish(slot)
        if self._probed is not None and slot in self._probed[0]:
            self._probed = None  # the slot's next request is another
        if self.policy is not None:
            self.policy.drop(slot)

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
        stats |= self.policy.stats()
        stats |= self._counted(stats)
        rounds, steps = stats["rounds"], stats["draft_steps"]
        new_rounds, new_steps = rounds - self._told[0], steps - self._told[1]
        self._told = (rounds, steps)
        return stats | {
            "draft_length": new_steps / new_rounds if new_rounds else None,
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
        room = self._book.room(slots, context, self.num_speculative_tokens)
        room[emitted == 0] = 0
        return Batch(
            slots=slots,
            context=context,
            room=room,
            sampled=self._table.sampled[slots],
            limit=self._slo.limits(slots, now),
            asked=self._slo.asked(slots, now),
            first_rows=first_rows,
            catchup_rows=catchup_rows,
        )

    def _probe_result(
        self, slots: np.ndarray, newest: np.ndarray, known: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Outcome of the tokens that were drafted in vain.

        Args:
            newest: int64 [n] first token of each request in this step.
            known: bool [n], True if there is one.

        Returns:
            Slots, confidences, and True for those that were right.
        """
        if self._probed is None:
            return None
        probed, confidence, token = self._probed
        self._probed = None
        place = {int(slot): i for i, slot in enumerate(slots) if known[i]}
        found = [i for i, slot in enumerate(probed) if int(slot) in place]
        here = [place[int(probed[i])] for i in found]
        return probed[found], confidence[found], token[found] == newest[here]

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
