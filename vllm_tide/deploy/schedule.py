"""The schedule: when to collect and train, a state machine over served requests.

Two modes. `always` never pauses. `tide` switches collection as TIDE's algorithm 1 does,
with its two averages, their initial values, decays and threshold: collection starts
when the short average falls below the long one by epsilon, and stops after a cycle
without improvement. Two differences from the paper:

* The averaged value. The acceptance of all drafted tokens depends on the lengths that
  control chooses, which hides a shift. Here it is the acceptance of the *first* drafted
  token of a step, weighted by the inverse probability of its verification (Horvitz and
  Thompson), which does not depend on length. Requests with too few of them are pooled
  with the next. A shift that makes control stop drafting at once is not detected until
  it drafts again.
* The end of training. The paper evaluates the new draft on held-out data against the
  acceptance seen in training. Here the gate of the other mode decides (`judgement.py`),
  which compares both drafts on the same requests.

In both modes training waits after cycles without a sign of a gain, because it slows
serving where no core is idle: after the n-th for n / `IDLE_CYCLES` - 1 durations of the
cycle, so its share of the time falls to `IDLE_CYCLES` / n, and to 1/16 at last. A
publication, a sign of a gain and a shift of traffic end the wait. A fresh draft is
trained without one until it shows a gain.

Pure: no clock, no torch. Runs in the trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vllm_tide.config import ScheduleConfig
from vllm_tide.deploy.served import ServedRequest


class Averages:
    """Short and long exponential average (TIDE, algorithm 1)."""

    def __init__(self, short_decay: float, long_decay: float, init_values: int) -> None:
        self.short_decay, self.long_decay = short_decay, long_decay
        self.init_values = init_values
        self.short = self.long = math.nan
        self.count = 0
        self._sum = 0.0

    @property
    def started(self) -> bool:
        return self.count >= self.init_values

    def add(self, value: float) -> bool:
        """Add a value; return whether it updated averages with initial values."""
        self.count += 1
        if self.count <= self.init_values:
            self._sum += value
            if self.started:
                self.short = self.long = self._sum / self.count
            return False
        keep_short, keep_long = self.short_decay, self.long_decay
        self.short = keep_short * self.short + (1.0 - keep_short) * value
        self.long = keep_long * self.long + (1.0 - keep_long) * value
        return True


MIN_TRIES = 16.0
"""Effective number of first tokens in one value of the series."""
SHORT_DECAY, LONG_DECAY = 0.9, 0.99  # per request, of the two averages (TIDE)
EPSILON = 0.05  # fall of the accepted share that counts as a shift (TIDE)
INIT_REQUESTS = 16  # for the initial averages
IDLE_CYCLES = 12
"""Cycles without a sign of a gain after which training waits between cycles."""
MAX_WAIT = 15.0
"""Longest wait, as a multiple of the last cycle's duration."""
WAIT_SHIFT = 0.15
"""Fall of the accepted share that ends a wait. The short average of requests that
differ by 0.2 (standard deviation) varies by 0.05, so `EPSILON` would end every wait."""


class Schedule:
    """Schedule driven by served requests and by the outcome of cycles.

    Args:
        min_new_tokens: New training tokens per cycle (TIDE's N_threshold).
        day0: The draft is fresh: collect from the first request on.

    Attributes:
        averages: Averages of first-token acceptance over all requests, in every mode.
        reason: Reason of the current state.
        shifts: Number of detected shifts.
        idle_cycles: Cycles since the last sign of a gain.
    """

    def __init__(
        self, config: ScheduleConfig, min_new_tokens: int, *, day0: bool = False
    ) -> None:
        self.config, self.min_new_tokens = config, min_new_tokens
        self.averages = Averages(SHORT_DECAY, LONG_DECAY, INIT_REQUESTS)
        self._pool = FirstTokens()
        self.shifts = self.pauses = self.idle_cycles = 0
        self._wait_until = -math.inf
        self._untrained = day0
        self._enabled = day0 or config.mode == "always"
        self.reason = "mode always"
        if config.mode == "tide":
            self.reason = "the draft is fresh" if day0 else "no shift yet"

    @property
    def collecting(self) -> bool:
        return self._enabled

    def observe(self, request: ServedRequest) -> None:
        value = self._pool.add(request)
        if value is None or not self.averages.add(value):
            return
        short, long = self.averages.short, self.averages.long
        if short < long - WAIT_SHIFT:
            self._end_wait()
        if self.config.mode == "tide" and short < long - EPSILON:
            if not self._enabled:
                self._end_wait()
                self.shifts += 1
                self.reason = f"acceptance fell from {long:.3f} to {short:.3f}"
            self._enabled = True

    def should_train(self, new_tokens: int, now: float) -> bool:
        """Return whether a cycle should begin, by training tokens since the last."""
        return self.collecting and not self.waiting_for(new_tokens, now)

    def waiting_for(self, new_tokens: int, now: float) -> str:
        """Return what a cycle waits for while data is collected; empty if nothing."""
        if (missing := self.min_new_tokens - new_tokens) > 0:
            return f"{missing} more captured tokens"
        if (wait := self._wait_until - now) > 0:
            return f"{wait:.0f} s, as {self.idle_cycles} cycles showed no gain"
        return ""

    def cycle_done(
        self, improved: bool, gaining: bool, seconds: float, now: float
    ) -> None:
        """Process a complete cycle; do not call it for interrupted ones.

        Args:
            gaining: The evidence shows a gain, or a draft is published.
            seconds: Duration of the cycle (s), which ended at `now` (monotonic, s).
        """
        if gaining:
            self._untrained = False
            self._end_wait()
        elif not self._untrained:
            self.idle_cycles += 1
            wait = min(self.idle_cycles / IDLE_CYCLES - 1, MAX_WAIT)
            self._wait_until = now + max(0.0, wait) * seconds
        if self.config.mode == "tide" and not improved and self._enabled:
            self._enabled = False
            self.pauses += 1
            self.reason = "a cycle without improvement"

    def _end_wait(self) -> None:
        self.idle_cycles, self._wait_until = 0, -math.inf

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
        }


@dataclass(slots=True)
class FirstTokens:
    """Acceptance of first drafted tokens, with sums as in `ServedRequest`."""

    tries: float = 0.0
    hits: float = 0.0
    squares: float = 0.0

    def add(self, request: ServedRequest) -> float | None:
        """Add a request; return the next value of the series, or None if not due.

        A value has an effective size (Kish) of at least `MIN_TRIES`: the squared sum of
        the weights over the sum of their squares, so one large weight counts once.
        """
        self.tries += request.tries
        self.hits += request.hits
        self.squares += request.squares
        if self.tries**2 < MIN_TRIES * self.squares or not self.tries:
            return None
        value = self.hits / self.tries
        self.tries = self.hits = self.squares = 0.0
        return value
