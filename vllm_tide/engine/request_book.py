"""What control keeps about each request: its slot, its length limit, its TPOT limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_tide.control.slo import SloBook
from vllm_tide.engine.requests import RequestTable


class RequestBook:
    """Requests under control.

    Args:
        capacity: Most requests of one step.
        longest: Most tokens of any request (`max_model_len`).
        slo_tpot_ms: The server's limit on time per output token (ms), or None.

    Attributes:
        table: Slots and what is known of them.
        slo: Limits of the live requests.
        malformed_slo: Requests whose own limit was no positive number.
    """

    def __init__(self, capacity: int, longest: int, slo_tpot_ms: float | None) -> None:
        self.table = RequestTable(capacity)
        self.slo = SloBook(capacity)
        self.malformed_slo = 0
        self._longest = longest
        self._default_slo = None if slo_tpot_ms is None else slo_tpot_ms / 1e3

    def admit(self, slot: int, num_prompt_tokens: int, params: Any) -> None:
        """A request got a slot.

        Args:
            slot: Its slot.
            num_prompt_tokens: Length of its prompt.
            params: vLLM's `SamplingParams`, or None.
        """
        wanted = self._longest
        if params is not None and params.max_tokens is not None:
            wanted = num_prompt_tokens + params.max_tokens
        self.table.most_tokens[slot] = min(wanted, self._longest)
        self.table.sampled[slot] = params is not None and params.temperature > 1e-5
        self.table.constrained[slot] = (
            params is not None and params.structured_outputs is not None
        )
        self.slo.add(slot, self._slo_seconds(params))

    def room(self, slots: np.ndarray, context: np.ndarray, most: int) -> np.ndarray:
        """Draft tokens that can be of use: int64 [n], at most `most`.

        Args:
            slots: int64 [n].
            context: int64 [n] tokens in the KV cache after this step.
            most: num_speculative_tokens.
        """
        # `context + 1` tokens exist; the target adds one more by itself.
        room = np.minimum(self.table.most_tokens[slots] - context - 2, most)
        return np.asarray(np.maximum(room, 0))

    def known(self, req_ids: Sequence[str]) -> list[int]:
        """Places of those requests that have a slot."""
        slot_of = self.table.slot_of
        return [i for i, req_id in enumerate(req_ids) if req_id in slot_of]

    def _slo_seconds(self, params: Any) -> float | None:
        """The request's own limit, else the server's; nonsense is counted."""
        extra = (params.extra_args or {}) if params is not None else {}
        given = extra.get("tide_slo_tpot_ms")
        if given is None:
            return self._default_slo
        try:
            limit = float(given)
        except (OverflowError, TypeError, ValueError):
            limit = 0.0
        if not 0 < limit < float("inf"):
            self.malformed_slo += 1
            return self._default_slo
        return limit / 1e3
