"""Speculation off and on again: when no length pays, and without trusting a model.

Off needs a predicted gain below `min_gain`, less a doubt of the prediction while little
was drafted; on again needs `HYSTERESIS` more. Both sides are multiplied by what recent
rounds of their kind really yielded against their prediction, so a wrong time model is
overridden; that record fades while its side is not in use, so the verdict is reviewed
after some hundred rounds. While off, probes keep the acceptance model fresh within a
share of time; probes that keep saying the same become rarer. While on, a round now and
then goes undrafted: what plain decoding takes is else only known from a curve fitted to
larger steps, and a curve that is wrong at its end would keep speculation on for ever.
While off, a few rounds now and then are drafted in earnest: nothing else says what
drafting takes.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from vllm_tide.control.calibration import HALF_LIFE_TOKENS

HYSTERESIS = 0.02
"""Added to `min_gain` before speculation comes on again."""
_TIME_KEEP = 0.5 ** (1 / 16)  # of the record of times, per round
_PRIOR_ROUNDS = 4.0  # rounds of agreement that a new record starts with
_PRIOR_TOKENS = 100.0
_FADE_KEEP = 0.5 ** (1 / 256)  # of a record whose side is not in use, per round
_CLIP = 1.5  # one round's time is not believed beyond this factor of the usual
_JITTER = 0.01  # of times that means nothing, on a quiet machine
_SPREAD = 0.03  # of a record's first rounds, a share of their time
_ERRORS = 2.5  # standard errors, at a spread of mean size: noise comes in runs
_PATIENCE = 16.0  # probes without a change after which they are half as frequent
_LEAST_SHARE = 0.25  # of the probe share
_CHECK_SHARE = 0.5  # of the probe share, for rounds that are done the other way
_CHECK_ROUNDS = 16  # between two of them, at least


class Record:
    """Realised against predicted throughput of one kind of round, decayed.

    Args:
        errors: Standard errors of its times that mean nothing.
    """

    def __init__(self, half_life_tokens: float, errors: float = 0.0) -> None:
        self._half_life, self._errors = half_life_tokens, errors
        self._realised = self._predicted = 0.0  # tokens
        self._times = self._rounds = 0.0  # sum of realised / predicted, rounds
        self._spread = _SPREAD

    def add(self, predicted: float, tokens: float) -> None:
        keep = 0.5 ** (predicted / self._half_life)
        self._realised = keep * self._realised + tokens
        self._predicted = keep * self._predicted + predicted

    def add_time(self, predicted: float, seconds: float) -> float:
        """Returns the seconds that are believed: one stall says nothing."""
        usual = self._longer()
        ratio = min(max(seconds / predicted, usual / _CLIP), usual * _CLIP)
        self._times = _TIME_KEEP * self._times + ratio
        self._rounds = _TIME_KEEP * self._rounds + 1.0
        away = abs(ratio - self._times / self._rounds)
        self._spread += (away - self._spread) / (self._rounds + 2.0)
        return ratio * predicted

    def fade(self) -> None:
        self._realised *= _FADE_KEEP
        self._predicted *= _FADE_KEEP
        self._times *= _FADE_KEEP
        self._rounds *= _FADE_KEEP

    def reset(self) -> None:
        self._realised = self._predicted = self._times = self._rounds = 0.0

    def ratio(self) -> float:
        """Realised over predicted throughput; 1 without evidence."""
        predicted = self._predicted + _PRIOR_TOKENS
        surprise = (self._realised - self._predicted) / predicted
        # One standard error is luck: a coin per token, near enough.
        luck = 0.5 / math.sqrt(predicted)
        longer = self._longer() - 1.0
        noise = self._errors * self._spread / math.sqrt(self._rounds + _PRIOR_ROUNDS)
        longer = _beyond(longer, max(noise, _JITTER))
        return (1.0 + _beyond(surprise, luck)) / (1.0 + longer)

    def _longer(self) -> float:
        return (self._times + _PRIOR_ROUNDS) / (self._rounds + _PRIOR_ROUNDS)


def _beyond(value: float, margin: float) -> float:
    """`value` brought towards 0 by `margin`, at most to 0."""
    return math.copysign(max(abs(value) - margin, 0.0), value)


class Gate:
    """The on/off switch.

    Args:
        min_gain: Least predicted gain of speculation, a share of plain throughput.
        probe_share: Most share of time spent on probes.

    Attributes:
        size: Of the batch, by powers of two: trials are paid for where they were made.
        plain: Record of rounds without.
        unchecked: Rounds since one was done the other way, or since the last turn.
    """

    def __init__(self, min_gain: float, probe_share: float) -> None:
        self._min_gain = min_gain
        self._probe_share = probe_share
        self.on = True
        self.drafting = Record(HALF_LIFE_TOKENS, _ERRORS)
        # Looks at plain rounds are few: each of them says something.
        self.plain = Record(HALF_LIFE_TOKENS)
        self._probed_at = self._checked_at = 0.0
        self._streak = self.unchecked = 0
        self.size = 0
        # By size: looks that changed nothing, and when what trials overspent is paid.
        # A trial of 48 requests can cost what four earn in a thousand rounds.
        self._checks, self._paid_at = Counter[int](), dict[int, float]()

    def decide(self, gain: float, free: float, now: float, doubt: float = 0.0) -> str:
        """Set `on` for this round.

        Args:
            gain: Predicted throughput of the best round with drafting over that of
                plain decoding (1: equal), within the limits.
            free: The same without limits.
            now: Seconds of rounds so far: an idle server saves up nothing.
            doubt: Share that the gain may be better than that.

        Returns:
            "" if on, else why not: "no_gain", "slo" (a limit forbids what would pay)
            or "override" (it was predicted to pay, and measured not to).
        """
        needed, trust = self._needed(), self._trust()
        if gain * (1.0 + doubt) >= needed / trust:
            if not self.on:
                self._turn(now)
            return ""
        if self.on:
            self._turn(now)
            self._probed_at = now
            self._streak = 0
        if gain >= needed:
            return "override"
        return "slo" if free * trust >= needed else "no_gain"

    def _turn(self, now: float) -> None:
        self.on = not self.on
        self._checked_at = now
        self._checks.clear()
        self._paid_at.pop(self.size, None)
        self.unchecked = 0

    @property
    def threshold(self) -> float:
        return self._needed() / self._trust()

    def _needed(self) -> float:
        return 1.0 + self._min_gain + (0.0 if self.on else HYSTERESIS)

    def _trust(self) -> float:
        return self.drafting.ratio() / self.plain.ratio()

    def probe_due(self, cost: float, now: float) -> bool:
        """True if to probe now, at `cost` seconds; the caller then does."""
        share = (1.0 - _CHECK_SHARE) * self._share(self._streak)
        if (now - self._probed_at) * share < cost:
            return False
        self._probed_at = now
        self._streak += 1
        return True

    def check_due(self, cost: float, now: float) -> bool:
        """Whether this round should go undrafted while on, or drafted while off.

        Args:
            cost: Seconds that are expected to be lost; 0: no share is waited for.
        """
        self.unchecked += 1
        share = _CHECK_SHARE * self._share(self._checks[self.size])
        soon = self.unchecked <= _CHECK_ROUNDS
        paid_at = 0.0 if self.on else self._paid_at.get(self.size, 0.0)
        saved = max(now - max(self._checked_at, paid_at), 0.0)
        if not share or soon or saved * share < cost:
            return False
        self._checked_at = now
        self._checks[self.size] += 1
        self.unchecked = 0
        return True

    def overspent(self, seconds: float) -> None:
        """A trial's round lost so much more than expected."""
        share = _CHECK_SHARE * self._share(self._checks[self.size])
        if share:
            paid_at = max(self._paid_at.get(self.size, 0.0), self._checked_at)
            self._paid_at[self.size] = paid_at + max(seconds, 0.0) / share

    def _share(self, streak: int) -> float:
        """Of time, after `streak` looks that changed nothing."""
        return self._probe_share * max(1.0 / (1.0 + streak / _PATIENCE), _LEAST_SHARE)

    def eager(self) -> None:
        """Probe at the full share again: something has changed."""
        self._streak = 0
        self._paid_at.clear()
        self.drafting.reset()


class AgainstPlain:
    """Seconds of rounds beside those of plain decoding; their ratio is the speed-up.

    Attributes:
        plain_s: Predicted seconds of plain decoding that emits the same tokens.
    """

    def __init__(self) -> None:
        self.plain_s = self.round_s = 0.0

    def add(
        self, plain: float, emitted: np.ndarray, seconds: float, idle: int
    ) -> float:
        """Add a round, and those like it that passed undrafted before it was seen.

        Returns seconds that they took longer than plain decoding.

        Args:
            plain: Predicted seconds of one plain step of its requests.
            emitted: int64 [n], tokens that each of its requests got; a plain step
                gives one to each that gets any.
        """
        served = int(np.count_nonzero(emitted))
        if not served:
            return 0.0
        # Python's own floats: the engine core encodes no others for the metrics.
        needed = float(plain * (int(emitted.sum()) / served + idle))
        self.plain_s += needed
        self.round_s += float(seconds)
        return float(seconds) - needed
