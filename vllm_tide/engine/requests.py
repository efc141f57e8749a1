"""The requests of control: their slots (array indices), properties and limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from vllm_tide.config import ControlConfig
from vllm_tide.control.slo import SloBook


class Requests:
    """Slots, properties and limits of the requests.

    Args:
        longest: Most tokens of any request (`max_model_len`).
        config: `tide.control`: the server's limit, and the smallest client limit.

    Attributes:
        slot_of: Slot of each request.
        sampled: bool [capacity], temperature > 0.
        constrained: bool [capacity], the output follows a grammar.
        malformed_limits: Number of requests with an invalid limit.
        ignored_limits: Number of requests with a limit where clients may set none.
    """

    def __init__(self, capacity: int, longest: int, config: ControlConfig) -> None:
        self.slot_of: dict[str, int] = {}
        self.sampled = np.zeros(capacity, bool)
        self.constrained = np.zeros(capacity, bool)
        self.slo = SloBook(capacity)
        self.malformed_limits = self.ignored_limits = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._latest: tuple[list[str], np.ndarray] | None = None  # of `slots`
        self._most_tokens = np.zeros(capacity, np.int64)  # of prompt and output
        self._k_max = np.zeros(capacity, np.int64)  # `tide_k_max`
        self._longest = longest
        self._slo_ms, self._least_ms = config.slo_tpot_ms, config.client_slo_tpot_ms

    def add(
        self, req_id: str, running: Collection[str], num_prompt_tokens: int, params: Any
    ) -> tuple[int, int | None]:
        """Assign a slot to a request, and set its properties and limits.

        Args:
            running: Requests of this step; any other may lose its slot.

        Returns:
            The slot, and the slot again if a preempted request lost it, else None.
        """
        released = None
        if not self._free:
            waiting = next(name for name in self.slot_of if name not in running)
            released = self.remove(waiting)
        slot = self.slot_of[req_id] = self._free.pop()
        self._latest = None
        most = self._longest
        if params is not None and params.max_tokens is not None:
            most = min(num_prompt_tokens + params.max_tokens, most)
        self._most_tokens[slot] = most
        self.sampled[slot] = params is not None and params.temperature > 1e-5
        self.constrained[slot] = (
            params is not None and params.structured_outputs is not None
        )
        cap = length_cap(params, self._longest)
        self._k_max[slot] = self._longest if cap is None else cap
        own, asked = self._slo_ms, self._asked_ms(params)
        if own is not None and asked is not None and asked >= own:
            own, asked = asked, None  # looser than the server's limit
        self.slo.add(slot, _seconds(own), _seconds(asked))
        return slot, released

    def remove(self, req_id: str) -> int | None:
        """Release a request's slot and return it; None if it had none."""
        slot = self.slot_of.pop(req_id, None)
        if slot is not None:
            self.slo.finish(slot)
            self._free.append(slot)
            self._latest = None
        return slot

    def without_slot(self, req_ids: Iterable[str]) -> list[str]:
        return [req_id for req_id in req_ids if req_id not in self.slot_of]

    def known(self, req_ids: Sequence[str]) -> list[int]:
        """Return the indices of the requests that have a slot."""
        return [i for i, req_id in enumerate(req_ids) if req_id in self.slot_of]

    def slots(self, req_ids: list[str]) -> np.ndarray:
        """Return the slots of requests that have one, int64 [n]; read-only."""
        if self._latest is None or self._latest[0] != req_ids:
            slots = [self.slot_of[name] for name in req_ids]
            self._latest = list(req_ids), np.array(slots, np.int64)
        return self._latest[1]

    def caps(self, slots: np.ndarray, context: np.ndarray, most: int) -> np.ndarray:
        """Return the useful number of draft tokens: int64 [n], at most `most`.

        Args:
            slots: int64 [n].
            context: int64 [n], tokens in the KV cache after this step.
        """
        # `context + 1` tokens exist, and the target adds one without a draft.
        caps = np.minimum(self._most_tokens[slots] - context - 2, most)
        return np.maximum(np.minimum(caps, self._k_max[slots]), 0)

    def _asked_ms(self, params: Any) -> float | None:
        """Return the request's valid limit if clients may set one; count invalid."""
        given = argument(params, "tide_slo_tpot_ms")
        if given is None:
            return None
        try:
            limit = float(given)
        except (OverflowError, TypeError, ValueError):
            limit = 0.0
        if not 0 < limit < float("inf"):
            self.malformed_limits += 1
            return None
        if self._least_ms is None:
            self.ignored_limits += 1
            return None
        return max(limit, self._least_ms)


def argument(params: Any, name: str) -> Any:
    """Return the value of a key of the request's `vllm_xargs`, or None."""
    return (getattr(params, "extra_args", None) or {}).get(name)


def length_cap(params: Any, most: int) -> int | None:
    """Return the request's `tide_k_max`, at most `most`; None if it is invalid."""
    asked = argument(params, "tide_k_max")
    return min(asked, most) if type(asked) is int and asked >= 0 else None


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
