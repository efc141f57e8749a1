"""When to collect and when to train: a state machine over served requests.

Three modes. `always` never pauses. `tide` is TIDE's algorithm 1 as far as it says when
to collect: one pair of averages with its start, its decays and its threshold; a fall of
the short one below the long one by epsilon switches collection on, one cycle without
improvement switches it off. Two things differ from the paper:

* What is averaged. The accepted share of drafted tokens moves with the lengths that
  control chooses, which hides a shift. Here it is the acceptance of the *first* drafted
  token of a step, each weighted by the inverse chance with which it was verified
  (Horvitz and Thompson): no length moves it. Requests with too little of it are pooled
  with the next. A shift so strong that control stops drafting at once is not seen until
  it drafts again.
* When training ends. The paper evaluates the new draft on held-out data against the
  acceptance seen in training; here the same publish gate as in other modes decides
  (`judgement.py`), which compares both drafts on the same requests.

`gated` mends what is weak in algorithm 1:

* One average of a mixed stream dilutes the fall of one domain by its share of the
  traffic. Here each group of similar requests has its own averages.
* A fixed epsilon is below the noise of short requests and far above that of long ones.
  Here it is widened to three standard errors; slow drift is seen as well.
* A draft that is bad from the start never falls. Here a new group counts as a shift.
* One unlucky cycle ends training. Here it takes `PATIENCE` of them, counted per group,
  and only groups not yet saturated are trained on. Soon after a shift there is too
  little to learn from, so each of these cycles waits for twice the tokens of the one
  before, and a group that was given up is tried once more whenever its requests since
  the shift have doubled: the number of such cycles grows with the logarithm of traffic.

Pure: no clock, no torch. Runs in the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_tide.config import ScheduleConfig
from vllm_tide.deploy.groups import MAX_GROUPS
from vllm_tide.deploy.served import ServedRequest

SIGMAS = 3.0
"""Standard errors that chance is granted."""
_PRIOR_VARIANCE, _PRIOR_VALUES = 0.04, 4.0  # of one request's acceptance


class Averages:
    """Short and long exponential average (TIDE, algorithm 1), and their noise.

    How far the two differ by chance depends on how noisy the series is: both are
    weighted sums of the same values, so the variance of their difference is the
    variance of one value times the sum of the squared differences of the weights.

    Attributes:
        short: NaN until started, as `long` is.
        squares: Sums over all values of the squared weight in `short`, in `long`, and
            of the product of both: variances and covariance in units of one value's.
    """

    def __init__(self, short_decay: float, long_decay: float, init_values: int) -> None:
        self.short_decay, self.long_decay = short_decay, long_decay
        self.init_values = init_values
        self.restart()

    def restart(self) -> None:
        self.short = self.long = math.nan
        self.count = 0
        self._sum = 0.0
        self.squares = (0.0, 0.0, 0.0)

    @property
    def started(self) -> bool:
        return self.count >= self.init_values

    def add(self, value: float) -> bool:
        """Take a value; True if it moved averages that had been started before."""
        self.count += 1
        if self.count <= self.init_values:
            self._sum += value
            if self.started:
                self.short = self.long = self._sum / self.count
                self.squares = (1 / self.count,) * 3
            return False
        keep_short, keep_long = self.short_decay, self.long_decay
        new_short, new_long = 1.0 - keep_short, 1.0 - keep_long
        self.short = keep_short * self.short + new_short * value
        self.long = keep_long * self.long + new_long * value
        short, long, both = self.squares
        self.squares = (
            keep_short**2 * short + new_short**2,
            keep_long**2 * long + new_long**2,
            keep_short * keep_long * both + new_short * new_long,
        )
        return True


class ShiftTest:
    """Watches one series of acceptances in [0, 1] for a fall.

    Two tests. *Step*: the short average below the long one, as in TIDE. *Drift*: the
    long average below the mean of the first values, which a slow fall drags along too
    little for the first test to see. Both must exceed epsilon and `SIGMAS` standard
    errors.

    Attributes:
        anchor: Mean of the first 1 / (1 - long_decay) values; NaN until then.
    """

    def __init__(
        self, short_decay: float, long_decay: float, init_values: int, epsilon: float
    ) -> None:
        self.averages = Averages(short_decay, long_decay, init_values)
        self.epsilon = epsilon
        self.num_anchor = max(init_values, math.ceil(1.0 / (1.0 - long_decay)))
        self._noise = self._noise_weight = 0.0
        self.restart()

    def restart(self) -> None:
        """Learn the level anew; what is known of the noise stays."""
        self.averages.restart()
        self.anchor = math.nan
        self._anchor_sum = 0.0
        self._last: float | None = None

    @property
    def variance(self) -> float:
        """Variance of one value around its level.

        From successive differences (von Neumann 1941), which a step or a drift of the
        level hardly touches.
        """
        prior = _PRIOR_VALUES * _PRIOR_VARIANCE
        return (self._noise + prior) / (self._noise_weight + _PRIOR_VALUES)

    @property
    def step_limit(self) -> float:
        """Fall of the short average below the long one that counts as a shift."""
        short, long, both = self.averages.squares
        return self._limit(short + long - 2.0 * both)

    @property
    def drift_limit(self) -> float:
        """Fall of the long average below the anchor that counts as a shift."""
        return self._limit(self.averages.squares[1] + 1.0 / self.num_anchor)

    def add(self, value: float) -> str | None:
        """Take a value; why it is a shift, or None. After one the caller restarts."""
        if self._last is not None:
            keep = self.averages.long_decay
            self._noise = keep * self._noise + 0.5 * (value - self._last) ** 2
            self._noise_weight = keep * self._noise_weight + 1.0
        self._last = value
        moved = self.averages.add(value)
        if self.averages.count <= self.num_anchor:
            self._anchor_sum += value
            if self.averages.count == self.num_anchor:
                self.anchor = self._anchor_sum / self.num_anchor
        if not moved:
            return None
        short, long = self.averages.short, self.averages.long
        if short < long - self.step_limit:
            return f"acceptance fell from {long:.3f} to {short:.3f}"
        # Before that the long average still consists of the anchor's values.
        settled = self.averages.count >= 2 * self.num_anchor
        if settled and long < self.anchor - self.drift_limit:
            return f"acceptance drifted from {self.anchor:.3f} to {long:.3f}"
        return None

    def _limit(self, squares: float) -> float:
        return max(self.epsilon, SIGMAS * math.sqrt(self.variance * max(squares, 0.0)))


NEW_GROUP_REQUESTS = 4
"""Requests that make a new group a shift: one odd request does not."""
ACTIVE_REQUESTS = 512
"""A group unseen for so many requests of the stream is not waited for."""
MIN_TRIES = 16.0
"""First tokens, counted as equally weighted ones, that make a value of a series."""
SHORT_DECAY, LONG_DECAY = 0.9, 0.99  # per request, of the two averages (TIDE)
EPSILON = 0.05  # fall of the accepted share that counts as a shift (TIDE)
INIT_REQUESTS = 16  # that set the first averages
PATIENCE = 3
"""Cycles without improvement after which training pauses."""
_MAX_DOUBLINGS = 16


class Schedule:
    """Decides from served requests and from the outcome of cycles.

    Args:
        min_new_tokens: New training tokens that make a cycle (TIDE's N_threshold).
        day0: The draft is fresh: collect from the first request on.

    Attributes:
        averages: Averages of first-token acceptance over all requests, in every mode.
        reason: Why the state is what it is.
        shifts: Shifts seen so far, new groups included.
    """

    def __init__(
        self, config: ScheduleConfig, min_new_tokens: int, *, day0: bool = False
    ) -> None:
        self.config, self.min_new_tokens = config, min_new_tokens
        self.averages = Averages(SHORT_DECAY, LONG_DECAY, INIT_REQUESTS)
        self._pool = FirstTokens()
        self.shifts = self.pauses = 0
        self._enabled = day0 or config.mode == "always"
        self._gate = _GroupGate() if config.mode == "gated" else None
        self.reason = {"always": "mode always", "tide": "no shift yet"}.get(
            config.mode, "no group of requests yet"
        )
        if day0 and config.mode != "always":
            self.reason = "the draft is fresh"

    @property
    def collecting(self) -> bool:
        if self._gate is not None:
            return self._enabled or bool(self._gate.wanted())
        return self._enabled

    def observe(self, request: ServedRequest) -> None:
        value = self._pool.add(request)
        moved = value is not None and self.averages.add(value)
        if self._gate is not None:
            why, shift = self._gate.observe(request)
            if why:
                self.shifts += shift
                self.reason = why
                self._enabled = False  # from now on the groups say what is wanted
            return
        if self.config.mode != "tide" or not moved:
            return
        short, long = self.averages.short, self.averages.long
        if short < long - EPSILON:
            if not self._enabled:
                self.shifts += 1
                self.reason = f"acceptance fell from {long:.3f} to {short:.3f}"
            self._enabled = True

    def should_train(self, new_tokens: int) -> bool:
        """True if a cycle should begin with so many training tokens since the last."""
        return self.collecting and new_tokens >= self.tokens_needed

    @property
    def tokens_needed(self) -> int:
        failures = 0 if self._gate is None else self._gate.failures()
        return self.min_new_tokens << min(failures, _MAX_DOUBLINGS)

    def cycle_done(
        self, improved: bool, by_group: Mapping[int, bool] | None = None
    ) -> None:
        """A cycle ran to its end and was judged; interrupted ones do not count."""
        if self._gate is not None:
            paused = self._gate.cycle_done(improved, by_group or {})
            if paused:
                self.reason = paused
                self.pauses += not self.collecting
        elif self.config.mode == "tide" and not improved and self._enabled:
            self._enabled = False
            self.pauses += 1
            self.reason = "a cycle without improvement"

    def wanted_groups(self) -> frozenset[int] | None:
        """Groups to train on; None is all of them, empty is none.

        To weight draws by, not to draw from alone: a draft trained on these forgets
        the others, which then shift in turn (`scripts/bench/schedule_sim.py`, rehearsal
        0: 0.90 of the gain at 0.98 of the cycles of `always`; 0.5: all at 0.43).
        """
        if self._gate is None:
            return None if self._enabled else frozenset()
        return None if self._enabled else self._gate.wanted()

    def snapshot(self) -> dict[str, Any]:
        started = self.averages.started
        return {
            "mode": self.config.mode,
            "collecting": self.collecting,
            "reason": self.reason,
            "shifts": self.shifts,
            "pauses": self.pauses,
            "short": self.averages.short if started else None,
            "long": self.averages.long if started else None,
            "groups": [] if self._gate is None else self._gate.snapshot(),
        }


@dataclass(slots=True)
class FirstTokens:
    """Acceptance of first drafted tokens; sums as in `ServedRequest`."""

    tries: float = 0.0
    hits: float = 0.0
    squares: float = 0.0

    def add(self, request: ServedRequest) -> float | None:
        """Take a request; the next value of the series, or None if it is not due.

        A value rests on at least `MIN_TRIES` tries by Kish's count, the squared sum of
        the weights over the sum of their squares: one rare look of great weight is one.
        """
        self.tries += request.tries
        self.hits += request.hits
        self.squares += request.squares
        if self.tries**2 < MIN_TRIES * self.squares or not self.tries:
            return None
        value = self.hits / self.tries
        self.tries = self.hits = self.squares = 0.0
        return value


@dataclass
class _Watched:
    test: ShiftTest
    seen: int
    pool: FirstTokens = field(default_factory=FirstTokens)
    requests: int = 0
    wanted: bool = False
    failures: int = 0
    since: int = 0  # `requests` at the last shift
    again: int = 0  # `requests` at which a group that was given up is tried again


class _GroupGate:  # mode `gated`
    def __init__(self) -> None:
        self._clock = 0
        self._groups: dict[int, _Watched] = {}
        self._versions: dict[str, int] = {}

    def wanted(self) -> frozenset[int]:
        return frozenset(
            name
            for name, group in self._groups.items()
            if group.wanted and self._clock - group.seen <= ACTIVE_REQUESTS
        )

    def failures(self) -> int:
        """Cycles in a row without improvement: of the wanted group with the fewest."""
        return min((self._groups[name].failures for name in self.wanted()), default=0)

    def observe(self, request: ServedRequest) -> tuple[str, bool]:
        """Take a request; why its group is wanted from now on, and if it shifted."""
        self._clock += 1
        self._follow_version(request)
        group = self._group(request.group)
        group.requests += 1
        group.seen = self._clock
        why: str | None = None
        value = group.pool.add(request)
        if value is not None:
            why = group.test.add(value)
        if why is None and group.requests == NEW_GROUP_REQUESTS:
            why = "new kind of requests"
        if why is not None:
            group.test.restart()
            group.wanted, group.failures = True, 0
            group.since, group.again = group.requests, 0
            return f"group {request.group}: {why}", True
        if group.wanted or not group.again or group.requests < group.again:
            return "", False
        # One cycle, with as many tokens as the last one that failed had.
        group.wanted, group.failures = True, PATIENCE - 1
        return f"group {request.group}: twice as many requests as at the pause", False

    def cycle_done(self, improved: bool, by_group: Mapping[int, bool]) -> str | None:
        saturated = []
        for name in sorted(self.wanted()):
            group = self._groups[name]
            group.failures = 0 if by_group.get(name, improved) else group.failures + 1
            if group.failures >= PATIENCE:
                group.wanted = False
                group.again = 2 * group.requests - group.since
                saturated.append(name)
        if not saturated:
            return None
        names = ", ".join(map(str, saturated))
        return f"group {names}: {PATIENCE} cycles without improvement"

    def snapshot(self) -> list[dict[str, Any]]:
        wanted = self.wanted()
        return [
            {
                "group": name,
                "requests": group.requests,
                "wanted": name in wanted,
                "failures": group.failures,
                "short": averages.short if averages.started else None,
                "long": averages.long if averages.started else None,
                "limit": group.test.step_limit if averages.started else None,
            }
            for name, group in sorted(self._groups.items())
            for averages in (group.test.averages,)
        ]

    def _group(self, name: int) -> _Watched:
        group = self._groups.get(name)
        if group is None:
            test = ShiftTest(SHORT_DECAY, LONG_DECAY, INIT_REQUESTS, EPSILON)
            group = self._groups[name] = _Watched(test, self._clock)
            while len(self._groups) > MAX_GROUPS + 1:  # one more: the unknown
                others = [n for n in self._groups if n != name]
                del self._groups[min(others, key=lambda n: self._groups[n].seen)]
        return group

    def _follow_version(self, request: ServedRequest) -> None:
        """Groups in training begin anew with each draft: their level should rise.

        The others go on, so that a draft which forgot them is noticed.
        """
        before = self._versions.get(request.engine)
        if before is not None and request.first_version <= before:
            return
        self._versions[request.engine] = request.first_version
        if before is None:
            return
        for group in self._groups.values():
            if group.wanted:
                group.test.restart()
