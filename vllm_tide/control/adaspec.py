"""The AdaSpec controller: time model, acceptance model, drafter, verifier, gate.

One round: `plan` predicts and opens or closes the gate; `go_on` turns the confidences
of each draft step into survivals and decides on another; `choose` picks the verified
set; `observe` learns from what the target said.

Every decision maximises tokens minus *bar* times seconds, where the bar is the
throughput reached lately: over rounds of unequal luck that gives more tokens per second
than maximising each round's own ratio (AdaSpec eq. 8), which is stingy in good rounds
and lavish in bad ones. The bar scales with what plain decoding would reach at the
round's batch, so it follows a changing batch at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isnan, nan, sqrt
from typing import Any

import numpy as np

from vllm_tide.config import ControlConfig
from vllm_tide.control.batch import Batch, Outcome, Plan, totals
from vllm_tide.control.calibration import Calibration, Exploration, RequestOffsets
from vllm_tide.control.costs import RoundCosts, Times, probe_seconds
from vllm_tide.control.drafter import Drafter
from vllm_tide.control.gate import AgainstPlain, Gate
from vllm_tide.control.history import History
from vllm_tide.control.verifier import select

_REFRESH_ROUNDS = 16
# Until so many tokens predictions are also refreshed when there are so many times more.
_EARLY_TOKENS, _EARLY_GROWTH = 512, 1.04
# Rounds that are learnt from together, once there are many: what learning touches has
# left the caches when the next round comes.
_LOT = 4
# Rounds until which every one teaches the time model and the history, afterwards every
# second: what they teach is much the same, and it costs time that tokens wait for.
_YOUNG_ROUNDS = 128
_TRIAL_ROUNDS = 4
_UNANSWERED = 4  # shadow probes without an answer: none will come, try real rounds
_SWAP_KEEP = 0.2  # share of the evidence that a new draft inherits
_BAR_REQUESTS = 32.0  # request-rounds over which the bar is averaged
_SMOOTH = 0.05
# While drafting does not pay the question is asked again after so many rounds of about
# as many requests: what a forecast costs would be a tax on plain decoding.
_REST_ROUNDS = 15
_CHECK_REST = 1  # after a round that checks what plain decoding takes: no questions
# So many of those, per factor of two of requests, do not wait if they lose little; four
# count for one where a prompt came in the way.
_EARLY, _EARLY_LOSS = 3, 0.5  # rounds
_EXPLORE_SHARE = 0.5  # of the probe share
# Share that a gain may be better than believed, while few tokens were drafted, to be
# verified or not: who drafts nothing learns nothing.
_DOUBT, _DOUBTED, _SWAPPED = 0.5, 500, 100  # tokens; what a new draft begins with
_DOUBT_ENDS = _DOUBT / sqrt(25 + _DOUBTED)
_KNOBS = ControlConfig.model_validate({})


@dataclass(frozen=True, slots=True)
class _Lesson:
    """A round that was drafted in, and what the target said of it.

    Attributes:
        values: z, logit, chance: float64 [3, most, n].
        survival: float32 [most, n].
        steps: Draft steps that the round had.
        answers: Places of requests, and tokens of each verified and accepted.
        explored: Lengths that pay and the chance of the others, where some were drawn.
    """

    slots: np.ndarray
    sampled: np.ndarray
    values: np.ndarray
    survival: np.ndarray
    steps: int
    answers: tuple[np.ndarray, np.ndarray, np.ndarray]
    explored: tuple[np.ndarray | None, float]


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings of a policy; `vllm_tide.control.policies.make_policy` takes them.

    Attributes:
        k_max: Most draft tokens of a request in a decode step.
        verify: Choose the verified set by value; False sends every drafted token
            (ablation).
        explore: Verify whole drafts now and then, within half of `probe_share`, and in
            trials; False where what `choose` says is not what is verified.
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


class AdaSpecPolicy:
    """AdaSpec's control.

    Order of calls: `plan`; if it says to draft, `go_on` after each draft step until it
    is False or the plan's steps are done; then, or where `Batch.memory` is, `choose`;
    `observe` once the target has sampled. `add` and `drop` when a request begins and
    ends, between rounds.

    Args:
        time: Time model, refined by what `observe` is given.

    Attributes:
        verify_chance: float64 [n], of what `choose` chose: the chance with which the
            first token of each draft is verified (`Record.verify_chance`); None: 1.
        remembered: bool [n], where `choose` chose the memory's; None if it has none.
    """

    def __init__(self, settings: ControlSettings, time: Times) -> None:
        self._settings = settings
        self._time = time
        k, capacity = settings.k_max, settings.max_requests
        self.calibration = Calibration(k)
        self.offsets = RequestOffsets(capacity)
        self.history = History(k, capacity)
        self.drafter = Drafter(self.history, settings.verify)
        self.gate = Gate(settings.min_gain, settings.probe_share)
        share = _EXPLORE_SHARE * settings.probe_share * settings.explore
        self._exploration = Exploration(share)
        self.verify_chance: np.ndarray | None = None
        self.remembered: np.ndarray | None = None
        # Per round of a lot, [K, n] views are cut out of these.
        self._space = np.empty((_LOT, 3 * k * capacity))
        self._survival_space = np.empty((_LOT, k * capacity), np.float32)
        self._place, self._lot = 0, list[_Lesson]()
        self._row = np.full(capacity, -1, np.int64)
        self._kind = np.zeros(capacity, np.int64)  # 1: sampled
        self._fresh = np.zeros(capacity, bool)  # has not emitted a token yet
        self._batch: Batch | None = None
        self._bar: float | None = None
        self._bar_tokens = self._bar_seconds = 0.0  # a request's; over plain seconds
        self._step = 0
        self._from_memory = 0  # tokens that `choose` took of the memory's
        self._trial, self._trials = False, 0  # this round; still to come in a row
        self._foreseen_loss = self._busy = 0.0  # seconds: of a trial, of all rounds
        self._unanswered = 0
        self._predicted = (0.0, nan)  # tokens and seconds of the round
        self._tokens_seen = self._tokens_refreshed = self._refreshed = 0
        self._off_at = 0  # the last round in which drafting did not pay
        self._count, self._off = Counter[str](), Counter[str]()
        # Quarters of looks at plain rounds, by bits of the batch's size; one under way.
        self._looks, self._look = Counter[int](), 0
        self._lengths = np.zeros(k + 1, np.int64)
        self._seconds = (nan, nan)  # predicted and measured round, smoothed
        self._against_plain = AgainstPlain()

    def add(self, slot: int, sampled: bool, now: float) -> None:
        self._study()
        self.offsets.add(slot)
        self.history.add(slot)
        self._row[slot] = -1
        self._kind[slot] = sampled
        self._fresh[slot] = True

    def drop(self, slot: int) -> None:
        self._row[slot] = -1

    def draft_swapped(self) -> None:
        """The draft has new weights: keep little of what was learnt about the old."""
        self._study()
        self.calibration.forget(_SWAP_KEEP)
        self.history.forget(_SWAP_KEEP)
        self.offsets.reset()
        self.gate.eager()
        self._tokens_seen = self._tokens_refreshed = min(self._tokens_seen, _SWAPPED)
        self._bar_tokens = self._bar_seconds = 0.0

    def plan(self, batch: Batch, now: float) -> Plan:
        self._open(batch, now)
        n = len(batch)
        most = min(int(batch.room.max()), self._settings.k_max) if n else 0
        if not most:
            return self._stay_off("no_room")
        costs = self._costs = RoundCosts(self._time.model, batch, most)
        self._predicted = (float(n), costs.plain)
        if (size := n.bit_length()) != self.gate.size:
            self.gate.size, self._trials = size, 0
        self._count["slo_misses"] += costs.missed
        room = self._room = batch.room  # of requests that the draft is of use to
        if batch.memory is not None:
            gains = self.history.accepted(batch.slots, np.minimum(room, most))
            room = self._room = batch.memory.left_to_draft(room, gains)
            if not room.any():
                return self._stay_off("memory")
        limited = costs.limit < costs.loose
        forecast = self.drafter.begin(batch.slots, room, costs)
        if limited and costs.limit == costs.loose:
            self._count["limits_left_out"] += 1
        elif batch.asked is not None:
            batch.limit = batch.asked
        plain = n / costs.plain
        gain = forecast.tokens / forecast.seconds / plain if forecast.steps else 0.0
        doubt = max(_DOUBT / sqrt(25 + self._tokens_seen) - _DOUBT_ENDS, 0.0)
        reason = self.gate.decide(gain, forecast.free / plain, self._busy, doubt)
        if reason:
            self._bar_tokens = self._bar_seconds = 0.0
            if not (forecast.steps and self._try(reason, gain, batch)):
                cost = probe_seconds(self._time.model, batch)
                probe = self.gate.probe_due(cost, self._busy)
                patient = self._unanswered < _UNANSWERED or not forecast.steps
                if not probe or patient:
                    self._unanswered += probe
                    return self._stay_off(reason, probe, 0 if probe else _REST_ROUNDS)
                self._trial, self._foreseen_loss = True, cost
        else:
            self._trials = 0
            lost = costs.plain * max(gain - 1.0, 0.0)
            lost += self._time.model.catchup_seconds(n)
            few = self._looks[size] < 4 * _EARLY
            early = few and lost < _EARLY_LOSS * costs.plain
            if self.gate.check_due(0.0 if early else lost, self._busy):
                self._look = size
                return self._stay_off("check", rest=_CHECK_REST)
        tokens = self._bar_tokens + forecast.tokens / n
        seconds = self._bar_seconds + forecast.seconds / costs.plain
        self._bar = plain * tokens / seconds
        self._begin_drafting(batch, most)
        return Plan(most, probe=self._trial, foreseen=forecast.steps)

    def go_on(self, step: int, confidence: np.ndarray) -> bool:
        """True if to draft another after draft step `step` (1-based).

        Args:
            confidence: float [n], highest probability of the draft at this step.
        """
        batch, costs = self._batch, self._costs
        assert batch is not None  # noqa: S101 (protocol: plan comes first)
        self._step = step
        self.calibration.predict(
            self._values, step, confidence, self._sampled, self._offset
        )
        return self.drafter.go_on(
            step=step,
            values=self._values,
            survival=self._survival,
            room=batch.room,
            wanted=self._room,
            costs=costs,
            bar=self._bar,
        )

    def choose(self) -> np.ndarray:
        """int64 [n], tokens of each request to verify, of what `remembered` says."""
        batch, step = self._batch, self._step
        assert batch is not None  # noqa: S101
        n = len(batch)
        if not step and batch.memory is None:
            return np.zeros(n, np.int64)
        costs, survival = self._costs, self._survival[:step]
        whole = drafted = np.minimum(batch.room, step)
        if batch.memory is not None:
            survival, whole, self.remembered = batch.memory.merge(survival, drafted)
        if not step:  # nothing was forecast: what was reached lately
            reached = n / costs.plain * self._bar_tokens
            self._bar = reached / self._bar_seconds if self._bar_seconds else None
        seconds = costs.target[: len(survival) * n + 1] + float(costs.draft[step])
        if self._settings.verify:
            choice = select(survival, n, seconds, costs.limit, self._bar)
            if costs.limit < costs.loose:
                free = select(survival, n, seconds, costs.loose, self._bar)
                least = free.tokens / free.seconds
                if not costs.fair(choice.tokens / choice.seconds, least):
                    choice = free
                    self._count["limits_left_out"] += 1
            expected, spent = choice.tokens, choice.seconds
            lengths = choice.lengths
            if self.remembered is not None:  # what is cut there is graded all the same
                whole = np.where(self.remembered, lengths, whole)
            measured = self._trial and self._settings.explore and costs.limit == np.inf
            if step and measured:
                lengths = whole  # what it takes is to be seen, not believed
            elif step:
                lengths = self._exploration.widen(lengths, whole, seconds)
        else:
            lengths = whole
            expected = n + float(np.maximum(survival, 0.0).sum())
            spent = float(seconds[int(whole.sum())])
        total = int(lengths.sum())
        if self.remembered is not None:
            self._from_memory = int(lengths[self.remembered].sum())
        self.verify_chance = self._exploration.verify_chance(lengths)
        self._predicted = (expected, float(seconds[total]))
        self._count["drafted_tokens"] += int(drafted.sum())
        self._count["trimmed_tokens"] += int(drafted.sum()) - total + self._from_memory
        keep = _BAR_REQUESTS / (n + _BAR_REQUESTS)
        self._bar_tokens = keep * self._bar_tokens + expected / n
        self._bar_seconds = keep * self._bar_seconds + spent / costs.plain
        return lengths

    def observe(self, outcome: Outcome) -> None:
        rested = outcome.rounds > 1
        timed = self._young or self._trial or rested or self._count["rounds"] & 1
        if size := self._look:
            clean = outcome.sample is not None and not outcome.sample.prefill
            self._looks[size] += 4 if clean else 1
            self._look, timed = 0, True
        if outcome.sample is not None and timed:
            self._time.observe(outcome.sample)
        if outcome.probe is not None and len(outcome.probe[0]):
            slots, confidence, hit = outcome.probe
            self._observe_probe(slots, confidence, hit)
        if prefilled := bool(self._fresh[outcome.slots].any()):
            self._fresh[outcome.slots[outcome.emitted > 0]] = False
        batch = self._batch
        self._count["verified_tokens"] += int(outcome.verified.sum())
        self._count["accepted_tokens"] += int(outcome.accepted.sum())
        if batch is None:
            return
        rows = self._row[outcome.slots]
        known = rows >= 0
        verified, accepted = outcome.verified, outcome.accepted
        if not known.all():
            rows, verified, accepted = rows[known], verified[known], accepted[known]
        self._row[batch.slots] = -1
        self._batch = None
        for _ in range(outcome.rounds - 1):
            self.gate.unchecked += 1
            self._pass_by()
        unforeseen = prefilled and not batch.prefill
        # Drafted before it was decided to draft nothing: no plain round.
        unforeseen |= not self._step and bool(verified.any())
        emitted = outcome.emitted[known]
        self._observe_times(batch, outcome.now, outcome.rounds, emitted, unforeseen)
        step, explored = self._step, self._exploration
        if step and len(rows):
            lesson = _Lesson(
                batch.slots,
                self._sampled,
                self._values,
                self._survival,
                step,
                (rows, verified, accepted),
                (explored.wanted, explored.chance),
            )
            self._lot.append(lesson)
            self._place = (self._place + 1) % _LOT
            judged = self._count["rounds"] - self._off_at < _REFRESH_ROUNDS
            if self._young or judged or len(self._lot) == _LOT:
                self._study()

    @property
    def _young(self) -> bool:
        return self._count["rounds"] < _YOUNG_ROUNDS

    def stats(self) -> dict[str, Any]:
        record = self.gate.drafting if self.gate.on else self.gate.plain
        return {
            **totals(self._count, self._off, self._lengths),
            "predicted_step_s": self._seconds[0],
            "measured_step_s": self._seconds[1],
            "time_error": self._time.error,
            "calibration_error": self.calibration.error(),
            "throughput_ratio": record.ratio(),
            "plain_seconds": self._against_plain.plain_s,
            "round_seconds": self._against_plain.round_s,
        }

    def _try(self, reason: str, gain: float, batch: Batch) -> bool:
        """True if this round drafts although it should not pay.

        No shadow probe says what that takes: a wrong time would keep it off for ever.
        """
        if not self._trials and reason == "no_gain":
            short = max(1.0 - gain / self.gate.threshold, 0.0)
            lost = _TRIAL_ROUNDS * self._costs.plain * short
            lost += self._time.model.catchup_seconds(batch.catchup_rows)
            self._trials = _TRIAL_ROUNDS * self.gate.check_due(lost, self._busy)
            self._foreseen_loss = lost / _TRIAL_ROUNDS
        self._trial = self._trials > 0
        self._trials -= self._trial
        return self._trial

    def _open(self, batch: Batch, now: float) -> None:
        """Begin a round; one that was never observed is forgotten."""
        if self._batch is not None:
            self._row[self._batch.slots] = -1
            self._look = 0
        self._batch = batch
        batch.slots = np.ascontiguousarray(batch.slots, np.int64)
        batch.room = np.ascontiguousarray(batch.room, np.int64)
        self._planned_at = now
        self._step = self._from_memory = 0
        self._survival = self._survival_space[0, :0].reshape(0, len(batch))
        self._trial = False
        self.remembered = None
        self._row[batch.slots] = np.arange(len(batch))
        self._count["rounds"] += 1

    def _stay_off(self, reason: str, probe: bool = False, rest: int = 0) -> Plan:
        self._study()
        self._off[reason] += 1
        self._count["probes"] += probe
        self._exploration.draw(0, allowed=False)
        if not self.gate.on:
            self._off_at = self._count["rounds"]
        if reason != "no_room":
            self._pass_by()
        return Plan(0, reason, probe, rest)

    def leave_out(self, slots: np.ndarray, seconds: float) -> None:
        """Of the rounds that were let pass one had prefill rows: not a plain round."""
        self._pass_by()
        self._fresh[slots] = False
        self._planned_at += seconds
        self._busy += seconds

    def _pass_by(self) -> None:
        """A round without drafting: what is known of drafting grows old."""
        self.history.idle()
        self.gate.drafting.fade()

    def _begin_drafting(self, batch: Batch, most: int) -> None:
        n = len(batch)
        place = self._place
        self._values = self._space[place, : 3 * most * n].reshape(3, most, n)
        self._survival = self._survival_space[place, : most * n].reshape(most, n)
        self._sampled = batch.sampled.astype(np.int64)
        self._offset = self.offsets.value[batch.slots]
        self._count["probes"] += self._trial
        allowed = self._settings.verify and self._costs.limit == np.inf
        self._exploration.draw(n, allowed)

    def _study(self) -> None:
        """Learn from the rounds of the lot."""
        lot, self._lot = self._lot, []
        for number, lesson in enumerate(lot):
            if self._young or not number & 1:
                drafted = lesson.survival[: lesson.steps] >= 0
                _, logit, chance = lesson.values[:, : lesson.steps]
                self.history.learn(lesson.slots, logit, chance, drafted)
                self._tokens_seen += int(drafted.sum())
            self._learn(lesson)
        seen, rounds = self._tokens_seen, self._count["rounds"]
        early = _EARLY_GROWTH * self._tokens_refreshed < seen < _EARLY_TOKENS
        if early or rounds - self._refreshed >= _REFRESH_ROUNDS and lot:
            self._tokens_refreshed, self._refreshed = seen, rounds
            self.history.refresh()

    def _learn(self, lesson: _Lesson) -> None:
        (position, row), (z, chance, hit), predicted = self.offsets.judge(
            lesson.slots,
            lesson.values,
            lesson.survival,
            lesson.steps,
            lesson.answers,
        )
        rows, _, accepted = lesson.answers
        self.gate.drafting.add(predicted, float(accepted.sum()) + len(rows))
        if len(row):
            wanted, chance_drawn = lesson.explored
            weight = Exploration.weight(position, row, wanted, chance_drawn)
            kind = lesson.sampled[row]
            self.calibration.learn(position, kind, z, chance, hit, weight)

    def _observe_probe(
        self, slots: np.ndarray, confidence: np.ndarray, hit: np.ndarray
    ) -> None:
        """A shadow probe: first positions of a few requests, not verified."""
        self._unanswered = 0
        kind, first = self._kind[slots], np.zeros(len(slots), np.int64)
        values = np.empty((3, 1, len(slots)))
        offset = self.offsets.value[slots]
        self.calibration.predict(values, 1, confidence, kind, offset)
        z, logit, chance = values[:, 0]
        accepted = hit.astype(np.float64)
        self.calibration.learn(first, kind, z, chance, accepted)
        self.offsets.learn(slots, accepted - chance, chance * (1.0 - chance))
        drafted = np.ones((1, len(slots)), bool)
        self.history.learn(slots, logit[None], chance[None], drafted)
        self.history.refresh()

    def _observe_times(
        self,
        batch: Batch,
        now: float,
        rounds: int,
        emitted: np.ndarray,
        unforeseen: bool,
    ) -> None:
        """Compare the round's time with its prediction.

        Args:
            rounds: How many like it passed until `now`.
            unforeseen: The step had rows that no prediction knew of.
        """
        step = self._step
        self._count["draft_steps"] += step
        self._lengths[step] += 1
        seconds = (now - self._planned_at) / rounds
        self._busy += max(seconds, 0.0) * rounds
        if seconds <= 0 or not batch.room.any():
            return
        idle, plain = rounds - 1, self._costs.plain
        predicted = self._predicted[1]
        if unforeseen:
            served = int(np.count_nonzero(emitted))
            if self._trial and step and served:
                lost = predicted - plain * float(emitted.sum()) / served
                self.gate.overspent(lost - self._foreseen_loss)
            return
        lost = self._against_plain.add(plain, emitted, seconds * rounds, idle)
        if step and batch.catchup_rows:
            predicted += self._time.model.catchup_seconds(batch.catchup_rows)
        record = self.gate.drafting if step else self.gate.plain
        if step or not self._from_memory:  # else it is a round of neither kind
            lost += record.add_time(predicted, seconds) - seconds
        if self._trial and step:
            self.gate.overspent(lost - self._foreseen_loss)
        if step:
            self.gate.plain.fade()
        before, measured = self._seconds
        if isnan(before):
            before, measured = predicted, seconds
        self._seconds = (
            before + _SMOOTH * (predicted - before),
            measured + _SMOOTH * (seconds - measured),
        )
