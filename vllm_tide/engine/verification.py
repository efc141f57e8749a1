"""vLLM's adaptive verification with TIDE's step costs (Model Runner V2).

Upstream's manager ranks the drafted tokens of all requests by estimated survival and
verifies a prefix of each request's drafts. Its estimator learns on the device from
accepted and rejected tokens. This module adds:

* costs that depend on the batch's context and are updated while serving, and a limit of
  the step time. Both are written into the manager's cost tables;
* labels for tokens that would never be verified: some steps verify whole drafts.

The ranking is upstream's. The host must fix the number of tokens of a step before the
device has the confidences, and both select the same set for a given number.

`ControlV2` chooses the draft depth, 0 included, before that. All ranks must make equal
decisions, so this module reads no clock: the scheduler's directive, which every rank
receives, carries the step costs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import (
    OnlineAcceptanceEstimator,
)
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
    AdaptiveVerificationManager,
)

from vllm_tide.capture.guard import Guard
from vllm_tide.control.costs import FirstPassAlways
from vllm_tide.control.step_times import StepTimes
from vllm_tide.control.time_model import NO_PASS, ForwardModel, TimeModel
from vllm_tide.engine.control_v2 import ControlV2, StepCosts

# A smaller change of slope, relative to the largest cost, is a rounding error.
_BEND = 1e-6


def times_of_tables(
    draft_ms: np.ndarray, target_ms: np.ndarray, depth: int, block: bool = False
) -> TimeModel:
    """Return a time model from vLLM's cost measurements for adaptive verification.

    They are measured at one context length,
    `VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN`, and taken as costs of the tokens.
    Costs of context and of everything but the forwards are fitted while serving.

    Args:
        draft_ms: float64 [1 + most requests], time of all draft passes by requests
            (ms), nondecreasing.
        target_ms: float64 [1 + most tokens], time of the target's forward by tokens
            (ms), nondecreasing.
        depth: Drafted tokens of the measured passes.
        block: Whether one pass drafts all of them.
    """
    target, rows = _forward(target_ms), 1 + depth
    if block:
        draft = _forward(draft_ms, rows=rows)
        return TimeModel(target, draft, NO_PASS, block_rows=rows)
    each = draft_ms / depth
    # The first pass also runs the rows of the previous drafts.
    return TimeModel(target, _forward(each, rows=rows), _forward(each))


def _forward(costs_ms: np.ndarray, rows: int = 1) -> ForwardModel:
    """Return an exact piecewise linear model of a table, with `rows` per entry."""
    seconds = np.maximum.accumulate(costs_ms[1:]) / 1e3
    bends = np.ones(len(seconds), bool)
    bends[1:-1] = np.abs(np.diff(seconds, 2)) > _BEND * seconds[-1]
    at = np.flatnonzero(bends)
    knots = (rows * (at + 1)).tolist()
    return ForwardModel(tuple(knots), tuple(seconds[at].tolist()), alpha=0.0)


logger = logging.getLogger("vllm.tide")

Tables = tuple[np.ndarray, np.ndarray]

# Steps until upstream's estimator has been fitted twice. Before that, at start and
# after a swap, its coefficients are those of other drafts.
_WARMUP_STEPS = 2 * OnlineAcceptanceEstimator.REFIT_INTERVAL


EXPLORE_SHARE = 0.01
"""Share of steps that verify whole drafts, if control may explore."""


class StepCostVerification(AdaptiveVerificationManager):
    """`AdaptiveVerificationManager` with TIDE's step costs.

    Args:
        control: Gives the context of the current step; None uses upstream's costs.
        full_verify_share: Share of steps that verify whole drafts.
        on_measured: Called with upstream's measured times, which TIDE's step costs then
            refine; None uses upstream's costs.
        block: Whether one draft pass drafts all tokens.
        contains: See `Guard`; False with several ranks.

    Attributes:
        verify_chance: `Record.verify_chance` of the current step: the share of such
            steps that verify whole drafts; 0 (unknown) if the device cut drafts by
            their confidences.
    """

    UPSTREAM = ("req_states", "query_start_loc", "num_bonus_tokens", "max_total_logits")

    def __init__(
        self,
        control: ControlV2 | None,
        full_verify_share: float,
        on_measured: Callable[[TimeModel], None] | None = None,
        block: bool = False,
        contains: bool = True,
        **upstream: Any,
    ) -> None:
        super().__init__(**upstream)
        # All ranks must retry at the same step: suspensions count steps of 20 ms.
        self._steps = 0
        self.guard = Guard(
            "costs of verification", lambda: 0.02 * self._steps, contains=contains
        )
        self._control = control
        self._times: FirstPassAlways | None = None
        self._on_measured, self._block = on_measured, block
        self._interval = round(1 / full_verify_share) if full_verify_share else 0
        self._step_costs: StepCosts | None = None
        self._depth = self.num_speculative_steps
        self._measured = self._own = (np.zeros(0), np.zeros(0))
        self._version = 0
        self._steps_since_swap = 0
        self.verify_chance = 0.0

    def begin_step(self, scheduler_output: Any, version: int) -> None:
        """Read the draft depth and costs of a step; `version` is `Swapper.number`."""
        self._step_costs = (scheduler_output.tide or {}).get("step_costs")
        self._depth = scheduler_output.num_spec_tokens_to_schedule
        self.verify_chance = 0.0
        self._steps += 1
        self.guard.retry()
        if version != self._version:
            self._version, self._steps_since_swap = version, 0

    def set_cost_curves(
        self,
        draft_curve: list[tuple[int, float]],
        verify_curve: list[tuple[int, float]],
    ) -> None:
        """Store upstream's tables, and create those for a step's costs."""
        super().set_cost_curves(draft_curve, verify_curve)
        assert self.cost_tables is not None  # noqa: S101 (set just now)
        draft_table, verify_table = self._measured = self.cost_tables
        self._own = draft_table.copy(), verify_table.copy()
        if self._on_measured is not None:
            # From the tables, which are equal on all ranks, unlike the curves.
            depth = self.num_speculative_steps
            times = times_of_tables(draft_table, verify_table, depth, self._block)
            self._times = FirstPassAlways(StepTimes(times))
            self._on_measured(times)

    def get_num_tokens(
        self,
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
    ) -> int:
        """Return the step's tokens after the cut of drafts; see upstream."""
        requests, drafts = len(num_tokens_per_req), sum(map(len, draft_tokens.values()))
        others = sum(num_tokens_per_req.values()) - drafts
        self._steps_since_swap += 1
        self.cost_tables = (
            self.guard.run("step_costs", self._tables, requests, others, drafts)
            or self._measured
        )
        tokens = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        if self._control is not None:
            self._control.cut(tokens - others)
        return tokens

    def _tables(self, requests: int, others: int, drafts: int) -> Tables:
        """Return costs (ms) by requests and by tokens, valid for this step only."""
        window = slice(others, others + drafts + 1)
        drafting, verifying, limit = self._costs(requests, others, drafts)
        draft_table, verify_table = self._own
        draft_table[requests] = drafting
        row = verify_table[window]
        row[:] = verifying[0] if self._verifies_all() else verifying
        # An infinite cost excludes a number of tokens; the plain step stays allowed.
        row[1:][drafting + verifying[1:] > limit] = np.inf
        return draft_table, verify_table

    def _costs(
        self, requests: int, others: int, drafts: int
    ) -> tuple[float, np.ndarray, float]:
        """Return costs of drafting, of the target by drafts [drafts + 1], limit; ms."""
        if self._step_costs is None or self._times is None or self._control is None:
            draft_table, verify_table = self._measured
            window = verify_table[others : others + drafts + 1]
            return float(draft_table[requests]), window, np.inf
        limit, learnt = self._step_costs
        times, context = self._times, self._control.context
        times.take(learnt)
        target = times.target_curve(requests, context, drafts, others - requests)
        draft = times.draft_curve(requests, context, others + drafts, self._depth)
        return 1e3 * float(draft[-1]), 1e3 * target, 1e3 * limit

    def _verifies_all(self) -> bool:
        if self._steps_since_swap <= _WARMUP_STEPS:
            self.verify_chance = 1.0
        elif self._interval > 0 and self._steps_since_swap % self._interval == 0:
            self.verify_chance = 1.0 / self._interval
        return self.verify_chance > 0.0
