"""AdaSpec's control of the speculative length (arXiv 2503.05096).

`StepTimes` predicts the seconds of a step, `Acceptance` the probability that a draft
token is accepted. Both estimate their variance and discount old data. In each step:

* `plan` predicts, for each depth, the tokens and the seconds of a step from simulated
  drafts. Time is linear in the rows of each pass and so quadratic in the length
  (eq. 1-5). It plans the best depth, or no drafts if the gain is too small.
* `go_on` corrects the plan: from the planned depth on, the draft's confidences decide
  whether another pass runs (predict, execute, correct).
* `choose` selects the draft tokens that are worth verifying (eq. 7, 8).
* `observe` records the accepted tokens.

Every decision maximises expected tokens minus seconds times the tokens per second of
the best predicted step. Exploration has one rule: take the other action if its bound
at two standard errors is better, or if none was taken for long, and the exploration
budget, a small share of all time, covers the expected loss.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import exp, inf, sqrt
from typing import Any

import numpy as np

from vllm_tide.config import ControlConfig
from vllm_tide.control.acceptance import Acceptance
from vllm_tide.control.allowance import Allowance
from vllm_tide.control.batch import Batch, Outcome, Plan, totals
from vllm_tide.control.costs import CLIENT_SHARE, Times, step_limit
from vllm_tide.control.forecast import Forecast, Forecaster
from vllm_tide.control.verifier import select

_SWAP_EVIDENCE = 0.2  # share of the evidence kept for a new draft (power prior)
_STANDARD_ERRORS = 2.0  # of the bounds that exploration compares
_SPREAD_STEPS = 32.0  # steps over which the catch-up cost is spread
_EXPLORATION_STEPS = 2  # consecutive; the second one's time includes the host time
_WHOLE_EVERY = 64  # interval of steps that verify whole drafts, within the budget
_UNASKED_STEPS = 16  # steps without drafts for one call of `plan`
_LEARN_STEPS, _LEARN_DRAFTS = 32, 1024  # maximum steps and drafts of one update
_QUANTILES = np.array([-1.2247, 0.0, 1.2247])  # of a standard normal, equal weights
_KNOBS = ControlConfig.model_validate({})


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings of the policy.

    Attributes:
        k_max: Maximum draft tokens of a request in a decode step.
        verify: Verify the draft tokens that are worth it; False verifies all of them
            (for ablations, and where a selection would bias the output).
        explore: Verify whole drafts periodically, within `probe_share`, and in
            exploration steps; False if the result of `choose` is not verified.
    """

    k_max: int = 7
    min_gain: float = _KNOBS.min_gain
    probe_share: float = _KNOBS.probe_share
    verify: bool = True
    explore: bool = True
    max_requests: int = 256

    def __post_init__(self) -> None:
        if self.k_max < 1 or self.max_requests < 1:
            raise ValueError("k_max and max_requests must be at least 1")
        if not 0 <= self.probe_share < 1:
            raise ValueError("probe_share must be in [0, 1)")


@dataclass(slots=True)
class _Step:
    """State of the current decode step.

    Attributes:
        caps: int64 [n], `Batch.caps`, with 0 where a draft is not useful.
        context: Tokens in the KV cache, summed over the requests.
        limit, operator_limit: Time limit (s) with and without the clients' limits.
        rate: Value of a second, in tokens.
        row_price: Cost of a verified row, in tokens.
        planned: Draft passes that run for any confidences.
        exploring: Whether this is an exploration step, with or without drafts.
        confidences: float32 [K, n], by draft pass; nan for passes that did not run.
        verified: int64 [n], draft tokens selected by `choose`.
    """

    number: int
    batch: Batch
    began: float
    caps: np.ndarray
    max_depth: int = 0
    context: int = 0
    forecast: Forecast | None = None
    limit: float = inf
    operator_limit: float = inf
    rate: float = 0.0
    row_price: float = 0.0
    planned: int = 0
    depth: int = 0
    exploring: bool = False
    confidences: np.ndarray | None = None
    survival: np.ndarray | None = None
    verified: np.ndarray | None = None


