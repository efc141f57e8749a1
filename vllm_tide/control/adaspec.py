"""AdaSpec's control of the speculative length (arXiv 2503.05096), made of two beliefs.

`StepTimes` says what a step takes and `Acceptance` which drafted tokens are accepted;
both know how sure they are, and both forget. One step is decided in this order:

* `plan` foresees, for each length, the tokens and the seconds of a step by simulated
  drafts. Time is linear in the rows of each pass and so quadratic in the length
  (eq. 1-5). The best length is planned, or none where that does not pay.
* `go_on` corrects the plan: from the planned length on, the confidences of the draft
  say whether another pass pays (predict, execute, correct).
* `choose` cuts the drafts to the tokens that are worth verifying (eq. 7, 8).
* `observe` learns from what the target said.

Every choice is the one of most expected tokens less seconds, a second being worth what
the best foreseen step gives in one. Exploration has one rule: do the other thing where
it may be better by two standard errors, and where an allowance, which earns a small
share of all time, can pay for what that is expected to lose.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import exp, inf, isnan, nan, sqrt
from typing import Any

import numpy as np

from vllm_tide.config import ControlConfig
from vllm_tide.control.acceptance import Acceptance
from vllm_tide.control.allowance import Allowance
from vllm_tide.control.batch import Batch, Outcome, Plan, totals
from vllm_tide.control.costs import CLIENT_SHARE, Times, step_limit
from vllm_tide.control.forecast import Forecast, Forecaster
from vllm_tide.control.verifier import select

_SWAP_KEEP = 0.2  # share of the evidence that a new draft inherits: a power prior
_BOUND = 2.0  # standard errors: optimism of a wish, pessimism of its price
_STAY = 32.0  # steps that a choice is expected to last: catching up is spread over
_TRIAL_STEPS = 4  # from the second one on the host's time is known too
_WHOLE_EVERY = 64  # one step in so many verifies whole drafts, if that can be paid
_REST_STEPS = 16  # without drafts that nobody is asked about
_LOT_STEPS, _LOT_DRAFTS = 32, 1024  # at most, that are learnt from together
_YOUNG_STEPS = 128  # until then the time of each one is learnt from
_POINTS = np.array([-1.2247, 0.0, 1.2247])  # a normal variable, in equal shares
_SMOOTH = 0.05
_KNOBS = ControlConfig.model_validate({})


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings of the policy.

    Attributes:
        k_max: Most draft tokens of a request in a decode step.
        verify: Choose the verified set by value; False sends every drafted token
            (ablation, and where a cut would bias the output).
        explore: Verify whole drafts now and then, within `probe_share`, and in trials;
            False where what `choose` says is not what is verified.
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
    """The step under way.

    Attributes:
        wanted: int64 [n], room of the requests that the draft is of use to.
        context: Tokens in the KV cache, of all requests.
        limit, loose: Seconds it may take; without the limits that clients ask for.
        bar: Tokens that a second is worth.
        price: Tokens that a verified row costs.
        drafting: Requests that the draft is of use to.
        sure: Draft passes that no confidence is asked about.
        predicted: Tokens and seconds.
        trial: It drafts, or does not, to see what that takes.
        said, logits: What the draft and then we say of each pass.
        sent: int64 [n], drafted tokens that were to be verified.
    """

    number: int
    batch: Batch
    began: float
    wanted: np.ndarray
    context: int = 0
    forecast: Forecast | None = None
    limit: float = inf
    loose: float = inf
    bar: float = 0.0
    price: float = 0.0
    drafting: int = 0
    sure: int = 0
    most: int = 0
    passes: int = 0
    predicted: tuple[float, float] = (0.0, nan)
    trial: bool = False
    said: list[np.ndarray] = field(default_factory=list)
    logits: np.ndarray | None = None
    survival: np.ndarray | None = None
    sent: np.ndarray | None = None


class AdaSpecPolicy:
    """AdaSpec's control.

    Order of calls: `plan`; if it says to draft, `go_on` after each draft pass until it
    is False or the plan's steps are done; then, or where `Batch.memory` is, `choose`;
    `observe` once the target has sampled. `add` and `drop` when a request begins and
    ends, between steps.

    Args:
        times: Step times, refined by what `observe` is given.

    Attributes:
        verify_chance: float64 [n], of what `choose` chose: the chance with which the
            first token of each draft is verified (`Record.verify_chance`); None: 1.
        remembered: bool [n], where `choose` chose the memory's; None if it has none.
    """

    def __init__(self, settings: ControlSettings, times: Times) -> None:
        self._settings, self._times = settings, times
        most, capacity = settings.k_max, settings.max_requests
        self.acceptance = Acceptance(most, capacity)
        self.allowance = Allowance(settings.probe_share)
        self.verify_chance: np.ndarray | None = None
        self.remembered: np.ndarray | None = None
        self._forecaster = Forecaster(
            times, self.acceptance, most, verify=settings.verify
        )
        self._born = np.zeros(capacity, np.int64)  # step in which a slot was given
        self._step: _Step | None = None
        self._trial = 0  # steps of one that are still to come
        # When drafts were last seen, and judged by the target.
        self._drafted_at = self._judged_at = 0.0
        self._waiting = list[tuple[_Step | None, Outcome]]()  # to be learnt from
        self._settled = 0  # of them that are counted
        self._since = 0  # steps since the last lot
        self._count, self._off = Counter[str](), Counter[str]()
        self._lengths = np.zeros(most + 1, np.int64)
        # Tokens and seconds of a step, predicted and measured, smoothed.
        self._usual = [nan] * 4
        self._against_plain = [0.0, 0.0]  # seconds of plain decoding, and of our steps

    def add(self, slot: int, sampled: bool, now: float) -> None:
        self.acceptance.requests.add(slot)
        self._born[slot] = self._count["rounds"] + 1

    def drop(self, slot: int) -> None:
        """A request has ended."""

    def draft_swapped(self) -> None:
        """The draft has new weights: keep little of what was learnt about the old."""
        self._learn(self._judged_at)
        self.acceptance.forget(_SWAP_KEEP)
        self.allowance.refill()

    def plan(self, batch: Batch, now: float) -> Plan:
        self._count["rounds"] += 1
        step = self._step = _Step(self._count["rounds"], batch, now, batch.room)
        self.allowance.earn(now)
        self.remembered = None
        n = len(batch)
        most = min(int(np.maximum.reduce(batch.room)), self._settings.k_max) if n else 0
        if not most:
            return self._stay_off("no_room")
        step.context, step.most = int(np.add.reduce(batch.context)), most
        if batch.memory is not None:
            gains = self.acceptance.accepted(batch.slots, most)
            step.wanted = batch.memory.left_to_draft(batch.room, gains)
        step.drafting = int(np.count_nonzero(step.wanted))
        found = step.forecast = self._foresee(step, 0.0, inf)
        plain = step.predicted = float(n), found.plain
        step.bar = n / found.plain
        if not step.drafting:
            return self._stay_off("memory")
        extra = 0.0
        if batch.catchup_rows:
            extra = self._times.catchup_seconds(batch.catchup_rows) / _STAY
        tokens, seconds, length = self._within_limits(step, extra)
        gain = tokens / seconds * found.plain / n
        needed = 1.0 + self._settings.min_gain
        drafts = gain >= needed
        if self._trial:
            self._trial -= 1
            drafts = step.trial = length > 0
        elif length:
            doubt = exp(_BOUND * self._forecaster.doubt(n, now))
            if not drafts:
                lost = _TRIAL_STEPS * found.plain * max(1.0 - gain / doubt, 0.0)
                lost += extra * _STAY
                worth = self._hopeful(step, extra, now) * doubt >= needed
                worth |= self.allowance.is_due(lost, now)
                if worth and self.allowance.pay(lost, now):
                    self._trial, drafts, step.trial = _TRIAL_STEPS - 1, True, True
                    self._count["probes"] += 1
            elif gain < doubt:
                lost = _TRIAL_STEPS * found.plain * (gain * doubt - 1.0)
                if self.allowance.pay(lost + found.draft[1], now):
                    return self._stay_off("check", _TRIAL_STEPS - 1)
        if not drafts:
            free, spent, _ = found.best(extra, inf)
            pays = step.limit < inf and free / spent >= needed * plain[0] / plain[1]
            return self._stay_off("slo" if pays else "no_gain", _REST_STEPS - 1)
        step.bar = tokens / seconds
        if step.limit < inf:
            found = self._foresee(step, 0.0, step.limit)
        step.price = step.bar * found.steps[length - 1][2]
        step.sure = length - 1
        return Plan(most, probe=step.trial, foreseen=length)

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        """True if to draft another after draft pass `step` (1-based).

        Args:
            confidence: float [n], highest probability of the draft at this pass.
        """
        this = self._step
        assert this is not None  # noqa: S101 (protocol: plan comes first)
        assert this.forecast is not None  # noqa: S101
        this.passes = step
        this.said.append(confidence)
        if step >= this.most:
            return False
        draft = this.forecast.draft
        if this.forecast.plain + draft[step + 1] > this.limit:
            return False
        if step < this.sure:
            return True
        alive = self._survival(this)[-1] * (this.wanted > step)
        # The next token is as such tokens are: three points of a normal variable.
        logits = self.acceptance.mean[step] + self.acceptance.spread * _POINTS
        chance = 1.0 / (1.0 + np.exp(-logits))
        worth = np.maximum(np.multiply.outer(chance, alive), this.price)
        gained = float(np.add.reduce(worth, axis=None)) / len(_POINTS)
        price = len(alive) * this.price
        return bool(gained - price > this.bar * (draft[step + 1] - draft[step]))

    def choose(self) -> np.ndarray:
        """int64 [n], tokens of each request to verify, of what `remembered` says."""
        step = self._step
        assert step is not None  # noqa: S101
        batch, passes, n = step.batch, step.passes, len(step.batch)
        self.verify_chance = None
        if step.forecast is None or not (passes or batch.memory is not None):
            return np.zeros(n, np.int64)
        survival = self._survival(step) if passes else np.empty((0, n), np.float32)
        whole = None
        if batch.memory is not None:
            whole = np.minimum(batch.room, passes)
            survival, whole, self.remembered = batch.memory.merge(survival, whole)
        # Of this context: a forecast is of about such a one, which keeps no limit.
        about = n, step.context, survival.size, batch.prefill
        seconds = self._times.target_curve(*about) + step.forecast.draft[passes]
        if self._settings.verify:
            lengths, expected = self._worth(step, survival, seconds)
            explores = self._settings.explore and step.limit == inf
            if passes and explores and (step.trial or step.number % _WHOLE_EVERY == 0):
                lengths = self._explore(step, lengths, seconds)
        else:
            lengths = np.minimum(batch.room, passes) if whole is None else whole
            expected = n + float(np.maximum(survival, 0.0).sum())
        step.predicted = expected, float(seconds[int(lengths.sum())])
        step.sent = lengths
        if self.remembered is not None:
            step.sent = np.where(self.remembered, 0, lengths)
        return lengths

    def observe(self, outcome: Outcome) -> None:
        # Little code: while a model computes, it falls out of the caches.
        step, self._step = self._step, None
        self._waiting.append((step, outcome))
        self._since += outcome.rounds
        rounds = self._count["rounds"]
        trial = step is not None and step.trial
        # After many of them one more step of a kind says nothing new.
        usual = step is not None and step.passes and step.number & 3 and not trial
        if outcome.sample is not None and (rounds < _YOUNG_STEPS or not usual):
            self._times.observe(outcome.sample, outcome.now)
        lot = min(rounds // 4, _LOT_STEPS)
        if self._since >= lot or (trial and not self._trial):
            self._learn(outcome.now)

    def leave_out(self, slots: np.ndarray, seconds: float) -> None:
        """Of the steps that were let pass one had prefill rows: not a plain step."""
        if self._step is not None:
            self._step.began += seconds

    def stats(self) -> dict[str, Any]:
        self._settle()
        plain, ours = self._against_plain
        predicted, measured = self._usual[:2], self._usual[2:]
        rates = [each[0] / each[1] for each in (measured, predicted)]
        return {
            **totals(self._count, self._off, self._lengths),
            "predicted_step_s": predicted[1],
            "measured_step_s": measured[1],
            "time_error": self._times.error,
            "calibration_error": self.acceptance.error(),
            "throughput_ratio": rates[0] / rates[1],
            "plain_seconds": plain,
            "round_seconds": ours,
        }

    def _stay_off(self, reason: str, rest: int = 0) -> Plan:
        self._off[reason] += 1
        return Plan(0, reason, rest=rest)

    def _within_limits(self, step: _Step, extra: float) -> tuple[float, float, int]:
        """The best step under the limits, which are set; as `Forecast.best`."""
        found, batch = step.forecast, step.batch
        assert found is not None  # noqa: S101 (asked by `plan`)
        limit, missed = step_limit(batch.limit, found.plain)
        step.limit = step.loose = limit
        if batch.asked is not None:
            asked, missed = step_limit(batch.asked, found.plain)
            step.limit = min(asked, limit)
        self._count["slo_misses"] += missed
        best = self._foresee(step, 0.0, step.limit).best(extra, step.limit)
        if step.limit < step.loose:
            free = self._foresee(step, 0.0, step.loose).best(extra, step.loose)
            plain = len(batch) / found.plain
            rates = [max(each[0] / each[1], plain) for each in (best, free)]
            if not self._fair(step, *rates):
                return free
        if batch.asked is not None:
            batch.limit = batch.asked
        return best

    def _foresee(self, step: _Step, better: float, limit: float) -> Forecast:
        if limit == inf and not better and step.forecast is not None:
            return step.forecast
        about = step.most, step.drafting, step.context
        return self._forecaster.foresee(step.batch, *about, better, limit)

    def _fair(self, step: _Step, limited: float, free: float) -> bool:
        """True if clients' limits cost few tokens per second; else they are dropped."""
        if limited >= CLIENT_SHARE * free:
            return True
        step.limit = step.loose
        self._count["limits_left_out"] += 1
        return False

    def _worth(
        self, step: _Step, survival: np.ndarray, seconds: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """Lengths that pay within the limits, and tokens expected of them."""
        n = len(step.batch)
        choice = select(survival, n, seconds, step.limit, step.bar)
        if step.limit < step.loose:
            free = select(survival, n, seconds, step.loose, step.bar)
            limited = choice.tokens / choice.seconds
            if not self._fair(step, limited, free.tokens / free.seconds):
                choice = free
        return choice.lengths, choice.tokens

    def _explore(
        self, step: _Step, lengths: np.ndarray, seconds: np.ndarray
    ) -> np.ndarray:
        """Whole drafts, in a trial or if they can be paid; else the lengths.

        So in a step that its number chose, which is before any confidence: nobody would
        know that what is never verified has come to be worth it.
        """
        whole: np.ndarray = np.minimum(step.batch.room, step.passes)
        if self.remembered is not None:  # what is cut there is graded all the same
            whole = np.where(self.remembered, lengths, whole)
        if step.trial:
            return whole
        lost = float(seconds[int(whole.sum())] - seconds[int(lengths.sum())])
        if not self.allowance.pay(lost, step.began):
            return lengths
        cut = (lengths == 0) & (whole > 0)
        self.verify_chance = np.where(cut, 1.0 / _WHOLE_EVERY, 1.0)
        return whole

    def _survival(self, step: _Step) -> np.ndarray:
        """Chance that a token and all before it are accepted, float32 [s, n]."""
        if step.survival is None or len(step.survival) < len(step.said):
            said, batch = np.array(step.said, np.float32), step.batch
            step.logits, step.survival = self.acceptance.survival(
                said, batch.slots, batch.sampled, batch.room
            )
        return step.survival

    def _hopeful(self, step: _Step, extra: float, now: float) -> float:
        """The gain if acceptance is better by two standard errors."""
        variance = self.acceptance.unseen(now - self._judged_at)
        better = _BOUND * sqrt(variance)
        found = self._foresee(step, better, step.limit)
        tokens, seconds, _ = found.best(extra, step.limit)
        return tokens / seconds / step.bar

    def _learn(self, now: float) -> None:
        """Learn from the steps that wait."""
        self._settle()
        waiting, self._waiting = self._waiting, []
        self._since = self._settled = 0
        lot, columns = list[tuple[_Step, Outcome]](), 0
        for step, outcome in waiting:
            if step is not None and step.passes and columns < _LOT_DRAFTS:
                lot.append((step, outcome))
                columns += len(step.batch)
        if lot:
            self._learn_drafts(lot, columns, now)
        self._forecaster.refresh()

    def _learn_drafts(
        self, lot: list[tuple[_Step, Outcome]], columns: int, now: float
    ) -> None:
        """Learn from `columns` drafts, of which each step has one a request."""
        most, capacity = self._settings.k_max, len(self._born)
        drafts = np.full((2, most, columns), np.nan)
        slots, judged, accepted, sampled = np.zeros((4, columns), np.int64)
        known, end = np.zeros((2, capacity), np.int64), 0
        for step, outcome in lot:
            batch, passes, who = step.batch, step.passes, outcome.slots
            known[:, who] = outcome.verified, outcome.accepted
            here = slice(end, end := end + len(batch))
            self._survival(step)
            drafts[0, :passes, here] = step.said
            drafts[1, :passes, here] = step.logits
            judged[here], accepted[here] = known[:, batch.slots]
            known[:, who] = 0
            sampled[here] = batch.sampled
            # A slot's next request learns nothing from the one before it.
            ended = self._born[batch.slots] > step.number
            slots[here] = np.where(ended, capacity, batch.slots)
        made = np.count_nonzero(~np.isnan(drafts[1]), axis=0)
        # What follows the first rejected token was never judged.
        judged = np.minimum(np.minimum(judged, accepted + 1), made)
        accepted = np.minimum(accepted, judged)
        if judged.any():
            self._judged_at = now
            said, logits = drafts
            self.acceptance.judged(said, logits, slots, sampled, judged, accepted)
        self.acceptance.drafted(drafts[1], now - self._drafted_at)
        self._drafted_at = now

    def _settle(self) -> None:
        """Count what waits."""
        for step, outcome in self._waiting[self._settled :]:
            self._count["verified_tokens"] += int(outcome.verified.sum())
            self._count["accepted_tokens"] += int(outcome.accepted.sum())
            if step is not None:
                self._count_step(step, outcome)
        self._settled = len(self._waiting)

    def _count_step(self, step: _Step, outcome: Outcome) -> None:
        """Take a step into the totals, and compare its time with its prediction."""
        self._count["draft_steps"] += step.passes
        self._lengths[step.passes] += 1
        if step.sent is not None:
            drafted = int(np.minimum(step.batch.room, step.passes).sum())
            self._count["drafted_tokens"] += drafted
            self._count["trimmed_tokens"] += drafted - int(step.sent.sum())
        seconds = (outcome.now - step.began) / outcome.rounds
        served = int(np.count_nonzero(outcome.emitted))
        sample, found = outcome.sample, step.forecast
        if seconds <= 0.0 or not served or found is None or step.batch.prefill:
            return
        if sample is not None and sample.prefill:  # what no prediction knew of
            return
        # Python's own floats: the engine core encodes no others for the metrics.
        emitted = int(outcome.emitted.sum())
        each = emitted / served + outcome.rounds - 1
        self._against_plain[0] += float(found.plain * each)
        self._against_plain[1] += float(seconds * outcome.rounds)
        predicted = step.predicted[1]
        if step.passes and step.batch.catchup_rows:
            predicted += self._times.catchup_seconds(step.batch.catchup_rows)
        now = step.predicted[0], predicted, float(emitted), float(seconds)
        before = now if isnan(self._usual[0]) else self._usual
        pairs = zip(before, now, strict=True)
        self._usual = [old + _SMOOTH * (new - old) for old, new in pairs]
