"""The engine core's side: orders swaps at one step for all ranks, carries numbers.

Every rank acts on what the scheduler's output says, so all of them switch drafts at
the same step; no rank decides by itself. A request's `cache_salt` never leaves the
engine core: the order names the new requests that have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NotRequired, TypedDict

from vllm_tide.config import ConfigError, parse_tide


class Order(TypedDict):
    """What a step's workers are told (`SchedulerOutput.tide`).

    Attributes:
        install: Version of the draft to install before the step.
        salted: New requests of the step that have a `cache_salt`.
        prices: What its verification costs (`ControlV2.prices`).
    """

    install: NotRequired[int]
    salted: NotRequired[list[str]]
    prices: NotRequired[Any]


def make_scheduler(
    speculative_config: Any, requests: Mapping[str, Any] | None = None
) -> SchedulerTide | None:
    """None unless `tide` is configured: the cost of *off* is one `is None`.

    Args:
        speculative_config: vLLM's.
        requests: The scheduler's requests by id.

    Raises:
        ConfigError: vLLM was patched for an earlier vllm_tide, which gave no requests.
    """
    if speculative_config is None or speculative_config.tide is None:
        return None
    if requests is None:
        raise ConfigError(
            "tide: vLLM's patches are of an earlier vllm_tide, which cannot keep "
            "requests with a cache_salt out of capture; run `vllm-tide patch apply`."
        )
    capture = parse_tide(speculative_config.tide).capture
    longest = speculative_config.num_speculative_tokens
    return SchedulerTide(longest, {} if capture.salted else requests)


class SchedulerTide:
    """TIDE in the scheduler.

    Args:
        longest: num_speculative_tokens.
        requests: vLLM's requests by id, of which those with a `cache_salt` are kept
            out of capture; empty keeps none out.
    """

    def __init__(self, longest: int, requests: Mapping[str, Any]) -> None:
        self._longest = longest
        self._requests = requests
        self._staged = 0
        self._ordered = 0
        self._depth: int | None = None
        self._prices: Any = None
        self._stats: dict[str, Any] | None = None
        self._swap_seconds: list[float] = []

    def control(self, new_requests: Iterable[Any] = ()) -> Order | None:
        """What the next step's workers are told, or None.

        Args:
            new_requests: vLLM's `NewRequestData` of the requests that the step brings.
        """
        order = Order()
        if self._staged not in (0, self._ordered):
            self._ordered = order["install"] = self._staged
        if salted := [new.req_id for new in new_requests if self._salted(new.req_id)]:
            order["salted"] = salted
        if self._prices is not None:
            order["prices"] = self._prices
        return order or None

    def _salted(self, req_id: str) -> bool:
        request = self._requests.get(req_id)
        return request is not None and bool(request.cache_salt)

    def draft_depth(self, most: int) -> int:
        """Draft steps of the step that is being scheduled.

        Model Runner V2's worker predicts them (`ControlV2.depth`); V1's decides for
        itself when the step has come that far. A prediction replaces vLLM's table of
        lengths, which may be there only for the graphs to capture (`arguments.py`).

        Args:
            most: What vLLM would draft.
        """
        return most if self._depth is None else min(self._depth, self._longest)

    def observe(self, report: dict[str, Any] | None) -> None:
        """Take a worker's report (`ModelRunnerOutput.tide`).

        A version that is still staged after it was ordered is ordered again: a rank
        did not hold it yet.
        """
        if report is None:
            return
        self._depth, self._prices = report.get("depth"), report.get("prices")
        if "staged" not in report:
            return  # no numbers this time
        if report["staged"] == self._ordered:
            self._ordered = 0
        self._staged = report["staged"]
        self._swap_seconds += report.get("swap_seconds", ())
        self._stats = report

    def stats(self) -> dict[str, Any] | None:
        """Numbers for the API server's metrics, once per report."""
        stats, self._stats = self._stats, None
        if stats is not None:
            stats = stats | {"swap_seconds": self._swap_seconds}
            self._swap_seconds = []
        return stats
