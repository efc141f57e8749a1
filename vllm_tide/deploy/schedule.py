"""When to collect and when to train: a state machine over served requests.

Two modes. `always` never pauses. `tide` is TIDE's algorithm 1 as far as it says when
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
        """Take a value; True if it moved averages that had been started before."""
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
"""First tokens, counted as equally weighted ones, that make a value of a series."""
SHORT_DECAY, LONG_DECAY = 0.9, 0.99  # per request, of the two averages (TIDE)
EPSILON = 0.05  # fall of the accepted share that counts as a shift (TIDE)
INIT_REQUESTS = 16  # that set the first averages


class Schedule:
    """Decides from served requests and from the outcome of cycles.

    Args:
        min_new_tokens: New training tokens that make a cycle (TIDE's N_threshold).
        day0: The draft is fresh: collect from the first request on.

    Attributes:
        averages: Averages of first-token acceptance over all requests, in every mode.
        reason: Why the state is what it is.
        shifts: Shifts seen so far.
    """

    def __init__(
        self, config: ScheduleConfig, min_new_tokens: int, *, day0: bool = False
    ) -> None:
        self.config, self.min_new_tokens = config, min_new_tokens
        self.averages = Averages(SHORT_DECAY, LONG_DECAY, INIT_REQUESTS)
        self._pool = FirstTokens()
        self.shifts = self.pauses = 0
        self._enabled = day0 or config.mode == "always"
        self.reason = "mode always"
        if config.mode == "tide":
            self.reason = "the draft is fresh" if day0 else "no shift yet"

    @property
    def collecting(self) -> bool:
        return self._enabled

    def observe(self, request: ServedRequest) -> None:
        value = self._pool.add(request)
        moved = value is not None and self.averages.add(value)
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
        return self.collecting and new_tokens >= self.min_new_tokens

    def cycle_done(self, improved: bool) -> None:
        """A cycle ran to its end and was judged; interrupted ones do not count."""
        if self.config.mode == "tide" and not improved and self._enabled:
            self._enabled = False
            self.pauses += 1
            self.reason = "a cycle without improvement"

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