class AdaSpecPolicy:
    """AdaSpec's control policy.

    Order of calls: `plan`; if it drafts, `go_on` after each draft pass until it returns
    False or the plan's passes are done; then, or with `Batch.memory`, `choose`;
    `observe` after the target has sampled. `add` for each new request, between steps.

    Args:
        times: Step times, updated by the samples of `observe`.

    Attributes:
        verify_chance: float64 [n], set by `choose`: probability that the first token
            of each draft is verified (`Record.verify_chance`); None: 1.
        remembered: bool [n], where `choose` selected the memory's proposal, or None.
    """

    def __init__(self, settings: ControlSettings, times: Times) -> None:
        self._settings, self._times = settings, times
        most, capacity = settings.k_max, settings.max_requests
        self.acceptance = Acceptance(most, capacity)
        # Separate: many small payments would consume the savings for a large one.
        self.allowance = Allowance(settings.probe_share)
        self._whole_drafts = Allowance(settings.probe_share / 4)
        self.verify_chance: np.ndarray | None = None
        self.remembered: np.ndarray | None = None
        self._forecaster = Forecaster(
            times, self.acceptance, most, verify=settings.verify
        )
        self._added_at = np.zeros(capacity, np.int64)  # step that assigned a slot
        self._step: _Step | None = None
        # Remaining consecutive exploration steps with drafts, and without drafts.
        self._exploration = self._check = 0
        self._waiting = list[tuple[_Step | None, Outcome]]()  # for the next update
        self._since = 0  # steps since the last update
        self._count, self._undrafted = Counter[str](), Counter[str]()
        self._by_depth = np.zeros(most + 1, np.int64)
        self._seconds = [0.0, 0.0]  # predicted without drafts; measured
        self._refresh()

    def add(self, slot: int, sampled: bool, now: float) -> None:
        self.acceptance.requests.add(slot)
        self._added_at[slot] = self._count["steps"] + 1

    def draft_swapped(self) -> None:
        """Reduce the evidence after the draft received new weights."""
        self._learn()
        self.acceptance.forget(_SWAP_EVIDENCE)
        self.allowance.refill()
        self._whole_drafts.refill()

    def plan(self, batch: Batch, now: float) -> Plan:
        self._count["steps"] += 1
        step = self._step = _Step(self._count["steps"], batch, now, batch.caps)
        self.allowance.earn(now)
        self._whole_drafts.earn(now)
        self.remembered = None
        n = len(batch)
        if n:
            most = int(np.maximum.reduce(batch.caps))
            step.max_depth = min(most, self._settings.k_max)
        if not step.max_depth:
            return self._undraft("no_room")
        step.context = int(np.add.reduce(batch.context))
        if batch.memory is not None:
            gains = self.acceptance.accepted(batch.slots, batch.caps)
            step.caps = batch.memory.left_to_draft(batch.caps, gains)
        forecast = step.forecast = self._predict(step)
        step.rate = n / forecast.plain
        if batch.memory is not None and not step.caps.any():
            return self._undraft("memory")
        extra = 0.0
        if batch.catchup_rows:
            extra = self._times.catchup_seconds(batch.catchup_rows) / _SPREAD_STEPS
        tokens, seconds, depth = self._best(step, forecast, extra)
        gain = tokens / seconds * forecast.plain / n
        needed = 1.0 + self._settings.min_gain
        drafts = gain >= needed
        if self._check:
            return self._undraft_to_measure(step)
        if self._exploration:
            self._exploration -= 1
            drafts = step.exploring = depth > 0
        elif depth:
            bound = exp(_STANDARD_ERRORS * self._forecaster.sd(n, now))
            plain = _EXPLORATION_STEPS * forecast.plain
            if not drafts:
                loss = plain * max(1.0 - gain / bound, 0.0) + extra * _SPREAD_STEPS
                worth = self._best_gain(step, extra) * bound >= needed
                worth |= self.allowance.is_due(loss, now)
                if worth and self.allowance.pay(loss, now):
                    self._exploration = _EXPLORATION_STEPS - 1
                    drafts = step.exploring = True
            else:
                loss = plain * (gain * bound - 1.0) + forecast.draft[1]
                worth = gain < bound or self.allowance.is_due(loss, now)
                if worth and self.allowance.pay(loss, now):
                    self._check = _EXPLORATION_STEPS
                    return self._undraft_to_measure(step)
        if not drafts:
            free = forecast.best(extra, inf) if step.limit < inf else (0.0, 1.0, 0)
            pays = free[0] / free[1] * forecast.plain / n >= needed
            return self._undraft("slo" if pays else "no_gain", _UNASKED_STEPS - 1)
        step.rate = tokens / seconds
        if step.limit < inf:
            forecast = self._predict(step, limit=step.limit)
        step.row_price = step.rate * forecast.steps[depth - 1][2]
        step.planned = depth - 1
        step.confidences = np.full((self._settings.k_max, n), np.nan, np.float32)
        self._count["exploration_steps"] += step.exploring
        return Plan(step.max_depth, foreseen=depth)

    def go_on(self, depth: int, confidence: np.ndarray) -> bool:
        """Return whether to run another draft pass after pass `depth` (1-based).

        Args:
            confidence: float [n], highest probability of the draft at this pass.
        """
        step = self._step
        assert step is not None  # noqa: S101 (plan is called first)
        assert step.confidences is not None  # noqa: S101
        assert step.forecast is not None  # noqa: S101
        step.depth = depth
        step.confidences[depth - 1] = confidence
        if depth >= step.max_depth:
            return False
        draft = step.forecast.draft
        if depth < step.planned:
            return True
        if step.forecast.plain + draft[depth + 1] > step.limit:
            return False
        alive = self._survival(step)[-1] * (step.caps > depth)
        worth = np.multiply.outer(self._next_chances[depth], alive)
        gained = float(np.add.reduce(np.maximum(worth, step.row_price), axis=None))
        gained = gained / len(_QUANTILES) - len(alive) * step.row_price
        return gained > step.rate * (draft[depth + 1] - draft[depth])

    def take_block(self, confidences: np.ndarray) -> None:
        """Take the result of a pass that drafts all tokens, instead of `go_on`.

        Args:
            confidences: float [K, n], highest probability of the draft by token.
        """
        step = self._step
        assert step is not None  # noqa: S101 (plan is called first)
        assert step.confidences is not None  # noqa: S101
        step.depth = min(len(confidences), step.max_depth)
        step.confidences[: step.depth] = confidences[: step.depth]

    def choose(self) -> np.ndarray:
        """Return the tokens of each request to verify, int64 [n] (see `remembered`)."""
        step = self._step
        assert step is not None  # noqa: S101
        batch, depth, n = step.batch, step.depth, len(step.batch)
        self.verify_chance = None
        if step.forecast is None or not (depth or batch.memory is not None):
            return np.zeros(n, np.int64)
        survival = self._survival(step) if depth else np.empty((0, n), np.float32)
        whole = None
        if batch.memory is not None:
            whole = np.minimum(batch.caps, depth)
            survival, whole, self.remembered = batch.memory.merge(survival, whole)
        if self._settings.verify:
            # For the exact context: a cached forecast is too coarse for a limit.
            seconds = self._times.target_curve(
                n, step.context, survival.size, batch.prefill
            )
            seconds = seconds + step.forecast.draft[depth]
            lengths = self._value(step, survival, seconds)
            explores = step.exploring or step.number % _WHOLE_EVERY == 0
            if explores and depth and self._settings.explore and step.limit == inf:
                lengths = self._explore(step, lengths, seconds)
        else:
            lengths = np.minimum(batch.caps, depth) if whole is None else whole
        step.verified = lengths
        if self.remembered is not None:
            step.verified = np.where(self.remembered, 0, lengths)
        return lengths

    def observe(self, outcome: Outcome) -> None:
        # Short, because a forward evicts this code from the CPU's caches.
        step, self._step = self._step, None
        if outcome.sample is not None and not (step is not None and step.depth):
            self._times.observe(outcome.sample, outcome.now)
        self._waiting.append((step, outcome))
        self._since += outcome.steps
        ends = step is not None and step.exploring and not self._exploration
        if self._check and ends:
            self._count["exploration_steps"] += min(outcome.steps, self._check)
            self._check = max(self._check - outcome.steps, 0)
            ends = not self._check
        if ends or self._since >= self._learn_steps():
            self._learn()

    def leave_out(self, seconds: float) -> None:
        """Exclude the time of a step with prefill rows from that since `plan`."""
        if self._step is not None:
            self._step.began += seconds

    def stats(self) -> dict[str, Any]:
        self._learn()
        plain, measured = self._seconds
        return {
            **totals(self._count, self._undrafted, self._by_depth),
            "time_error": self._times.error,
            "calibration_error": self.acceptance.error(),
            "plain_step_seconds": plain,
            "step_seconds": measured,
        }

    def _undraft(self, reason: str, unasked: int = 0) -> Plan:
        self._undrafted[reason] += 1
        return Plan(0, reason, unasked=unasked)

    def _undraft_to_measure(self, step: _Step) -> Plan:
        step.exploring = True
        return self._undraft("check", self._check - 1)

    def _predict(
        self, step: _Step, better: float = 0.0, limit: float = inf
    ) -> Forecast:
        drafting = int(np.count_nonzero(step.caps))
        about = step.max_depth, drafting, step.context
        return self._forecaster.predict(step.batch, *about, better, limit)

    def _best(
        self, step: _Step, forecast: Forecast, extra: float
    ) -> tuple[float, float, int]:
        """Set the step's limits and return `Forecast.best` within them."""
        batch = step.batch
        limit, missed = step_limit(batch.limit, forecast.plain)
        step.limit = step.operator_limit = limit
        if batch.asked is not None:
            asked, missed = step_limit(batch.asked, forecast.plain)
            step.limit = min(asked, limit)
        self._count["slo_unreachable_steps"] += missed
        if step.limit == inf:
            return forecast.best(extra, inf)
        best = self._predict(step, limit=step.limit).best(extra, step.limit)
        if step.limit < limit:
            free = self._predict(step, limit=limit).best(extra, limit)
            plain = len(batch) / forecast.plain
            rates = [max(each[0] / each[1], plain) for each in (best, free)]
            if not self._keeps_clients_limits(step, *rates):
                return free
        if batch.asked is not None:
            batch.limit = batch.asked
        return best

    def _keeps_clients_limits(self, step: _Step, limited: float, free: float) -> bool:
        """Return False and drop the clients' limits if they cost too many tokens/s."""
        if limited >= CLIENT_SHARE * free:
            return True
        step.limit = step.operator_limit
        self._count["client_limits_dropped"] += 1
        return False

    def _value(
        self, step: _Step, survival: np.ndarray, seconds: np.ndarray
    ) -> np.ndarray:
        """Return the lengths of the highest value within the step's limits."""
        n = len(step.batch)
        lengths, tokens, s = select(survival, n, seconds, step.limit, step.rate)
        if step.limit < step.operator_limit:
            most, free, free_s = select(
                survival, n, seconds, step.operator_limit, step.rate
            )
            if not self._keeps_clients_limits(step, tokens / s, free / free_s):
                return most
        return lengths

    def _best_gain(self, step: _Step, extra: float) -> float:
        """Return the gain over plain if acceptance is two standard errors better."""
        better = _STANDARD_ERRORS * sqrt(self.acceptance.variance)
        forecast = self._predict(step, better, step.limit)
        tokens, seconds, _ = forecast.best(extra, step.limit)
        return tokens / seconds * forecast.plain / len(step.batch)

    def _explore(
        self, step: _Step, lengths: np.ndarray, seconds: np.ndarray
    ) -> np.ndarray:
        """Return whole drafts if exploring or within the budget, else `lengths`.

        Steps are selected by number, before any confidence is known. Without whole
        drafts there would be no data about tokens that are never verified.
        """
        whole: np.ndarray = np.minimum(step.batch.caps, step.depth)
        if self.remembered is not None:  # its cut tokens are evaluated anyway
            whole = np.where(self.remembered, lengths, whole)
        if step.exploring:
            return whole
        # This step's price must not decide, because it depends on the confidences.
        if not self._whole_drafts.may_borrow:
            return lengths
        loss = float(seconds[int(whole.sum())] - seconds[int(lengths.sum())])
        self._whole_drafts.borrow(loss)
        step.exploring = True
        self._count["exploration_steps"] += 1
        cut = (lengths == 0) & (whole > 0)
        self.verify_chance = np.where(cut, 1.0 / _WHOLE_EVERY, 1.0)
        return whole

    def _survival(self, step: _Step) -> np.ndarray:
        """Return survival probabilities of the drafted tokens, float32 [s, n]."""
        if step.survival is None or len(step.survival) < step.depth:
            assert step.confidences is not None  # noqa: S101 (after a pass)
            confidences, batch = step.confidences[: step.depth], step.batch
            _, step.survival = self.acceptance.survival(
                confidences, batch.slots, batch.sampled, batch.caps
            )
        return step.survival

    def _learn_steps(self) -> int:
        """Return the number of steps per update, which is small at first."""
        return min(self._count["steps"] // 4, _LEARN_STEPS)

    def _learn(self) -> None:
        """Update the models with the steps that were not used yet."""
        waiting, self._waiting, self._since = self._waiting, [], 0
        steps, outcomes, drafts = list[_Step](), list[Outcome](), 0
        late = self._learn_steps() == _LEARN_STEPS
        for step, outcome in waiting:
            self._count_step(step, outcome)
            if step is None or not step.depth:
                continue
            # With much data, one in four ordinary drafting steps is enough.
            usual = late and step.number % 4 != 0 and not step.exploring
            if outcome.sample is not None and not usual:
                self._times.observe(outcome.sample, outcome.now)
            if drafts < _LEARN_DRAFTS or step.exploring:
                steps.append(step)
                outcomes.append(outcome)
                drafts += len(step.batch)
        if steps:
            self._learn_drafts(steps, outcomes)
        self._refresh()

    def _refresh(self) -> None:
        """Recompute the values that decisions read."""
        belief = self.acceptance
        # float64 [K, 3], quantiles of a token that is not drafted yet.
        logits = belief.mean[:, None] + belief.spread * _QUANTILES
        self._next_chances = 1.0 / (1.0 + np.exp(-logits))
        self._forecaster.refresh()

    def _learn_drafts(self, steps: list[_Step], outcomes: list[Outcome]) -> None:
        """Update `acceptance` with the drafts of some steps, one column per draft."""
        capacity, batches = len(self._added_at), [step.batch for step in steps]
        sizes = [len(batch) for batch in batches]
        slots = np.concatenate([batch.slots for batch in batches])
        sampled = np.concatenate([batch.sampled for batch in batches])
        caps = np.concatenate([batch.caps for batch in batches])
        confidences = np.concatenate([step.confidences for step in steps], axis=1)
        by_slot = np.zeros((2, len(steps), capacity), np.int64)
        for row, each in enumerate(outcomes):
            by_slot[:, row, each.slots] = each.verified, each.accepted
        judged, accepted = by_slot[:, np.repeat(np.arange(len(steps)), sizes), slots]
        # Drafts of a slot's previous request do not update its current one.
        numbers = np.repeat([step.number for step in steps], sizes)
        slots = np.where(self._added_at[slots] > numbers, capacity, slots)
        logits, _ = self.acceptance.survival(confidences, slots, sampled, caps)
        made = np.count_nonzero(~np.isnan(logits), axis=0)
        # Tokens after the first rejected one have no label.
        judged = np.minimum(np.minimum(judged, accepted + 1), made)
        accepted = np.minimum(accepted, judged)
        if judged.any():
            self.acceptance.judged(
                confidences, logits, slots, sampled, judged, accepted
            )
        self.acceptance.drafted(logits, outcomes[-1].now)

    def _count_step(self, step: _Step | None, outcome: Outcome) -> None:
        """Add a step to the totals."""
        self._count["verified_tokens"] += int(outcome.verified.sum())
        self._count["accepted_tokens"] += int(outcome.accepted.sum())
        if step is None:
            return
        self._count["draft_passes"] += step.depth
        self._by_depth[step.depth] += 1
        if step.verified is not None:
            drafted = int(np.minimum(step.batch.caps, step.depth).sum())
            self._count["drafted_tokens"] += drafted
            self._count["trimmed_tokens"] += drafted - int(step.verified.sum())
        seconds, sample = outcome.now - step.began, outcome.sample
        served = int(np.count_nonzero(outcome.emitted))
        if step.forecast is None or not served or seconds <= 0.0:
            return
        if step.batch.prefill or (sample is not None and sample.prefill):
            return
        # Python floats, because the engine core cannot encode NumPy's for the metrics.
        each = int(outcome.emitted.sum()) / served + outcome.steps - 1
        self._seconds[0] += float(step.forecast.plain * each)
        self._seconds[1] += float(seconds)
