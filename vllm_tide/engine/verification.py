"""vLLM's adaptive verification at this project's step costs (Model Runner V2).

Upstream's manager ranks the drafted tokens of all requests by estimated survival and
verifies, of each request, the prefix that pays; its estimator learns from the target's
verdicts, on the device. What it lacks is given to it here, and the rest stays its own:

* costs that follow the batch's context and what serving teaches, and a limit on the
  time of a round: written into the tables of costs that it reads;
* labels of tokens that it would never verify, by verifying all of a draft now and then.

The ranking itself is upstream's: the host must know a step's tokens before the device
knows its confidences, and of a given number both find the same set.

How deep is drafted, 0 included, is decided before it (`ControlV2`). Every rank decides
for itself and all must decide alike, so nothing here reads a clock: step costs come
with the scheduler's directive, which every rank gets.
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
from vllm_tide.control.time_model import ForwardModel, TimeModel
from vllm_tide.engine.control_v2 import ControlV2, StepCosts

# Of the dearest step: a slope that changes by less is rounding.
_BEND = 1e-6


def times_of_tables(
    draft_ms: np.ndarray, target_ms: np.ndarray, passes: int
) -> TimeModel:
    """A time model from the costs that vLLM measures for its adaptive verification.

    What is spent around the forwards,
    and what context costs, is learnt while it serves: all was measured at one length,
    `VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN`, and is taken for the price of the
    tokens.

    Args:
        draft_ms: float64 [1 + most requests], ms of all draft passes by requests.
        target_ms: float64 [1 + most tokens], ms of the target's forward by tokens;
            neither falls.
    """
    each = draft_ms / passes
    return TimeModel(
        target=_forward(target_ms),
        # Its first pass also runs the rows that were drafted before.
        draft_first=_forward(each, rows=1 + passes),
        draft_next=_forward(each),
    )


def _forward(costs_ms: np.ndarray, rows: int = 1) -> ForwardModel:
    """Knots where a table bends: exact, stairs too. `rows` of the pass per entry."""
    seconds = np.maximum.accumulate(costs_ms[1:]) / 1e3
    bends = np.ones(len(seconds), bool)
    bends[1:-1] = np.abs(np.diff(seconds, 2)) > _BEND * seconds[-1]
    at = np.flatnonzero(bends)
    knots = (rows * (at + 1)).tolist()
    return ForwardModel(tuple(knots), tuple(seconds[at].tolist()), alpha=0.0)


logger = logging.getLogger("vllm.tide")

Tables = tuple[np.ndarray, np.ndarray]

# Rounds until upstream's estimator has been fitted twice: before that, and after a
# swap, a cut would rest on coefficients of other drafts.
_YOUNG_ROUNDS = 2 * OnlineAcceptanceEstimator.REFIT_INTERVAL


LOOK_SHARE = 0.01
"""Share of steps that verify whole drafts, where control may explore."""


class StepCostVerification(AdaptiveVerificationManager):
    """`AdaptiveVerificationManager` that is told what a round costs.

    Args:
        control: Knows the context of the step that began; None: upstream's costs.
        look_share: Share of rounds that verify all that was drafted.
        on_measured: Told the times that upstream measured, whose refinement the step
            costs are then; None: upstream's costs are taken.

    Attributes:
        verify_chance: `Record.verify_chance` of the step that begins: the share of
            steps like it that verify whole drafts; 0, unknown, where the device cut
            them by what it knows of them.
    """

    UPSTREAM = ("req_states", "query_start_loc", "num_bonus_tokens", "max_total_logits")

    def __init__(
        self,
        control: ControlV2 | None,
        look_share: float,
        on_measured: Callable[[TimeModel], None] | None = None,
        **upstream: Any,
    ) -> None:
        super().__init__(**upstream)
        # Ranks must agree when it is tried again: steps of 20 ms are its clock.
        self._steps = 0
        self.guard = Guard("pricing of verification", lambda: 0.02 * self._steps)
        self._control = control
        self._times: StepTimes | None = None
        self._on_measured = on_measured
        self._look_every = round(1 / look_share) if look_share else 0
        self._step_costs: StepCosts | None = None
        self._depth = self.num_speculative_steps
        self._measured = self._own = (np.zeros(0), np.zeros(0))
        self._version = 0
        self._rounds = 0
        self.verify_chance = 0.0

    def begin_step(self, scheduler_output: Any, version: int) -> None:
        """Take how deep the step drafts and its costs; `version`: `Swapper.base`."""
        self._step_costs = (scheduler_output.tide or {}).get("step_costs")
        self._depth = scheduler_output.num_spec_tokens_to_schedule
        self.verify_chance = 0.0
        self._steps += 1
        self.guard.retry()
        if version != self._version:
            self._version, self._rounds = version, 0

    def set_cost_curves(
        self,
        draft_curve: list[tuple[int, float]],
        verify_curve: list[tuple[int, float]],
    ) -> None:
        """Keep upstream's tables, and make those that a round's costs go to."""
        super().set_cost_curves(draft_curve, verify_curve)
        assert self.cost_tables is not None  # noqa: S101 (set just now)
        draft_table, verify_table = self._measured = self.cost_tables
        self._own = draft_table.copy(), verify_table.copy()
        if self._on_measured is not None:
            # Of the tables, not of the curves: those are the same on every rank.
            times = times_of_tables(
                draft_table, verify_table, self.num_speculative_steps
            )
            self._times = StepTimes(times)
            self._on_measured(times)

    def get_num_tokens(
        self,
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
    ) -> int:
        """See upstream: the step's tokens, cut to what pays."""
        requests, drafts = len(num_tokens_per_req), sum(map(len, draft_tokens.values()))
        others = sum(num_tokens_per_req.values()) - drafts
        self._rounds += 1
        self.cost_tables = (
            self.guard.run("step_costs", self._tables, requests, others, drafts)
            or self._measured
        )
        tokens = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        if self._control is not None:
            self._control.cut(tokens - others)
        return tokens

    def _tables(self, requests: int, others: int, drafts: int) -> Tables:
        """Costs [ms] by requests, and by tokens of the target, where they are read."""
        window = slice(others, others + drafts + 1)
        drafting, verifying, limit = self._costs(requests, others, drafts)
        draft_table, verify_table = self._own
        draft_table[requests] = drafting
        row = verify_table[window]
        row[:] = verifying[0] if self._looks() else verifying
        # Nothing is worth a token's infinite cost; the plain step is always allowed.
        row[1:][drafting + verifying[1:] > limit] = np.inf
        return draft_table, verify_table

    def _costs(
        self, requests: int, others: int, drafts: int
    ) -> tuple[float, np.ndarray, float]:
        """Drafting, the target step by its drafts [drafts + 1], their limit; in ms."""
        if self._step_costs is None or self._times is None or self._control is None:
            draft_table, verify_table = self._measured
            window = verify_table[others : others + drafts + 1]
            return float(draft_table[requests]), window, np.inf
        limit, learnt = self._step_costs
        self._times.take(learnt)
        model, context = FirstPassAlways(self._times), self._control.context
        target = model.target_curve(requests, context, drafts, others - requests)
        draft = model.draft_curve(requests, context, others + drafts, self._depth)
        return 1e3 * float(draft[-1]), 1e3 * target, 1e3 * limit

    def _looks(self) -> bool:
        if self._rounds <= _YOUNG_ROUNDS:
            self.verify_chance = 1.0
        elif self._look_every > 0 and self._rounds % self._look_every == 0:
            self.verify_chance = 1.0 / self._look_every
        return self.verify_chance > 0.0
