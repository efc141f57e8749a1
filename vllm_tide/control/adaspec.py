"""AdaSpec's control of the speculative length (arXiv 2503.05096), on two beliefs.

`StepTimes` predicts the seconds of a step and `Acceptance` the chance that a drafted
token is accepted; both have variances, and both forget. The order in a step:

* `plan` predicts, for each depth, the tokens and the seconds of a step from simulated
  drafts. Time is linear in the rows of each pass and so quadratic in the length
  (eq. 1-5). The best depth is planned, or none where that does not pay.
* `go_on` corrects the plan: from the planned depth on, the confidences of the draft
  decide about each further pass (predict, execute, correct).
* `choose` cuts the drafts to the tokens that are worth verifying (eq. 7, 8).
* `observe` takes what the target accepted.

Every choice maximises expected tokens less seconds times the tokens per second of the
best predicted step. Exploration has one rule: take the other action if it is better by
two standard errors and if an allowance, a small share of all time, covers the expected
loss.
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

_SWAP_EVIDENCE = 0.2  # share of the evidence that a new draft inherits: a power prior
_STANDARD_ERRORS = 2.0  # of the bounds that exploration compares
_SPREAD_STEPS = 32.0  # steps over which the price of catching up is spread
_EXPLORATION_STEPS = 2  # in a row; the second one's time has the host's in it
_WHOLE_EVERY = 64  # one step in so many verifies whole drafts, within the allowance
_UNASKED_STEPS = 16  # without drafts, for which the engine does not ask
_LEARN_STEPS, _LEARN_DRAFTS = 32, 1024  # learnt from together, at most
_QUANTILES = np.array([-1.2247, 0.0, 1.2247])  # of a standard normal, equal weights
_KNOBS = ControlConfig.model_validate({})


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings of the policy.

    Attributes:
        k_max: Most draft tokens of a request in a decode step.
        verify: Choose the verified tokens by value; False sends every drafted token
            (ablation, and where a cut would bias the output).
        explore: Verify whole drafts now and then, within `probe_share`, and in
            exploration steps; False where the result of `choose` is not verified.
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
    """The decode step under way.

    Attributes:
        caps: int64 [n], as of the batch, 0 where the draft is of no use.
        context: Tokens in the KV cache, of all requests.
        limit, operator_limit: Seconds that the step may take; without clients' limits.
        rate: Tokens that a second is worth.
        row_price: Tokens that a verified row costs.
        planned: Draft passes that no confidence decides about.
        exploring: The step drafts, or does not, to measure what that yields.
        confidences: float32 [K, n], of each draft pass; nan of those that did not run.
        verified: int64 [n], drafted tokens that were chosen.
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
    """AdaSpec's control.

    Order of calls: `plan`; if it drafts, `go_on` after each draft pass until it is
    False or the plan's passes are done; then, or where `Batch.memory` is, `choose`;
    `observe` once the target has sampled. `add` when a request begins, between steps.

    Args:
        times: Step times, refined by the samples that `observe` gets.

    Attributes:
        verify_chance: float64 [n], of what `choose` chose: the chance with which the
            first token of each draft is verified (`Record.verify_chance`); None: 1.
        remembered: bool [n], where `choose` chose the memory's; None if it has none.
    """

    def __init__(self, settings: ControlSettings, times: Times) -> None:
        self._settings, self._times = settings, times
        most, capacity = settings.k_max, settings.max_requests
        self.acceptance = Acceptance(most, capacity)
        # Apart: many small payments would use up what is saved for a large one.
        self.allowance = Allowance(settings.probe_share)
        self._whole_drafts = Allowance(settings.probe_share / 4)
        self.verify_chance: np.ndarray | None = None
        self.remembered: np.ndarray | None = None
        self._forecaster = Forecaster(
            times, self.acceptance, most, verify=settings.verify
        )
        self._added_at = np.zeros(capacity, np.int64)  # step that a slot was given in
        self._step: _Step | None = None
        # Steps in a row that are still to come: drafted to explore, or not drafted.
        self._exploration = self._check = 0
        self._waiting = list[tuple[_Step | None, Outcome]]()  # not learnt from yet
        self._since = 0  # steps since the last learning
        self._count, self._undrafted = Counter[str](), Counter[str]()
        self._by_depth = np.zeros(most + 1, np.int64)
        self._seconds = [0.0, 0.0]  # of plain decoding, predicted; of the same steps
        self._refresh()

    def add(self, slot: int, sampled: bool, now: float) -> None:
        self.acceptance.requests.add(slot)
        self._added_at[slot] = self._count["steps"] + 1

    def draft_swapped(self) -> None:
        """Keep little of what was learnt: the draft has new weights."""
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
            elif gain < bound:
                loss = plain * (gain * bound - 1.0) + forecast.draft[1]
                if self.allowance.pay(loss, now):
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
        """Return whether to draft another token after draft pass `depth` (1-based).

        Args:
            confidence: float [n], highest probability of the draft at this pass.
        """
        step = self._step
        assert step is not None  # noqa: S101 (protocol: plan comes first)
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

    def choose(self) -> np.ndarray:
        """int64 [n], tokens of each request to verify (see `remembered`)."""
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
            # Of this context: a forecast is of one like it, which keeps no limit.
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
        # Little code: while a model computes, it falls out of the caches.
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
        """Leave a step with prefill rows out of those since `plan`."""
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
        """As `Forecast.best` within the step's limits, which are set."""
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
        """Return False, and drop them from the step, if they cost too many tokens/s."""
        if limited >= CLIENT_SHARE * free:
            return True
        step.limit = step.operator_limit
        self._count["client_limits_dropped"] += 1
        return False

    def _value(
        self, step: _Step, survival: np.ndarray, seconds: np.ndarray
    ) -> np.ndarray:
        """Lengths of most value within the limits."""
        n = len(step.batch)
        choice = select(survival, n, seconds, step.limit, step.rate)
        if step.limit < step.operator_limit:
            free = select(survival, n, seconds, step.operator_limit, step.rate)
            rates = [each.tokens / each.seconds for each in (choice, free)]
            if not self._keeps_clients_limits(step, *rates):
                return free.lengths
        return choice.lengths

    def _best_gain(self, step: _Step, extra: float) -> float:
        """Tokens per second over plain, acceptance being two standard errors better."""
        better = _STANDARD_ERRORS * sqrt(self.acceptance.variance)
        forecast = self._predict(step, better, step.limit)
        tokens, seconds, _ = forecast.best(extra, step.limit)
        return tokens / seconds * forecast.plain / len(step.batch)

    def _explore(
        self, step: _Step, lengths: np.ndarray, seconds: np.ndarray
    ) -> np.ndarray:
        """Whole drafts, in an exploration step or if they are paid for; else `lengths`.

        A step is taken for its number, so before any confidence: tokens that are never
        verified would never be learnt to be worth it.
        """
        whole: np.ndarray = np.minimum(step.batch.caps, step.depth)
        if self.remembered is not None:  # tokens cut there are graded all the same
            whole = np.where(self.remembered, lengths, whole)
        if step.exploring:
            return whole
        # Not by the price of this step, which depends on the confidences.
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
        """Chance that a token and all before it are accepted, float32 [s, n]."""
        if step.survival is None or len(step.survival) < step.depth:
            assert step.confidences is not None  # noqa: S101 (it drafts)
            confidences, batch = step.confidences[: step.depth], step.batch
            _, step.survival = self.acceptance.survival(
                confidences, batch.slots, batch.sampled, batch.caps
            )
        return step.survival

    def _learn_steps(self) -> int:
        """Return how many steps are learnt from together: few at first."""
        return min(self._count["steps"] // 4, _LEARN_STEPS)

    def _learn(self) -> None:
        """Learn from the steps that wait."""
        waiting, self._waiting, self._since = self._waiting, [], 0
        steps, outcomes, drafts = list[_Step](), list[Outcome](), 0
        late = self._learn_steps() == _LEARN_STEPS
        for step, outcome in waiting:
            self._count_step(step, outcome)
            if step is None or not step.depth:
                continue
            # After many of them one more usual step teaches nothing new.
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
        """Take what was learnt into what decides."""
        belief = self.acceptance
        # float64 [K, 3], of a token that is still to be drafted.
        logits = belief.mean[:, None] + belief.spread * _QUANTILES
        self._next_chances = 1.0 / (1.0 + np.exp(-logits))
        self._forecaster.refresh()

    def _learn_drafts(self, steps: list[_Step], outcomes: list[Outcome]) -> None:
        """Learn from the drafts of some steps, a column for each draft."""
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
        # A slot's next request learns nothing from the one before it.
        numbers = np.repeat([step.number for step in steps], sizes)
        slots = np.where(self._added_at[slots] > numbers, capacity, slots)
        logits, _ = self.acceptance.survival(confidences, slots, sampled, caps)
        made = np.count_nonzero(~np.isnan(logits), axis=0)
        # What follows the first rejected token was never judged.
        judged = np.minimum(np.minimum(judged, accepted + 1), made)
        accepted = np.minimum(accepted, judged)
        if judged.any():
            self.acceptance.judged(
                confidences, logits, slots, sampled, judged, accepted
            )
        self.acceptance.drafted(logits, outcomes[-1].now)

    def _count_step(self, step: _Step | None, outcome: Outcome) -> None:
        """Take a step into the totals."""
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
        # Python's own floats: the engine core encodes no others for the metrics.
        each = int(outcome.emitted.sum()) / served + outcome.steps - 1
        self._seconds[0] += float(step.forecast.plain * each)
        self._seconds[1] += float(seconds)
